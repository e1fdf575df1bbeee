"""``masked_gemm_signals`` and ``masked_gemm_kernels`` in Triton; the prefix sums and the sort between are torch's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shiplap.plugin_api import triton_launcher
from shiplap_sparse3d.cuda import status
from shiplap_sparse3d.cuda.hash import report_row

__all__ = ["launch_kernels", "launch_signals"]

INDEX = "sorted_index[{row}] is no row"
ROWS = 128
TAPS = 32  # bits of a code


@triton.jit
def _load_table(table, row, n, v, TAPS: tl.constexpr):
    """Return the numbers of the neighbour table in the rows ``row``, ``[rows, taps]``. Beyond its ``n`` rows and ``v``
    columns they are -1.
    """
    tap = tl.arange(0, TAPS)[None, :]
    at = row[:, None] * v + tap
    return tl.load(table + at, mask=(row < n)[:, None] & (tap < v), other=-1)


@triton.jit(do_not_specialize=["n", "v", "blocks"])
def codes_kernel(table, codes, ranks, counts, n, v, blocks, ROWS: tl.constexpr, TAPS: tl.constexpr):
    """Write a bit for each column in which a row of the neighbour ``table`` has a neighbour to ``codes``, and the rank
    of these bits as a Gray code to ``ranks``. Write the number of rows of each block with a neighbour in each column to
    ``counts [v, blocks]``.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tap = tl.arange(0, TAPS)
    hits = _load_table(table, row, n, v, TAPS) >= 0
    code = tl.sum(hits.to(tl.int64) << tap[None, :].to(tl.int64), 1)
    # The prefix XOR turns a Gray code into its rank.
    rank = code ^ (code >> 1)
    rank = rank ^ (rank >> 2)
    rank = rank ^ (rank >> 4)
    rank = rank ^ (rank >> 8)
    rank = rank ^ (rank >> 16)
    tl.store(codes + row, code.to(tl.int32), mask=row < n)
    tl.store(ranks + row, rank, mask=row < n)
    tl.store(counts + tap.to(tl.int64) * blocks + tl.program_id(0), tl.sum(hits.to(tl.int32), 0), mask=tap < v)


