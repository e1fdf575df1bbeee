"""Voxels that share a cell, in submanifold layers: each row is a voxel of its own, and its neighbours are found.

Models project voxels onto an image, or give each Gaussian the cell that contains it, and convolve over the result.
spconv accepts such input, and its result depends on the order in which threads write to a hash table. Here row ``i``
reads itself and, in each other cell of the window, the first row of that cell. So over the first rows it is a
convolution of distinct voxels. Each other row of a cell gets a copy of the first row's result, plus the difference
between itself and the first one under the weight of the centre. Both are sums of ops that have gradients.

Only the data tell whether rows share a cell. On the CPU the op that builds a table reports that, and the layer
continues from there. On a GPU this would mean waiting, and a graph has no other branch: both expect shared cells after
:func:`expect_duplicates`, and no batch that a layer meets changes that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from shiplap import ShiplapError
from shiplap.plugin_api import error
from shiplap.plugin_api.memos import built_outside_modes
from shiplap_sparse3d.coords import keys_of
from shiplap_sparse3d.geometry import Geometry
from shiplap_sparse3d.plan import Plan

__all__ = ["SharedPlan", "expect_duplicates", "first_rows", "plan_of"]

jit: Any = torch.jit  # which types do not know in full
_expected = False


def expect_duplicates(expected: bool = True) -> bool:
    """Set whether submanifold layers accept several voxels in one cell on a GPU and in graphs that are compiled from
    now on. If ``expected`` is false, they raise an error for such voxels. Return the previous setting.

    On the CPU, layers outside of graphs always accept them. A layer skips the check if a strided layer made its voxels,
    since those are distinct.
    """
    global _expected
    before, _expected = _expected, expected
    return before


def first_rows(coords: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the number of the first row with equal coordinates for each row of ``coords``, ``int64 [n]``. ``coords``
    is ``int32 [n, 4]`` in a grid with ``shape`` cells per axis.
    """
    # Stable, so that the first row of a cell stays in front of the others.
    order = keys_of(coords, shape).argsort(stable=True)
    ordered = coords.index_select(0, order)
    places = torch.arange(order.shape[0], device=coords.device)
    begins = (ordered != ordered.roll(1, 0)).any(1)  # of one row, or of equal ones alone, no begin is seen
    start = torch.where(begins, places, 0).cummax(0).values
    return torch.empty_like(order).scatter(0, order, order.index_select(0, start))


@dataclass(frozen=True)
class SharedPlan(Plan):
    """The plan of a submanifold layer of which several voxels may lie in one cell. Its neighbour tables are those of
    the first row of each cell. The results of a cell's other rows are computed from the result of its first row.

    Attributes:
        first: ``int64 [n]``, the first row in the cell of each row.
        centre: the tap at which a voxel reads itself.
    """

    first: Tensor | None = None
    centre: int = 0

    def conv(
        self, feats: Tensor, weight: Tensor, bias: Tensor | None = None, groups: int = 1, tf32: bool | None = None
    ) -> Tensor:
        """Return the convolution ``[n, co]`` of ``feats [n, ci]`` with ``weight [co, k, ci / groups]`` on voxels of
        which several may lie in one cell. Each row reads itself at the centre, and the first row of each neighbouring
        cell. If ``bias`` is None, no bias is added. ``groups`` and ``tf32`` are those of :meth:`Plan.conv`.
        """
        assert self.first is not None
        # Every row of a cell gets the result of the first one.
        of_cells = super().conv(feats, weight, bias, groups, tf32).index_select(0, self.first)
        # A row reads itself at the centre, where the plan reads the first row of the cell.
        difference = feats - feats.index_select(0, self.first)
        return of_cells + _grouped_rows(difference, weight[:, self.centre], groups).to(of_cells.dtype)

    @property
    def by_row(self) -> Tensor:
        """The row that each row reads under each tap, ``int32 [n, k]``, or -1 if there is none. At the centre each row
        reads itself, whereas in the plan's table it reads the first row of its cell.
        """
        assert self.first is not None
        table = self.unsorted().table.index_select(0, self.first)
        own = torch.arange(table.shape[0], dtype=table.dtype, device=table.device)
        return torch.cat([table[:, : self.centre], own[:, None], table[:, self.centre + 1 :]], 1)


