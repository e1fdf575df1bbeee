"""Broken lifetimes of addresses: pointers that a plan keeps, alignment that nobody promised."""

from jaxtyping import Float
from torch import Tensor

from shiplap_testing.zoo.bad.common import M, adopt, bad
from shiplap_testing.zoo.specimen import register

_plans = {}


def _baked(x, bias):
    """Return ``x + bias``. This function has a defect on purpose. It adds the ``bias`` of the first call with this
    shape, dtype and device of ``x`` in all later calls, too. A matmul descriptor that holds the address of its ``bias``
    acts in the same way.
    """
    key = x.shape, x.dtype, x.device
    if key not in _plans:
        _plans[key] = bias
    return x + _plans[key]


@adopt(register("baked_bias(Tensor x, Tensor bias) -> Tensor", _baked, lambda x, bias: x.new_empty(x.shape)))
def baked_bias(x: M, bias: Float[Tensor, "c"]) -> M:
    """Return ``x + bias``, the reference of the broken operator ``zoo::baked_bias``. The operator adds the ``bias`` of
    its first call with a shape, dtype and device of ``x`` in all later ones.
    """
    return x + bias


bad("bias baked into the plan of a shape", baked_bias, "addresses", note="two layers of one shape share a plan")


def _aligned(x):
    """Return ``2 * x``.

    This function has a defect on purpose: the address of a view is rounded down to a multiple of 16 bytes. A kernel
    that loads 16 bytes at a time can have this defect.
    """
    per = max(1, 16 // x.itemsize)
    flat = x.contiguous()
    # Rounded down in elements, which as_strided counts in.
    return flat.as_strided(flat.shape, flat.stride(), flat.storage_offset() // per * per) * 2


@adopt(register("aligned(Tensor x) -> Tensor", _aligned, lambda x: x.new_empty(x.shape)))
def aligned(x: M) -> M:
    """Return ``2 * x``, the reference of the broken operator ``zoo::aligned``. If the address of a view is not a
    multiple of 16 bytes, the operator reads from the next lower multiple.
    """
    return x * 2


bad("takes every address for aligned", aligned, "addresses", "edges", note="a slice of a larger tensor")
