"""The model of a survey: a network, the features of a point, and the class that each logit stands for."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shiplap_sparse3d import ops
from shiplap_sparse3d.axes import Triple
from shiplap_sparse3d.errors import SurveyError, failure_text, survey_error
from shiplap_sparse3d.modes import device_of
from shiplap_sparse3d.survey.field import Field, probe, receptive_field, rows_of
from shiplap_sparse3d.tensor import SparseTensor

_SAMPLES, _TRIALS = 2000, 6  # points of a probe of the features, and how many probes


@dataclass(frozen=True)
class Points:
    """Some points of a survey, as the function ``features`` of a model gets them.

    Attributes:
        xyz: ``float64 [p, 3]``, the coordinates in the file, without any shift.
        intensity, return_number, number_of_returns: ``int64 [p]``.
    """

    xyz: Tensor
    intensity: Tensor
    return_number: Tensor
    number_of_returns: Tensor

    def __len__(self) -> int:
        return self.xyz.shape[0]

    def take(self, rows: Tensor) -> Points:
        """Return the points selected by ``rows``, a tensor of indices or a boolean mask."""
        return Points(self.xyz[rows], self.intensity[rows], self.return_number[rows], self.number_of_returns[rows])


def point_features(points: Points) -> Tensor:
    """Return five features of each point, ``float32 [p, 5]``, that do not depend on other points. They are 1, the
    scaled intensity, the scaled number of returns, whether it is the first return, and whether it is the last.
    """
    first, last = points.return_number <= 1, points.return_number >= points.number_of_returns
    intensity = (points.intensity.float() / 256).log1p()
    number = points.number_of_returns.float() / 4
    return torch.stack([torch.ones_like(intensity), intensity, number, first.float(), last.float()], 1)


class VoxelScene(NamedTuple):
    """The points of one part of a survey as the network of a model takes them.

    Attributes:
        voxels: the mean features of the points in each voxel.
        feats: ``float32 [p, c]``, the features of each point.
        inverse: ``int64 [p]``, the voxel of each point.
    """

    voxels: SparseTensor
    feats: Tensor
    inverse: Tensor


@dataclass(frozen=True)
class SurveyModel:
    """A network with all settings that a survey needs.

    Args:
        net: the network. It is called as ``net(voxels)`` with a ``SparseTensor`` of the mean features of each voxel. It
            returns logits ``[n, classes]``, as a tensor or a sparse tensor on the same voxels. If ``per_point`` is
            true, it is called as ``net(voxels, features, inverse)`` and returns ``[p, classes]``.
        voxel: edges of a voxel along x, y and z, in the unit of the file. Cells are counted from coordinate 0.
        classes: the class code of each logit.
        features: a function that returns the features ``float32 [p, c]`` of ``Points``.
        context: the distance, in the unit of the file, up to which the features of a point may depend on other points.
            They must not depend on where a part of the survey begins.
        per_point: whether the network returns logits for points instead of voxels.

    Raises:
        SurveyError: ``SL825`` for an argument of another type or an invalid value.
    """

    net: nn.Module
    voxel: tuple[float, float, float]
    classes: tuple[int, ...]
    features: Callable[[Points], Tensor] = point_features
    context: float = 0.0
    per_point: bool = False

    def __post_init__(self) -> None:
        edges = len(self.voxel) == 3 and all(math.isfinite(v) and v > 0 for v in self.voxel)
        codes = self.classes and all(0 <= c <= 255 for c in self.classes)
        for right, got, expected in (
            (isinstance(self.net, nn.Module), f"net is a {type(self.net).__name__}", "a torch.nn.Module"),
            (edges, f"voxel {self.voxel}", "three lengths above 0"),
            (codes, f"classes {self.classes}", "a class code from 0 to 255 for each logit"),
            (math.isfinite(self.context) and self.context >= 0, f"context {self.context}", "a length"),
        ):
            if not right:
                raise survey_error("SL825", "SurveyModel", got, expected)

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return device_of(self.net)

    @cached_property
    def channels(self) -> int:
        """The number of features of a point, from a call of ``features`` on ten random points."""
        return self.features_of(_random_points(10, self.voxel, 0.0)).shape[1]

    @cached_property
    def field(self) -> Field:
        """The receptive field of the network, derived from its layers at the first access. Raise ``SL820`` if it is
        unknown, and ``SL825`` if the network fails.
        """
        try:
            return receptive_field(self.net, self.channels, self.answer_voxels)
        except SurveyError:
            raise
        except Exception as failure:  # whatever a network of the user's raises
            what, expected = "the network does not run on the features", f"one of voxels with {self.channels} features"
            raise survey_error("SL825", "SurveyModel.net", failure_text(failure), expected, what=what) from failure

    def check(self) -> Field:
        """Run the network on small probes, and return the receptive field that they show. Raise ``SL820`` if it is
        larger than that of the network's sparse layers. Raise ``SL825`` if the features or the logits have a wrong
        shape, or if features depend on points beyond ``context``.
        """
        self._check_features()
        return probe(self.net, self.channels, self.field, self.answer_voxels)

    def features_of(self, points: Points) -> Tensor:
        """Return ``features(points)`` as ``float32 [p, c]``. Raise ``SL825`` unless the user's function returns a
        matrix of finite numbers with a row for each point.
        """
        made = self.features(points)
        if not isinstance(made, Tensor) or made.dim() != 2 or len(made) != len(points):
            got = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
            raise survey_error("SL825", "SurveyModel.features", got, f"a tensor [{len(points)}, c]")
        if self.features is not point_features and not bool(made.isfinite().all()):
            raise survey_error("SL825", "SurveyModel.features", "values that are not finite", "numbers")
        return made.float()

    def scene(self, coords: Tensor, feats: Tensor, grid: Triple, scenes: int = 1) -> VoxelScene:
        """Return the voxels of points as a :class:`VoxelScene`. ``coords`` are the points' scenes, below ``scenes``,
        and cells in ``grid``, ``int32 [p, 4]``. ``feats [p, c]`` are their features, of which each voxel gets the mean.
        """
        cells, inverse, counts = ops.unique_coords(coords)
        voxels = SparseTensor(ops.segment_mean(feats, inverse, counts), cells, grid, scenes)
        return VoxelScene(voxels, feats, inverse.long())

    def answer(self, scene: VoxelScene) -> Tensor:
        """Return the logits ``[p, classes]`` of the points of ``scene``. Points in one voxel have equal logits unless
        the model is ``per_point``. Raise ``SL825`` if the network returns another shape.
        """
        logits = rows_of(self._call(scene))
        rows = len(scene.feats) if self.per_point else scene.voxels.feats.shape[0]
        if logits.shape != (rows, len(self.classes)):
            got, expected = f"shape {tuple(logits.shape)}", f"[{rows}, {len(self.classes)}]: a logit for each class"
            raise survey_error("SL825", "the network's output", got, expected)
        return logits if self.per_point else logits[scene.inverse]

    def answer_voxels(self, voxels: SparseTensor) -> Tensor:
        """Return the logits ``[n, classes]`` of points with the features of ``voxels``, one for each voxel."""
        rows = torch.arange(len(voxels.feats), device=voxels.feats.device)
        return self.answer(VoxelScene(voxels, voxels.feats, rows))

    def forward(self, coords: Tensor, feats: Tensor, grid: Triple) -> Tensor:
        """Return the logits ``[p, classes]`` of points, with gradients for training. ``coords`` are the points' cells
        ``int32 [p, 3]`` in ``grid``, and ``feats`` their features ``[p, c]``.
        """
        return self.answer(self.scene(nn.functional.pad(coords, (1, 0)), feats, grid))

    def digest(self) -> str:
        """Return the SHA-256, in hexadecimal, of the network's parameters and structure and of ``voxel``, ``classes``
        and ``context``. The code of ``features`` has no influence on it.
        """
        sha = hashlib.sha256(json.dumps([repr(self.net), self.voxel, self.classes, self.context]).encode())
        for name, value in self.net.state_dict().items():
            content = value.detach().cpu().flatten().contiguous()  # a tensor without axes cannot be viewed as bytes
            sha.update(name.encode() + content.view(torch.uint8).numpy().tobytes())
        return sha.hexdigest()

    def _call(self, scene: VoxelScene) -> object:
        """Return the result of the network for the voxels of ``scene``, and for its points if the model is
        ``per_point``.
        """
        return self.net(scene.voxels, scene.feats, scene.inverse) if self.per_point else self.net(scene.voxels)

    def _check_features(self) -> None:
        """Raise ``SL825`` if the features of random points change when points farther away than ``context`` are moved
        or removed.
        """
        reach = max(self.context, *self.voxel[:2])
        # Features may look along one axis only, so trials alternate between x and y.
        for seed in range(_TRIALS):
            points = _random_points(_SAMPLES, self.voxel, self.context, seed)
            along = points.xyz[:, seed % 2]
            distance = (along - (along.amax() + along.amin()) / 2).abs()
            inner, near = distance <= reach, distance <= reach + self.context
            down = torch.where(near, 0.0, 1e4)[:, None] * points.xyz.new_tensor([0, 0, 1])
            moved, whole = replace(points, xyz=points.xyz - down), self.features_of(points)[inner]
            for other in (self.features_of(points.take(near))[inner[near]], self.features_of(moved)[inner]):
                if not torch.equal(whole, other):
                    what, got = "the features look beyond their context", "other values after a change beyond it"
                    expected = f"features of points within {self.context} (SurveyModel.context)"
                    fix = "pass the distance as context, and measure from coordinate 0, not from the first point"
                    raise survey_error("SL825", "SurveyModel.features", got, expected, fix, what)


def _random_points(count: int, voxel: tuple[float, float, float], context: float, seed: int = 0) -> Points:
    """Return ``count`` random points in a box. Equal arguments give equal points. The box is eight voxels high. Its
    width along x and y is six times the largest of ``context`` and the voxel's edges, plus eight voxels.
    """
    draw = torch.Generator().manual_seed(seed)
    wide = 6 * max(context, *voxel[:2])
    size = torch.tensor([wide + 8 * voxel[0], wide + 8 * voxel[1], 8 * voxel[2]])
    xyz = torch.rand(count, 3, generator=draw, dtype=torch.float64) * size + 1234.5 + 100 * seed
    returns = torch.randint(1, 4, (count,), generator=draw)
    return Points(xyz, torch.randint(0, 2000, (count,), generator=draw), torch.ones_like(returns), returns)
