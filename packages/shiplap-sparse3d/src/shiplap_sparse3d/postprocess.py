"""The two steps after FlexGEMM's neighbour map, which its masked implicit GEMM reads besides the table.

The convolutions of this package read :class:`~shiplap_sparse3d.Plan` instead; these ops are for kernels written against
FlexGEMM's layout. Their sizes do not depend on data: lists have their greatest possible length and are filled up with
-1, and the number of valid entries stays on the device as the last offset.
"""

from __future__ import annotations

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

import shiplap as sl
from shiplap_sparse3d.coords import refuse_rows
from shiplap_sparse3d.cpu import LIBRARY

__all__ = ["masked_gemm_kernels", "masked_gemm_signals"]

MAX_TAPS = 32  # bits of a code


def _bits_of_codes(codes: Tensor) -> Tensor:
    """Return the bits of int32 ``codes`` as ``bool [..., 32]``, lowest bit first."""
    return (codes[..., None] >> torch.arange(MAX_TAPS, device=codes.device) & 1).bool()


@sl.op(
    "sparse3d::masked_gemm_signals",
    requires=("v <= 32",),
    outputs=("gray_code", "sorted_index", "valid_signal_i", "valid_signal_o", "valid_signal_seg"),
)
def masked_gemm_signals(
    table: Int32[Tensor, "n v"],
) -> tuple[Int32[Tensor, "n"], Int64[Tensor, "n"], Int32[Tensor, "n*v"], Int32[Tensor, "n*v"], Int64[Tensor, "v+1"]]:
    """Return five tensors of a neighbour table for FlexGEMM's masked product.

    Bit ``v`` of ``gray_code`` is set if the row hits tap ``v``. ``sorted_index`` sorts the rows by the rank of these
    bits as a Gray code, and equal rows by their number. ``valid_signal_i`` and ``valid_signal_o`` hold the input and
    output rows of all pairs, by tap and then by output row. Those of tap ``v`` are ``valid_signal_seg[v]`` to
    ``valid_signal_seg[v + 1]``. A negative number in the table is no hit.

    The row numbers in the table are the input rows that each output row reads. After the last pair the lists of pairs
    are filled up with -1.
    """
    n, v = table.shape
    hits = table >= 0
    codes = (hits.long() << torch.arange(v, device=table.device)).sum(1)
    rank = codes
    for shift in (1, 2, 4, 8, 16):  # the prefix XOR that undoes a Gray code
        rank = rank ^ (rank >> shift)
    tap, row = hits.t().nonzero().unbind(1)
    signals = table.new_full((2, n * v), -1)
    signals[0, : len(tap)], signals[1, : len(tap)] = table[row, tap], row.int()
    ends = torch.nn.functional.pad(hits.sum(0).cumsum(0), (1, 0))
    return codes.int(), rank.argsort(stable=True), signals[0], signals[1], ends


@sl.op(
    "sparse3d::masked_gemm_kernels",
    dims={"b": "cdiv(n, block)"},
    outputs=("valid_kernel", "valid_kernel_seg"),
    requires=("block >= 1", "32 * cdiv(n, block) <= 2147483647"),
)
def masked_gemm_kernels(
    gray_code: Int32[Tensor, "n"], sorted_index: Int64[Tensor, "n"], block: int
) -> tuple[Int32[Tensor, "32*b"], Int32[Tensor, "b+1"]]:
    """Return the taps that any row of each block of ``block`` rows hits, and where the taps of each block begin. Rows
    are taken in the order ``sorted_index``.

    ``valid_kernel`` is one list for all blocks, ascending in each block, with -1 at its end. The taps of block ``i``
    are ``valid_kernel[valid_kernel_seg[i] : valid_kernel_seg[i + 1]]``. Raise ``SL211`` for a ``sorted_index`` outside
    ``[0, n)``.

    A row hits the taps whose bits are set in its ``gray_code``, which ``masked_gemm_signals`` returns.
    """
    n = gray_code.shape[0]
    refuse_rows("masked_gemm_kernels", (sorted_index < 0) | (sorted_index >= n), "sorted_index[{row}] is no row")
    blocks = -(-n // block)
    # The last block is filled up with rows that hit no tap.
    bits = torch.nn.functional.pad(_bits_of_codes(gray_code[sorted_index]), (0, 0, 0, blocks * block - n))
    any_row = bits.view(blocks, block, MAX_TAPS).any(1)
    taps = any_row.nonzero()[:, 1].int()
    ends = torch.nn.functional.pad(any_row.sum(1).cumsum(0), (1, 0)).int()
    return torch.nn.functional.pad(taps, (0, MAX_TAPS * blocks - len(taps)), value=-1), ends


masked_gemm_signals.kernel("cpu", sl.cabi(LIBRARY, "sparse3d_masked_gemm_signals"), workspace="24 * n + 49472")
masked_gemm_kernels.kernel("cpu", sl.cabi(LIBRARY, "sparse3d_masked_gemm_kernels"))
