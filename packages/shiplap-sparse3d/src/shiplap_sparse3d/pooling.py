"""Pooling: over a table (max, sum, average of the rows under the taps) and over whole scenes.

Tables are plain ones here (``Geometry.pooled``), never sorted: pooling reads each entry once, whatever the order. A row
without hits, a scene without voxels and a padding row give zeros.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal

import torch
from jaxtyping import Float, Int16, Int32
from torch import Tensor

import shiplap as sl
from shiplap.plugin_api import error
from shiplap_sparse3d.coords import check_scenes, refuse_rows
from shiplap_sparse3d.cpu import CPU_FLOATS, LIBRARY
from shiplap_sparse3d.ops import rows_under, sum_dtype, transpose_table

__all__ = [
    "avg_pool",
    "global_max_pool",
    "global_pool",
    "global_sum_pool",
    "max_pool",
    "max_pool_grad",
    "max_pool_with_taps",
    "sum_pool",
]


def _check_table(op: str, table: Tensor, rows: int) -> None:
    """Raise ``SL211`` if a row of the neighbour ``table`` has a number outside ``[-1, rows)``. ``op`` is the op's name
    in the error.
    """
    refuse_rows(op, ((table < -1) | (table >= rows)).any(1), "table row {row} has an entry outside " + f"[-1, {rows})")


# --- over a table -----------------------------------------------------------------------------------------------------


def max_pool(feats: Tensor, table: Tensor, table_t: Tensor | None = None) -> Tensor:
    """Return the largest of the rows of ``feats [n, c]`` that each output reads, channel by channel, as ``[m, c]``. An
    output that reads no row gets zeros.

    The neighbour table ``table [m, k]`` holds the rows that an output reads, or -1. ``table_t`` is
    ``transpose_table(table, n)``, which the gradient builds if it is None. :func:`max_pool_with_taps` explains the
    gradient and NaN.
    """
    return max_pool_with_taps(feats, table, table_t)[0]


def avg_pool(feats: Tensor, table: Tensor, table_t: Tensor | None = None) -> Tensor:
    """Return the mean of the rows of ``feats [n, c]`` that each output reads, as ``[m, c]``. An output that reads no
    row gets zeros.

    The neighbour table ``table [m, k]`` holds the rows that an output reads, or -1, which does not count.
    ``torch.nn.AvgPool3d`` divides by the volume of the kernel instead, for which :func:`sum_pool` can be used.
    ``table_t`` is the transposed table, which the gradient builds if it is None.
    """
    return sum_pool(feats, table, table_t, average=True)


@sl.op("sparse3d::max_pool_with_taps", requires=("k <= 32767",), outputs=("out", "taps"))
def max_pool_with_taps(
    feats: Float[Tensor, "n c"], table: Int32[Tensor, "m k"], table_t: Int32[Tensor, "n k"] | None = None
) -> tuple[Float[Tensor, "m c"], Int16[Tensor, "m c"]]:
    """Return the largest value under the taps of each output, channel by channel, and its tap. Of equal values the
    first tap is taken. Without a hit the value is 0 and the tap is -1.

    The maximum starts from the first hit and not from zero, so it may be negative. NaN is larger than every number, as
    in ``torch.nn.MaxPool3d``. The gradient goes to that tap only, while spconv gives it in full to every input that
    equals the output. Only the backward reads ``table_t``, and builds it if it is None. Raise ``SL211`` for a number in
    the table outside ``[-1, n)``.

    A tap is a column of the neighbour ``table``, and a number in it that is not -1 is a hit, the row of ``feats`` that
    the output reads by this tap. ``table_t`` is the transposed table.
    """
    _check_table("max_pool_with_taps", table, feats.shape[0])
    hit = torch.nn.functional.pad(table >= 0, (0, 1))[..., None]  # a last tap without a hit, if there is no other
    rows = rows_under(feats, torch.nn.functional.pad(table, (0, 1), value=-1))
    most = torch.where(hit, rows, -torch.inf).amax(1)
    # Comparisons with NaN are false, so NaN needs a test of its own. ``argmax`` returns the first of equal ones.
    largest = hit & ((rows == most[:, None]) | (rows.isnan() & most.isnan()[:, None]))
    taps = torch.where(hit.any(1), largest.int().argmax(1), -1)
    return torch.where(hit.any(1), most, 0), taps.to(torch.int16)


@sl.op("sparse3d::max_pool_grad")
def max_pool_grad(
    grad: Float[Tensor, "m c"], taps: Int16[Tensor, "m c"], table_t: Int32[Tensor, "n k"]
) -> Float[Tensor, "n c"]:
    """Return the gradient of ``max_pool_with_taps`` with respect to its features, ``out[i] = sum_v grad[t[i, v]]`` over
    the channels whose tap is ``v``. ``t`` is ``table_t``, the transposed table. The sum runs in the order of taps, so
    it is the same in each run. Raise ``SL211`` for a number in ``table_t`` outside ``[-1, m)``.

    A tap is a column of the neighbour table. ``taps`` holds the tap that each maximum came from, or -1, as
    ``max_pool_with_taps`` returns it.
    """
    _check_table("max_pool_grad", table_t, grad.shape[0])
    tap = torch.arange(table_t.shape[1], device=grad.device)[:, None]
    chosen = (table_t >= 0)[..., None] & (rows_under(taps, table_t) == tap)
    return torch.where(chosen, rows_under(grad, table_t), 0).to(sum_dtype(grad.dtype)).sum(1).to(grad.dtype)


@max_pool_with_taps.backward(strided=True)
def _(grads: tuple[Tensor, Tensor], saved: SimpleNamespace, needs: SimpleNamespace) -> dict[str, Tensor]:
    """Return the gradient of ``max_pool_with_taps`` with respect to its features, as a dict by argument name. The dict
    is empty if autograd does not need it. The gradient of each output is added to the input row that had the largest
    value.
    """
    if not needs.feats:
        return {}
    back = saved.table_t if saved.table_t is not None else transpose_table(saved.table, saved.feats.shape[0])
    return {"feats": max_pool_grad(grads[0], saved.taps, back)}


@max_pool_grad.backward(strided=True)
def _(grad: Tensor, saved: SimpleNamespace, needs: SimpleNamespace) -> dict[str, Tensor]:
    """Return the gradient of ``max_pool_grad`` with respect to its ``grad``, as a dict by argument name. The dict is
    empty if autograd does not need it. For each output it is the value of the incoming gradient at the input row that
    had the largest value.
    """
    if not needs.grad:
        return {}
    if grad.shape[0] == 0 or saved.table_t.shape[1] == 0:
        return {"grad": grad.new_zeros(saved.taps.shape)}
    table = transpose_table(saved.table_t, saved.taps.shape[0])
    # The second gradient reads the winning input of each output.
    rows = table.gather(1, saved.taps.clamp_min(0).long())
    hit = (saved.taps >= 0) & (rows >= 0)
    return {"grad": torch.where(hit, grad.gather(0, rows.clamp_min(0).long()), 0)}


@sl.op("sparse3d::sum_pool")
def sum_pool(
    feats: Float[Tensor, "n c"],
    table: Int32[Tensor, "m k"],
    table_t: Int32[Tensor, "n k"] | None = None,
    average: bool = False,
) -> Float[Tensor, "m c"]:
    """Return the sum of the rows under the taps of each output, or with ``average`` their mean over the hits. Outputs
    without a hit are zeros. Sums are kept in at least float32. Only the backward reads ``table_t``, and builds it if it
    is None. Raise ``SL211`` for a number in the table outside ``[-1, n)``.

    A tap is a column of the neighbour ``table``, and a number in it that is not -1 is a hit, the row of ``feats`` that
    the output reads by this tap. ``table_t`` is the transposed table.
    """
    _check_table("sum_pool", table, feats.shape[0])
    out = rows_under(feats, table).to(sum_dtype(feats.dtype)).sum(1)
    return (out / _hits_per_row(table, out) if average else out).to(feats.dtype)


def _hits_per_row(table: Tensor, like: Tensor) -> Tensor:
    """Return the number of rows that each output reads, the numbers in a row of ``table`` that are not -1, as ``[m,
    1]`` in the dtype of ``like``. It is at least 1.
    """
    return (table >= 0).sum(1, keepdim=True).clamp_min(1).to(like.dtype)


@sum_pool.backward(strided=True)
def _(grad: Tensor, saved: SimpleNamespace, needs: SimpleNamespace) -> dict[str, Tensor]:
    """Return the gradient of ``sum_pool`` with respect to its features, as a dict by argument name. The dict is empty
    if autograd does not need it. Each input row gets the sum of the gradients of the outputs that read it. For an
    average these are first divided by the number of rows that the output reads.
    """
    if not needs.feats:
        return {}
    back = saved.table_t if saved.table_t is not None else transpose_table(saved.table, saved.feats.shape[0])
    share = (grad / _hits_per_row(saved.table, grad)) if saved.average else grad
    return {"feats": sum_pool(share, back, saved.table)}


for _op in (max_pool_with_taps, max_pool_grad, sum_pool):
    _op.kernel("cpu", sl.cabi(LIBRARY, f"sparse3d_{_op.spec.opname}"), dtypes=CPU_FLOATS)


# --- over scenes ------------------------------------------------------------------------------------------------------


def global_pool(feats: Tensor, coords: Tensor, batch_size: int, mode: Literal["max", "avg", "sum"] = "avg") -> Tensor:
    """Return the maximum, mean or sum of the rows of each scene, ``[batch_size, c]``, with zeros for empty scenes.
    ``feats`` is ``[n, c]`` and ``coords`` is ``[n, 1 + axes]``.

    Raises:
        ArgumentError: ``SL208`` for another ``mode``, ``SL211`` for a batch index outside ``[-1, batch_size)``.
    """
    if coords.shape[1] != 4:  # the ops read the batch index alone
        coords = coords[:, :1].expand(-1, 4)
    if mode == "max":
        return global_max_pool(feats, coords, batch_size)[0]
    if mode not in ("avg", "sum"):
        raise error("SL208", where="global_pool, argument 'mode'", got=repr(mode), expected="'max', 'avg' or 'sum'")
    return global_sum_pool(feats, coords, batch_size, mode == "avg")


def _scene_of_rows(op: str, coords: Tensor, batch_size: int) -> Tensor:
    """Return the scene of each row, ``int64 [n]``, with ``batch_size`` for padding. Raise ``SL211`` for scenes outside
    ``[-1, batch_size)``. ``op`` is the op's name in the error.
    """
    check_scenes(op, coords, batch_size)
    scene = coords[:, 0].long()
    return torch.where(scene < 0, batch_size, scene)


@sl.op("sparse3d::global_max_pool", requires=("batch_size >= 1",), outputs=("out", "rows"))
def global_max_pool(
    feats: Float[Tensor, "n c"], coords: Int32[Tensor, "n 4"], batch_size: int
) -> tuple[Float[Tensor, "batch_size c"], Int32[Tensor, "batch_size c"]]:
    """Return the largest value of each scene, channel by channel, and its row. Of equal values the first row is taken.
    A scene without voxels has the value 0 and the row -1.

    NaN is larger than every number. The gradient goes to that row only. A batch index of -1 is padding. Raise ``SL211``
    for a batch index outside ``[-1, batch_size)``.
    """
    scene = _scene_of_rows("global_max_pool", coords, batch_size)
    least, out, rows = feats.new_full((1, feats.shape[1]), -torch.inf), [], []
    for b in range(batch_size):
        members = (scene == b)[:, None]
        # A last row that belongs to no scene, so that there is a largest value without voxels, too.
        here = torch.cat([torch.where(members, feats, least), least])
        most = here.amax(0)
        # ``argmax`` returns the first of equal ones.
        largest = ((here == most) | (here.isnan() & most.isnan()))[:-1] & members
        first = torch.nn.functional.pad(largest.int(), (0, 0, 0, 1)).argmax(0).int()
        out.append(torch.where(members.any(), most, 0))
        rows.append(torch.where(members.any(), first, -1))
    return torch.stack(out), torch.stack(rows)


@global_max_pool.backward(strided=True)
def _(grads: tuple[Tensor, Tensor], saved: SimpleNamespace, needs: SimpleNamespace) -> dict[str, Tensor]:
    """Return the gradient of ``global_max_pool`` with respect to its features, as a dict by argument name. The dict is
    empty if autograd does not need it. The gradient of each scene and channel goes to the row that had the largest
    value.
    """
    if not needs.feats:
        return {}
    grad, n = grads[0], saved.feats.shape[0]
    # No row wins twice under one channel; scenes without one add to a row of their own, which is dropped.
    rows = torch.where(saved.rows >= 0, saved.rows, n).long()
    return {"feats": grad.new_zeros(n + 1, grad.shape[1]).scatter_add(0, rows, grad)[:n]}


@sl.op("sparse3d::global_sum_pool", requires=("batch_size >= 1",))
def global_sum_pool(
    feats: Float[Tensor, "n c"], coords: Int32[Tensor, "n 4"], batch_size: int, average: bool = False
) -> Float[Tensor, "batch_size c"]:
    """Return the sum of each scene's rows, or with ``average`` their mean. Scenes without voxels are zeros. Sums are
    kept in at least float32. A batch index of -1 is padding. Raise ``SL211`` for a batch index outside ``[-1,
    batch_size)``.
    """
    scene = _scene_of_rows("global_sum_pool", coords, batch_size)
    # Padding adds to a row of its own, which is dropped.
    total = feats.new_zeros(batch_size + 1, feats.shape[1], dtype=sum_dtype(feats.dtype))
    total = total.index_add(0, scene, feats.to(total.dtype))[:batch_size]
    return (total / _rows_per_scene(scene, batch_size, total) if average else total).to(feats.dtype)


def _rows_per_scene(scene: Tensor, batch_size: int, like: Tensor) -> Tensor:
    """Return the number of rows of each scene, and at least 1, as ``[batch_size, 1]`` in the dtype of ``like``.
    ``scene`` holds the scene of each row, or ``batch_size`` for padding.
    """
    counts = torch.zeros(batch_size + 1, dtype=torch.int64, device=scene.device)
    counts = counts.scatter_add(0, scene, torch.ones_like(scene))[:batch_size, None]
    return counts.clamp_min(1).to(like.dtype)


@global_sum_pool.backward(strided=True)
def _(grad: Tensor, saved: SimpleNamespace, needs: SimpleNamespace) -> dict[str, Tensor]:
    """Return the gradient of ``global_sum_pool`` with respect to its features, as a dict by argument name. The dict is
    empty if autograd does not need it. Each row has the gradient of its scene, for an average divided by the scene's
    number of rows. Padding has zeros.
    """
    if not needs.feats:
        return {}
    scene = saved.coords[:, 0].long()
    scene = torch.where(scene < 0, saved.batch_size, scene)
    share = grad.to(sum_dtype(grad.dtype))  # a count may leave the range of a half
    share = share / _rows_per_scene(scene, saved.batch_size, share) if saved.average else share
    return {"feats": torch.nn.functional.pad(share, (0, 0, 0, 1))[scene].to(grad.dtype)}


global_max_pool.kernel("cpu", sl.cabi(LIBRARY, "sparse3d_global_max_pool"), dtypes=CPU_FLOATS)
global_sum_pool.kernel(
    "cpu",
    sl.cabi(LIBRARY, "sparse3d_global_sum_pool"),
    dtypes=CPU_FLOATS,
    workspace="8 * batch_size + batch_size * c * max(itemsize, 4) + 128",
)
