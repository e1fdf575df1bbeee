"""``SparseTensor`` and the geometry it lives on. A geometry holds coordinates and the tables built from them, so that
layers on the same voxels share one table, and a network whose tables exist runs without touching a coordinate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shiplap.errors import error
from shiplap.kernels.sparse3d import ops
from shiplap.kernels.sparse3d.coords import output_shape
from shiplap.kernels.sparse3d.plan import Plan

__all__ = ["Geometry", "SparseTensor", "Strided", "triple", "voxelize"]

Triple = tuple[int, int, int]


def triple(value: int | Sequence[int], name: str) -> Triple:
    """``3`` or ``(3, 3, 1)`` → one int per axis."""
    values = (value,) * 3 if isinstance(value, int) else tuple(value)
    if len(values) != 3:
        raise error("SL208", where=name, got=values, expected="an int, or one int per axis")
    return values


@dataclass
class Strided:
    """The result of one strided step: the coarser geometry and the plan of convolutions onto it."""

    geometry: Geometry
    plan: Plan


class Geometry:
    """Active voxels of a grid, and every table computed on them so far.

    Attributes:
        coords: ``int32 [n, 4]`` rows (batch, x, y, z), distinct, inside the grid.
        spatial_shape: cells per axis.
        batch_size: number of scenes.
        parent: where this geometry came from by a strided step, for the way back.
    """

    def __init__(self, coords: Tensor, spatial_shape: Sequence[int], batch_size: int) -> None:
        self.coords = coords
        self.spatial_shape = triple(spatial_shape, "spatial_shape")
        self.batch_size = batch_size
        self.parent: tuple[Geometry, Triple, Strided] | None = None
        self._subm: dict[tuple[Triple, Triple], Plan] = {}
        self._strided: dict[tuple[Triple, Triple, Triple, Triple], Strided] = {}

    def subm(self, kernel: int | Sequence[int], dilation: int | Sequence[int] = 1) -> Plan:
        """Plan of a submanifold convolution, built at most once."""
        key = triple(kernel, "kernel"), triple(dilation, "dilation")
        if key not in self._subm:
            table = ops.subm_table(self.coords, list(self.spatial_shape), list(key[0]), list(key[1]))
            # A neighbour across offset d sees this voxel across -d: an odd kernel read backwards is its own transpose.
            odd = all(k % 2 == 1 for k in key[0])
            back = None if odd else (ops.transpose_table(table, self.coords.shape[0]), None, None)
            self._subm[key] = self._settled(Plan(table, self.coords.shape[0], symmetric=odd, back=back))
        return self._subm[key]

    def _settled(self, plan: Plan) -> Plan:
        """``plan`` as the kernels of this device want it."""
        return plan.sorted() if self.coords.device.type == "cuda" else plan

    def strided(
        self,
        kernel: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
    ) -> Strided:
        """The geometry one strided convolution away, with tables, built at most once."""
        window = (
            triple(kernel, "kernel"),
            triple(stride, "stride"),
            triple(padding, "padding"),
            triple(dilation, "dilation"),
        )
        if window not in self._strided:
            scalars = [list(self.spatial_shape), *map(list, window)]
            coords = ops.out_coords(self.coords, *scalars)
            table = ops.conv_table(self.coords, coords, *scalars)
            back = ops.transpose_table(table, self.coords.shape[0])
            plan = self._settled(Plan(table, self.coords.shape[0], back=(back, None, None)))
            step = Strided(Geometry(coords, output_shape(self.spatial_shape, *window), self.batch_size), plan)
            step.geometry.parent = self, window[0], step
            self._strided[window] = step
        return self._strided[window]

    def to(self, device: torch.device | str) -> Geometry:
        """The same voxels on another device, without tables."""
        return Geometry(self.coords.to(device), self.spatial_shape, self.batch_size)


class SparseTensor:
    """Features on active voxels.

    Args:
        feats: ``[n, c]``.
        coords: ``int32 [n, 4]`` rows (batch, x, y, z), distinct and inside the grid (checked when a table is built).
        spatial_shape: cells per axis.
        batch_size: number of scenes; every batch index is below it.
        geometry: used instead of the three above when the voxels are those of another tensor.
    """

    def __init__(
        self,
        feats: Tensor,
        coords: Tensor | None = None,
        spatial_shape: Sequence[int] = (),
        batch_size: int = 1,
        *,
        geometry: Geometry | None = None,
    ) -> None:
        if geometry is None:
            if coords is None:
                raise error("SL209", where="SparseTensor", got="no coords", expected="coords or geometry")
            geometry = Geometry(coords, spatial_shape, batch_size)
        self.feats, self.geometry = feats, geometry

    @property
    def coords(self) -> Tensor:
        return self.geometry.coords

    @property
    def spatial_shape(self) -> Triple:
        return self.geometry.spatial_shape

    @property
    def batch_size(self) -> int:
        return self.geometry.batch_size

    def replace(self, feats: Tensor) -> SparseTensor:
        """Other features on the same voxels; tables are shared."""
        return SparseTensor(feats, geometry=self.geometry)

    def dense(self) -> Tensor:
        """``[batch_size, c, X, Y, Z]``, zeros where no voxel is active."""
        out = self.feats.new_zeros(self.batch_size, *self.spatial_shape, self.feats.shape[1])
        out = out.index_put(tuple(self.coords.long().unbind(1)), self.feats)
        return out.permute(0, 4, 1, 2, 3)

    def __repr__(self) -> str:
        n, c = self.feats.shape
        return f"SparseTensor(n={n}, c={c}, spatial_shape={self.spatial_shape}, batch_size={self.batch_size})"


def voxelize(
    points: Tensor,
    feats: Tensor,
    size: float | Sequence[float],
    *,
    batch: Tensor | None = None,
    origin: Sequence[float] | None = None,
    spatial_shape: Sequence[int] | None = None,
    batch_size: int | None = None,
) -> tuple[SparseTensor, Tensor]:
    """Points → voxels with the mean of their features, and the voxel of each point.

    Args:
        points: ``[p, 3]`` positions, in the unit of ``size``.
        feats: ``[p, c]``.
        size: edge of a voxel, one number or one per axis.
        batch: ``int32 [p]`` scene of each point (default: one scene).
        origin: corner of the grid (default: the minimum of the points).
        spatial_shape, batch_size: default: as large as the points need, which costs a host synchronisation.

    Returns:
        ``(voxels, inverse)`` with ``inverse int32 [p]``; voxels are in ascending (batch, x, y, z) order.

    Raises:
        ArgumentError: SL211 for points below ``origin``, beyond ``spatial_shape`` or not finite.
    """
    edge = points.new_tensor([size] * 3 if isinstance(size, (int, float)) else list(size))
    if origin is not None:
        corner = points.new_tensor(list(origin))
    else:
        corner = points.amin(0) if points.shape[0] else points.new_zeros(3)
    cells = torch.floor((points - corner) / edge)
    _check_cells(points, cells, spatial_shape)
    scene = batch if batch is not None else torch.zeros(points.shape[0], dtype=torch.int32, device=points.device)
    coords, inverse, counts = ops.unique_coords(torch.cat([scene.int()[:, None], cells.int()], 1))
    if spatial_shape is None:
        spatial_shape = (coords[:, 1:].amax(0) + 1).tolist() if coords.shape[0] else [1, 1, 1]
    if batch_size is None:
        batch_size = 1 if batch is None or not coords.shape[0] else int(coords[:, 0].max()) + 1
    return SparseTensor(ops.segment_mean(feats, inverse, counts), coords, spatial_shape, batch_size), inverse


def _check_cells(points: Tensor, cells: Tensor, spatial_shape: Sequence[int] | None) -> None:
    limit = cells.new_tensor(list(spatial_shape)) if spatial_shape is not None else cells.new_full((3,), 2.0**31)
    outside = ~((cells >= 0) & (cells < limit)).all(1)  # a NaN compares false, so it is outside
    if bool(outside.any()):
        row = int(outside.nonzero()[0, 0])
        raise error(
            "SL211", where="sparse3d.voxelize", got=f"point {row} = {points[row].tolist()}, cell {cells[row].tolist()}",
            expected=f"cells from 0 to {[int(v) - 1 for v in limit.tolist()]}",
            fix="set origin and spatial_shape so that every point is inside, or drop the points that are not",
        )  # fmt: skip
