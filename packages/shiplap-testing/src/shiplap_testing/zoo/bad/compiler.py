"""Broken promises to the compiler: fakes with other sizes, strides, dtypes and devices than the real op."""

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from shiplap_testing.zoo.bad.common import M, V, adopt, bad
from shiplap_testing.zoo.specimen import register


@adopt(register("keeps_strides(Tensor x) -> Tensor", lambda x: x * 2, lambda x: x.new_empty(x.shape)))
def keeps_strides(x: M) -> M:
    """Return ``2 * x``, the reference of the broken operator ``zoo::keeps_strides``. The operator's result has the
    strides of ``x``, but the result of its fake is contiguous.
    """
    return x * 2


bad("stride bug for a transposed input", keeps_strides, "fake", "compile")


@adopt(register("fake_dtype(Tensor x) -> Tensor", lambda x: x.float().sum(1), lambda x: x.new_empty(x.shape[0])))
def fake_dtype(x: M) -> Float32[Tensor, "n"]:
    """Return the sum of each row in float32, the reference of the broken operator ``zoo::fake_dtype``. The result of
    the operator's fake has the dtype of ``x``.
    """
    return x.float().sum(1)


bad("fake with another dtype", fake_dtype, "fake", note="right for float32, wrong for bfloat16")


@adopt(register("fake_device(Tensor x) -> Tensor", lambda x: x * 2, lambda x: torch.empty_like(x, device="meta")))
def fake_device(x: M) -> M:
    """Return ``2 * x``, the reference of the broken operator ``zoo::fake_device``. The result of the operator's fake is
    on the meta device and not on that of ``x``.
    """
    return x * 2


bad("fake on another device", fake_device, "fake", "compile")


@adopt(
    register(
        "odd_sizes(Tensor x) -> Tensor",
        lambda x: torch.nn.functional.pad(x, (0, x.shape[0] % 2)).view(-1, 2).sum(1),
        lambda x: x.new_empty(x.shape[0] // 2),
    ),
    dims={"m": "cdiv(n, 2)"},
)
def odd_sizes(x: V) -> Float[Tensor, "m"]:
    """Return the sums of neighbouring pairs of ``x``, where the last of an odd number is added to zero. It is the
    reference of the broken operator ``zoo::odd_sizes``. The result of the operator's fake has ``n // 2`` elements,
    which is one too few for odd sizes.
    """
    return torch.nn.functional.pad(x, (0, x.shape[0] % 2)).view(-1, 2).sum(1)


bad("fake wrong for odd sizes", odd_sizes, "fake", note="n // 2 for cdiv(n, 2)")


def _slide(x, L):
    """Return ``x [n, k]`` with its columns expanded as SlideSparse does for 2:4 sparsity. Each group of ``L`` columns
    becomes ``L / 2 - 1`` overlapping groups of four columns. Columns past the end of ``x`` are zeros, and zeros pad the
    number of columns to a multiple of 32.
    """
    k = x.shape[1]
    j = torch.arange(-(-k // L) * 2 * (L - 2))
    r = j % (2 * (L - 2))
    source = j // (2 * (L - 2)) * L + 2 * (r // 4) + r % 4
    lifted = torch.where(source < k, x[:, source.clamp(max=k - 1)] if k else x.new_zeros(len(x), len(j)), 0)
    return torch.nn.functional.pad(lifted, (0, -len(j) % 32))


def _slide_fake(x, L):
    """Return an uninitialised tensor as the fake of ``_slide``. This function has a defect on purpose. If ``L`` does
    not divide the columns of ``x``, the number of columns is computed without rounding groups up.
    """
    return x.new_empty(x.shape[0], (x.shape[1] * 2 * (L - 2) // L + 31) // 32 * 32)


@adopt(
    register("slide(Tensor x, SymInt L=12) -> Tensor", lambda x, L=12: _slide(x, L), lambda x, L=12: _slide_fake(x, L)),
    dims={"kp": "cdiv(cdiv(k, L) * 2 * (L - 2), 32) * 32"},
    requires=("L >= 4", "L % 2 == 0"),
)
def slide(x: Float[Tensor, "n k"], L: int = 12) -> Float[Tensor, "n kp"]:
    """Return ``x`` with its columns expanded as SlideSparse does for 2:4 sparsity. It is the reference of the broken
    operator ``zoo::slide``. The result of the operator's fake has too few columns if ``L`` does not divide the columns
    of ``x``.
    """
    return _slide(x, L)


bad("SlideSparse's fake and real sizes", slide, "fake", note="K*2*(L-2)//L for ceil(K/L)*2*(L-2); needs no GPU")


@adopt(register("specialises(Tensor x) -> Tensor", lambda x: x * 2, lambda x: x.new_empty([int(s) for s in x.shape])))
def specialises(x: M) -> M:
    """Return ``2 * x``, the reference of the broken operator ``zoo::specialises``. The operator's fake converts sizes
    to ints, so that a graph is compiled anew for each size.
    """
    return x * 2


bad("recompiles for each size", specialises, "fake", "compile", note="int() of a size in the fake")


@adopt(register("no_fake(Tensor x) -> Tensor", lambda x: x.clone().mul_(2), key="CPU"))
def no_fake(x: M) -> M:
    """Return ``2 * x``, the reference of the broken operator ``zoo::no_fake``. The operator has no fake, so that a
    compiler breaks the graph where it is called.
    """
    return x * 2


bad("no fake at all", no_fake, "fake", "compile", "opcheck", note="a graph break")
