"""Points to voxels and back: quantisation with labels, and tensors of points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shiplap.plugin_api import error
from shiplap_sparse3d.axes import Axes
from shiplap_sparse3d.coords import check_rows, require, require_tensor
from shiplap_sparse3d.grid_sample import grid_sample_3d
from shiplap_sparse3d.tensor import SparseTensor, voxelize


class QuantizedPoints(NamedTuple):
    """The result of :func:`sparse_quantize`, the distinct voxels that contain points.

    Attributes:
        coords: ``int32 [m, d]``, distinct cells in ascending order. Negative points have negative cells.
        first: ``int64 [m]``, the first point of each voxel.
        inverse: ``int64 [p]``, the voxel of each point.
        feats: ``[m, c]``, the features of the first point of each voxel, or None if no features were given.
        labels: ``[m]``, one label for each voxel, or None if no labels were given.
    """

    coords: Tensor
    first: Tensor
    inverse: Tensor
    feats: Tensor | None = None
    labels: Tensor | None = None


def sparse_quantize(
    points: Tensor,
    feats: Tensor | None = None,
    labels: Tensor | None = None,
    size: float | Sequence[float] = 1.0,
    *,
    ignore_label: int = -100,
    conflict: Literal["vote", "ignore"] = "vote",
) -> QuantizedPoints:
    """Return the distinct cells ``floor(points / size)`` of ``points``, with the first point and one label for each
    cell. :func:`voxelize` returns means of features instead.

    Args:
        points: ``[p, d]``, integers or floating-point numbers. They have no column for the scene. Put it in front of
            the cells afterwards, as :func:`collate` does.
        feats: the features of the points, ``[p, c]``.
        labels: integers ``[p]``.
        size: the edge of a voxel, one number or one for each axis.
        ignore_label: the label of points that do not count, and of voxels all of whose points have it.
        conflict: the label of a voxel whose points have several labels. With ``"vote"`` it is that of most points, and
            of equally frequent labels the smallest. With ``"ignore"`` it is ``ignore_label``.

    Raises:
        ArgumentError: ``SL201`` to ``SL208`` for arguments that do not fit each other, ``SL211`` for points that are
            not finite.
    """
    where = "sparse3d.sparse_quantize"
    require_tensor(f"{where}, argument 'points'", points)
    if points.dim() != 2:
        raise error("SL201", where=f"{where}, argument 'points'", got=f"{points.dim()} dims", expected="[p, d]")
    if conflict not in ("vote", "ignore"):
        raise error("SL208", where=f"{where}, argument 'conflict'", got=repr(conflict), expected="'vote' or 'ignore'")
    # Halves are too coarse for cells, and float64 holds every int32.
    wide = torch.promote_types(points.dtype, torch.float32) if points.is_floating_point() else torch.float64
    edge = torch.as_tensor(size, dtype=wide, device=points.device)
    if edge.shape not in ((), (1,), points.shape[1:]) or not bool((edge > 0).all()):
        expected = "one number, or one for each axis, more than 0"
        raise error("SL208", where=f"{where}, argument 'size'", got=size, expected=expected)
    cells = torch.floor(points.to(wide) / edge)
    if not bool((cells.abs() < 2**31).all()):
        row = int((~(cells.abs() < 2**31).all(1)).nonzero()[0, 0])
        raise error("SL211", where=where, got=f"point {row} = {points[row].tolist()}", expected="cells below 2**31")
    for given in (feats, labels):
        if given is not None:
            require_tensor(f"{where}, features and labels", given)
            check_rows(where, given, points.shape[0])
    # In int64, since graphs of torch 2.11 take the inverse to have the dtype of the argument.
    coords, inverse = torch.unique(cells.long(), dim=0, return_inverse=True)
    first = _first_of(inverse, coords.shape[0])
    chosen = None if labels is None else _label_voxels(labels, inverse, len(coords), ignore_label, conflict)
    return QuantizedPoints(coords.int(), first, inverse, None if feats is None else feats[first], chosen)


def _first_of(inverse: Tensor, voxels: int) -> Tensor:
    """Return the first row of each voxel, ``int64 [voxels]``. ``inverse`` holds the voxel of each row."""
    rows = torch.arange(inverse.shape[0], device=inverse.device)
    return torch.full((voxels,), inverse.shape[0], device=inverse.device).scatter_reduce(0, inverse, rows, "amin")


def _label_voxels(labels: Tensor, inverse: Tensor, voxels: int, ignore: int, conflict: str) -> Tensor:
    """Return the label of each voxel, ``[voxels]``, from the ``labels`` of its points. ``inverse`` holds the voxel of
    each point. ``ignore`` and ``conflict`` are the arguments ``ignore_label`` and ``conflict`` of
    :func:`sparse_quantize`.

    Raise ``SL204`` if the labels are not integers ``[p]``. Raise ``SL208`` if their dtype does not hold the value
    ``ignore``.
    """
    if labels.dim() != 1 or labels.is_floating_point():
        got = f"{labels.dtype} {tuple(labels.shape)}"
        raise error("SL204", where="sparse3d.sparse_quantize, argument 'labels'", got=got, expected="integers [p]")
    if torch.tensor(ignore).to(labels.dtype).item() != ignore:  # -100 wraps around in uint8
        where, got = "sparse3d.sparse_quantize, argument 'ignore_label'", f"{ignore} for {labels.dtype}"
        raise error("SL208", where=where, got=got, expected="a value of the labels' dtype", fix="pass labels.long()")
    votes = labels != ignore
    pairs, count = torch.unique(torch.stack([inverse, labels.long()], 1)[votes], dim=0, return_counts=True)
    voxel, label = pairs.unbind(1)
    made = labels.new_full((voxels,), ignore)
    if conflict == "ignore":
        alone = torch.bincount(voxel, minlength=voxels)[voxel] == 1
        return made.index_put((voxel[alone],), label[alone].to(labels.dtype))
    most = count.new_zeros(voxels).scatter_reduce(0, voxel, count, "amax")
    winners = (count == most[voxel]).nonzero()[:, 0]  # of equally many the smallest label comes first
    best = torch.full_like(most, len(pairs)).scatter_reduce(0, voxel[winners], winners, "amin")
    has_label = best < len(pairs)
    return made.index_put((has_label,), label[best[has_label]].to(labels.dtype))


@dataclass(eq=False)
class PointTensor:
    """Points with features, from which voxels can be made and which can take the features of voxels.

    Attributes:
        feats: ``[p, c]``.
        points: ``[p, 3]`` positions in units of voxels.
        batch: integers ``[p]``, the scene of each point, or None for one scene.
    """

    feats: Tensor
    points: Tensor
    batch: Tensor | None = None

    def __post_init__(self) -> None:
        """Raise ``SL201`` unless the points are ``[p, 3]``, and ``SL202`` if there are not as many rows of features."""
        require_tensor("PointTensor, argument 'points'", self.points)
        require_tensor("PointTensor, argument 'feats'", self.feats)
        if self.points.dim() != 2 or self.points.shape[1] != 3:
            got = f"shape {tuple(self.points.shape)}"
            raise error("SL201", where="PointTensor, argument 'points'", got=got, expected="[p, 3]")
        check_rows("PointTensor", self.feats, self.points.shape[0])

    def voxelize(self, spatial_shape: Axes | None = None, batch_size: int | None = None) -> SparseTensor:
        """Return the sparse tensor of the voxels that contain points, with the mean of the features of these points. A
        point lies in the cell ``floor(point)``. By default ``spatial_shape`` and ``batch_size`` are as large as the
        points need.
        """
        return voxelize(
            self.points,
            self.feats,
            1.0,
            batch=self.batch,
            origin=(0.0, 0.0, 0.0),
            spatial_shape=spatial_shape,
            batch_size=batch_size,
        )[0]

    def sample(self, x: SparseTensor, mode: Literal["trilinear", "nearest"] = "trilinear") -> PointTensor:
        """Return these points with the features of ``x`` at their positions. With the mode ``"trilinear"`` these are
        interpolated between the voxels around a point, and with ``"nearest"`` they are those of the voxel that contains
        it. Raise ``SL211`` for points of scenes that ``x`` does not have.
        """
        shape = (x.batch_size, x.feats.shape[1], *x.spatial_shape)
        if self.batch is None:
            return PointTensor(grid_sample_3d(x.feats, x.coords, shape, self.points[None], mode)[0], self.points)
        scene, most = self.batch.long(), x.batch_size - 1
        where = "PointTensor.sample, argument 'batch'"
        require(  # an index below 0 would read another scene
            ((scene >= 0) & (scene <= most)).all(),
            f"SL211: {where}: a point is in no scene from 0 to {most}",
            lambda: error(
                "SL211", where=where, got=f"scenes {int(scene.min())} to {int(scene.max())}", expected=f"0 to {most}"
            ),
        )
        if torch.compiler.is_compiling():  # a graph does not know how many points a scene has: it looks in each
            everywhere = self.points.expand(x.batch_size, *self.points.shape)
            each = grid_sample_3d(x.feats, x.coords, shape, everywhere, mode)
            point = torch.arange(scene.shape[0], device=scene.device)
            return PointTensor(each[scene, point], self.points, self.batch)
        counts = torch.bincount(scene, minlength=x.batch_size)
        order = scene.argsort(stable=True)
        place = torch.arange(len(scene), device=scene.device) - (counts.cumsum(0) - counts)[scene[order]]
        queries = self.points.new_zeros(len(counts), int(counts.max()) if len(scene) else 0, 3)
        queries[scene[order], place] = self.points[order]
        sampled = grid_sample_3d(x.feats, x.coords, shape, queries, mode)
        return PointTensor(sampled[scene[order], place][order.argsort()], self.points, self.batch)
