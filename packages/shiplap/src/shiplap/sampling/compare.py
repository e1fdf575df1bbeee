"""Comparison of results: bit by bit, or within a tolerance that follows from the dtype and the length of sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from shiplap.sampling.common_factor import describe_common_factor
from shiplap.sampling.difference_pattern import describe_pattern

if TYPE_CHECKING:
    from shiplap.declare.spec import OpSpec


NeighbourSize = Literal["all", "row", "none"]


@dataclass(frozen=True)
class Difference:
    """The outcome of a comparison of results.

    Attributes:
        problem: a text that describes the first difference. It is empty if the results agree.
        error: the largest error in units of the tolerance.
    """

    problem: str = ""
    error: float = 0.0


@dataclass(frozen=True)
class Reduction:
    """The length and precision of the sums from which one element of a result is computed.

    Attributes:
        terms: the largest number of terms.
        eps: the machine epsilon of these sums, or 0 if it is that of the result.
    """

    terms: int
    eps: float = 0.0

    def growth(self, eps: float, wide_sums: bool) -> float:
        """Return the relative rounding error of a sum of ``terms`` numbers that is stored with the machine epsilon
        ``eps``. If ``wide_sums`` is true, the sum is assumed to be accumulated in float32 and rounded once at the end.
        If it is false, all partial sums are assumed to be rounded with the larger of ``eps`` and the field ``eps``.
        """
        steps: float = 4 + 2 * self.terms**0.5
        grown = max(eps, self.eps) * steps
        return min(grown, 8 * eps + max(torch.finfo(torch.float32).eps, self.eps) * steps) if wide_sums else grown


SURE_SHARE = 0.9  # share of the tolerance, leaving room for rounding in the comparison itself
FLOAT8_SUMS_EPS = 2.0**-13  # precision of sums of 8-bit floats in Hopper's tensor cores, whatever the output dtype
PART = 1 << 18  # elements of a large result on a CPU that are compared at once, so that they stay in its caches
DEVICE_PART = 1 << 25  # elements of one on an accelerator, whose memory could not hold all of them several times over


def derive_reduction(spec: OpSpec, env: dict[str, Any]) -> Reduction:
    """Return the length and precision of the sums that an op computes, from which its tolerance follows.

    The number of terms is the product of the sizes of the input dims that no output has. ``env`` maps dim names to
    sizes. If an argument can only be float8, the precision is that of tensor cores.
    """
    inputs = {d.of or d.text for a in spec.tensors if a.tensor for d in a.tensor.dims if d.kind in ("name", "variadic")}
    outs = {d.text for o in spec.outputs for d in o.tensor.dims}
    sizes = [env[n] for n in inputs - outs if n in env]
    terms = max(1, prod(prod(s) if isinstance(s, tuple) else int(s) for s in sizes))
    dtypes = [a.tensor.dtypes for a in spec.tensors if a.tensor]
    eight = any(names and all(n.startswith("float8") for n in names) for names in dtypes)
    return Reduction(terms, FLOAT8_SUMS_EPS if eight else 0.0)


def bitwise_difference(got: Sequence[Tensor], expected: Sequence[Tensor], than: str = "") -> str:
    """Return a text with the first element at which two lists of results differ in bits, or the first result whose
    shape or dtype differs. Return an empty string if the lists agree.

    NaNs with the same bits are equal. ``than`` names the second list in the text. If it is empty, the word is
    "expected".
    """
    for index, (g, e) in enumerate(zip(got, expected, strict=True)):
        if problem := _shape_problem(g, e):
            return f"result {index}: {problem}"
        g, e = g.detach().contiguous(), e.detach().contiguous()
        if not torch.equal(_as_integer_bits(g), _as_integer_bits(e)):
            differs = (_as_integer_bits(g) != _as_integer_bits(e)).nonzero()
            # The bits of a complex number are a pair, so their position has one index more.
            at = tuple(differs[0].tolist()[: g.dim()])
            values = f"{g[at].item()!r}, {than or 'expected'} {e[at].item()!r}"
            return f"result {index}{list(at)} = {values}; {len(differs)} of {g.numel()} differ"
    return ""


def _as_integer_bits(t: Tensor) -> Tensor:
    """Return the bits of ``t`` as a tensor of integers. Floats and bools are viewed as integers of their width. A
    complex number becomes two integers along a new last dim. Integers are returned unchanged.
    """
    if not (t.dtype == torch.bool or t.is_floating_point() or t.is_complex()):
        return t
    if t.is_complex():
        t = torch.view_as_real(t)
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize])


def _shape_problem(got: Tensor, expected: Tensor) -> str:
    """Return a text that says how the results ``got`` and ``expected`` differ in shape or, if the shapes agree, in
    dtype. Return an empty string if both agree.
    """
    if got.shape != expected.shape:
        return f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    return f"{got.dtype}, expected {expected.dtype}" if got.dtype != expected.dtype else ""


def compare_within_tolerance(
    got: Sequence[Tensor],
    own: Sequence[Tensor],
    wide: Sequence[Tensor],
    sums: Reduction,
    *,
    wide_sums: bool = False,
    near: NeighbourSize = "all",
    allowed: Sequence[Tensor] | None = None,
    tolerance: float = 0.0,
) -> Difference:
    """Return the difference of ``got``, the results of an op, from the results of its reference. If all are within the
    tolerance, its ``problem`` is empty.

    ``own`` are the reference's results in its own precision, and ``wide`` those in float64. Integers must equal those
    of ``own`` or of ``wide``. NaN and infinity must be at the same indices as in ``own`` or in ``wide``. Any other
    element may differ by ``eps * (4 + 2 sqrt(terms)) * (|wide| + rms(wide))``, the growth of rounding errors in sums
    that ``sums`` describes. Three times the largest error of the reference itself is added, and a larger multiple if
    there are few elements.

    If ``wide_sums`` is true, sums of 16-bit numbers are assumed to be kept in float32, as kernels do. If it is false,
    they are assumed to be rounded to the dtype of the result. The tolerance of a long sum in bfloat16 then exceeds its
    value, so a kernel that leaves out most of the terms passes.

    ``near`` says whether the rms is taken over all elements (``"all"``), over an element's row (``"row"``), or left out
    (``"none"``). If it is left out, errors in small elements are found that large elements would hide. ``allowed`` has,
    for each element, a further deviation that rounding explains (see ``sampling.rounding``). ``tolerance`` is a
    relative deviation that the declaration admits.
    """
    model = _ToleranceModel(sums, wide_sums, near, tolerance)
    if len(got) != len(own):
        return Difference(f"{len(got)} results, expected {len(own)}")
    worst = 0.0
    for index, (g, o, w) in enumerate(zip(got, own, wide, strict=True)):
        extra = allowed[index] if allowed is not None else None
        difference = (
            Difference(problem) if (problem := _shape_problem(g, o)) else _compare_result(g, o, w, model, extra)
        )
        worst = max(worst, difference.error)
        if difference.problem:
            return Difference(f"result {index}: {difference.problem}", worst)
    return Difference(error=worst)


def agrees_without_float64(
    got: Sequence[Tensor],
    own: Sequence[Tensor],
    sums: Reduction,
    *,
    wide_sums: bool = False,
    near: NeighbourSize = "all",
    errors: Sequence[float] = (),
) -> bool:
    """Return True if ``compare_within_tolerance`` accepts ``got`` whatever the reference's values in float64 are, so
    that they need not be computed. Return False if that is not certain. ``wide_sums`` and ``near`` are as in
    ``compare_within_tolerance``.

    Let E be the largest error of ``own``. The tolerance of an element is at least ``growth * (|wide| + rms(wide))``
    plus 3 E, and ``wide`` is within E of ``own``. So ``|got - own| <= growth * (|own| + rms(own))`` implies that
    ``got`` is within the tolerance, as long as ``growth`` is at most 1. The rms is left out for ``near="none"``.

    ``errors`` has a number for each result that is at most E, if some is known. The difference may then be larger by
    nearly twice that number. Of the 3 E, one is the distance of ``wide`` from ``own``, and ``2 * growth`` are for the
    magnitude and the rms of ``own``, which may exceed those of ``wide`` by E each.
    """
    if len(got) != len(own):
        return False
    rows = zip(got, own, errors or [0.0] * len(own), strict=True)
    return all(_tensor_agrees(g.detach(), o.detach(), sums, wide_sums, near, error) for g, o, error in rows)


def _tensor_agrees(
    got: Tensor, own: Tensor, sums: Reduction, wide_sums: bool, near: NeighbourSize, error: float
) -> bool:
    """Return True if the one result ``got`` is within the tolerance whatever the reference's values in float64 are, and
    False if that is not certain. ``own`` are the reference's values in its own precision, whose largest error is at
    least ``error``. The other arguments are those of ``agrees_without_float64``.
    """
    if _shape_problem(got, own):
        return False
    if not got.numel():
        return True
    if not got.is_floating_point() or got.itemsize == 1:
        return bool(torch.equal(_as_integer_bits(got.contiguous()), _as_integer_bits(own.contiguous())))
    length = part_length(got)
    if near == "none" and got.numel() > length:
        parts = zip(got.reshape(-1).split(length), own.reshape(-1).split(length), strict=True)
        return all(_tensor_agrees(*part, sums, wide_sums, near, error) for part in parts)
    if describe_common_factor(got, own, own):  # single numbers of 16 bits do not show it
        return False
    # In 16 bits their difference would be rounded itself.
    g, o = (t.float() if t.itemsize == 2 else t for t in (got, own))
    off = g - o
    least, most = (float(end) for end in torch.aminmax(off))
    if not (math.isfinite(least) and math.isfinite(most)):  # NaN or infinity, equal only with the same bits
        return bool(torch.equal(_as_integer_bits(got.contiguous()), _as_integer_bits(own.contiguous())))
    growth: float = SURE_SHARE * sums.growth(torch.finfo(got.dtype).eps, wide_sums)
    common: float = growth * float(torch.linalg.vector_norm(o)) / o.numel() ** 0.5 if near == "all" else 0.0
    common += max(0.0, 2.0 * (SURE_SHARE - growth)) * error
    # ``agrees_without_float64`` argues for a growth of at most 1.
    if not (math.isfinite(common) and growth <= 1):
        return False
    if max(-least, most) <= common:
        return True
    return bool(off.abs_().sub_(o.abs(), alpha=growth).max() <= common)


@dataclass(frozen=True)
class _ToleranceModel:
    """The parameters from which the tolerance of an element is computed. ``sums`` has the length and precision of the
    sums from which the element is computed. If ``wide_sums`` is true, these are taken to be accumulated in float32.
    ``near`` says over which elements a root mean square is taken, and ``tolerance`` is a further relative error.
    """

    sums: Reduction
    wide_sums: bool
    near: NeighbourSize
    tolerance: float

    def size(self, w: Tensor) -> Tensor:
        """Return a tensor with the magnitude to which the error of each element of ``w`` is relative. It is the
        magnitude of the element plus a root mean square. This is taken over all elements if ``near`` is ``"all"``, over
        the row if it is ``"row"``, and left out if it is ``"none"``.
        """
        size = w.abs()
        if not size.numel() or self.near == "none":
            return size
        if self.near == "row" and size.dim() > 1:
            return size + size.square().mean(-1, keepdim=True).sqrt()
        return size + size.square().mean().sqrt()


def part_length(t: Tensor) -> int:
    """Return how many elements of the large result ``t`` are compared at once on its device."""
    return PART if t.device.type == "cpu" else DEVICE_PART


def _compare_result(got: Tensor, own: Tensor, wide: Tensor, model: _ToleranceModel, extra: Tensor | None) -> Difference:
    """Return the difference of one result ``got`` from the reference, whose values are ``own`` in its own precision and
    ``wide`` in float64. ``extra`` is a further deviation that is allowed for each element, or None for no such
    deviation.

    A large result is compared in parts. If a part differs, the whole result is compared again, so that the reported
    index is right.
    """
    got, own, wide = got.detach(), own.detach(), wide.detach()
    if wide.shape != own.shape:
        wide = own
    number = (got.is_floating_point() and got.itemsize > 1) or got.is_complex()
    if number and extra is None and model.near == "none" and got.numel() > part_length(got):
        difference = _compare_parts(got, own, wide, model)
        if not difference.problem:
            return difference
    return _compare_elements(got, own, wide, model, extra)


def _compare_parts(got: Tensor, own: Tensor, wide: Tensor, model: _ToleranceModel) -> Difference:
    """Return the difference of the first part of a large result ``got`` that differs from the reference. The index in
    its text is counted from the start of the part. If no part differs, return a difference with the largest error of
    all parts. ``own`` and ``wide`` are the reference's values in its own precision and in float64.
    """
    parts = [*zip(*(t.reshape(-1).split(part_length(got)) for t in (got, own, wide)), strict=True)]
    # That of the whole result, as where it is not compared part by part.
    slack = _slack(max(float(_own_error(*part)[2].max()) for part in parts), got.numel())
    worst = 0.0
    for g, o, w in parts:
        difference = _compare_elements(g, o, w, model, None, slack)
        worst = max(worst, difference.error)
        if difference.problem:
            return difference
    return Difference(error=worst)


def _own_error(got: Tensor, own: Tensor, wide: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (finite, wide, error) for a result ``got`` and the reference in its own precision (``own``) and in float64
    (``wide``).

    The returned ``finite`` is a mask of the elements that are finite in all three tensors. The returned ``wide`` is in
    float64 or complex128, and ``error`` is the absolute difference of ``own`` from it. Both are 0 at the elements
    outside the mask.
    """
    finite = torch.isfinite(got) & torch.isfinite(own) & torch.isfinite(wide)
    w = torch.where(finite, _to_double(wide), 0)
    return finite, w, torch.where(finite, (_to_double(own) - w).abs(), 0)


