"""Pooling over scenes, as launch programs: parts of the rows are reduced, and then the parts, in order. No atomics:
results are the same in each run.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from shiplap.extend import TritonLaunches, launch_program
from shiplap_sparse3d.cuda import status
from shiplap_sparse3d.cuda.hash import report
from shiplap_sparse3d.cuda.pool import CHANNELS, TILE, accumulator, beats

__all__ = ["GLOBAL_MAX_POOL", "GLOBAL_SUM_POOL", "PART", "PARTS", "global_max_pool", "global_sum_pool"]

SCENE = "coords row {row} has a batch index outside [-1, batch_size)"
PART, PARTS = 2048, 256  # rows of a part, and how many parts at most
NO_ROW = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _part(parts, c, CHANNELS: tl.constexpr):
    """Part, scene, channels and which of them there are."""
    pid = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    return pid % parts, pid // parts, channel[None, :].to(tl.int64), (channel < c)[None, :]


@triton.jit
def _members(coords, row, end, scene, scenes, status, code):
    """Which rows are of the scene."""
    b = tl.load(coords + row.to(tl.int64) * 4, mask=row < end, other=-1)
    report(status, code, row, (b < -1) | (b >= scenes))
    return (b == scene)[:, None]


@triton.jit(do_not_specialize=["n", "parts", "part_rows", "scenes", "code"])
def global_max_kernel(
    feats,
    coords,
    partial,
    status: tl.int64,
    n,
    c,
    parts,
    part_rows,
    scenes,
    code,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """``partial[part, scene, c]``: the first row with the largest value, or -1."""
    part, scene, channel, within = _part(parts, c, CHANNELS)
    start = part.to(tl.int64) * part_rows
    end = tl.minimum(start + part_rows, n)
    best = accumulator(feats, ROWS, CHANNELS)
    best_row = tl.full([ROWS, CHANNELS], NO_ROW, tl.int32)
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        mine = _members(coords, row, end, scene, scenes, status, code)
        x = tl.load(feats + row[:, None].to(tl.int64) * c + channel, mask=mine & within, other=0).to(best.dtype)
        better = mine & ((best_row == NO_ROW) | beats(x, best))
        best, best_row = tl.where(better, x, best), tl.where(better, row[:, None].to(tl.int32), best_row)
    there = best_row != NO_ROW
    nan = there & (best != best)
    most = tl.max(tl.where(there & ~nan, best, float("-inf")), 0)[None, :]
    any_nan = tl.max(nan.to(tl.int32), 0)[None, :] > 0
    winner = there & tl.where(any_nan, nan, best == most)
    first_row = tl.min(tl.where(winner, best_row, NO_ROW), 0)[None, :]
    at = (part.to(tl.int64) * scenes + scene) * c + channel
    tl.store(partial + at, tl.where(first_row == NO_ROW, -1, first_row), mask=within)


@triton.jit(do_not_specialize=["parts", "scenes"])
def global_max_finish(feats, partial, out, rows, c, parts, scenes, CHANNELS: tl.constexpr):
    _, scene, channel, within = _part(1, c, CHANNELS)
    best = accumulator(feats, 1, CHANNELS)
    best_row = tl.full([1, CHANNELS], -1, tl.int32)
    for part in range(parts):
        row = tl.load(partial + (part * scenes + scene).to(tl.int64) * c + channel, mask=within, other=-1)
        x = tl.load(feats + row.to(tl.int64) * c + channel, mask=row >= 0, other=0).to(best.dtype)
        better = (row >= 0) & ((best_row < 0) | beats(x, best))
        best, best_row = tl.where(better, x, best), tl.where(better, row, best_row)
    at = scene.to(tl.int64) * c + channel
    tl.store(out + at, best.to(out.dtype.element_ty), mask=within)
    tl.store(rows + at, best_row, mask=within)


@triton.jit
def _sums(place, like):
    """The memory at an address, as partial sums of values of the type that the pointer ``like`` has."""
    return place.to(tl.pointer_type(tl.float64 if like.dtype.element_ty == tl.float64 else tl.float32))


@triton.jit(do_not_specialize=["n", "parts", "part_rows", "scenes", "code"])
def global_sum_kernel(
    feats,
    coords,
    partial: tl.int64,
    counts,
    status: tl.int64,
    n,
    c,
    parts,
    part_rows,
    scenes,
    code,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """``partial[part, scene, c]`` and ``counts[part, scene]``: sums, and of how many rows."""
    part, scene, channel, within = _part(parts, c, CHANNELS)
    start = part.to(tl.int64) * part_rows
    end = tl.minimum(start + part_rows, n)
    total = accumulator(feats, ROWS, CHANNELS)
    count = tl.zeros([ROWS, 1], tl.int32)
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        mine = _members(coords, row, end, scene, scenes, status, code)
        total += tl.load(feats + row[:, None].to(tl.int64) * c + channel, mask=mine & within, other=0).to(total.dtype)
        count += mine.to(tl.int32)
    at = part.to(tl.int64) * scenes + scene
    tl.store(_sums(partial, feats) + at * c + channel, tl.sum(total, 0)[None, :], mask=within)
    tl.store(counts + at, tl.sum(tl.sum(count, 1), 0), mask=tl.program_id(1) == 0)


@triton.jit(do_not_specialize=["parts", "scenes"])
def global_sum_finish(partial: tl.int64, counts, out, c, parts, scenes, AVERAGE: tl.constexpr, CHANNELS: tl.constexpr):
    _, scene, channel, within = _part(1, c, CHANNELS)
    total = accumulator(out, 1, CHANNELS)
    count = 0
    for part in range(parts):
        at = (part * scenes + scene).to(tl.int64)
        total += tl.load(_sums(partial, out) + at * c + channel, mask=within, other=0)
        count += tl.load(counts + at)
    if AVERAGE:
        total = total / tl.maximum(count, 1).to(total.dtype)
    tl.store(out + scene.to(tl.int64) * c + channel, total.to(out.dtype.element_ty), mask=within)


def _program(part: int, tile: int) -> TritonLaunches:
    """A program without launches, and the integers that all of them use."""
    values = {
        "channels": CHANNELS,
        "block": f"max(1, {tile} // channels)",
        "columns": "cdiv(c, channels)",
        "parts": f"min(cdiv(n, {part}), {PARTS})",
        "part_rows": "cdiv(n, max(parts, 1))",
    }
    return launch_program(values=values, errors=status.ERRORS)


def _reduced(program: TritonLaunches, kernel: Any, scratch: dict[str, tuple[str, str]]) -> TritonLaunches:
    """``program``, then a launch for each part of the rows and each scene."""
    return program.then(
        kernel,
        grid=("parts * batch_size", "columns"),
        arguments={"scenes": "batch_size", "ROWS": "block", "CHANNELS": "channels"},
        constants={"num_warps": 4},
        scratch=scratch,
        word="status",
        codes={"code": SCENE},
    )


def global_max_pool(part: int = PART, tile: int = TILE) -> TritonLaunches:
    """The program of ``pooling.global_max_pool``."""
    scratch = {"partial": ("int32", "0")}
    return _reduced(_program(part, tile), global_max_kernel, scratch).then(
        global_max_finish,
        grid=("batch_size", "columns"),
        arguments={"scenes": "batch_size", "CHANNELS": "channels"},
        constants={"num_warps": 4},
        scratch=scratch,
    )


def global_sum_pool(part: int = PART, tile: int = TILE) -> TritonLaunches:
    """The program of ``pooling.global_sum_pool``. The workspace has sums of the parts, then their numbers of rows."""
    scratch = {"partial": ("int64", "0"), "counts": ("int32", "8 * parts * batch_size * c")}
    return _reduced(_program(part, tile), global_sum_kernel, scratch).then(
        global_sum_finish,
        grid=("batch_size", "columns"),
        arguments={"scenes": "batch_size", "AVERAGE": "average", "CHANNELS": "channels"},
        constants={"num_warps": 4},
        scratch=scratch,
    )


GLOBAL_MAX_POOL, GLOBAL_SUM_POOL = global_max_pool(), global_sum_pool()
