"""Comparison of tensors bit by bit, on a processor or a GPU."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

WORD = 8  # bytes that a comparison on a GPU takes at once
_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def bits_are_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of equal shape and dtype have equal bits in all elements."""
    a, b = a.contiguous(), b.detach().contiguous()
    if not a.numel():
        return True
    if a.device.type == b.device.type == "cpu":  # torch compares bytes one by one, memcmp is faster
        return bool(_libc.memcmp(a.data_ptr(), b.data_ptr(), a.numel() * a.itemsize) == 0)
    flat = [t.reshape(-1).view(torch.uint8) for t in (a, b)]
    # A comparison on a GPU writes a byte for each word, so that wide words are up to eight times as fast.
    if all(t.numel() % WORD == 0 and t.data_ptr() % WORD == 0 and t.storage_offset() % WORD == 0 for t in flat):
        flat = [t.view(torch.int64) for t in flat]
    return bool(torch.equal(*flat))