def _slack(own_error: float, count: int) -> float:
    """Return the absolute deviation of a result that the reference's own error explains.

    ``own_error`` is the largest error of the reference over ``count`` elements. The result is a multiple of it, which
    is larger for few elements. Where terms cancel, rounding errors are random, and the largest of a few says little
    about the next.
    """
    return (3 + 30 / math.sqrt(max(1, count))) * own_error


def _compare_elements(
    got: Tensor, own: Tensor, wide: Tensor, model: _ToleranceModel, extra: Tensor | None, slack: float | None = None
) -> Difference:
    """Return the difference of one result ``got`` from the reference, element by element. ``own`` and ``wide`` are the
    reference's values in its own precision and in float64.

    ``slack`` is the absolute deviation that the reference's own error explains. If it is None, it is computed from
    these elements. ``extra`` is a further deviation that is allowed for each element, or None for no such deviation.
    """
    if got.dtype == torch.bool and (strange := got.view(torch.uint8) > 1).any():
        at = tuple(strange.nonzero()[0].tolist())
        byte = int(got.view(torch.uint8)[at])
        return Difference(f"[{', '.join(map(str, at))}] is stored as {byte}: a bool is a byte of 0 or 1", math.inf)
    if not (got.is_floating_point() or got.is_complex()):
        return _first_difference((got != own) & (got != wide.to(got.dtype)), got, own)
    finfo = torch.finfo(got.dtype)
    got, own, wide, narrow = (float8_to_float32(t) for t in (got, own, wide, wide.to(got.dtype)))
    g = _to_double(got)
    if all(map(is_finite, (got, own, wide, narrow))):  # the usual case, in fewer operations
        finite, w = None, _to_double(wide)
        own_error = (_to_double(own) - w).abs()
    else:
        same_place = [_same_finiteness(got, expected) for expected in (own, narrow)]
        bad = ~(same_place[0] | same_place[1] | _sum_overflowed(got, own, wide, model.sums))
        if extra is not None:
            bad &= torch.isfinite(extra)  # elsewhere, rounding decides whether the element is a number
        if bad.any():
            return _first_difference(bad, got, own)
        finite, w, own_error = _own_error(got, own, wide)
    size = model.size(w)
    if slack is None:
        slack = _slack(float(own_error.max()) if own_error.numel() else 0.0, w.numel())
    growth = model.sums.growth(finfo.eps, model.wide_sums) + model.tolerance
    # A GPU may flush subnormal numbers; a CPU keeps them, and rounds to the smallest.
    smallest = finfo.tiny if got.device.type != "cpu" else finfo.tiny * finfo.eps * (16 + 4 * model.sums.terms**0.5)
    tolerance = growth * size + slack + max(smallest, 5e-324)
    if extra is not None:
        tolerance = tolerance + extra
    off = (g - w).abs()
    error = (off if finite is None else torch.where(finite, off, 0)) / tolerance
    worst = float(error.max()) if error.numel() else 0.0
    first = _first_difference(error > 1, got, wide)
    return Difference(first.problem and f"{first.problem}; off by {worst:.3g} tolerances", worst)


