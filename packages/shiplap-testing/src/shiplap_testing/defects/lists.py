"""Right for a list of two tensors of one size, and where all optional arguments are given."""

from functools import partial

import torch
from jaxtyping import Float, Float32
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.declared import M, V
from shiplap_testing.defects.defect import add, c_kernel, of
from shiplap_testing.defects.values_float import filled
from shiplap_testing.defects.witness import close, randn, same, wide

lists = partial(add, "lists")


def summed(ns):
    """Declare the op ``summed`` in the namespace ``ns`` and return it. Its reference returns the sum of ``x`` and the
    tensors of the list ``more``.
    """

    @sl.op(f"{ns}::summed")
    def summed(x: M, more: list[M]) -> M:
        """Return the sum of ``x`` and the tensors of the list ``more``. Kernels of the op are compared with this
        reference.
        """
        return sum(more, x)

    return summed


def _all_terms(x, more):
    """Return the sum of ``x`` and the tensors of ``more``, computed in float32, or in float64 for float64. This is a
    kernel of the op ``summed`` without a defect.
    """
    return sum((wide(t) for t in more), wide(x))


def _stacked(x, more):
    """Return the sum of ``x`` and the tensors of ``more``. This kernel of ``summed`` has a defect on purpose: for an
    empty list, ``torch.stack`` raises ``RuntimeError``.
    """
    return x + torch.stack(list(more)).sum(0)


lists(
    "an empty list that is stacked",
    "torch.stack raises for no tensors",
    of(summed, filled(_stacked)),
    of(summed, filled(_all_terms)),
    same(lambda: (randn(2, 3), [])),
)


def _in_pairs(x, more):
    """Return the sum of ``x`` and the tensors of ``more``. This kernel of ``summed`` has a defect on purpose: of an odd
    number of tensors, the last is left out.
    """
    return sum((a + b for a, b in zip(more[::2], more[1::2], strict=False)), x)


lists(
    "terms added in pairs",
    "the last one of an odd number has no partner",
    of(summed, filled(_in_pairs)),
    of(summed, filled(_all_terms)),
    same(lambda: (randn(2, 3), [randn(2, 3, seed=i) for i in range(3)])),
)


def _up_to_two(x, more):
    """Return the sum of ``x`` and the tensors of ``more``. This kernel of ``summed`` has a defect on purpose: of three
    or more tensors, only the first and the last are added.
    """
    return (x, x + more[0], x + more[0] + more[-1])[min(len(more), 2)] if more else x


lists(
    "a list of at most two",
    "the launcher has the addresses of the first and the last tensor",
    of(summed, filled(_up_to_two)),
    of(summed, filled(_all_terms)),
    same(lambda: (randn(2, 3), [randn(2, 3, seed=i) for i in range(3)])),
)


def _without_repeats(x, more):
    """Return the sum of ``x`` and the tensors of ``more``. This kernel of ``summed`` has a defect on purpose: a tensor
    that is in the list twice is added only once.
    """
    # A dict keeps one tensor for each address.
    return sum({t.data_ptr(): t for t in more}.values(), x)


lists(
    "a tensor that is twice in a list",
    "terms are collected by address, and equal addresses are one term",
    of(summed, filled(_without_repeats)),
    of(summed, filled(_all_terms)),
    same(lambda: (randn(2, 3), [t := randn(2, 3, seed=1), t])),
)


def _one_only(x, more):
    """Return the sum of ``x`` and the tensors of ``more``. This kernel of ``summed`` has a defect on purpose: if the
    list has one tensor, that tensor is returned without ``x``.
    """
    return more[0] if len(more) == 1 else sum(more, x)


lists(
    "a list of one",
    "the short cut for a single term returns the term",
    of(summed, filled(_one_only)),
    of(summed, filled(_all_terms)),
    same(lambda: (randn(2, 3), [randn(2, 3, seed=1)])),
)


