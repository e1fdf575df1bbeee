"""The inner loops on every instruction set of this machine, through their C symbols."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shiplap_slidesparse import cpu

ISAS = {"baseline": 0, "avx2": 1, "avx512": 2, "avx512vnni": 3}
OK, UNSUPPORTED = 0, 2
ELEMENTS = [torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    folder = os.environ.get("SHIPLAP_LIBRARY_PATH")
    return ctypes.CDLL(str(Path(folder) / cpu.LIBRARY.name if folder else cpu.LIBRARY))


def call(library: ctypes.CDLL, name: str, *args: object) -> None:
    """Tensors by address, ints as int64 but for the last, which is the instruction set; skips one that is not there."""
    given = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in args[:-1]]
    given = [ctypes.c_int64(a) if type(a) is int else a for a in given]
    isa = ISAS[str(args[-1])]
    status = getattr(library, f"slidesparse_{name}_isa")(*given, ctypes.c_int32(isa))
    if status == UNSUPPORTED:
        pytest.skip(f"this machine has no {args[-1]} with {name}")
    assert status == OK


@pytest.mark.parametrize("dot", ["dot_int8", "dot_panel"])
@pytest.mark.parametrize("isa", ISAS)
def test_integers_are_exact(library: ctypes.CDLL, isa: str, dot: str) -> None:
    """Every shape of a tile and every remainder of a vector, all values of a byte; the greatest depth at the limits."""
    rng = torch.Generator().manual_seed(0)
    for rows, columns, depth in (
        *((r, c, 70) for r in (1, 2, 3, 4, 16) for c in (1, 2, 3, 4, 5, 16)),
        *((3, 4, k) for k in (*range(0, 67), 127, 128, 129, 1000)),
    ):
        left = torch.randint(-128, 128, (rows, depth), generator=rng).to(torch.int8)
        right = torch.randint(-128, 128, (columns, depth), generator=rng).to(torch.int8)
        out = torch.full((rows, 16), -7, dtype=torch.int32)
        call(library, dot, left, rows, right, columns, depth, out, isa)
        assert torch.equal(out[:, :columns].long(), left.long() @ right.long().t()), (rows, columns, depth)
        assert (out[:, columns:] == -7).all()
    left = torch.tensor([[a, b, 0, 0, 5, 7, a, b] for a in range(-128, 128) for b in (-128, -64, -1, 1, 64, 127)])
    right = torch.randint(-128, 128, (3, 8), generator=rng).to(torch.int8)  # pairs on both sides of 16 bits
    for part in left.to(torch.int8).split(16):
        out = torch.zeros(16, 16, dtype=torch.int32)
        call(library, dot, part, len(part), right, 3, 8, out, isa)
        assert torch.equal(out[: len(part), :3].long(), part.long() @ right.long().t())
    for a, b in ((-128, -128), (-128, 127), (127, 127), (127, -128)):
        k = 131040
        left, right = torch.full((2, k), a, dtype=torch.int8), torch.full((2, k), b, dtype=torch.int8)
        out = torch.zeros(2, 16, dtype=torch.int32)
        call(library, dot, left, 2, right, 2, k, out, isa)
        assert (out[:, :2] == a * b * k).all()


@pytest.mark.parametrize("isa", ISAS)
def test_floats_are_summed_in_float(library: ctypes.CDLL, isa: str) -> None:
    for rows, columns, depth in ((1, 1, 1), (3, 4, 31), (16, 16, 513), (2, 5, 0), (7, 3, 64)):
        left, right = torch.randn(rows, depth), torch.randn(columns, depth)
        out = torch.zeros(rows, 16)
        call(library, "dot_float", left, rows, right, columns, depth, out, isa)
        exact, size = left.double() @ right.double().t(), left.abs().double() @ right.abs().double().t()
        assert ((out[:, :columns] - exact).abs() <= 1e-6 * size).all()


@pytest.mark.parametrize("isa", ISAS)
def test_numbers_are_widened_and_rounded_as_torch_does(library: ctypes.CDLL, isa: str) -> None:
    """All numbers of 8 and 16 bits, subnormal ones and NaN among them."""
    for element, dtype in enumerate(ELEMENTS):
        if dtype.itemsize > 2:
            values = torch.randn(1000).to(dtype)
        elif dtype.itemsize == 2:
            values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
        else:
            values = torch.arange(256, dtype=torch.uint8).view(dtype)
        wide = torch.zeros(len(values))
        call(library, "widen", values, ctypes.c_int32(element), wide, len(values), isa)
        assert torch.equal(wide.isnan(), values.float().isnan())
        assert torch.equal(
            wide.nan_to_num(0, torch.inf, -torch.inf), values.float().nan_to_num(0, torch.inf, -torch.inf)
        )
    row = torch.cat((torch.randn(100_003) * 100, torch.arange(-500.0, 500.0, 0.5), torch.logspace(-12, 3, 999)))
    for inverse in (1.0, 0.37, 2.0**-9):
        for float8, dtype, limit in ((1, torch.float8_e4m3fn, 448.0), (0, torch.int8, 127.0)):
            out, largest = torch.zeros(len(row), dtype=dtype), torch.zeros(1)
            call(library, "narrow", row, len(row), ctypes.c_float(inverse), ctypes.c_int32(float8), out, largest, isa)
            scaled = (row * inverse).clamp(-limit, limit)
            expected = (scaled if float8 else scaled.round()).to(dtype)
            assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
            assert largest == row.abs().max()
