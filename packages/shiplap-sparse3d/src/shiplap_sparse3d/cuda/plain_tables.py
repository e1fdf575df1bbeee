"""Tables that are not sorted, launched by Python: their ops have C functions for the CPU in one library with others.

The lookups are those of lookup.py, where a launch program has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shiplap.plugin_api import triton_launcher
from shiplap_sparse3d.coords import output_shape
from shiplap_sparse3d.cuda import status
from shiplap_sparse3d.cuda.hash import SLOT_BYTES
from shiplap_sparse3d.cuda.lookup import (
    BLOCK_ROWS,
    BLOCK_WARPS,
    INSERTS,
    LOOKUPS,
    NEAR_OTHERS,
    NEAR_ROWS,
    OUTPUT_OUTSIDE,
    OUTSIDE,
    TWICE,
    batches_below,
)
from shiplap_sparse3d.cuda.lookup_kernels import block_kernel, insert_kernel, lookup_kernel, near_kernel

__all__ = ["conv_table", "subm_table"]

NEAR = 1024  # voxels up to here are compared with each other

_insert = triton_launcher(insert_kernel)
_taps = triton_launcher(lookup_kernel)
_blocks = triton_launcher(block_kernel)
_near = triton_launcher(near_kernel)


class TableWindow(NamedTuple):
    """The window (kernel, stride, padding and dilation) by which queries in the grid ``grid`` look up voxels in the
    grid ``shape``. A query is an output voxel whose neighbours are wanted.
    """

    shape: Sequence[int]
    grid: Sequence[int]
    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    @property
    def few_blocks(self) -> bool:
        """Whether the taps of a query lie in at most eight blocks (2 x 2 x 2 cells) of the hash. This is so for at most
        three cells per axis without dilation.
        """
        return max(self.kernel) <= 3 and max(self.dilation) == 1

    @property
    def wide(self) -> bool:
        """Whether the input coordinate that a tap (cell of the kernel) of a query reads may need more than 32 bits."""
        _, grid, kernel, stride, padding, dilation = self
        return max(grid) * max(stride) + max(padding) + max(kernel) * max(dilation) >= 2**31

    @property
    def taps(self) -> dict[str, Any]:
        """The kernel's number of cells per axis, ``KX``, ``KY`` and ``KZ``, and ``WIDE``, as keyword arguments of the
        Triton kernels.
        """
        return {**dict(zip(("KX", "KY", "KZ"), self.kernel, strict=True)), "WIDE": self.wide}


def subm_table(
    coords: Tensor, shape: list[int], kernel: list[int], dilation: list[int], *, out: Tensor, workspace: Tensor
) -> None:
    """Write the neighbour table ``[n, k]`` of a submanifold convolution to ``out``. This is ``ops.subm_table`` on CUDA.
    Few voxels are compared with each other. More voxels are found in a hash in ``workspace``.
    """
    word = status.word(coords.device)
    if not out.numel():
        return
    # A submanifold kernel is centred on its voxel.
    padding = [k // 2 * d for k, d in zip(kernel, dilation, strict=True)]
    window, coords, n = (
        TableWindow(shape, shape, kernel, (1, 1, 1), padding, dilation),
        coords.contiguous(),
        len(coords),
    )
    # More voxels than this are looked up faster in a hash than compared with each other.
    if n > NEAR:
        _look_up("subm_table", coords, coords, window, out, word, OUTSIDE, workspace)
        return
    codes = status.code_of("subm_table", OUTSIDE), status.code_of("subm_table", TWICE)
    cells = *shape, batches_below(shape), *padding, *dilation
    _near[(-(-n // NEAR_ROWS),)](
        coords,
        out,
        word,
        n,
        out.shape[1],
        *cells,
        *codes,
        **window.taps,
        ROWS=NEAR_ROWS,
        OTHERS=NEAR_OTHERS,
        num_warps=4,
    )


def conv_table(
    coords: Tensor,
    out_coords: Tensor,
    shape: list[int],
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    *,
    out: Tensor,
    workspace: Tensor,
) -> None:
    """Write to ``out`` the neighbour table ``int32 [m, k]`` of a convolution from the voxels ``coords`` to the voxels
    ``out_coords``. This is ``ops.conv_table`` on CUDA. Voxels are found in a hash in ``workspace``.
    """
    word = status.word(coords.device)
    if not coords.shape[0]:
        # Without inputs there is no hash to look anything up in.
        out.fill_(-1)
    elif out.numel():
        grid = output_shape(shape, kernel, stride, padding, dilation)
        window = TableWindow(shape, grid, kernel, stride, padding, dilation)
        queries = out_coords.contiguous()
        _look_up("conv_table", coords.contiguous(), queries, window, out, word, OUTPUT_OUTSIDE, workspace)


def _look_up(
    op: str,
    coords: Tensor,
    queries: Tensor,
    window: TableWindow,
    out: Tensor,
    word: int,
    message: str,
    workspace: Tensor,
) -> None:
    """Write the row of ``coords`` at each tap (cell of the kernel) of each of ``queries`` to ``out``, or -1 if there is
    none. The rows are found in a hash at the start of ``workspace``. Errors are reported in the status word at the
    address ``word``, from which the host raises ``SL211`` later.
    """
    capacity, slots = _build_hash(op, coords, window.shape, workspace, word), workspace.data_ptr()
    (m, k), (shape, grid, _, stride, padding, dilation) = out.shape, window
    tensors, code = (queries, slots, out, 0, 0, None, word, m), status.code_of(op, message)
    cells = *shape, *grid, batches_below(grid), *stride, *padding
    if window.few_blocks:
        sizes = {"SIZE": k, "PARTS": 1, "ROWS": BLOCK_ROWS, "KEY": 0, "BINS": 0, "PAGE": 0, "num_warps": BLOCK_WARPS}
        _blocks[(-(-m // BLOCK_ROWS),)](*tensors, *cells, capacity, code, 1, 1, **window.taps, **sizes)
        return
    size = min(k, 32)
    taps = 1 << max(0, size - 1).bit_length()
    rows, of_kernel = LOOKUPS // taps, {name: v for name, v in window.taps.items() if name != "KX"}
    sizes = {"SIZE": size, "TAPS": taps, "ROWS": rows, "KEY": 0, "BINS": 0, "PAGE": 0, "num_warps": 1}
    grid_of_programs = -(-m // rows), -(-k // size)
    _taps[grid_of_programs](*tensors, k, *cells, *dilation, capacity, code, 1, 1, **of_kernel, **sizes)


def _build_hash(op: str, coords: Tensor, shape: Sequence[int], workspace: Tensor, word: int) -> int:
    """Insert the voxels ``coords`` into a hash at the start of ``workspace``, and return the hash's number of slots.
    Rows outside the grid and duplicates are reported in the status word at the address ``word``, from which the host
    raises ``SL211`` later.
    """
    n = coords.shape[0]
    capacity = max(2 * n, 64)
    # The workspace is for the largest use, and only the part of the hash must be cleared.
    used = SLOT_BYTES * capacity
    if workspace.numel() > 2 * used or workspace.numel() > 1 << 20:
        workspace = workspace[: -(-used // 8) * 8].view(torch.int64)  # wide stores
    workspace.zero_()
    codes = status.code_of(op, OUTSIDE), status.code_of(op, TWICE)
    cells = *shape, batches_below(shape), capacity
    _insert[(-(-n // INSERTS),)](coords, workspace.data_ptr(), word, n, *cells, *codes, BLOCK=INSERTS, num_warps=1)
    return capacity