def plus_sums(ns):
    """Declare the op ``plus_sums`` in the namespace ``ns`` and return it. Its reference adds the sum of all elements of
    all tensors of the list ``parts`` to each element of ``x``.
    """

    @sl.op(f"{ns}::plus_sums")
    def plus_sums(x: V, parts: list[Float[Tensor, "_"]]) -> V:
        """Return ``x`` plus the sum of all elements of all tensors of the list ``parts``. Kernels of the op are
        compared with this reference.
        """
        return sum((p.sum() for p in parts), x)

    return plus_sums


def _as_the_first(x, parts):
    """Return ``x`` plus the sum of all elements of the tensors of ``parts``. This kernel of ``plus_sums`` has a defect
    on purpose: of each tensor, only as many elements are added as the first tensor has.
    """
    return sum((p[: len(parts[0])].sum() for p in parts), x)


lists(
    "all parts as long as the first",
    "one length is passed for all of the list",
    of(plus_sums, filled(_as_the_first)),
    of(plus_sums, filled(lambda x, parts: sum((wide(p).sum() for p in parts), wide(x)))),
    same(lambda: (randn(2), [randn(2, seed=1), randn(5, seed=2)])),
)


def affine(ns):
    """Declare the op ``affine`` in the namespace ``ns`` and return it. Its reference returns ``x * weight + bias``,
    where an absent ``weight`` or ``bias`` is left out.
    """

    @sl.op(f"{ns}::affine")
    def affine(x: M, weight: Float[Tensor, "c"] | None = None, bias: Float[Tensor, "c"] | None = None) -> M:
        """Return ``x * weight + bias``, where an absent ``weight`` or ``bias`` is left out. Kernels of the op are
        compared with this reference.
        """
        x = x if weight is None else x * weight
        return x if bias is None else x + bias

    return affine


def _affine(nested):
    """Return a function that registers a kernel of the op ``affine``. If ``nested`` is false, there is no defect. If it
    is true, there is a defect on purpose: ``bias`` is added only if there is a ``weight``.
    """

    def fill(x, weight, bias):
        """Return ``x * weight + bias``, where an absent ``weight`` or ``bias`` is left out. If ``nested`` (argument of
        ``_affine``) is false, there is no defect. If it is true, there is a defect on purpose: ``bias`` is added only
        if there is a ``weight``.
        """
        if weight is None:
            return x if nested or bias is None else x + bias
        return x * weight if bias is None else x * weight + bias

    return filled(fill)


lists(
    "a bias without a weight",
    "the kernel looks for the bias only where there is a weight",
    of(affine, _affine(True)),
    of(affine, _affine(False)),
    same(lambda: (randn(2, 3), None, randn(3))),
)


def shifted32(ns):
    """Declare the op ``shifted32`` in the namespace ``ns`` and return it. Its reference returns ``x + bias``, or ``x``
    if ``bias`` is None.
    """

    @sl.op(f"{ns}::shifted32")
    def shifted32(x: Float32[Tensor, "n"], bias: Float32[Tensor, "n"] | None = None) -> Float32[Tensor, "n"]:
        """Return ``x + bias``, or ``x`` if ``bias`` is None. Kernels of the op are compared with this reference."""
        return x if bias is None else x + bias

    return shifted32


def _absent(value):
    """Return a function that registers a kernel of the op ``shifted32`` in C, which computes ``x + bias``. If ``bias``
    is None, the kernel adds the C number ``value``. If ``value`` is zero, there is no defect. Otherwise there is a
    defect on purpose: ``x`` should be returned unchanged.
    """
    return c_kernel(f"""
int shifted32(const sl_context* ctx, const DLTensor* x, const DLTensor* bias, DLTensor* out) {{
  const float* from = x->data; float* to = out->data; const float* b = bias ? bias->data : NULL;
  for (int64_t i = 0; i < x->shape[0]; ++i) to[i] = from[i] + (b ? b[i] : {value});
  return SL_OK;
}}""")


lists(
    "C: an absent bias of one",
    "an argument that is not there counts as a vector of ones, as a weight would",
    of(shifted32, _absent("1.0f")),
    of(shifted32, _absent("0.0f")),
    lambda op: close(op(torch.ones(3)), torch.ones(3)),
    needs=["compiler"],
)