def _grouped_rows(rows: Tensor, weight: Tensor, groups: int) -> Tensor:
    """Return the product of ``rows [n, ci]`` and the transpose of ``weight [co, ci / groups]`` within each of
    ``groups`` groups of channels, ``[n, co]``.
    """
    if groups == 1:
        return torch.nn.functional.linear(rows, weight)
    split = rows.reshape(rows.shape[0], groups, rows.shape[1] // groups).transpose(0, 1)  # [groups, n, ci / groups]
    columns = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1]).transpose(1, 2)
    return torch.bmm(split, columns).transpose(0, 1).flatten(1)


def plan_of(geometry: Geometry, kernel: list[int], dilation: list[int]) -> Plan:
    """Return the plan (neighbour tables) of a submanifold layer on the voxels of ``geometry``. Several voxels may lie
    in one cell on the CPU, and elsewhere if :func:`expect_duplicates` allows it.

    Raise ``SL211`` if voxels share a cell where that is not allowed, and for rows outside the grid.
    """
    # A strided layer made these voxels, so they are distinct.
    if geometry.parent is not None:
        return geometry.subm(kernel, dilation)
    if is_compiling():
        return _plan_of_shared(geometry, kernel, dilation) if _expected else geometry.subm(kernel, dilation)
    if geometry.shared is not None or (_expected and geometry.coords.is_cuda and _has_twins(geometry)):
        return _plan_of_shared(geometry, kernel, dilation)
    if jit.is_tracing() and _has_twins(geometry):  # an op that raises leaves torch's tracer in pieces
        return _plan_of_shared(geometry, kernel, dilation)
    try:
        return geometry.subm(kernel, dilation)
    except ShiplapError as wrong:
        # SL211 has other causes too, such as rows outside the grid.
        if wrong.id != "SL211" or geometry.coords.is_cuda or not _has_twins(geometry):
            raise
    return _plan_of_shared(geometry, kernel, dilation)


@built_outside_modes
def _has_twins(geometry: Geometry) -> bool:
    """Return whether any two rows of ``geometry`` have equal coordinates. The host waits for a GPU."""
    first = first_rows(geometry.coords, geometry.spatial_shape)
    return not torch.equal(first, torch.arange(first.shape[0], device=first.device))


def _plan_of_shared(geometry: Geometry, kernel: list[int], dilation: list[int]) -> SharedPlan:
    """Return the plan (neighbour tables) of a submanifold layer on voxels of which several may lie in one cell.
    ``geometry`` stores the first row of each cell, so that it is found once for all kernels.
    """
    if geometry.shared is None:
        first, coords = _first_of_cells(geometry.coords, geometry.spatial_shape)
        distinct = Geometry.unchecked(coords, geometry.spatial_shape, geometry.batch_size, False, geometry.ndim)
        geometry.shared = first, distinct
    first, distinct = geometry.shared
    plan = distinct.subm(kernel, dilation)
    centre = 0
    for size in kernel:
        # The number of the tap in the middle of each axis, in tap order.
        centre = centre * size + size // 2
    return SharedPlan(
        plan.table, plan.rows, plan.order, plan.masks, plan.reflect, plan.symmetric, plan.back, first, centre
    )


@built_outside_modes
def _first_of_cells(coords: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the number of the first row with equal coordinates for each row of ``coords``, ``int64 [n]``, and a copy
    of ``coords``. In the copy every row that is not the first of its cell consists of -1, which is padding.
    """
    first = first_rows(coords, shape)
    alone = first == torch.arange(first.shape[0], device=first.device)
    return first, torch.where(alone[:, None], coords, -1)


def refuse_shared(plan: Plan, where: str) -> None:
    """Raise ``SL211`` if ``plan`` (neighbour tables) is a ``SharedPlan``, of which several voxels may lie in one cell.
    ``where`` names the operation, which is not defined for such voxels.
    """
    if isinstance(plan, SharedPlan):
        raise error("SL211", where=where, got="voxels that share a cell", expected="distinct voxels")
