"""Tensors that lie beside protected memory: an access next to them ends the process instead of passing unseen."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache

import torch
from torch import Tensor

# PROT_NONE of mprotect, which the mmap module does not name.
NONE, PAGE = 0, mmap.PAGESIZE


@cache
def _libc() -> ctypes.CDLL:
    """Return the C library, which takes longer to find than a small tensor to copy."""
    return ctypes.CDLL(None)


def copy_beside_guard(t: Tensor, *, after: bool) -> Tensor:
    """Return a contiguous copy of ``t`` next to a page of memory that cannot be accessed. If ``after`` is true, the
    copy ends directly before the page, and otherwise it begins directly behind it.

    Return ``t`` itself if it has no elements, is not on the CPU, or the page cannot be protected.
    """
    size = t.numel() * t.itemsize
    if t.device.type != "cpu" or not size:
        return t
    pages = -(-size // PAGE) * PAGE
    memory = mmap.mmap(-1, pages + PAGE)
    view = (ctypes.c_char * len(memory)).from_buffer(memory)
    address = ctypes.addressof(view)
    # mprotect returns another number than 0 if it fails. The tensor then stays where it is, unguarded.
    if _libc().mprotect(ctypes.c_void_p(address + (pages if after else 0)), ctypes.c_size_t(PAGE), NONE):
        return t
    start = pages - size if after else PAGE
    placed = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start).view(t.dtype).view(t.shape)
    # The tensor keeps the mapping alive: its storage holds a reference to the buffer.
    return placed.copy_(t)
