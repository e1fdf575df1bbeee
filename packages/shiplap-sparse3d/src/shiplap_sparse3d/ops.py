"""The eight ops of sparse3d, each declared once. Contracts and terms: docs/design/0002-sparse3d.md.

Coordinates are ``int32 [n, 4]`` rows (batch, x, y, z). A table is ``int32 [m, k]``: the input row under each tap of
each output row, or -1. Semantics follow spconv 2.x and FlexGEMM (cross-correlation, tap ``(kx*Ky + ky)*Kz + kz``).
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from jaxtyping import Float, Int32
from torch import Tensor

import shiplap as sl
from shiplap_sparse3d.coords import (
    GridLookup,
    assert_some_rows,
    check_coords,
    inside_grid,
    output_shape,
    refuse_rows,
    runs_without_python,
    tap_offsets,
)

__all__ = [
    "conv",
    "conv_table",
    "conv_weight_grad",
    "out_coords",
    "segment_mean",
    "sort_table",
    "subm_table",
    "tap_blocks",
    "transpose_table",
    "unique_coords",
]

GEOMETRY = ("len(spatial_shape) == 3", "min(spatial_shape) >= 1", "len(kernel) == 3", "min(kernel) >= 1")
WINDOW = (
    *GEOMETRY,
    "len(stride) == 3",
    "min(stride) >= 1",
    "len(padding) == 3",
    "min(padding) >= 0",
    "len(dilation) == 3",
    "min(dilation) >= 1",
)
OUT_COORDS_BOUND = "n * " + " * ".join(
    f"cdiv(kernel[{d}], stride[{d}] // gcd(stride[{d}], dilation[{d}]))" for d in range(3)
)


# --- voxels -----------------------------------------------------------------------------------------------------------


@sl.op("sparse3d::unique_coords", bounds={"m": "n"}, outputs=("unique", "inverse", "counts"))
def unique_coords(
    coords: Int32[Tensor, "n 4"],
) -> tuple[Int32[Tensor, "m 4"], Int32[Tensor, "n"], Int32[Tensor, "m"]]:
    """Return the distinct rows of ``coords`` in ascending order, the number of the distinct row of each input row, and
    the count of each distinct row.

    Raise ``SL211`` if the extents of the four columns multiply to 2^63 or more.
    """
    unique, inverse, counts = torch.unique(coords, dim=0, return_inverse=True, return_counts=True)
    return unique, inverse.int(), counts.int()


def distinct_voxels(coords: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct rows of ``coords`` in ascending order, the number of the distinct row of each input row, and
    the count of each distinct row.

    The op ``unique_coords`` computes them. In a program that is being exported for a GPU, an operator of torch does.
    """
    if not runs_without_python(coords, ("cuda",)):
        found = unique_coords(coords)
        assert_some_rows(found[0], coords)
        return found
    # In int64, since graphs of torch 2.11 take inverse and counts to have the dtype of the argument.
    unique, inverse, counts = torch.unique(coords.long(), dim=0, return_inverse=True, return_counts=True)
    torch._check(unique.shape[0] <= coords.shape[0])
    return unique.int(), inverse.int(), counts.int()


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of ``dtype`` are summed, at least float32. A sum of 16-bit numbers can leave
    their range although the average does not.
    """
    return torch.promote_types(dtype, torch.float32)


@sl.op("sparse3d::segment_mean")
def segment_mean(
    feats: Float[Tensor, "n c"], index: Int32[Tensor, "n"], counts: Int32[Tensor, "m"]
) -> Float[Tensor, "m c"]:
    """Return the mean of the rows of ``feats`` that share an ``index``. ``counts`` holds the number of rows of each
    index. A count of 0 gives zeros. Sums are kept in at least float32.

    Raise ``SL211`` for an index that is not a row of ``counts``.
    """
    refuse_rows("segment_mean", (index < 0) | (index >= counts.shape[0]), "index[{row}] is not a row of counts")
    total = feats.new_zeros(counts.shape[0], feats.shape[1], dtype=sum_dtype(feats.dtype))
    total = total.index_add(0, index.long(), feats.to(total.dtype))
    return (total / counts.clamp_min(1).to(total.dtype)[:, None]).to(feats.dtype)


@segment_mean.backward(strided=True)
def _(grad: Tensor, saved: SimpleNamespace, needs: SimpleNamespace) -> dict[str, Tensor]:
    """Return the gradient of ``segment_mean`` with respect to its features, as a dict by argument name. The dict is
    empty if autograd does not need it. Each row gets an equal share of the gradient of its segment (the rows with one
    index).
    """
    # Each row has an equal share of the mean.
    share = grad.to(sum_dtype(grad.dtype)) / saved.counts.clamp_min(1)[:, None]
    return {"feats": share.to(grad.dtype)[saved.index.long()]} if needs.feats else {}


# --- tables -----------------------------------------------------------------------------------------------------------


@sl.op(
    "sparse3d::subm_table",
    dims={"k": "prod(kernel)"},
    requires=(*GEOMETRY, "len(dilation) == 3", "min(dilation) >= 1"),
)
def subm_table(
    coords: Int32[Tensor, "n 4"], spatial_shape: list[int], kernel: list[int], dilation: list[int]
) -> Int32[Tensor, "n k"]:
    """Return the neighbour table of a submanifold convolution, ``int32 [n, k]``. For each tap of each voxel it holds
    the row of the voxel at ``x + (kx - Kx//2)*Dx`` (likewise for y and z), or -1.

    Raise ``SL211`` for duplicate rows and for coordinates outside ``spatial_shape`` (cells per axis).
    """
    check_coords("subm_table", coords, spatial_shape)
    offsets = [
        [0, *((t - k // 2) * d for t, k, d in zip(tap, kernel, dilation, strict=True))] for tap in tap_offsets(kernel)
    ]
    # int64, so that an offset beyond int32 does not wrap into the grid.
    return GridLookup(coords, spatial_shape)(coords.long()[:, None] + torch.tensor(offsets, device=coords.device))


@sl.op("sparse3d::out_coords", bounds={"m": OUT_COORDS_BOUND}, requires=WINDOW)
def out_coords(
    coords: Int32[Tensor, "n 4"],
    spatial_shape: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Int32[Tensor, "m 4"]:
    """Return the output voxels of a strided convolution in ascending order. They are all cells of the output grid that
    an input voxel reaches. Raise ``SL211`` as ``subm_table`` does.

    An input voxel reaches an output cell if it lies at one of the cells of the kernel placed there.
    """
    check_coords("out_coords", coords, spatial_shape)
    grid = output_shape(spatial_shape, kernel, stride, padding, dilation)
    step = torch.tensor([1, *stride], device=coords.device)
    shifts = [[0, *(p - t * d for p, t, d in zip(padding, tap, dilation, strict=True))] for tap in tap_offsets(kernel)]
    moved = coords.long()[:, None] + torch.tensor(shifts, device=coords.device)
    outputs = torch.div(moved, step, rounding_mode="floor")
    # An output exists where the division by the stride has no remainder.
    candidates = outputs[(outputs * step == moved).all(2) & inside_grid(outputs, grid)]
    return torch.unique(candidates, dim=0).int()


@sl.op("sparse3d::conv_table", dims={"k": "prod(kernel)"}, requires=WINDOW)
def conv_table(
    coords: Int32[Tensor, "n 4"],
    out_coords: Int32[Tensor, "m 4"],
    spatial_shape: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Int32[Tensor, "m k"]:
    """Return the neighbour table of a strided convolution, ``int32 [m, k]``. For each tap ``k`` of each output ``o`` it
    holds the input row at ``o*S - P + k*Dl``, or -1. Raise ``SL211`` for duplicate rows and for rows outside their
    grid.

    ``S``, ``P`` and ``Dl`` are stride, padding and dilation. A tap is a cell of the kernel, the last axis fastest. The
    row is -1 if there is no voxel at this cell.
    """
    check_coords("conv_table", coords, spatial_shape)
    grid = output_shape(spatial_shape, kernel, stride, padding, dilation)
    check_coords("conv_table", out_coords, grid)
    corner = out_coords.long() * torch.tensor([1, *stride], device=coords.device)
    offsets = [[0, *(t * d - p for t, d, p in zip(tap, dilation, padding, strict=True))] for tap in tap_offsets(kernel)]
    return GridLookup(coords, spatial_shape)(corner[:, None] + torch.tensor(offsets, device=coords.device))


@sl.op("sparse3d::transpose_table", requires=("rows >= 0",))
def transpose_table(table: Int32[Tensor, "m k"], rows: int) -> Int32[Tensor, "rows k"]:
    """Return the transpose of a neighbour table, which holds the output row that reads each input row by each tap. It
    has ``t[table[j, v], v] = j`` and -1 elsewhere. Raise ``SL211`` for a number outside ``[-1, rows)``, and if two
    outputs read one input by the same tap.

    ``table[j, v]`` is the input row that output ``j`` reads by tap ``v`` (a cell of the kernel), or -1. ``rows`` is the
    number of input rows.
    """
    refuse_rows("transpose_table", ((table < -1) | (table >= rows)).any(1), "row {row} has an entry outside [-1, rows)")
    hit = table >= 0
    at = torch.where(hit, table, rows).long()  # entries without a row go to a last one, which is dropped
    number = torch.arange(table.shape[0], dtype=torch.int32, device=table.device)[:, None].expand_as(table)
    result = table.new_full((rows + 1, table.shape[1]), -1).scatter(0, at, number)
    # Of two rows with one entry, one was overwritten.
    lost = hit & (result.gather(0, at) != number)
    refuse_rows("transpose_table", lost.any(1), "an entry of row {row} occurs twice under its tap")
    return result[:rows]


# --- convolution ------------------------------------------------------------------------------------------------------
#
# A table may be *sorted*, so that rows whose hits look alike lie together: its taps are cut into ``parts`` runs of
# ``cdiv(k, parts)``, and ``order[p, r]`` is the output row whose hits under the taps of part ``p`` are ``table[r]``.
# ``masks[p, b]`` has a bit for each tap of the part that any of the rows ``64 * b`` to ``64 * b + 63`` hits.

# So many rows of a sorted table share a mask of the taps that they hit.
ROWS_PER_MASK = 64
MAX_PART = 31  # taps of a part: one bit each in an int32 that stays positive


def part_size(taps: int, parts: int) -> int:
    """Return the number of taps of each part of a neighbour table, or 0 if ``parts`` is 0. The ``taps`` columns of the
    table are cut into ``parts`` groups that are sorted separately. The last part may have fewer taps.
    """
    return -(-taps // parts) if parts else 0


@sl.op(
    "sparse3d::sort_table",
    dims={"b": "cdiv(m, 64)"},
    outputs=("columns", "order", "masks"),
    requires=("parts >= 1", "parts <= max(k, 1)", "cdiv(k, parts) <= 31", "run >= 1"),
)
def sort_table(
    table: Int32[Tensor, "m k"], parts: int, run: int = 1 << 18
) -> tuple[Int32[Tensor, "k m"], Int32[Tensor, "parts m"], Int32[Tensor, "parts b"]]:
    """Return the neighbour table ``table`` with its rows sorted, as ``columns``, ``order`` and ``masks``.

    ``table[i, v]`` is the input row that output ``i`` reads by tap ``v``, or -1. Output ``i`` hits the tap if the
    number is not -1. The taps are split into ``parts`` groups (parts) of successive taps, and each part is sorted on
    its own. ``order[p, i]`` is the output at place ``i`` of part ``p``. ``columns[v, i]`` is ``table[order[p, i], v]``,
    where ``p`` is the part of tap ``v``. Bit ``t`` of ``masks[p, b]`` is set if an output at one of the 64 places from
    ``64 * b`` on hits tap ``t`` of part ``p``.

    Each run of ``run`` successive outputs is sorted by itself, stably, by the descending rank of its hits in the Gray
    code. A block of 64 places then has few taps that only some of its outputs hit. Outputs without a hit come last in
    their run. A run that fits the cache of a GPU keeps neighbours close in memory.
    """
    m, k = table.shape
    size, columns, orders, masks = part_size(k, parts), [], [], []
    blocks = -(-m // ROWS_PER_MASK)
    for part in range(parts):
        taps_here = table[:, part * size : (part + 1) * size]
        bits = torch.arange(taps_here.shape[1], device=table.device)
        hits = ((taps_here >= 0).long() << bits).sum(1)
        rank = hits
        for shift in (1, 2, 4, 8, 16):  # the prefix XOR that undoes a Gray code
            rank = rank ^ (rank >> shift)
        within = torch.arange(m, device=table.device) // run
        # The run is the most significant part of the key, so runs stay in order.
        order = (rank - (within << MAX_PART + 1)).argsort(descending=True, stable=True)
        columns.append(taps_here[order].t())
        orders.append(order.int())
        padded = torch.nn.functional.pad(hits[order], (0, blocks * ROWS_PER_MASK - m)).view(blocks, ROWS_PER_MASK)
        # The union of the hits of a block, tap by tap.
        any_row = ((padded[..., None] >> torch.arange(MAX_PART, device=table.device)) & 1).amax(1)
        masks.append((any_row << torch.arange(MAX_PART, device=table.device)).sum(1).int())
    return torch.cat(columns).contiguous(), torch.stack(orders), torch.stack(masks)


_TAPS = ("taps >= 0", f"taps <= {MAX_PART} * parts")  # the bits of a mask that count


@sl.op("sparse3d::tap_blocks", dims={"k": "taps"}, outputs=("blocks", "counts"), requires=_TAPS)
def tap_blocks(masks: Int32[Tensor, "parts b"], taps: int) -> tuple[Int32[Tensor, "k b"], Int32[Tensor, "k"]]:
    """Return the blocks of 64 rows of a sorted table that hit each tap, ``int32 [taps, b]``, and their numbers. The
    blocks of a tap are ascending, followed by zeros.

    ``masks`` is a result of ``sort_table``. A block hits a tap (a column of the neighbour table) if any of its rows has
    a neighbour in that column.
    """
    size = part_size(taps, masks.shape[0])
    tap = torch.arange(taps, device=masks.device)
    hit = ((masks[tap // max(size, 1)] >> (tap % max(size, 1))[:, None]) & 1).bool() if taps else masks.new_zeros(0, 0)
    counts = hit.sum(1)
    # Sorted by "not hit", so the blocks that hit come first, in order.
    blocks = (~hit).to(torch.uint8).argsort(dim=1, stable=True) if taps else masks.new_zeros(0, masks.shape[1])
    behind = torch.arange(masks.shape[1], device=masks.device) >= counts[:, None]
    return blocks.masked_fill(behind, 0).int(), counts.int()


def by_output(table: Tensor, order: Tensor | None) -> Tensor:
    """Return a sorted neighbour ``table`` with its rows in the order of the outputs again. ``order [parts, m]`` has the
    output of each row for each part, a group of columns that was sorted separately. If ``order`` is None, ``table`` is
    not sorted and is returned unchanged.
    """
    if order is None or table.shape[1] == 0:
        return table
    part = torch.arange(table.shape[1], device=table.device) // part_size(table.shape[1], order.shape[0])
    return torch.full_like(table, -1).scatter(0, order.long()[part].t(), table)


def rows_under(feats: Tensor, index: Tensor) -> Tensor:
    """Return ``feats[index]``, with a row of zeros for each index of -1. ``feats`` may have no rows, and ``index`` may
    have any shape.
    """
    padded = torch.cat([feats, feats.new_zeros(1, *feats.shape[1:])])
    return padded[torch.where(index >= 0, index, feats.shape[0]).long()]


def _check_table(op: str, table: Tensor, rows: int) -> None:
    """Raise ``SL211`` if a row of the neighbour ``table`` has a number outside ``[-1, rows)``. ``op`` is the op's name
    in the error.
    """
    refuse_rows(op, ((table < -1) | (table >= rows)).any(1), "table row {row} has an entry outside " + f"[-1, {rows})")


_CHANNELS = ("groups >= 1", "cg * groups == ci", "co % groups == 0")


@sl.op("sparse3d::conv", requires=_CHANNELS, autocast="autocast")
def conv(
    feats: Float[Tensor, "n ci"],
    weight: Float[Tensor, "co k cg"],
    table: Int32[Tensor, "m k"],
    bias: Float[Tensor, "co"] | None = None,
    order: Int32[Tensor, "parts m"] | None = None,
    masks: Int32[Tensor, "parts b"] | None = None,
    table_t: Int32[Tensor, "n k"] | None = None,
    order_t: Int32[Tensor, "parts_t n"] | None = None,
    masks_t: Int32[Tensor, "parts_t bt"] | None = None,
    groups: int = 1,
    reflect: bool = False,
    symmetric: bool = False,
    tf32: bool = False,
) -> Float[Tensor, "m co"]:
    """Return the convolution over a neighbour table, ``out[j] = bias + sum_v weight[:, v] @ feats[table[j, v]]``. Where
    the table has -1, nothing is added.

    ``order`` and ``masks`` are those of ``sort_table`` if the table is sorted, and otherwise None. Channels are
    convolved in ``groups``, as in ``torch.nn.Conv3d``. If ``reflect`` is true, tap ``v`` takes ``weight[:, k-1-v]``.
    If ``tf32`` is true, a GPU may round float32 factors to 10 bits of fraction. Sums are always float32, or float64 for
    float64. Raise ``SL211`` for a number in the table outside ``[-1, n)``.

    Only the backward reads the other arguments. ``table_t``, ``order_t`` and ``masks_t`` are the transposed table and
    the results of sorting it. ``symmetric`` is true if the table with its columns in reverse order is its own
    transpose, as submanifold tables of odd kernels are. If neither is given, the backward builds the transposed table.
    """
    _check_table("conv", table, feats.shape[0])
    table, weight = by_output(table, order), weight.flip(1) if reflect else weight
    (m, k), (co, _, cg) = table.shape, weight.shape
    rows = rows_under(feats, table).view(m, k, groups, cg).permute(1, 2, 0, 3)
    products = rows @ weight.view(groups, co // groups, k, cg).permute(2, 0, 3, 1)  # [k, groups, m, co / groups]
    products = products.transpose(1, 2).reshape(k, m, co)
    out = torch.where((table.t() >= 0)[..., None], products, 0).sum(0)  # not 0 * inf where there is no hit
    return out if bias is None else out + bias


@sl.op(
    "sparse3d::conv_weight_grad",
    dims={"cg": "ci // groups"},
    requires=("groups >= 1", "ci % groups == 0", "co % groups == 0"),
)
def conv_weight_grad(
    grad: Float[Tensor, "m co"],
    feats: Float[Tensor, "n ci"],
    table: Int32[Tensor, "m k"],
    order: Int32[Tensor, "parts m"] | None = None,
    blocks: Int32[Tensor, "k b"] | None = None,
    counts: Int32[Tensor, "k"] | None = None,
    groups: int = 1,
    reflect: bool = False,
    tf32: bool = False,
) -> Float[Tensor, "co k cg"]:
    """Return the gradient of the weight of ``conv``, ``out[:, v] = sum_j grad[j] (x) feats[table[j, v]]``. ``grad`` is
    the gradient of the output of ``conv``. ``order``, ``blocks`` and ``counts`` belong to a sorted table, as the ops
    ``sort_table`` and ``tap_blocks`` return them. Raise ``SL211`` for a number in the table outside ``[-1, n)``.

    ``groups``, ``reflect`` and ``tf32`` are the arguments of ``conv``. If the table is not sorted, ``order``,
    ``blocks`` and ``counts`` are None.
    """
    _check_table("conv_weight_grad", table, feats.shape[0])
    table = by_output(table, order)
    (m, k), co, cg = table.shape, grad.shape[1], feats.shape[1] // groups
    rows = rows_under(feats, table).view(m, k, groups, cg).permute(1, 2, 0, 3)
    hits = torch.where((table.t() >= 0)[..., None], grad, 0).view(k, m, groups, co // groups).permute(0, 2, 3, 1)
    out = (hits @ rows).permute(1, 2, 0, 3).reshape(co, k, cg)
    return out.flip(1) if reflect else out


def _swap_channels(weight: Tensor, groups: int) -> Tensor:
    """Return the weight ``[co, k, ci / groups]`` as ``[ci, k, co / groups]``, the weight of the transposed convolution.
    For one group the result is a view.
    """
    if groups == 1:
        return weight.permute(2, 1, 0)
    co, k, cg = weight.shape
    return weight.view(groups, co // groups, k, cg).permute(0, 3, 2, 1).reshape(groups * cg, k, co // groups)


@conv.backward(strided=True)
def _(grad: Tensor, saved: SimpleNamespace, needs: SimpleNamespace) -> dict[str, Tensor]:
    """Return the gradients of ``conv`` with respect to its bias, weight and features, as a dict by argument name.
    ``grad`` is the gradient of the result. An argument whose gradient autograd does not need (``needs``) is left out.
    """
    # Each tap reads rows of ``grad``, so these are made adjacent. Columns of a sorted table are, and stay as they are.
    grad = grad.contiguous()
    gradients, here = {}, (saved.table, saved.order, saved.masks)
    groups, reflect, tf32 = saved.groups, saved.reflect, saved.tf32
    if needs.bias:  # what takes scratch comes before what stays: a sum over rows takes 132 MiB on an H200
        gradients["bias"] = grad.sum(0)
    if needs.weight:
        blocks, counts = tap_blocks(saved.masks, saved.table.shape[1]) if saved.masks is not None else (None, None)
        gradients["weight"] = conv_weight_grad(
            grad, saved.feats, saved.table, saved.order, blocks, counts, groups, reflect, tf32
        )
    if needs.feats and saved.symmetric:
        weight, nothing = _swap_channels(saved.weight, groups), (None, None, None)
        gradients["feats"] = conv(grad, weight, here[0], None, *here[1:], *nothing, groups, not reflect, True, tf32)
    elif needs.feats:
        back = (saved.table_t, saved.order_t, saved.masks_t)
        if back[0] is None:
            # Without a transpose from the forward pass, an unsorted one is made here.
            back = transpose_table(by_output(*here[:2]), saved.feats.shape[0]), None, None
        weight = _swap_channels(saved.weight, groups)
        gradients["feats"] = conv(grad, weight, back[0], None, *back[1:], *here, groups, reflect, False, tf32)
    return gradients


@conv_weight_grad.backward(strided=True)
def _(grad: Tensor, saved: SimpleNamespace, needs: SimpleNamespace) -> dict[str, Tensor]:
    """Return the gradients of ``conv_weight_grad`` with respect to its ``grad`` and ``feats``, as a dict by argument
    name. An argument whose gradient autograd does not need (``needs``) is left out. These are second derivatives of a
    convolution.
    """
    table, gradients = by_output(saved.table, saved.order), {}
    options = {"groups": saved.groups, "reflect": saved.reflect, "tf32": saved.tf32}
    if needs.grad:
        gradients["grad"] = conv(saved.feats, grad, table, **options)
    if needs.feats:
        back = transpose_table(table, saved.feats.shape[0])
        gradients["feats"] = conv(saved.grad, _swap_channels(grad, saved.groups), back, **options)
    return gradients
