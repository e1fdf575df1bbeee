"""One step from voxels to other voxels: the voxels that a window reaches, and the plan of convolutions onto them.

Both directions share their ops. A transposed window reaches ``o = i*S - P + k*Dl``. Seen from the scaled voxels ``i*S``
that is a window of stride 1 whose taps count backwards, so ``out_coords`` finds those voxels too, and the table is the
transpose of the strided one that leads back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from shiplap import ShiplapError
from shiplap.plugin_api import error
from shiplap.plugin_api.memos import built_outside_modes
from shiplap_sparse3d import bounded, ops, planning
from shiplap_sparse3d.axes import Triple
from shiplap_sparse3d.coords import is_known_to_hold, most_outputs, output_shape, runs_without_python
from shiplap_sparse3d.plan import Plan, parts_for, wants_sorted
from shiplap_sparse3d.rows import rows_where

__all__ = ["StepWindow", "connect_voxels", "output_cells", "submanifold_plan"]


class StepWindow(NamedTuple):
    """The window by which a convolution goes from input voxels to output voxels. ``kernel``, ``stride``, ``padding``
    and ``dilation`` have one number for each of three axes.

    Attributes:
        output_padding: the output padding of a transposed convolution, or None for a strided one.
        capacity: the number of rows of the result if that is fixed (the last ones are padding), or None.
    """

    kernel: Triple
    stride: Triple
    padding: Triple
    dilation: Triple
    output_padding: Triple | None = None
    capacity: int | None = None

    def shape(self, grid: Triple) -> Triple:
        """Return the output grid of a convolution with this window from the input ``grid``, with at least 0 cells per
        axis.
        """
        if self.output_padding is None:
            return cast("Triple", output_shape(grid, *self[:4]))
        axes = zip(grid, *self[:4], self.output_padding, strict=True)
        sizes = (max(0, (w - 1) * s - 2 * p + d * (k - 1) + 1 + extra) for w, k, s, p, d, extra in axes)
        return cast("Triple", tuple(sizes))

    def keeps_voxels(self, grid: Triple | None) -> bool:
        """Return whether every voxel reaches an output voxel, wherever it lies in ``grid`` (None: without bounds).
        Return False if that is not known, as for a kernel with gaps.
        """
        kernel, stride, padding, dilation, extra, _ = self
        if any(k > 1 and d > 1 for k, d in zip(kernel, dilation, strict=True)):
            return False
        outputs = grid and self.shape(grid)
        if outputs is not None and not all(is_known_to_hold(cells > 0) for cells in outputs):
            return False
        if extra is not None:  # the cells that a voxel reaches follow each other, and not all are cut off
            return min(extra) >= 0 and all(p < k for k, p in zip(kernel, padding, strict=True))
        if any(k < s for k, s in zip(kernel, stride, strict=True)):
            return False
        if grid is None or outputs is None:
            return True
        # The windows lie side by side, so the last one decides.
        axes = zip(grid, outputs, kernel, stride, padding, strict=True)
        return all(is_known_to_hold((m - 1) * s - p + k >= w) for w, m, k, s, p in axes)

    def grid_before(self, grid: Triple, reached: Triple) -> Triple:
        """Return the smallest input grid that contains ``grid`` and from which a convolution with this window leads to
        an output grid of at least ``reached``.
        """
        axes = zip(self.kernel, self.padding, self.dilation, strict=True)
        around = [d * (k - 1) + 1 - 2 * p for k, p, d in axes]
        if self.output_padding is None:
            least = [(m - 1) * s + a for m, s, a in zip(reached, self.stride, around, strict=True)]
        else:
            ends = zip(reached, self.stride, around, self.output_padding, strict=True)
            least = [-(-(m - a - e) // s) + 1 for m, s, a, e in ends]
        return cast("Triple", tuple(map(max, grid, least)))

    def max_outputs(self, rows: int, grid: Triple, batch_size: int) -> int:
        """Return an upper bound of the number of output voxels that ``rows`` voxels in ``batch_size`` scenes of
        ``grid`` can reach by a convolution with this window.
        """
        each = list(self.kernel)
        if self.output_padding is None:
            axes = zip(self.kernel, self.stride, self.dilation, strict=True)
            # Along an axis one input reaches an output for each tap at a multiple of the stride.
            each = [-(-k // (s // math.gcd(s, d))) for k, s, d in axes]
        x, y, z = self.shape(grid)  # multiplied out: math.prod of a generator is closed to torch.compile
        return min(rows * each[0] * each[1] * each[2], batch_size * x * y * z)


@built_outside_modes
def output_cells(window: StepWindow, coords: Tensor, grid: Triple) -> Tensor:
    """Return the voxels that those at ``coords`` in ``grid`` reach by ``window``, ``int32 [m, 4]``, ascending. If the
    window has a capacity, ``m`` is equal to it, with padding (-1) in the rows without a voxel.
    """
    kernel, stride, padding, dilation, extra, capacity = window
    if extra is None:
        return _out_coords(coords, grid, kernel, stride, padding, dilation, capacity)
    # Taps count backwards, hence padding on the far side; more padding than the kernel covers cuts the border off.
    far = [d * (k - 1) - p for p, d, k in zip(padding, dilation, kernel, strict=True)]
    room = [(w - 1) * s + 1 + max(0, e) + min(0, 2 * f) for w, s, e, f in zip(grid, stride, extra, far, strict=True)]
    b, *cells = coords.unbind(1)
    scaled = torch.stack([b, *(c * s + min(0, f) for c, s, f in zip(cells, stride, far, strict=True))], 1)
    # Negative padding moves voxels out of the grid, and ``out_coords`` would refuse them.
    if min(far) < 0:
        scaled = _cut_to_grid(scaled, room)
    outer = [max(0, f) for f in far]
    coords_out = _out_coords(scaled, [max(1, r) for r in room], kernel, (1, 1, 1), outer, dilation, capacity)
    if min(extra) >= 0:
        return coords_out
    # A negative output padding cuts the far border off.
    coords_out = _cut_to_grid(coords_out, window.shape(grid))
    return coords_out if capacity is not None else coords_out.index_select(0, rows_where(coords_out[:, 0] >= 0))


def _out_coords(
    coords: Tensor,
    grid: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    capacity: int | None,
) -> Tensor:
    """Return the voxels that a convolution with this kernel, stride, padding and dilation reaches from ``coords``,
    ascending. If ``capacity`` is not None, the result is padded to that many rows. In a program that is being exported
    for a GPU, memory is reserved for the largest possible number of voxels.
    """
    window = list(kernel), list(stride), list(padding), list(dilation)
    if capacity is not None:
        return bounded.out_coords_bounded(coords, list(grid), *window, capacity)[0]
    if not runs_without_python(coords, ("cuda",)):
        return ops.out_coords(coords, list(grid), *window)
    most = most_outputs(coords.shape[0], window)
    keys, count = bounded.reached_keys(coords, list(grid), *window, most)
    rows = count.item()
    # An exported graph needs bounds of a size that depends on data.
    torch._check(rows >= 0)
    torch._check(rows <= most)
    return bounded.voxels_of_keys(keys[:rows], [max(1, size) for size in output_shape(grid, *window)])


def _cut_to_grid(coords: Tensor, limits: Sequence[int]) -> Tensor:
    """Return ``coords`` with padding (-1) in place of the rows outside ``[0, limits)``."""
    inside = [(c >= 0) & (c < limit) for c, limit in zip(coords.unbind(1)[1:], limits, strict=True)]
    return torch.where((inside[0] & inside[1] & inside[2])[:, None], coords, -1)


@built_outside_modes
def submanifold_plan(coords: Tensor, grid: Triple, kernel: Triple, dilation: Triple, scenes: int = 0) -> Plan:
    """Return the plan (neighbour table) of submanifold convolutions from ``coords`` onto themselves. ``scenes`` is the
    number of scenes, or 0 if it is not known.

    On a GPU with an odd kernel, one op makes a table in which each run of ``1 << 18`` rows is sorted by the taps (cells
    of the kernel) under which a row has a neighbour. Such a run fits the cache of a GPU. Otherwise the table is
    unsorted.
    """
    arguments, (x, y, z) = (coords, list(grid), list(kernel), list(dilation)), kernel
    # A neighbour across offset d sees this voxel across -d: an odd kernel read backwards is its own transpose.
    odd = x % 2 == y % 2 == z % 2 == 1
    if odd and wants_sorted(coords):
        parts = parts_for(coords.shape[0], x * y * z)
        columns, order, masks = planning.subm_plan(*arguments, parts, 1 << 18, scenes)
        return Plan(columns.t(), coords.shape[0], order, masks, symmetric=True)
    return Plan(ops.subm_table(*arguments), coords.shape[0], symmetric=odd)


@built_outside_modes
def connect_voxels(
    window: StepWindow, coords: Tensor, grid: Triple, reached: Tensor, *, ordered: bool = False, back: bool = False
) -> Plan:
    """Return the plan (neighbour tables) of convolutions by ``window`` from ``coords`` in ``grid`` onto the voxels
    ``reached``.

    If ``ordered`` is true, the rows are sorted by the taps (cells of the kernel) under which they have a neighbour. If
    ``back`` is true, a sorted plan has the transposed table, which gradients read. An unsorted plan of a strided window
    does not have it. The plan of a transposed window always has it, and is sorted only if both arguments are true.
    """
    kernel, stride, padding, dilation, extra, _ = window
    lists = list(kernel), list(stride), list(padding), list(dilation)
    n, m, k = coords.shape[0], reached.shape[0], math.prod(kernel)
    if extra is None:
        arguments = coords, reached, list(grid), *lists
        if not ordered:
            return Plan(ops.conv_table(*arguments), n)
        parts = parts_for(m, k, strided=max(stride) > 1), parts_for(n, k) if back else 0
        columns, order, masks, *rest = planning.conv_plan(*arguments, *parts)
        return Plan(columns.t(), n, order, masks, back=(rest[0].t(), rest[1], rest[2]) if back else None)
    whole = window._replace(output_padding=(max(0, extra[0]), max(0, extra[1]), max(0, extra[2]))).shape(grid)
    arguments = reached, coords, [max(1, w) for w in whole], *lists
    if not (ordered and back):
        table = ops.conv_table(*arguments)
        return Plan(ops.transpose_table(table, m), n, back=(table, None, None))
    columns, order, masks, *rest = planning.conv_plan(*arguments, parts_for(n, k), parts_for(m, k))
    return Plan(rest[0].t(), n, rest[1], rest[2], back=(columns.t(), order, masks))


def vanished_grid_error(window: StepWindow, grid: tuple[int, ...], shape: tuple[int, ...]) -> ShiplapError:
    """Return the error ``SL208`` of a convolution by ``window`` from ``grid`` to the output grid ``shape``, which has
    no cells.
    """
    kernel, padding, dilation = (each[-len(grid) :] for each in (window.kernel, window.padding, window.dilation))
    return error(
        "SL208",
        where="a step to other voxels",
        got=f"a grid {shape}: kernel {kernel}, padding {padding}, dilation {dilation} on {grid}",
        expected="1 cell or more per axis",
        fix="enlarge spatial_shape or the padding, or take a smaller kernel",
    )
