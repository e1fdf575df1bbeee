"""The samples of the audit for the sparse3d ops: distinct voxels inside a grid, tables as table ops return them."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import Any

import torch
from torch import Generator, Tensor

from shiplap_sparse3d import bounded, norms, offsets, ops, planning, pooling
from shiplap_sparse3d.coords import output_shape

# The number of scenes of a sample.
SCENES = 2


def _choose_grid(rows: int) -> list[int]:
    """Return three grid sizes for which ``rows`` voxels in ``SCENES`` scenes fill about a third of the cells."""
    edge = max(3, math.ceil((3 * rows / SCENES) ** (1 / 3)))
    return [edge + 1, edge, edge + 2]


def _draw_voxels(rng: Generator, rows: int, grid: list[int], device: Any) -> Tensor:
    """Return random distinct voxels of ``SCENES`` scenes of ``grid``, unsorted, as ``int32 [rows, 4]``."""
    # A permutation of cell numbers gives distinct voxels.
    cells = torch.randperm(SCENES * math.prod(grid), generator=rng)[:rows]
    z, rest = cells % grid[2], cells // grid[2]
    y, rest = rest % grid[1], rest // grid[1]
    return torch.stack([rest // grid[0], rest % grid[0], y, z], 1).int().to(device)


MANY = 4096  # rows from which a table is drawn on its device, and looks like those of scans; also for many taps


def _draw_table(rng: Generator, outputs: int, inputs: int, taps: int, device: Any) -> Tensor:
    """Return a random neighbour table ``int32 [outputs, taps]``. It holds the number of an input row, below ``inputs``,
    or -1 for about half of its elements. No number occurs twice in a column. Large square tables for a cubic kernel of
    odd size are those of voxels on a surface.
    """
    if outputs and max(outputs, inputs, taps) >= MANY:
        edge = round(taps ** (1 / 3))
        sheet = outputs == inputs >= MANY and edge % 2 == 1 and edge**3 == taps
        return (
            _draw_sheet(rng, outputs, edge, device) if sheet else _draw_spread_table(rng, outputs, inputs, taps, device)
        )
    span = max(1, 2 * max(outputs, inputs))
    # Numbers beyond the inputs become misses, about half of them.
    columns = [torch.randperm(span, generator=rng)[:outputs] for _ in range(taps)]
    table = torch.stack(columns, 1) if taps else torch.zeros(outputs, 0, dtype=torch.int64)
    return torch.where(table < inputs, table, -1).int().to(device)


def _draw_sheet(rng: Generator, rows: int, edge: int, device: Any) -> Tensor:
    """Return the neighbour table ``int32 [rows, edge**3]`` of a convolution from voxels on a wavy surface, two voxels
    thick, onto themselves. The tuner needs such tables to measure the time that kernels save by skipping columns
    without a neighbour.
    """
    at = torch.arange(rows, device=device)
    side = math.isqrt((rows + 1) // 2) + 1
    x, y = at // 2 // side, at // 2 % side
    shift = torch.rand(2, generator=rng).tolist()
    height = (12 + 6 * torch.sin(x / 7 + shift[0]) + 6 * torch.cos(y / 9 + shift[1])).long() + at % 2
    coords = torch.stack([torch.zeros_like(x), x, y, height], 1).int()
    return ops.subm_table.reference(coords, [side + 1, side, 32], [edge] * 3, [1, 1, 1])


def _draw_spread_table(rng: Generator, outputs: int, inputs: int, taps: int, device: Any) -> Tensor:
    """Return a random neighbour table ``int32 [outputs, taps]`` of numbers below ``inputs`` or -1, for large sizes. A
    column is ``(row * odd + shift) % span`` with a random odd factor, so no number occurs twice and no permutation is
    drawn.
    """
    span = 1 << (2 * max(outputs, inputs) - 1).bit_length()
    odd, shift = (torch.randint(0, span // 2, (taps,), generator=rng).to(device) for _ in range(2))
    entries = (torch.arange(outputs, device=device)[:, None] * (2 * odd + 1) + shift) % span
    return torch.where(entries < inputs, entries, -1).int()


def _triple_of(sizes: dict[str, Any], name: str, default: list[int], least: int = 1) -> list[int]:
    """Return the three numbers ``sizes[name]``, each raised to at least ``least``. Return ``default`` if there are not
    three numbers.
    """
    value = list(sizes.get(name) or ())
    return [max(least, v) for v in value] if len(value) == 3 else default


def _draw_window(sizes: dict[str, Any]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return kernel, stride, padding and dilation from ``sizes``, three numbers each. A size that ``sizes`` lacks is 3,
    2, 1 or 1 on each axis. The kernel has at most 5 cells per axis, and the padding less than the kernel.
    """
    kernel = [min(5, k) for k in _triple_of(sizes, "kernel", [3, 3, 3])]
    # More padding than a kernel covers would give outputs that no input reaches.
    padding = [min(p, k - 1) for p, k in zip(_triple_of(sizes, "padding", [1, 1, 1], 0), kernel, strict=True)]
    return kernel, _triple_of(sizes, "stride", [2, 2, 2]), padding, _triple_of(sizes, "dilation", [1, 1, 1])


