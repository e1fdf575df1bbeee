"""Errors of CUDA kernels, told late: a kernel that meets a bad value writes one word, and the next call raises.

A synchronisation at every call would cost more than the kernels do. The word lies in pinned host memory, which a kernel
reaches by its address and the host reads without asking the device; nothing is written unless something is wrong. A
captured graph writes the same word, so replays are told as well.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from shiplap.extend import error

__all__ = ["code_of", "poll", "synchronize", "word"]

ROW_BITS = 40  # of the word: a table has fewer entries than that; the code lies above
_codes: dict[tuple[str, str], int] = {}  # by op and message with {row}, in order, from 1
_words: dict[torch.device, tuple[torch.Tensor, Any]] = {}  # the memory, and the integer that lives there


def code_of(op: str, message: str) -> int:
    """A number for this message, to be written as ``code << ROW_BITS | row``."""
    return _codes.get((op, message)) or _codes.setdefault((op, message), len(_codes) + 1)


def _word(device: torch.device) -> tuple[torch.Tensor, Any]:
    entry = _words.get(device)
    if entry is None:
        memory = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        entry = _words.setdefault(device, (memory, ctypes.c_int64.from_address(memory.data_ptr())))
    return entry


def word(device: torch.device) -> int:
    """The address of the device's word, after raising what it says: what every kernel launcher asks for first."""
    memory, value = _words.get(device) or _word(device)
    if value.value:
        poll(device)
    return memory.data_ptr()


def poll(device: torch.device) -> None:
    """Raise SL211 if a kernel that has finished on ``device`` met a bad value; it is told once."""
    _, value = _word(device)
    told = value.value
    if told:
        value.value = 0
        op, message = list(_codes)[(told >> ROW_BITS) - 1]
        raise error("SL211", where=f"sparse3d::{op}", got=message.format(row=told & ((1 << ROW_BITS) - 1)))


def synchronize(device: torch.device | str | None = None) -> None:
    """Wait for ``device`` (default: the current CUDA device) and raise what its sparse3d kernels found wrong.

    Raises:
        ArgumentError: SL211, naming the op and the row.
    """
    if device is None and not torch.cuda.is_available():
        return
    place = torch.device("cuda" if device is None else device)
    if place.type != "cuda":
        return
    with torch.cuda.device(place):
        place = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.synchronize(place)
    poll(place)
