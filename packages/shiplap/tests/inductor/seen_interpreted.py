"""Run by test_seen.py in a process of its own: what Inductor makes of an op of ``sl.triton`` whose kernel it may see.

``seen_interpreted.py on|off``: whether torch's flag is on. Prints the generated code, then which kernels ran.
"""

from __future__ import annotations

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch._inductor.config as config
import triton
import triton.language as tl
from jaxtyping import Float32
from torch import Tensor
from torch._inductor.utils import run_and_get_code

import shiplap as sl
from shiplap.plugin_api.interpreting import interpret
from shiplap.torch_private import triton_internals

interpret()
config.epilogue_fusion_user_defined_triton_kernel = sys.argv[1] == "on"


@triton.jit
def twice_kernel(x, out, numel_x, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < numel_x) * 2, mask=at < numel_x)


@triton.jit
def turned_kernel(x, out, n, m, stride_x_0, stride_x_1, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + row * stride_x_0 + at * stride_x_1, mask=at < m)
    tl.store(out + row * m + at, value - 1, mask=at < m)


@sl.op("seen::twice")
def twice(x: Float32[Tensor, "n m"]) -> Float32[Tensor, "n m"]:
    return x * 2


@sl.op("seen::less")
def less(x: Float32[Tensor, "n m"]) -> Float32[Tensor, "n m"]:
    return x - 1


twice.kernel("cuda", sl.triton(twice_kernel, grid="cdiv(n * m, BLOCK)", constants={"BLOCK": 16, "num_warps": 2}))
less.kernel("cuda", sl.triton(turned_kernel, grid="n", arguments={"BLOCK": "pow2ceil(m)"}))


def fused(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Each result is one kernel where the flag is on."""
    return torch.relu(twice(a)), less(b.t()).exp().half()


def layouts(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """What follows has another layout, other elements or another input (pytorch#184247)."""
    return twice(a).t().relu(), less(b)[1:, ::2].exp(), twice(c).t().contiguous() + c.t()


def both(*given: Tensor) -> tuple[Tensor, ...]:
    return *fused(*given[:2]), *layouts(*given[2:])


if __name__ == "__main__":
    tensors = [torch.randn(7, 5) for _ in range(5)]
    got, code = run_and_get_code(torch.compile(both, fullgraph=True), *tensors)
    print("".join(code))
    print("ran:", *triton_internals.launches)
    for mine, want in zip(got, both(*tensors), strict=True):
        torch.testing.assert_close(mine, want)
        assert mine.stride() == want.stride()
    print("equal")