def is_finite(t: Tensor) -> bool:
    """Return whether all elements of the floating-point or complex tensor ``t`` are finite."""
    t = float8_to_float32(t)
    if t.is_complex() or not t.numel():
        return bool(torch.isfinite(t).all())
    # A mask of 10^5 to 10^6 elements takes 9 to 29 times as long (float32 and float64, one core, 2026-11-30).
    return all(math.isfinite(float(end)) for end in torch.aminmax(t))


def _sum_overflowed(got: Tensor, own: Tensor, wide: Tensor, sums: Reduction) -> Tensor:
    """Return a mask of the elements where a sum overflows both in the result ``got`` and in the reference ``own``, but
    not in float64 (``wide``).

    Whether such a sum ends as infinity or NaN depends on the order of the terms and on fused products.
    """
    both = torch.isfinite(wide) & ~torch.isfinite(own) & ~torch.isfinite(got)
    return both if sums.terms > 1 or got.is_complex() else both & torch.isnan(own)


def float8_to_float32(t: Tensor) -> Tensor:
    """Return a float8 tensor converted to float32, since torch does not calculate with float8. Other tensors are
    returned unchanged.
    """
    return t.float() if t.is_floating_point() and t.itemsize == 1 else t


def _to_double(t: Tensor) -> Tensor:
    """Return ``t`` converted to complex128 if it is complex, otherwise to float64."""
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def _same_finiteness(a: Tensor, b: Tensor) -> Tensor:
    """Return a mask of the elements that are both finite, both NaN, or the same infinity.

    For complex numbers, the mask has the elements that are both finite or both not finite. A product with infinity may
    end as infinity or NaN, depending on its formula.
    """
    if a.is_complex():
        return torch.isfinite(a) == torch.isfinite(b)
    return (torch.isfinite(a) & torch.isfinite(b)) | (torch.isnan(a) & torch.isnan(b)) | (a == b)


def _first_difference(bad: Tensor, got: Tensor, expected: Tensor) -> Difference:
    """Return a difference that names the first index at which the mask ``bad`` is set, both values there, the number of
    set elements, and the pattern of these. Its error is infinity. Return an empty difference if no element is set.
    """
    if not bad.any():
        return Difference()
    at = tuple(bad.nonzero()[0].tolist())
    values = f"{_format_element(got[at])}, expected {_format_element(expected[at])}"
    text = f"{values}; {int(bad.sum())} of {bad.numel()} differ{describe_pattern(bad, got, expected)}"
    return Difference(f"[{', '.join(map(str, at))}] = {text}", float("inf"))


def _format_element(t: Tensor) -> str:
    """Return the value of a tensor of one element as a string. A float has at most eight significant digits."""
    value = t.item()
    return f"{value:.8g}" if isinstance(value, float) else str(value)
