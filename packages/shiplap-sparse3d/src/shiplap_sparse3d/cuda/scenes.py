"""Pooling over scenes, in Triton.

Parts of the rows are reduced, and then the parts, in order and without atomics, so results are the same in each run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shiplap.plugin_api import triton_launcher
from shiplap_sparse3d.cuda import status
from shiplap_sparse3d.cuda.hash import report_row
from shiplap_sparse3d.cuda.pool import blocks_of, is_larger, is_wide, make_accumulator

__all__ = ["global_max_pool", "global_sum_pool"]

SCENE = "coords row {row} has a batch index outside [-1, batch_size)"
PART, PARTS = 2048, 256  # rows of a part, and how many parts at most
# Above every number of a row.
NO_ROW = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _program_part(parts, c, CHANNELS: tl.constexpr):
    """Return the part, the scene and the channels of this program, and a mask of the channels below ``c``. A part is a
    run of successive rows that is pooled separately, and there are ``parts`` of them.
    """
    pid = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    return pid % parts, pid // parts, channel[None, :].to(tl.int64), (channel < c)[None, :]


@triton.jit
def _scene_members(coords, row, end, scene, scenes, coords_row, status, code):
    """Return a column mask of the rows below ``end`` that belong to ``scene``. Scene numbers below -1, and those from
    ``scenes`` on, are reported in a status word, from which the host raises ``SL211`` later.
    """
    b = tl.load(coords + row * coords_row, mask=row < end, other=-1)
    report_row(status, code, row, (b < -1) | (b >= scenes))
    return (b == scene)[:, None]


@triton.jit(do_not_specialize=["n", "parts", "part_rows", "scenes", "code"])
def global_max_kernel(
    feats,
    coords,
    partial,
    status,
    n,
    c,
    parts,
    part_rows,
    scenes,
    feats_row,
    feats_col,
    coords_row,
    code,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the number of the row with the largest value to ``partial[part, scene, c]`` for each channel, or -1 if no
    row of the part belongs to the scene. Of equal values the first row is taken. A part is a run of successive rows.
    """
    part, scene, channel, within = _program_part(parts, c, CHANNELS)
    start = part.to(tl.int64) * part_rows
    end = tl.minimum(start + part_rows, n)
    best = make_accumulator(ROWS, CHANNELS, WIDE)
    best_row = tl.full([ROWS, CHANNELS], NO_ROW, tl.int32)
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        mine = _scene_members(coords, row, end, scene, scenes, coords_row, status, code)
        x = tl.load(feats + row[:, None] * feats_row + channel * feats_col, mask=mine & within, other=0).to(best.dtype)
        # Strictly larger only, so that the first of equal rows stays.
        better = mine & ((best_row == NO_ROW) | is_larger(x, best))
        best, best_row = tl.where(better, x, best), tl.where(better, row[:, None].to(tl.int32), best_row)
    there = best_row != NO_ROW
    nan = there & (best != best)
    # Lanes are reduced by value and then by row, since a reduction of pairs would need a combine function.
    most = tl.max(tl.where(there & ~nan, best, float("-inf")), 0)[None, :]
    any_nan = tl.max(nan.to(tl.int32), 0)[None, :] > 0
    winner = there & tl.where(any_nan, nan, best == most)
    first_row = tl.min(tl.where(winner, best_row, NO_ROW), 0)[None, :]
    at = (part.to(tl.int64) * scenes + scene) * c + channel
    tl.store(partial + at, tl.where(first_row == NO_ROW, -1, first_row), mask=within)


@triton.jit(do_not_specialize=["parts", "scenes"])
def global_max_finish(
    feats, partial, out, rows, c, parts, scenes, feats_row, feats_col, CHANNELS: tl.constexpr, WIDE: tl.constexpr
):
    """Write the maximum of each scene over all parts to ``out [scenes, c]``, or 0 for a scene without rows. Write the
    number of the row that it comes from to ``rows``, or -1. A part is a run of successive rows.
    """
    _, scene, channel, within = _program_part(1, c, CHANNELS)
    best = make_accumulator(1, CHANNELS, WIDE)
    best_row = tl.full([1, CHANNELS], -1, tl.int32)
    for part in range(parts):
        row = tl.load(partial + (part * scenes + scene).to(tl.int64) * c + channel, mask=within, other=-1)
        x = tl.load(feats + row.to(tl.int64) * feats_row + channel * feats_col, mask=row >= 0, other=0).to(best.dtype)
        better = (row >= 0) & ((best_row < 0) | is_larger(x, best))
        best, best_row = tl.where(better, x, best), tl.where(better, row, best_row)
    at = scene.to(tl.int64) * c + channel
    tl.store(out + at, best.to(out.dtype.element_ty), mask=within)
    tl.store(rows + at, best_row, mask=within)


