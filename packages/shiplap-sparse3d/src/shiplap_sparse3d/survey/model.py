"""The model of a survey: a network, the features of a point, and the class that each logit stands for."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from shiplap.plugin_api import error
from shiplap_sparse3d import ops
from shiplap_sparse3d.axes import Triple
from shiplap_sparse3d.errors import SurveyError
from shiplap_sparse3d.survey.field import Field, evaluation_mode, receptive_field, rows_of
from shiplap_sparse3d.survey.probe import Seen, probe
from shiplap_sparse3d.tensor import SparseTensor

_SAMPLES, _TRIALS = 2000, 6  # points of a probe of the features, and how many probes


@dataclass(frozen=True)
class Points:
    """Points of one part of a survey.

    Attributes:
        xyz: ``float64 [p, 3]``, the coordinates of the file, never shifted.
        intensity, return_number, number_of_returns: ``int64 [p]``.
    """

    xyz: Tensor
    intensity: Tensor
    return_number: Tensor
    number_of_returns: Tensor

    def __len__(self) -> int:
        """Return the number of points."""
        return self.xyz.shape[0]

    def take(self, rows: Tensor) -> Points:
        """Return the points selected by ``rows``, a tensor of indices or a boolean mask."""
        return Points(self.xyz[rows], self.intensity[rows], self.return_number[rows], self.number_of_returns[rows])


def point_features(points: Points) -> Tensor:
    """Return five features of each point, ``float32 [p, 5]``, that depend on no neighbours: 1, scaled intensity, number
    of returns, whether it is the first return, and whether it is the last.
    """
    first, last = points.return_number <= 1, points.return_number >= points.number_of_returns
    intensity = (points.intensity.float() / 256).log1p()
    return torch.stack(
        [torch.ones_like(intensity), intensity, points.number_of_returns.float() / 4, first.float(), last.float()], 1
    )


@dataclass(frozen=True)
class VoxelScene:
    """Points as a network takes them.

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
        net: called as ``net(voxels)`` with a ``SparseTensor`` of the mean features of each voxel; returns logits
            ``[n, classes]``, as a tensor or a sparse tensor on the same voxels. With ``per_point`` it is called as
            ``net(voxels, features, inverse)`` and returns ``[p, classes]``.
        voxel: edges of a voxel along x, y and z, in the unit of the file. Cells are counted from coordinate 0.
        classes: the class code of each logit.
        features: points → ``float32 [p, c]``; :func:`point_features` unless given.
        context: how far, in the unit of the file, ``features`` looks for other points. It must see no farther, and must
            not depend on where a part of the survey begins.
        per_point: whether the network answers for points instead of voxels.

    Raises:
        SurveyError: SL825 for arguments that do not fit.
    """

    net: nn.Module
    voxel: tuple[float, float, float]
    classes: tuple[int, ...]
    features: Callable[[Points], Tensor] = point_features
    context: float = 0.0
    per_point: bool = False

    def __post_init__(self) -> None:
        """Raise SL825 for a field of the wrong kind: a network that is no module, a voxel without three positive
        lengths, class codes outside of 0 to 255, or a negative context.
        """
        problems = [
            (not isinstance(self.net, nn.Module), f"net is a {type(self.net).__name__}", "a torch.nn.Module"),
            (
                len(self.voxel) != 3 or not all(math.isfinite(v) and v > 0 for v in self.voxel),
                f"voxel {self.voxel}",
                "three lengths above 0",
            ),
            (
                not self.classes or not all(0 <= c <= 255 for c in self.classes),
                f"classes {self.classes}",
                "a class code from 0 to 255 for each logit",
            ),
            (not (math.isfinite(self.context) and self.context >= 0), f"context {self.context}", "a length"),
        ]
        for wrong, got, expected in problems:
            if wrong:
                raise error("SL825", where="SurveyModel", got=got, expected=expected)

    @property
    def device(self) -> torch.device:
        """Return the device of the network's first parameter, or the CPU for a network without parameters."""
        parameter = next(self.net.parameters(), None)
        return parameter.device if parameter is not None else torch.device("cpu")

    @cached_property
    def channels(self) -> int:
        """Return the number of features of a point, from a call of ``features`` on ten random points."""
        return self.features_of(_random_points(10, self.voxel, 0.0)).shape[1]

    @cached_property
    def field(self) -> Field:
        """Return the receptive field of the network, derived from the layers that a trial run calls. Raises SL820 where
        it has none, and SL825 if the network does not run.
        """
        try:
            return receptive_field(self.net, self.channels, self._voxels_only)
        except SurveyError:
            raise
        except Exception as failure:  # whatever a network of the user's raises
            raise error(
                "SL825",
                where="SurveyModel.net",
                what="the network does not run on the features",
                got=" ".join(str(failure).split()) or type(failure).__name__,
                expected=f"a network of voxels with {self.channels} features",
            ) from failure

    def check(self) -> Seen:
        """Raise SL820 or SL825 unless random trials confirm the derived receptive field, the context of the features
        and the number of logits, and return the distance up to which the network really looked.
        """
        self._check_features()
        return probe(self.net, self.channels, self.field, self._logits_only)

    def features_of(self, points: Points) -> Tensor:
        """Return ``features(points)`` as ``float32 [p, c]``. Raises SL825 unless the user's function returns a matrix
        with a row for each point.
        """
        made = self.features(points)
        if not isinstance(made, Tensor) or made.dim() != 2 or len(made) != len(points):
            got = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
            raise error("SL825", where="SurveyModel.features", got=got, expected=f"a tensor [{len(points)}, c]")
        return made.float()

    def scene(self, coords: Tensor, feats: Tensor, grid: Triple) -> VoxelScene:
        """Return the input of the network for points with cells ``coords`` (``int32 [p, 3]`` in ``grid``) and ``feats``
        (``[p, c]``): voxels with the mean features of their points, the features, and the voxel of each point.
        """
        # All points of a tile are one scene.
        scenes = coords.new_zeros(len(coords), 1)
        cells, inverse, counts = ops.unique_coords(torch.cat([scenes, coords], 1))
        return VoxelScene(SparseTensor(ops.segment_mean(feats, inverse, counts), cells, grid), feats, inverse.long())

    def logits(self, scene: VoxelScene) -> Tensor:
        """Return the logits ``[p, classes]`` of the points of ``scene``, with the network in evaluation mode and
        without gradients.
        """
        with evaluation_mode(self.net), torch.inference_mode():
            return self.answer(scene)

    def answer(self, scene: VoxelScene) -> Tensor:
        """Return the logits ``[p, classes]`` of the points of ``scene``. A network of voxels gives each point the
        logits of its voxel. Raises SL825 for an output of another shape.
        """
        logits = rows_of(self._call_network(scene.voxels, scene.feats, scene.inverse))
        rows = len(scene.feats) if self.per_point else scene.voxels.feats.shape[0]
        if logits.shape != (rows, len(self.classes)):
            expected = f"[{rows}, {len(self.classes)}]: a logit for each class"
            raise error("SL825", where="the network's output", got=f"shape {tuple(logits.shape)}", expected=expected)
        return logits if self.per_point else logits[scene.inverse]

    def forward(self, coords: Tensor, feats: Tensor, grid: Triple) -> Tensor:
        """Return logits ``[p, classes]`` with gradients, for training, of points with cells ``coords``
        (``int32 [p, 3]`` in ``grid``) and ``feats`` (``[p, c]``).
        """
        return self.answer(self.scene(coords, feats, grid))

    def digest(self) -> str:
        """Return the SHA-256, in hexadecimal, of the network's parameters and structure and of voxel, classes and
        context. The code of ``features`` does not enter.
        """
        sha = hashlib.sha256(json.dumps([repr(self.net), self.voxel, self.classes, self.context]).encode())
        for name, value in self.net.state_dict().items():
            sha.update(name.encode())
            sha.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if value.numel() else b"")
        return sha.hexdigest()

    def _call_network(self, voxels: SparseTensor, feats: Tensor, inverse: Tensor) -> object:
        """Return the output of the network: called with the voxels alone or, if ``per_point``, also with the features
        of the points and the voxel of each (``inverse``).
        """
        return self.net(voxels, feats, inverse) if self.per_point else self.net(voxels)

    def _voxels_only(self, voxels: SparseTensor) -> object:
        """Return the output of the network for ``voxels`` that hold one point each, so that the two kinds of network
        can be probed alike.
        """
        return self._call_network(voxels, voxels.feats, torch.arange(len(voxels.feats), device=voxels.feats.device))

    def _logits_only(self, voxels: SparseTensor) -> object:
        """Return the output of the network for ``voxels`` that hold one point each. Raises SL825 unless it has a logit
        for each class, which is checked before a survey makes a folder.
        """
        made = self._voxels_only(voxels)
        logits = rows_of(made)
        if logits.shape[1:] != (len(self.classes),):
            expected = f"[{len(logits)}, {len(self.classes)}]: a logit for each class"
            raise error("SL825", where="the network's output", got=f"shape {tuple(logits.shape)}", expected=expected)
        return made

    def _check_features(self) -> None:
        """Raise SL825 if features of random points change when points farther away than ``context`` are moved or
        removed.
        """
        reach = max(self.context, *self.voxel[:2])
        # Features may look along one axis only, so trials alternate between x and y.
        for seed in range(_TRIALS):
            points = _random_points(_SAMPLES, self.voxel, self.context, seed)
            along = points.xyz[:, seed % 2]
            distance = (along - (along.amax() + along.amin()) / 2).abs()
            inner, near = distance <= reach, distance <= reach + self.context
            # Along z only, so that the points keep the x and y by which they are chosen.
            moved = replace(
                points, xyz=points.xyz - torch.where(near, 0.0, 1e4)[:, None] * points.xyz.new_tensor([0, 0, 1])
            )
            whole = self.features_of(points)[inner]
            for other in (self.features_of(points.take(near))[inner[near]], self.features_of(moved)[inner]):
                if not torch.equal(whole, other):
                    raise error(
                        "SL825",
                        where="SurveyModel.features",
                        what="the features look beyond their context",
                        got="other values after a change of points beyond the context",
                        expected=f"features of points within {self.context} (SurveyModel.context)",
                        fix="pass the distance as context, and measure from coordinate 0, not from the first point",
                    )


def _random_points(count: int, voxel: tuple[float, float, float], context: float, seed: int = 0) -> Points:
    """Return ``count`` random points, the same for each ``seed``, in a box that is eight ``voxel`` lengths high and
    some contexts and voxels wide.
    """
    draw = torch.Generator().manual_seed(seed)
    wide = 6 * max(context, *voxel[:2])
    size = torch.tensor([wide + 8 * voxel[0], wide + 8 * voxel[1], 8 * voxel[2]])
    xyz = torch.rand(count, 3, generator=draw, dtype=torch.float64) * size + 1234.5 + 100 * seed
    returns = torch.randint(1, 4, (count,), generator=draw)
    return Points(xyz, torch.randint(0, 2000, (count,), generator=draw), torch.ones_like(returns), returns)
