"""Later ones in Triton, run by its interpreter."""

from functools import partial

import torch
from jaxtyping import Float32
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.defect import Part, add, of
from shiplap_testing.defects.witness import randn, same, uniform

M32 = Float32[Tensor, "n c"]
size = partial(add, "size", needs=["triton"], later=True)


def cdiv(a, b):
    return -(-a // b)


def normed(ns):
    @sl.op(f"{ns}::normed", requires=("c >= 1", "c <= 512"))
    def normed(x: M32) -> M32:
        y = x - x.mean(1, keepdim=True)
        return y * torch.rsqrt(y.square().mean(1, keepdim=True) + 1e-3)

    return normed


def _normed(masked) -> Part:
    def bind(op):
        from shiplap_testing.defects import triton_kernels

        @op.kernel("cpu")
        def forward(x, *, out):
            if len(x):
                block = 16
                while block < x.shape[1]:
                    block *= 2
                triton_kernels.norm[(cdiv(len(x), 16),)](
                    x.contiguous(), out, *x.shape, MASKED=masked, ROWS=16, BLOCK=block
                )

    return bind


size(
    "Triton: variance that counts the padding",
    "lanes beyond the row hold minus the mean after it was subtracted",
    of(normed, _normed(False)),
    of(normed, _normed(True)),
    same(lambda: (uniform(2, 70) + 1,)),
)


def multiplied(ns):
    @sl.op(f"{ns}::multiplied")
    def multiplied(a: Float32[Tensor, "m k"], b: Float32[Tensor, "k n"]) -> Float32[Tensor, "m n"]:
        return a @ b

    return multiplied


def _multiplied(clipped) -> Part:
    def bind(op):
        from shiplap_testing.defects import triton_kernels

        @op.kernel("cpu")
        def forward(a, b, *, out):
            (m, k), n = a.shape, b.shape[1]
            out.zero_()
            if m and n and k:
                grid = (cdiv(m, 32) * cdiv(n, 32),)
                triton_kernels.grouped[grid](
                    a.contiguous(), b.contiguous(), out, m, n, k, GROUP=4, BLOCK=32, CLIPPED=clipped
                )

    return bind


size(
    "Triton: groups of tiles of full height",
    "the last group of rows of tiles is taken to have four, so that tiles are left out",
    of(multiplied, _multiplied(False)),
    of(multiplied, _multiplied(True)),
    same(lambda: (randn(170, 5), randn(5, 70, seed=1))),
)


def shifted(ns):
    @sl.op(f"{ns}::shifted")
    def shifted(x: M32, bias: Float32[Tensor, "c"]) -> M32:
        return x + bias

    return shifted


def _shifted(own) -> Part:
    def bind(op):
        from shiplap_testing.defects import triton_kernels

        @op.kernel("cpu")
        def forward(x, bias, *, out):
            if x.numel():
                grid = (cdiv(x.shape[0], 16), cdiv(x.shape[1], 64))
                triton_kernels.shift[grid](x.contiguous(), bias.contiguous(), out, *x.shape, OWN=own, ROWS=16, BLOCK=64)

    return bind


size(
    "Triton: bias of the first tile of columns",
    "the offset of the tile is missing where the bias is loaded",
    of(shifted, _shifted(False)),
    of(shifted, _shifted(True)),
    same(lambda: (randn(3, 100), randn(100, seed=1))),
)