@triton.jit(do_not_specialize=["n", "v", "blocks"])
def pairs_kernel(table, ends, inputs, outputs, n, v, blocks, ROWS: tl.constexpr, TAPS: tl.constexpr):
    """Write the (input row, output row) pairs of a block of rows to ``inputs`` and ``outputs``, column by column of the
    neighbour ``table``. Those of a column follow the pairs of earlier blocks in it. ``ends`` holds the running sums of
    the numbers of pairs, over columns and then blocks.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tap = tl.arange(0, TAPS)
    entry = _load_table(table, row, n, v, TAPS)
    hits = (entry >= 0).to(tl.int32)
    end = tl.load(ends + tap.to(tl.int64) * blocks + tl.program_id(0), mask=tap < v, other=0)
    # Running sums give the end of the block's pairs. Its own hits lead back to the begin.
    first = end - tl.sum(hits, 0)
    at = first[None, :] + tl.cumsum(hits, 0) - hits
    tl.store(inputs + at, entry, mask=hits == 1)
    tl.store(outputs + at, row[:, None].to(tl.int32) + tap[None, :] * 0, mask=hits == 1)


@triton.jit(do_not_specialize=["n", "block", "code"])
def union_kernel(codes, index, unions, counts, status, n, block, code, ROWS: tl.constexpr, TAPS: tl.constexpr):
    """Write the union of the bits of ``codes`` over each block of ``block`` rows, taken in the order ``index``, to
    ``unions``. Write the number of its set bits to ``counts``. Invalid row numbers are reported in a status word, from
    which the host raises ``SL211`` later.
    """
    first = tl.program_id(0).to(tl.int64) * block
    tap = tl.arange(0, TAPS)
    any_row = tl.zeros([TAPS], dtype=tl.int64)
    for start in range(0, block, ROWS):
        offset = start + tl.arange(0, ROWS)
        at = first + offset
        mask = (offset < block) & (at < n)
        row = tl.load(index + at, mask=mask, other=0)
        # Invalid rows are reported, and must not be read.
        good = mask & (row >= 0) & (row < n)
        report_row(status, code, at, mask & ~good)
        bits = tl.load(codes + row, mask=good, other=0)
        any_row = tl.maximum(any_row, tl.max((bits[:, None] >> tap[None, :]) & 1, 0).to(tl.int64))
    # A sum of distinct powers of two is a bit mask.
    tl.store(unions + tl.program_id(0), tl.sum(any_row << tap.to(tl.int64), 0).to(tl.int32))
    tl.store(counts + tl.program_id(0), tl.sum(any_row, 0).to(tl.int32))


@triton.jit
def list_kernel(unions, ends, taps, TAPS: tl.constexpr):
    """Write the numbers of the set bits of each element of ``unions``, ascending, to ``taps``. ``ends`` holds the index
    in ``taps`` at which those of the element begin.
    """
    tap = tl.arange(0, TAPS)
    hit = (tl.load(unions + tl.program_id(0)) >> tap) & 1
    first = tl.load(ends + tl.program_id(0))
    tl.store(taps + first + tl.cumsum(hit, 0) - hit, tap, mask=hit == 1)


_codes = triton_launcher(codes_kernel)
_pairs = triton_launcher(pairs_kernel)
_union = triton_launcher(union_kernel)
_list = triton_launcher(list_kernel)


def launch_signals(table: Tensor, codes: Tensor, order: Tensor, inputs: Tensor, outputs: Tensor, ends: Tensor) -> None:
    """Write the bits of each row to ``codes``, one for each column of the neighbour ``table`` with a neighbour. Write
    the row numbers sorted by the rank of these bits as a Gray code to ``order``, stably. Write the (input, output)
    pairs of each column to ``inputs`` and ``outputs``, and where they begin and end to ``ends``. This is
    ``postprocess.masked_gemm_signals`` on CUDA.
    """
    status.word(table.device)
    n, v = table.shape
    ends.zero_()
    if not n:
        return
    table, blocks = table.contiguous(), -(-n // ROWS)
    ranks = torch.empty(n, dtype=torch.int64, device=table.device)
    counts = torch.empty(v, blocks, dtype=torch.int32, device=table.device)
    _codes[(blocks,)](table, codes, ranks, counts, n, v, blocks, ROWS=ROWS, TAPS=TAPS)
    # Stable, so that rows of equal rank stay in order on every device.
    order.copy_(ranks.sort(stable=True).indices)
    if v:
        inputs.fill_(-1)
        outputs.fill_(-1)
        # Tap by tap, so that one running sum gives the places of the pairs of all taps.
        reached = counts.flatten().cumsum(0).view(v, blocks)  # int64
        ends[1:] = reached[:, -1]
        _pairs[(blocks,)](table, reached, inputs, outputs, n, v, blocks, ROWS=ROWS, TAPS=TAPS)


def launch_kernels(codes: Tensor, index: Tensor, block: int, taps: Tensor, ends: Tensor) -> None:
    """Write the bits that any code in each block of ``block`` rows has set to ``taps``, as bit numbers, and where those
    of each block begin and end to ``ends``. The rows are taken in the order ``index``. This is
    ``postprocess.masked_gemm_kernels`` on CUDA.
    """
    word, n, blocks = status.word(codes.device), codes.shape[0], ends.shape[0] - 1
    ends.zero_()
    if not n:
        return
    unions = torch.empty(blocks, dtype=torch.int32, device=codes.device)
    _union[(blocks,)](
        codes.contiguous(),
        index.contiguous(),
        unions,
        ends[1:],
        word,
        n,
        block,
        status.code_of("masked_gemm_kernels", INDEX),
        ROWS=ROWS,
        TAPS=TAPS,
    )
    # The counts stand behind a leading 0, so their sums are the begins and the last end.
    ends.copy_(ends.cumsum(0))
    taps.fill_(-1)
    _list[(blocks,)](unions, ends, taps, TAPS=TAPS)