def _draw_normal(rng: Generator, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
    """Return normally distributed random values of ``shape``. Large tensors are drawn on their device."""
    if math.prod(shape) < 2**20:
        return torch.randn(shape, generator=rng, dtype=torch.float64).to(device=device, dtype=dtype)
    # Large tensors are drawn on the device, from a seed of the given generator.
    there = Generator(device).manual_seed(int(torch.randint(2**62, (1,), generator=rng)))
    return torch.randn(shape, generator=there, device=device).to(dtype)


def _round_if_tf32(tf32: bool, *values: Tensor) -> list[Tensor]:
    """Return ``values``, rounded to bfloat16 if ``tf32`` is true and unchanged otherwise. Products of rounded values
    are exact in TF32, so results can be compared.
    """
    return [v.bfloat16().to(v.dtype) for v in values] if tf32 else [*values]


@ops.unique_coords.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return the argument of ``unique_coords``, rows of small numbers, many of which are equal."""
    return (torch.randint(-3, 4, (sizes["n"], 4), generator=rng, dtype=torch.int32).to(device),)


@ops.segment_mean.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``segment_mean``, which are rows, the segment of each row, and the number of rows in each
    segment.
    """
    segments = sizes["m"]
    # Without a segment no row can have an index.
    rows = sizes["n"] if segments else 0
    index = torch.randint(0, max(1, segments), (rows,), generator=rng)
    counts = torch.bincount(index, minlength=segments)[:segments].int().to(device)
    return _draw_normal(rng, (rows, sizes["c"]), dtype, device), index.int().to(device), counts


@ops.subm_table.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``subm_table``, which are voxels, their grid, and the kernel and dilation of a
    convolution.
    """
    grid = _choose_grid(sizes["n"])
    kernel, _, _, dilation = _draw_window(sizes)
    return _draw_voxels(rng, sizes["n"], grid, device), grid, kernel, dilation


@ops.out_coords.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``out_coords``, which are voxels, their grid, and the kernel, stride, padding and dilation of
    a convolution.
    """
    grid = _choose_grid(sizes["n"])
    return _draw_voxels(rng, sizes["n"], grid, device), grid, *_draw_window(sizes)


def _conv_table_arguments(rng: Generator, sizes: dict[str, Any], device: Any) -> tuple[Any, ...]:
    """Return arguments of ``conv_table``. They are input voxels, output voxels, the input grid, and the kernel, stride,
    padding and dilation of the convolution. The output voxels lie in the output grid.
    """
    kernel, stride, padding, dilation = _draw_window(sizes)
    grid = _choose_grid(max(sizes["n"], sizes["m"] * math.prod(stride)))
    grid = [g + d * (k - 1) for g, d, k in zip(grid, dilation, kernel, strict=True)]
    outputs = list(output_shape(grid, kernel, stride, padding, dilation))
    coords, out_coords = _draw_voxels(rng, sizes["n"], grid, device), _draw_voxels(rng, sizes["m"], outputs, device)
    return coords, out_coords, grid, kernel, stride, padding, dilation


@ops.conv_table.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``conv_table``, which are input voxels, output voxels, the input grid, and the kernel,
    stride, padding and dilation of the convolution.
    """
    return _conv_table_arguments(rng, sizes, device)


@ops.transpose_table.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``transpose_table``, which are a neighbour table and the number of its inputs."""
    return _draw_table(rng, sizes["m"], sizes["rows"], sizes["k"], device), sizes["rows"]


def _sorted_form(table: Tensor, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(table, order, masks)``, the neighbour ``table`` with its rows sorted by the columns in which they have
    a neighbour. ``order`` has the output of each row, and ``masks`` the columns in which any row of each block of 64
    has a neighbour. ``parts`` is the number of groups of columns that are sorted separately.
    """
    columns, order, masks = ops.sort_table.reference(table, parts)
    return columns.t(), order, masks


def _choose_parts(sizes: dict[str, Any], name: str = "parts") -> int:
    """Return a valid number of parts for a neighbour table of ``sizes["k"]`` columns. A part is a group of columns that
    is sorted separately. The number is ``sizes[name]``, limited so that each part has from 1 to 31 columns.
    """
    return max(1, -(-sizes["k"] // ops.MAX_PART), min(sizes[name], sizes["k"]))


@ops.sort_table.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``sort_table``, which are a neighbour table, the number of parts (groups of columns that are
    sorted separately), and the number of successive rows that are sorted by themselves.
    """
    return _draw_table(rng, sizes["m"], sizes["m"], sizes["k"], device), _choose_parts(sizes), sizes["run"]


@planning.subm_plan.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``subm_plan``. They are voxels and their grid, kernel and dilation, the number of parts
    (groups of columns that are sorted separately), the number of successive rows that are sorted by themselves, and the
    number of scenes or 0.
    """
    grid = _choose_grid(sizes["n"])
    kernel, _, _, dilation = _draw_window(sizes)
    parts = _choose_parts({**sizes, "k": math.prod(kernel)})
    scenes = SCENES if sizes["scenes"] else 0  # known or not: fewer are an error
    return _draw_voxels(rng, sizes["n"], grid, device), grid, kernel, dilation, parts, sizes["run"], scenes


@planning.conv_plan.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``conv_plan``. They are input voxels, output voxels, the input grid, kernel, stride, padding
    and dilation, the numbers of parts (groups of columns that are sorted separately) of both tables, and the number of
    successive rows that are sorted by themselves.
    """
    sizes = {**sizes, "k": math.prod(_draw_window(sizes)[0])}
    back = _choose_parts(sizes, "parts_t") if sizes["parts_t"] else 0
    return *_conv_table_arguments(rng, sizes, device), _choose_parts(sizes), back, sizes["run"]


def _choose_channels(sizes: dict[str, Any]) -> tuple[int, int, int, int]:
    """Return ``(groups, ci, co, channels of a group)`` near the requested sizes. ``ci`` and ``co`` are the numbers of
    input and output channels, and ``groups`` divides both.
    """
    # Every group needs a channel on both sides.
    groups = max(1, min(sizes["groups"], sizes["ci"], sizes["co"]))
    ci, co = (sizes[name] // groups * groups for name in ("ci", "co"))
    return groups, ci, co, ci // groups


@ops.conv.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``conv``, which are tensors and then options. ``sizes["absent"]`` names optional tensors that
    are None. A neighbour table is sorted, unless one of the tensors that describe its sorting is absent.
    """
    n, m, k = (sizes[name] for name in ("n", "m", "k"))
    groups, ci, co, cg = _choose_channels(sizes)
    table: Tensor = _draw_table(rng, m, n, k, device)
    shapes = (n, ci), (co, k, cg), (co,)
    feats, weight, bias = _round_if_tf32(sizes["tf32"], *(_draw_normal(rng, shape, dtype, device) for shape in shapes))
    back: tuple[Any, ...] = (None, None, None)
    if "table_t" not in sizes["absent"]:
        # Optional arguments that are absent stay None, as in calls on the CPU.
        back = ops.transpose_table.reference(table, n), None, None
    order = masks = None
    if not {"order", "masks"} & {*sizes["absent"]}:
        table, order, masks = _sorted_form(table, _choose_parts(sizes))
    if not {"table_t", "order_t", "masks_t"} & {*sizes["absent"]}:
        back = _sorted_form(back[0], _choose_parts(sizes, "parts_t"))
    return feats, weight, table, bias, order, masks, *back, groups, sizes["reflect"], False, sizes["tf32"]


@ops.conv_weight_grad.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``conv_weight_grad``, which are a gradient, features, a neighbour table, three tensors that
    describe its sorting, and options. ``sizes["absent"]`` names optional tensors. If one of these is absent, the table
    is not sorted, and all three are None.
    """
    n, m, k = (sizes[name] for name in ("n", "m", "k"))
    groups, ci, co, _ = _choose_channels(sizes)
    values = (_draw_normal(rng, shape, dtype, device) for shape in ((m, co), (n, ci)))
    grad, feats = _round_if_tf32(sizes["tf32"], *values)
    table: Tensor = _draw_table(rng, m, n, k, device)
    order = blocks = counts = None
    if not {"order", "blocks", "counts"} & {*sizes["absent"]}:
        table, order, masks = _sorted_form(table, max(1, -(-k // ops.MAX_PART), min(sizes["parts"], k)))
        blocks, counts = ops.tap_blocks.reference(masks, k)
    return grad, feats, table, order, blocks, counts, groups, sizes["reflect"], sizes["tf32"]


@ops.tap_blocks.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``tap_blocks``, which are random masks ``int32 [parts, b]`` and the number of columns of a
    neighbour table. The masks have bits only for the columns of a part.
    """
    taps = sizes["taps"]
    parts = max(1, sizes["parts"], -(-taps // ops.MAX_PART))
    # Masks have bits for the taps of a part only.
    last = 1 << ops.part_size(taps, parts)
    return torch.randint(0, last, (parts, sizes["b"]), generator=rng).int().to(device), taps


# --- pooling ----------------------------------------------------------------------------------------------------------


def _draw_negative(rng: Generator, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
    """Return normally distributed random values with negative sign. A maximum that starts from zero gives a wrong
    result for them. Equal values, which have no derivative, are left to the tests.
    """
    return -_draw_normal(rng, shape, dtype, device).abs()


def _pool_arguments(rng: Generator, sizes: dict[str, Any], device: Any) -> tuple[Tensor, Tensor]:
    """Return a random neighbour table ``int32 [m, k]`` for pooling, with input rows or -1, and its transpose."""
    table: Tensor = _draw_table(rng, sizes["m"], sizes["n"], sizes["k"], device)
    return table, ops.transpose_table.reference(table, sizes["n"])


@pooling.max_pool_with_taps.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``max_pool_with_taps``, which are features below zero, a neighbour table and its
    transpose.
    """
    return _draw_negative(rng, (sizes["n"], sizes["c"]), dtype, device), *_pool_arguments(rng, sizes, device)


@pooling.max_pool_grad.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``max_pool_grad``, which are a gradient, the columns of the neighbour table with the largest
    values in a max pooling, and the transposed table.
    """
    table, back = _pool_arguments(rng, sizes, device)
    feats = _draw_negative(rng, (sizes["n"], sizes["c"]), dtype, device)
    taps = pooling.max_pool_with_taps.reference(feats, table)[1]
    return _draw_normal(rng, (sizes["m"], sizes["c"]), dtype, device), taps, back


@pooling.sum_pool.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``sum_pool``, which are features, a neighbour table and its transpose, and whether to
    average.
    """
    return (
        _draw_normal(rng, (sizes["n"], sizes["c"]), dtype, device),
        *_pool_arguments(rng, sizes, device),
        sizes["average"],
    )


def _draw_scenes(rng: Generator, sizes: dict[str, Any], device: Any) -> tuple[Tensor, int]:
    """Return rows ``int32 [n, 4]`` of random scenes in any order, and the number of scenes. Some rows are padding
    (-1).
    """
    count = max(1, sizes["batch_size"])
    batch = torch.randint(-1, count, (sizes["n"], 1), generator=rng)
    cells = torch.randint(0, 9, (sizes["n"], 3), generator=rng)
    return torch.cat([batch, cells], 1).int().to(device), count


@pooling.global_max_pool.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``global_max_pool``, which are features below zero, the scenes of their rows, and the number
    of scenes.
    """
    return _draw_negative(rng, (sizes["n"], sizes["c"]), dtype, device), *_draw_scenes(rng, sizes, device)


@pooling.global_sum_pool.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``global_sum_pool``, which are features, the scenes of their rows, the number of scenes, and
    whether to average.
    """
    return (
        _draw_normal(rng, (sizes["n"], sizes["c"]), dtype, device),
        *_draw_scenes(rng, sizes, device),
        sizes["average"],
    )


@norms.norm_relu.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``norm_relu``, which are features, mean and variance, weight and bias, and a small ``eps``.
    The variances are from 0.5 to 1.5.
    """
    c = sizes["c"]
    mean, weight, bias = (_draw_normal(rng, (c,), dtype, device) for _ in range(3))
    var = (torch.rand(c, generator=rng) + 0.5).to(dtype).to(device)
    return _draw_normal(rng, (sizes["n"], c), dtype, device), mean, var, weight, bias, 1e-3


# --- capacity form ----------------------------------------------------------------------------------------------------


@bounded.out_coords_bounded.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``out_coords_bounded``, which are voxels, their grid, kernel, stride, padding and dilation,
    and a capacity, the number of output rows.
    """
    return _bounded_arguments(rng, sizes, device)


def _bounded_arguments(rng: Generator, sizes: dict[str, Any], device: Any) -> tuple[Any, ...]:
    """Return arguments of ``out_coords_bounded``. They are voxels mixed with padding, their grid, the kernel, stride,
    padding and dilation of a convolution, and the capacity. So many of the drawn voxels are kept that they reach no
    more outputs than the capacity.
    """
    grid, window = _choose_grid(sizes["n"]), _draw_window(sizes)
    coords = _draw_voxels(rng, sizes["n"], grid, device)
    coords[torch.rand(sizes["n"], generator=rng).to(device) < 0.2] = -1

    def reached(rows: int) -> int:
        """Return the number of output voxels that the first ``rows`` of the drawn voxels ``coords`` reach. It never
        falls as ``rows`` grows, so a binary search can call this function.
        """
        return ops.out_coords.reference(coords[:rows], grid, *window).shape[0]

    # The number of outputs grows with the rows, so a binary search finds the most that fit.
    kept = bisect_right(range(sizes["n"] + 1), sizes["capacity"], key=reached) - 1
    coords[kept:] = -1
    return coords, grid, *window, sizes["capacity"]


@bounded.reached_keys.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``reached_keys``, which are voxels, their grid, kernel, stride, padding and dilation, and a
    capacity, the number of keys.
    """
    return _bounded_arguments(rng, sizes, device)


@bounded.first_voxels.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``first_voxels``. They are voxels, their grid, kernel, stride, padding and dilation, a
    capacity, and a number of scenes that may be too small.
    """
    return *_bounded_arguments(rng, sizes, device), sizes["scenes"]


@bounded.voxels_of_keys.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``voxels_of_keys``, which are keys of distinct voxels in any order, and the grid. The last
    eighth of the keys is padding.
    """
    grid = _choose_grid(sizes["m"])
    keys = torch.randperm(SCENES * math.prod(grid), generator=rng)[: sizes["m"]]
    keys[sizes["m"] - sizes["m"] // 8 :] = bounded.NO_KEY
    return keys.to(device), grid


# --- by offsets -------------------------------------------------------------------------------------------------------


def _draw_rows(rng: Generator, rows: int, columns: int, device: Any, *, distinct: bool) -> Tensor:
    """Return ``int32 [rows, columns]``, a random scene and random coordinates around zero in each row. If ``distinct``
    is true, no row occurs twice. Otherwise rows may repeat.
    """
    # About a third of the cells has a voxel, so that some neighbours exist and others do not.
    edge = max(2, math.ceil((3 * rows / SCENES) ** (1 / max(1, columns - 1))))
    cells = SCENES * edge ** (columns - 1) if columns > 1 else max(rows, 1)
    at = torch.randperm(cells, generator=rng)[:rows] if distinct else torch.randint(cells, (rows,), generator=rng)
    digits = []
    for _ in range(columns - 1):
        digits.append(at % edge - edge // 2)
        at = at // edge
    return torch.stack([at, *digits], 1).int().to(device)


def _draw_step(rng: Generator, sizes: dict[str, Any], device: Any) -> tuple[Tensor, list[int]]:
    """Return random offsets ``int32 [k, d]``, with 0 in the scene's column, and a stride for each column."""
    taps = torch.randint(-2, 3, (sizes["k"], sizes["d"]), generator=rng)
    taps[:, 0] = 0
    # Scalars follow from the sizes, so that two samples of one size differ in their tensors only.
    return taps.int().to(device), [1, *(1 + (axis + sizes["n"]) % 2 for axis in range(sizes["d"] - 1))]


@offsets.offset_table.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``offset_table``, which are distinct voxels with padding, outputs with repeats, offsets, and
    a stride.
    """
    coords = _draw_rows(rng, sizes["n"], sizes["d"], device, distinct=True)
    coords[: sizes["n"] // 8] = -1
    return coords, _draw_rows(rng, sizes["m"], sizes["d"], device, distinct=False), *_draw_step(rng, sizes, device)


@offsets.offset_cells.samples
def _(rng: Generator, sizes: dict[str, Any], dtype: torch.dtype, device: Any) -> tuple[Any, ...]:
    """Return arguments of ``offset_cells``, which are voxels with repeats, offsets, a stride, the lower and upper
    bounds of outputs, and whether the step is transposed.
    """
    coords, axes = _draw_rows(rng, sizes["n"], sizes["d"], device, distinct=False), sizes["d"] - 1
    bounds = [0, *[-5] * axes], [SCENES, *[9] * axes]
    return coords, *_draw_step(rng, sizes, device), *bounds, sizes["transposed"]
