"""The eight ops of sparse3d, each declared once. Contracts and words: docs/design/0002-sparse3d.md.

Coordinates are ``int32 [n, 4]`` rows (batch, x, y, z). A table is ``int32 [m, k]``: the input row under each tap of
each output row, or -1. Semantics follow spconv 2.x and FlexGEMM (cross-correlation, tap ``(kx*Ky + ky)*Kz + kz``).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from jaxtyping import Float, Int32
from torch import Tensor

import shiplap as sl
from shiplap.kernels.sparse3d.coords import Lookup, check_coords, inside, output_shape, refuse, taps

__all__ = [
    "conv", "conv_table", "conv_weight_grad", "out_coords", "segment_mean", "subm_table", "transpose_table",
    "unique_coords",
]  # fmt: skip

LIBRARY = Path(__file__).parent / "libshiplap_sparse3d.so"

_GEOMETRY = ("len(spatial_shape) == 3", "min(spatial_shape) >= 1", "len(kernel) == 3", "min(kernel) >= 1")
_WINDOW = (
    *_GEOMETRY, "len(stride) == 3", "min(stride) >= 1", "len(padding) == 3", "min(padding) >= 0",
    "len(dilation) == 3", "min(dilation) >= 1",
)  # fmt: skip
_BOUND = "n * " + " * ".join(f"cdiv(kernel[{d}], stride[{d}] // gcd(stride[{d}], dilation[{d}]))" for d in range(3))


def _bind(
    op: sl.Op, workspace: str | None = None, *, strided: tuple[str, ...] = (), dtypes: tuple[str, ...] = ()
) -> None:
    """The CPU kernel of ``op``: the C function of the same name."""
    kernel = sl.cabi(LIBRARY, f"sparse3d_{op.spec.opname}", strided=strided)
    op.kernel("cpu", kernel, workspace=workspace, dtypes=dtypes)


# --- voxels -----------------------------------------------------------------------------------------------------------


@sl.op("sparse3d::unique_coords", bounds={"m": "n"}, outputs=("unique", "inverse", "counts"))
def unique_coords(
    coords: Int32[Tensor, "n 4"],
) -> tuple[Int32[Tensor, "m 4"], Int32[Tensor, "n"], Int32[Tensor, "m"]]:
    """Distinct rows in ascending order, the distinct row of each input row, and how often each occurs.

    Raises SL211 when the extents of the four columns multiply to 2^63 or more.
    """
    if coords.shape[0] == 0:
        empty = coords.new_empty(0)
        return coords.new_empty(0, 4), empty, empty.clone()
    unique, inverse, counts = torch.unique(coords, dim=0, return_inverse=True, return_counts=True)
    return unique, inverse.int(), counts.int()


@sl.op("sparse3d::segment_mean")
def segment_mean(
    feats: Float[Tensor, "n c"], index: Int32[Tensor, "n"], counts: Int32[Tensor, "m"]
) -> Float[Tensor, "m c"]:
    """Mean of the rows of ``feats`` that share an ``index``; ``counts`` says how many there are of each (0: zeros)."""
    refuse("segment_mean", (index < 0) | (index >= counts.shape[0]), "index[{row}] is not a row of counts")
    total = feats.new_zeros(counts.shape[0], feats.shape[1]).index_add(0, index.long(), feats)
    return total / counts.clamp_min(1).to(feats.dtype)[:, None]


@segment_mean.backward(saves=("index", "counts"))
def _(grad: Tensor, saved: SimpleNamespace, needs: SimpleNamespace) -> dict[str, Tensor]:
    share = grad / saved.counts.clamp_min(1).to(grad.dtype)[:, None]
    return {"feats": share[saved.index.long()]} if needs.feats else {}


# --- tables -----------------------------------------------------------------------------------------------------------


@sl.op(
    "sparse3d::subm_table",
    dims={"k": "prod(kernel)"},
    requires=(*_GEOMETRY, "len(dilation) == 3", "min(dilation) >= 1"),
)
def subm_table(
    coords: Int32[Tensor, "n 4"], spatial_shape: list[int], kernel: list[int], dilation: list[int]
) -> Int32[Tensor, "n k"]:
    """Submanifold table: the row at ``x + (kx - Kx//2)*Dx``, and so on per axis.

    Raises SL211 for duplicate rows and for coordinates outside ``spatial_shape`` (cells per axis).
    """
    check_coords("subm_table", coords, spatial_shape)
    find, columns = Lookup(coords, spatial_shape), []
    for tap in taps(kernel):
        offset = [(t - k // 2) * d for t, k, d in zip(tap, kernel, dilation, strict=True)]
        columns.append(find(coords.long() + torch.tensor([0, *offset], device=coords.device)))
    return torch.stack(columns, 1)


@sl.op("sparse3d::out_coords", bounds={"m": _BOUND}, requires=_WINDOW)
def out_coords(
    coords: Int32[Tensor, "n 4"],
    spatial_shape: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Int32[Tensor, "m 4"]:
    """Output voxels of a strided convolution in ascending order: every one that an input voxel reaches.

    Raises SL211 as ``subm_table`` does.
    """
    check_coords("out_coords", coords, spatial_shape)
    grid = output_shape(spatial_shape, kernel, stride, padding, dilation)
    step = torch.tensor([1, *stride], device=coords.device)
    reached = [coords.long().new_empty(0, 4)]
    for tap in taps(kernel):
        shift = [p - t * d for p, t, d in zip(padding, tap, dilation, strict=True)]
        moved = coords.long() + torch.tensor([0, *shift], device=coords.device)
        outputs = torch.div(moved, step, rounding_mode="floor")
        reached.append(outputs[(outputs * step == moved).all(1) & inside(outputs, grid)])
    candidates = torch.cat(reached)
    return (torch.unique(candidates, dim=0) if candidates.shape[0] else candidates).int()


@sl.op("sparse3d::conv_table", dims={"k": "prod(kernel)"}, requires=_WINDOW)
def conv_table(
    coords: Int32[Tensor, "n 4"],
    out_coords: Int32[Tensor, "m 4"],
    spatial_shape: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Int32[Tensor, "m k"]:
    """Strided table: the input row at ``o*S - P + k*Dl``. Raises SL211 as ``subm_table`` does."""
    check_coords("conv_table", coords, spatial_shape)
    grid = output_shape(spatial_shape, kernel, stride, padding, dilation)
    check_coords("conv_table", out_coords, grid)
    find, columns = Lookup(coords, spatial_shape), []
    corner = out_coords.long() * torch.tensor([1, *stride], device=coords.device)
    for tap in taps(kernel):
        offset = [t * d - p for t, d, p in zip(tap, dilation, padding, strict=True)]
        columns.append(find(corner + torch.tensor([0, *offset], device=coords.device)))
    return torch.stack(columns, 1)


@sl.op("sparse3d::transpose_table", requires=("rows >= 0",))
def transpose_table(table: Int32[Tensor, "m k"], rows: int) -> Int32[Tensor, "rows k"]:
    """``t[table[j, v], v] = j`` and -1 elsewhere: from each input row to the output rows it reaches.

    Raises SL211 for an entry outside ``[-1, rows)``, and when two rows reach one input by the same tap.
    """
    refuse("transpose_table", ((table < -1) | (table >= rows)).any(1), "row {row} has an entry outside [-1, rows)")
    result = table.new_full((rows, table.shape[1]), -1)
    j, v = (table >= 0).nonzero().unbind(1)
    result[table[j, v].long(), v] = j.int()
    refuse("transpose_table", result[table[j, v].long(), v] != j, "entry {row} occurs twice under its tap")
    return result


# --- convolution ------------------------------------------------------------------------------------------------------


def _gather(feats: Tensor, column: Tensor) -> Tensor:
    """Rows of ``feats`` under one tap, zeros where there is none."""
    if feats.shape[0] == 0:
        return feats.new_zeros(column.shape[0], feats.shape[1])
    return torch.where(column[:, None] >= 0, feats[column.clamp_min(0).long()], 0)


def _check_table(op: str, table: Tensor, rows: int) -> None:
    refuse(op, ((table < -1) | (table >= rows)).any(1), "table row {row} has an entry outside " + f"[-1, {rows})")


@sl.op("sparse3d::conv")
def conv(
    feats: Float[Tensor, "n ci"],
    weight: Float[Tensor, "co k ci"],
    table: Int32[Tensor, "m k"],
    bias: Float[Tensor, "co"] | None = None,
    table_t: Int32[Tensor, "n k"] | None = None,
) -> Float[Tensor, "m co"]:
    """Convolution over a table: ``out[j] = bias + sum_v weight[:, v] @ feats[table[j, v]]``.

    ``table_t`` (``transpose_table(table, n)``) is read by the backward only; without it the backward builds it.
    Raises SL211 for a table entry outside ``[-1, n)``.
    """
    _check_table("conv", table, feats.shape[0])
    out = feats.new_zeros(table.shape[0], weight.shape[0])
    for v in range(table.shape[1]):
        out = out + _gather(feats, table[:, v]) @ weight[:, v].T
    return out if bias is None else out + bias


@sl.op("sparse3d::conv_weight_grad")
def conv_weight_grad(
    grad: Float[Tensor, "m co"], feats: Float[Tensor, "n ci"], table: Int32[Tensor, "m k"]
) -> Float[Tensor, "co k ci"]:
    """Weight gradient of ``conv``: ``out[:, v] = sum_j grad[j] (x) feats[table[j, v]]``. Raises like ``conv``."""
    _check_table("conv_weight_grad", table, feats.shape[0])
    if table.shape[1] == 0:
        return feats.new_zeros(grad.shape[1], 0, feats.shape[1])
    return torch.stack([grad.T @ _gather(feats, table[:, v]) for v in range(table.shape[1])], 1)


def _swap(weight: Tensor) -> Tensor:
    """``[co, k, ci]`` → ``[ci, k, co]``, a view: the weight seen from the other end."""
    return weight.permute(2, 1, 0)


@conv.backward(saves=("feats", "weight", "table", "table_t"))
def _(grad: Tensor, saved: SimpleNamespace, needs: SimpleNamespace) -> dict[str, Tensor]:
    found = {}
    if needs.feats:
        back = saved.table_t if saved.table_t is not None else transpose_table(saved.table, saved.feats.shape[0])
        found["feats"] = conv(grad, _swap(saved.weight), back, None, saved.table)
    if needs.weight:
        found["weight"] = conv_weight_grad(grad, saved.feats, saved.table)
    if needs.bias:
        found["bias"] = grad.sum(0)
    return found


@conv_weight_grad.backward
def _(grad: Tensor, saved: SimpleNamespace, needs: SimpleNamespace) -> dict[str, Tensor]:
    found = {}
    if needs.grad:
        found["grad"] = conv(saved.feats, grad, saved.table)
    if needs.feats:
        back = transpose_table(saved.table, saved.feats.shape[0])
        found["feats"] = conv(saved.grad, _swap(grad), back, None, saved.table)
    return found


_SINGLE_OR_DOUBLE = ("float32", "float64")

_bind(unique_coords, "24 * n + 49408")
_bind(segment_mean, dtypes=_SINGLE_OR_DOUBLE)
_bind(subm_table, "24 * n + 49472")
_bind(
    out_coords,  # pages are touched as the hash set grows, so memory follows the outputs found and not this bound
    f"24 * n + 16 * pow2ceil(max(2 * {_BOUND}, 16)) + 16 * {_BOUND} + 8 * (kernel[0] + kernel[1] + kernel[2]) + 49664",
)
_bind(conv_table, "24 * (n + m) + 49792")
_bind(transpose_table)
_bind(
    conv, "k * ci * 16 * cdiv(co, 16) * itemsize + threads * (65536 + 2112 * k + 64 * cdiv(k, 16))",
    strided=("weight",), dtypes=_SINGLE_OR_DOUBLE,
)  # fmt: skip
_bind(
    conv_weight_grad,
    "(k * co + 128 * threads) * 16 * cdiv(ci, 16) * itemsize"
    " + threads * (2048 * cdiv(co, 16) * itemsize + 4160 * k + 64 * cdiv(k, 16)) + 64 * cdiv(k, 8)",
    dtypes=_SINGLE_OR_DOUBLE,
)
