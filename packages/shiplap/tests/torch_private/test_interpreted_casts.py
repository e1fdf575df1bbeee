"""Triton's interpreter converts to and from bfloat16 as torch does, for the kernels of ``sl.triton`` alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from shiplap.torch_private import triton_internals
from shiplap_testing import quick_interpreter
from shiplap_testing.forked import interpreted

pytest.importorskip("triton")

CASTS = """
import sys
import torch
import triton
import triton.language as tl
from contextlib import nullcontext

from shiplap.torch_private.triton_internals import correct_interpreted_casts

source, target = (getattr(torch, name) for name in sys.argv[1:3])


@triton.jit
def store(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(5), dtype=torch.int64)
bits[:64] &= 0x807FFFFF  # subnormal
bits[64] = 0
x = bits.int().view(torch.float32)
x[65:70] = torch.tensor([float("inf"), -float("inf"), -0.0, 1.0, 3.4e38])
if not (source.is_floating_point and target.is_floating_point):
    x = bits.remainder(5000).float() - 2500
x = x.to(source)
out = torch.empty(len(x), dtype=target)
with correct_interpreted_casts() if sys.argv[3:] != ["its own"] else nullcontext():
    store[(4,)](x, out, len(x), 1024)
expected = x.to(target)
number = ~expected.isnan()
assert out.isnan().equal(~number)
width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[out.itemsize]
print(int((out.view(width) != expected.view(width))[number].sum()), "wrong")
"""


@pytest.mark.parametrize("other", ["float32", "float64", "float16", "int32", "int64"])
@pytest.mark.parametrize("narrowed", [True, False])
def test_values_are_converted_as_by_torch(other: str, narrowed: bool) -> None:
    kinds = (other, "bfloat16") if narrowed else ("bfloat16", other)
    assert "\n0 wrong" in "\n" + interpreted("-W", "ignore", "-c", CASTS, *kinds).stdout


def test_the_interpreter_itself_does_not_round() -> None:
    """If this fails, the correction can go."""
    printed = interpreted("-W", "ignore", "-c", CASTS, "float32", "bfloat16", "its own")
    assert printed.returncode or "\n0 wrong" not in "\n" + printed.stdout


BESIDE = """
import torch
import triton
import triton.language as tl
from jaxtyping import BFloat16, Float32
from torch import Tensor

import shiplap as sl


@triton.jit
def store(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


def stored(x):
    out = torch.empty(len(x), dtype=torch.bfloat16)
    store[(1,)](x, out, len(x), 64)
    return out


@sl.op("casts::rounded")
def rounded(x: Float32[Tensor, "n"]) -> BFloat16[Tensor, "n"]:
    return x.bfloat16()


x = 1 + torch.arange(64) / 4096
before = stored(x)
rounded.kernel("cpu", sl.triton(store, grid="cdiv(n, BLOCK)", constants={"BLOCK": 64}))
assert stored(x).equal(before), "a binding changes a kernel of somebody else"
assert rounded(x).equal(x.bfloat16())
assert not before.equal(x.bfloat16())
assert stored(x).equal(before), "a call changes a kernel of somebody else"
print("beside")
"""


def test_only_kernels_of_the_library_are_corrected() -> None:
    done = interpreted("-W", "ignore", "-c", BESIDE)
    assert "beside" in done.stdout, done.stderr


MASKS = """
import sys
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

from shiplap.torch_private.triton_internals import correct_interpreted_casts

if sys.argv[1] == "the package":  # which tests would have corrected already
    InterpreterBuilder.create_splat = InterpreterBuilder.create_splat.__closure__[0].cell_contents


@triton.jit
def store(out, m, n, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(out + row * BLOCK + at, at, mask=(row < m) & (at < n))


out = torch.zeros(3, 8, dtype=torch.int32)
if sys.argv[1] == "the package":
    with correct_interpreted_casts():
        store[(3,)](out, 2, 5, 8)
else:
    store[(3,)](out, 2, 5, 8)
print(out.sum(1).tolist())
"""


@pytest.mark.parametrize("of", ["the package", "the tests"])
def test_a_condition_of_one_row_is_a_mask_with_each_release_of_triton(of: str) -> None:
    """Triton 3.9 makes integers of it, and refuses these."""
    done = interpreted("-W", "ignore", "-c", MASKS, of)
    assert "[10, 10, 0]" in done.stdout, done.stderr


OVERLAPPING = """
from triton.runtime import interpreter
from triton.runtime.interpreter import interpreter_builder
from shiplap.torch_private.triton_internals import correct_interpreted_casts

own = interpreter._patch_lang_tensor
first, second = correct_interpreted_casts(), correct_interpreted_casts()
first.__enter__()
second.__enter__()
first.__exit__(None, None, None)
assert "cast_impl" in vars(interpreter_builder)
second.__exit__(None, None, None)
assert not {"cast_impl", "create_splat"} & vars(interpreter_builder).keys()
assert interpreter._patch_lang_tensor is own
print("restored")
"""


def test_the_last_of_several_launches_restores_the_cast() -> None:
    done = interpreted("-W", "ignore", "-c", OVERLAPPING)
    assert "restored" in done.stdout, done.stderr


class Scope:
    """What restores the methods of Triton's tensors later."""

    def set_attr(self, part: Any, name: str, value: Any) -> None:
        setattr(part, name, value)


@pytest.mark.parametrize("of", ["the package", "the tests"])
def test_a_scalar_is_an_int_with_each_release_of_numpy(of: str) -> None:
    """An array with one element is none with NumPy 2.5, which Triton 3.6 takes it for."""

    class Tensor:
        handle = SimpleNamespace(data=numpy.array([3]))

    def own(part: Any, scope: Any) -> None:
        scope.set_attr(part, "__index__", lambda self: pytest.fail("the interpreter's own"))

    if of == "the package":
        triton_internals._patch_with_index(own, Tensor, Scope())
    else:
        quick_interpreter._with_index(own)(Tensor, Scope())
    assert range(Tensor()) == range(3)  # type: ignore[arg-type]