@triton.jit(do_not_specialize=["n", "parts", "part_rows", "scenes", "code"])
def global_sum_kernel(
    feats,
    coords,
    partial,
    counts,
    status,
    n,
    c,
    parts,
    part_rows,
    scenes,
    feats_row,
    feats_col,
    coords_row,
    code,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write the sum of the rows of one scene in one part to ``partial[part, scene, c]``, and the number of these rows
    to ``counts[part, scene]``. A part is a run of successive rows.
    """
    part, scene, channel, within = _program_part(parts, c, CHANNELS)
    start = part.to(tl.int64) * part_rows
    end = tl.minimum(start + part_rows, n)
    total = make_accumulator(ROWS, CHANNELS, WIDE)
    count = tl.zeros([ROWS, 1], tl.int32)
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        mine = _scene_members(coords, row, end, scene, scenes, coords_row, status, code)
        total += tl.load(feats + row[:, None] * feats_row + channel * feats_col, mask=mine & within, other=0).to(
            total.dtype
        )
        count += mine.to(tl.int32)
    at = part.to(tl.int64) * scenes + scene
    tl.store(partial + at * c + channel, tl.sum(total, 0)[None, :], mask=within)
    # Programs of further channels count the same rows.
    tl.store(counts + at, tl.sum(tl.sum(count, 1), 0), mask=tl.program_id(1) == 0)


@triton.jit(do_not_specialize=["parts", "scenes"])
def global_sum_finish(
    partial, counts, out, c, parts, scenes, AVERAGE: tl.constexpr, CHANNELS: tl.constexpr, WIDE: tl.constexpr
):
    """Write the sum of the rows of each scene to ``out [scenes, c]``, added over the sums ``partial`` of all parts
    (runs of successive rows). If ``AVERAGE`` is true, write the mean instead. A scene without rows gets 0.
    """
    _, scene, channel, within = _program_part(1, c, CHANNELS)
    total = make_accumulator(1, CHANNELS, WIDE)
    count = 0
    for part in range(parts):
        at = (part * scenes + scene).to(tl.int64)
        total += tl.load(partial + at * c + channel, mask=within, other=0)
        count += tl.load(counts + at)
    if AVERAGE:
        total = total / tl.maximum(count, 1).to(total.dtype)
    tl.store(out + scene.to(tl.int64) * c + channel, total.to(out.dtype.element_ty), mask=within)


_global_max, _global_sum = triton_launcher(global_max_kernel), triton_launcher(global_sum_kernel)
_finish_max, _finish_sum = triton_launcher(global_max_finish), triton_launcher(global_sum_finish)


def _split_rows(n: int) -> tuple[int, int]:
    """Return the number of parts (runs of successive rows) into which ``n`` rows are cut for a pooling over scenes, and
    the number of rows in each part.
    """
    parts = min(triton.cdiv(n, PART), PARTS)
    return parts, triton.cdiv(n, parts) if parts else 0


def global_max_pool(
    feats: Tensor, coords: Tensor, batch_size: int, *, out: Tensor, rows: Tensor, workspace: Tensor
) -> None:
    """Write the maximum over the rows of each of ``batch_size`` scenes to ``out``, channel by channel. Write the number
    of the row that each maximum comes from to ``rows``, or -1 for a scene without voxels. This is
    ``pooling.global_max_pool`` on CUDA.
    """
    word, (n, c), code = status.word(feats.device), feats.shape, status.code_of("global_max_pool", SCENE)
    if not out.numel():
        return
    (parts, part_rows), blocks, partial = _split_rows(n), blocks_of(c), workspace.view(torch.int32)
    columns = triton.cdiv(c, blocks["CHANNELS"])
    if parts:
        _global_max[(parts * batch_size, columns)](
            feats,
            coords,
            partial,
            word,
            n,
            c,
            parts,
            part_rows,
            batch_size,
            *feats.stride(),
            coords.stride(0),
            code,
            **is_wide(feats),
            **blocks,
        )
    del blocks["ROWS"]
    _finish_max[(batch_size, columns)](
        feats, partial, out, rows, c, parts, batch_size, *feats.stride(), **is_wide(feats), **blocks
    )


def global_sum_pool(
    feats: Tensor, coords: Tensor, batch_size: int, average: bool, *, out: Tensor, workspace: Tensor
) -> None:
    """Write the sum over the rows of each of ``batch_size`` scenes to ``out``, or the mean if ``average`` is true. This
    is ``pooling.global_sum_pool`` on CUDA.
    """
    word, (n, c), code = status.word(feats.device), feats.shape, status.code_of("global_sum_pool", SCENE)
    if not out.numel():
        return
    (parts, part_rows), blocks = _split_rows(n), blocks_of(c)
    # 8 bytes for each sum, which float64 needs.
    columns, sums = triton.cdiv(c, blocks["CHANNELS"]), 8 * parts * batch_size * c
    partial = workspace[:sums].view(torch.float64 if feats.dtype == torch.float64 else torch.float32)
    counts = workspace[sums:].view(torch.int32)
    if parts:
        _global_sum[(parts * batch_size, columns)](
            feats,
            coords,
            partial,
            counts,
            word,
            n,
            c,
            parts,
            part_rows,
            batch_size,
            *feats.stride(),
            coords.stride(0),
            code,
            **is_wide(feats),
            **blocks,
        )
    del blocks["ROWS"]
    _finish_sum[(batch_size, columns)](
        partial, counts, out, c, parts, batch_size, AVERAGE=average, **is_wide(feats), **blocks
    )
