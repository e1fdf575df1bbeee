"""Rows under the taps of queries, in Triton: the part that all tables share.

Voxels are put into a hash (hash.py) and looked up: kernels of at most three cells per axis block by block, of which a
window meets eight; others tap by tap. Few voxels are compared with each other instead, which takes one launch of three.
Every entry is looked up, also where a submanifold table could be mirrored: neighbouring lookups share cache lines, rows
are written whole, and no two programs write the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shiplap_sparse3d.coords import MAX_CELLS
from shiplap_sparse3d.cuda import sort, status
from shiplap_sparse3d.cuda.hash import SLOT_BYTES, slots_for
from shiplap_sparse3d.cuda.lookup_kernels import launch_blocks, launch_insert, launch_near, launch_taps

__all__ = ["OUTSIDE", "Target", "Window", "around", "batches_below", "look_up"]

OUTSIDE = "coords row {row} is outside spatial_shape (or its grid has 2^63 cells or more)"
TWICE = "duplicate coordinates: row {row} occurs more than once"

INSERTS = 64  # rows of a program; one warp each, which waits for its own slowest search only
LOOKUPS = 256  # entries of a program
BLOCK_ROWS, BLOCK_WARPS = 8, 1  # queries of a program that looks up blocks, and its warps
NEAR = 1024  # voxels up to here are compared with each other
NEAR_ROWS, NEAR_OTHERS = 4, 256


class Window(NamedTuple):
    """What is looked up: from ``shape`` under the taps of queries in ``grid``."""

    shape: Sequence[int]
    grid: Sequence[int]
    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    @property
    def few_blocks(self) -> bool:
        """Whether the taps of a query lie in eight blocks of the hash."""
        return max(self.kernel) <= 3 and max(self.dilation) == 1

    @property
    def wide(self) -> bool:
        """Whether a coordinate under a tap may not fit 32 bits."""
        _, grid, kernel, stride, padding, dilation = self
        return max(grid) * max(stride) + max(padding) + max(kernel) * max(dilation) >= 2**31


def batches_below(shape: Sequence[int]) -> int:
    """How many scenes of this grid have fewer than 2^63 cells together."""
    return min(2**31 - 1, (MAX_CELLS - 1) // max(1, shape[0] * shape[1] * shape[2]))


def around(shape: list[int], kernel: list[int], dilation: list[int]) -> Window:
    """The window of a submanifold table."""
    padding = [k // 2 * d for k, d in zip(kernel, dilation, strict=True)]
    return Window(shape, shape, kernel, (1, 1, 1), padding, dilation)


class Target(NamedTuple):
    """Where a lookup writes, by address: the table ``[m, k]``, and what its sort needs if ``form`` asks for keys."""

    table: int
    k: int
    form: sort.Form | None = None
    keys: int = 0
    counts: int = 0
    masks: Tensor | None = None


def look_up(
    op: str,
    coords: Tensor,
    queries: Tensor,
    window: Window,
    target: Target,
    word: int,
    message: str,
    workspace: Tensor,
) -> None:
    """Look up all taps of all queries. ``workspace`` starts with the hash; counts, which start as 0, are behind it."""
    form = target.form
    n, keyed = coords.shape[0], form is not None and form.key is not None
    coords = coords.contiguous()
    if queries is coords and n <= NEAR and not keyed:
        shape, _, kernel, _, padding, dilation = window
        launch_near[(-(-n // NEAR_ROWS),)](
            coords,
            target.table,
            word,
            n,
            target.k,
            *shape,
            batches_below(shape),
            *padding,
            *dilation,
            status.code_of(op, OUTSIDE),
            status.code_of(op, TWICE),
            KX=kernel[0],
            KY=kernel[1],
            KZ=kernel[2],
            WIDE=window.wide,
            ROWS=NEAR_ROWS,
            OTHERS=NEAR_OTHERS,
            num_warps=4,
        )
        return
    capacity = _build_hash(op, coords, window.shape, workspace, word, form.zeros if form else 0)
    launch = _look_up_blocks if window.few_blocks else _look_up_taps
    launch(window, queries.contiguous(), capacity, workspace.data_ptr(), target, word, status.code_of(op, message))


def _build_hash(op: str, coords: Tensor, shape: Sequence[int], workspace: Tensor, word: int, zeros: int) -> int:
    """Fill the hash at the start of ``workspace`` (``zeros`` bytes behind it are cleared too): its capacity."""
    n = coords.shape[0]
    capacity = slots_for(n)
    used = SLOT_BYTES * capacity + zeros
    if workspace.numel() > 2 * used or workspace.numel() > 1 << 20:
        workspace = workspace[: -(-used // 8) * 8].view(torch.int64)  # wide stores
    workspace.zero_()
    launch_insert[(-(-n // INSERTS),)](
        coords,
        workspace.data_ptr(),
        word,
        n,
        *shape,
        batches_below(shape),
        capacity,
        status.code_of(op, OUTSIDE),
        status.code_of(op, TWICE),
        BLOCK=INSERTS,
        num_warps=1,
    )
    return capacity


def _look_up_blocks(
    window: Window, queries: Tensor, capacity: int, slots: int, target: Target, word: int, code: int
) -> None:
    shape, grid, kernel, stride, padding, _ = window
    table, k, form, keys, counts, masks = target
    m = queries.shape[0]
    size, run, runs, key, bins = (form.size, form.run, form.runs, form.key, form.bins) if form else (k, 1, 1, None, 0)
    launch_blocks[(-(-m // BLOCK_ROWS),)](
        queries,
        slots,
        table,
        keys,
        counts,
        masks,
        word,
        m,
        *shape,
        *grid,
        batches_below(grid),
        *stride,
        *padding,
        capacity,
        code,
        run,
        runs,
        KX=kernel[0],
        KY=kernel[1],
        KZ=kernel[2],
        WIDE=window.wide,
        SIZE=size,
        PARTS=-(-k // size),
        ROWS=BLOCK_ROWS,
        KEY=key,
        BINS=bins,
        num_warps=BLOCK_WARPS,
    )


def _look_up_taps(
    window: Window, queries: Tensor, capacity: int, slots: int, target: Target, word: int, code: int
) -> None:
    shape, grid, kernel, stride, padding, dilation = window
    table, k, form, keys, counts, masks = target
    m, size = queries.shape[0], form.size if form else min(k, 32)
    taps = sort.pow2(size)
    rows = LOOKUPS // taps
    run, runs, key, bins = (form.run, form.runs, form.key, form.bins) if form else (1, 1, None, 0)
    launch_taps[(-(-m // rows), -(-k // size))](
        queries,
        slots,
        table,
        keys,
        counts,
        masks,
        word,
        m,
        k,
        *shape,
        *grid,
        batches_below(grid),
        *stride,
        *padding,
        *dilation,
        capacity,
        code,
        run,
        runs,
        KY=kernel[1],
        KZ=kernel[2],
        WIDE=window.wide,
        SIZE=size,
        TAPS=taps,
        ROWS=rows,
        KEY=key,
        BINS=bins,
        num_warps=1,
    )
