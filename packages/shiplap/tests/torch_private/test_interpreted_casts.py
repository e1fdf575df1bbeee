"""Triton's interpreter stores float32 values into a bfloat16 tensor as a device does."""

from __future__ import annotations

from shiplap_testing.forked import interpreted

SCRIPT = """
import sys
import torch
import triton
import triton.language as tl

from shiplap.torch_private.triton_internals import correct_interpreted_casts

if sys.argv[1:] != ["its own"]:
    correct_interpreted_casts()
    correct_interpreted_casts()


@triton.jit
def store(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(5), dtype=torch.int64)
bits[:64] &= 0x807FFFFF  # subnormal
bits[64] = 0
x = bits.int().view(torch.float32)
x[65:70] = torch.tensor([float("inf"), -float("inf"), -0.0, 1.0, 3.4e38])
out = torch.empty(len(x), dtype=torch.bfloat16)
store[(4,)](x, out, len(x), 1024)
number = ~x.isnan()
assert out.isnan().equal(~number)
wrong = (out.view(torch.int16) != x.bfloat16().view(torch.int16))[number].nonzero()
print(len(wrong), "wrong")
"""


def test_float32_is_rounded_to_bfloat16():
    assert "\n0 wrong" in "\n" + interpreted("-W", "ignore", "-c", SCRIPT).stdout


def test_the_interpreter_itself_does_not_round():
    """If this fails, the correction can go."""
    printed = interpreted("-W", "ignore", "-c", SCRIPT, "its own")
    assert printed.returncode or "\n0 wrong" not in "\n" + printed.stdout
