"""Broken lifetimes of addresses: pointers that a plan keeps, alignment that nobody promised."""

from jaxtyping import Float
from torch import Tensor

from shiplap_testing.zoo.bad.common import M, adopt, bad
from shiplap_testing.zoo.specimen import register

_plans = {}


def _baked(x, bias):
    """As a matmul descriptor with CUBLASLT_MATMUL_DESC_BIAS_POINTER, cached by shape."""
    key = x.shape, x.dtype, x.device
    if key not in _plans:
        _plans[key] = bias
    return x + _plans[key]


@adopt(register("baked_bias(Tensor x, Tensor bias) -> Tensor", _baked, lambda x, bias: x.new_empty(x.shape)))
def baked_bias(x: M, bias: Float[Tensor, "c"]) -> M:
    return x + bias


bad("bias baked into the plan of a shape", baked_bias, "addresses", note="two layers of one shape share a plan")


def _aligned(x):
    """A kernel that loads 16 bytes at a time, and takes the address down to where it can."""
    per = max(1, 16 // x.itemsize)
    flat = x.contiguous()
    return flat.as_strided(flat.shape, flat.stride(), flat.storage_offset() // per * per) * 2


@adopt(register("aligned(Tensor x) -> Tensor", _aligned, lambda x: x.new_empty(x.shape)))
def aligned(x: M) -> M:
    return x * 2


bad("takes every address for aligned", aligned, "addresses", "edges", note="a slice of a larger tensor")
