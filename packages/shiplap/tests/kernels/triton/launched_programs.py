"""Programs of launches without a GPU: branches, fills, sorts, late errors. Used by launched_cases.py."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Int32
from torch import Tensor

import shiplap as sl
from shiplap.plugin_api import LateErrors, launch_program


@triton.jit(do_not_specialize=["n"])
def few(x, out, n, WIDTH: tl.constexpr):
    """Each row goes behind those that are less, and those that are equal and before it."""
    row = tl.arange(0, WIDTH)
    mine = tl.maximum(tl.load(x + row, mask=row < n, other=0x7FFFFFFF), 0)
    place = row * 0
    for j in tl.static_range(WIDTH):
        other = tl.maximum(tl.load(x + row * 0 + j, mask=j + row * 0 < n, other=0x7FFFFFFF), 0)
        place += ((other < mine) | ((other == mine) & (j < row))).to(tl.int32)
    tl.store(out + place, row, mask=row < n)


@triton.jit(do_not_specialize=["keys", "status", "n", "code"])
def keyed(x, keys: tl.int64, status: tl.int64, n, code, BITS: tl.constexpr, WIDTH: tl.constexpr):
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(x + at, mask=at < n, other=0)
    word = status.to(tl.int64).to(tl.pointer_type(tl.int64)) + at * 0
    tl.store(word, (code.to(tl.int64) << 40) | at, mask=(value < 0) & (at < n))
    value = tl.maximum(value, 0)
    if BITS == 16:
        tl.store(keys.to(tl.int64).to(tl.pointer_type(tl.int16)) + at, value.to(tl.int16), mask=at < n)
    elif BITS == 32:
        tl.store(keys.to(tl.int64).to(tl.pointer_type(tl.int32)) + at, value, mask=at < n)
    else:
        tl.store(keys.to(tl.int64).to(tl.pointer_type(tl.int64)) + at, value.to(tl.int64), mask=at < n)


@triton.jit(do_not_specialize=["rows"])
def written(rows, ones, out, n, WIDTH: tl.constexpr):
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    row = tl.load(rows + at, mask=at < n, other=0).to(tl.int32)
    tl.store(out + at, row - 1 - tl.load(ones + at, mask=at < n, other=0), mask=at < n)


@sl.op("launched::ordered")
def ordered(x: Int32[Tensor, "n"], most: int) -> Int32[Tensor, "n"]:
    """The rows in ascending order, where what is negative counts as 0; up to ``most`` are compared with each other."""
    return x.clamp_min(0).argsort(stable=True).int()


class Words(LateErrors):
    """In plain memory: the driver has no device."""

    def memory(self, device: torch.device) -> Tensor:
        return torch.zeros(1, dtype=torch.int64)


ERRORS = Words()
NEGATIVE = "row {row} is negative"
ROOM = "28 * n"
ORDER = (
    launch_program(
        values={
            "small": "0 < n and n <= most",
            "large": "n > 0 and small == 0",
            "bits": "where(most == 1, 16, where(most == 2, 32, 64))",
        },
        errors=ERRORS,
    )
    .then(few, grid=1, when="small == 1", arguments={"WIDTH": "pow2ceil(n)"}, constants={"num_warps": 1})
    .then(
        keyed,
        grid="cdiv(n, WIDTH)",
        when="large == 1",
        arguments={"BITS": "bits"},
        constants={"WIDTH": 32, "num_warps": 1},
        scratch={"keys": ("int64", "0")},
        word="status",
        codes={"code": NEGATIVE},
    )
    .fill("24 * n", "4 * n", byte=255, when="large == 1")
    .sort(bits="bits", count="n", keys="0", values="8 * n", rows="16 * n", when="large == 1")
    .then(
        written,
        grid="cdiv(n, WIDTH)",
        when="large == 1",
        constants={"WIDTH": 64, "num_warps": 1},
        scratch={"rows": ("int64", "16 * n"), "ones": ("int32", "24 * n")},
    )
)


def told(call: Any) -> str:
    """The error of a call, or nothing."""
    try:
        call()
    except sl.ShiplapError as e:
        return f"{e.id} {e.got}"
    return "nothing"


# The word of late errors where there is no Python: its memory is of the driver, and the library knows its messages.
ALONE = """
#include "shiplap/late_errors.h"
const shiplap::triton::Message messages[] = {{7, "mylib::take", "index {row} is outside the table"}};
shiplap::triton::Late late{messages, 1};
extern "C" __attribute__((visibility("default"))) int64_t word(int device, char* text) {
  try {
    return late.word(device);
  } catch (const shiplap::triton::Told& told) {
    std::snprintf(text, 200, "%s", told.what());
    return 0;
  }
}
"""


def alone(library: ctypes.CDLL) -> list[str]:
    """What a program without Python says of a word that a kernel has written, call by call."""
    library.word.restype = ctypes.c_int64
    messages, text = list[str](), ctypes.create_string_buffer(200)
    address = library.word(0, text)
    for value in (7 << 40 | 12, 9 << 40 | 3, 0):
        ctypes.c_int64.from_address(address).value = value
        text.value = b""
        second = library.word(0, text)
        messages.append(text.value.decode() or ("the same word" if second == address else "another word"))
    return messages
