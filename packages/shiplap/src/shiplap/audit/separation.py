"""The property that separates the failing samples of a check from the passing ones, such as ``d >= 257``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from shiplap.sampling.case import SampleCase
from shiplap.sampling.ledger import AXES
from shiplap.sampling.sample_times import count_elements

MULTIPLES = (128, 64, 32, 16, 8, 4, 2)  # of which the sizes of tiles and vectors usually are
MOST_VALUES = 4  # values that a property may list
FEW = 12  # properties of which pairs are tried, those first that fewest passing samples have


@dataclass(frozen=True)
class SampleProperty:
    """A property that all failing samples of a check have.

    Attributes:
        axis: the axis of the ledger that it is about, such as ``size``.
        text: the property in words, such as ``d >= 257``.
        holds: whether each of the passing samples has it, in their order.
        kind: the kind of a property of sizes, which is ``one``, ``equal``, ``tail`` or empty.
    """

    axis: str
    text: str
    holds: tuple[bool, ...]
    kind: str = ""

    @property
    def passing(self) -> int:
        """The number of passing samples that have the property, too."""
        return sum(self.holds)


@dataclass(frozen=True)
class Separation:
    """The properties that all failing samples of a check have together and the fewest passing ones.

    Attributes:
        axes: the axes of the ledger that they are about, such as ``size``.
        text: a clause about the failing samples, for the evidence of a finding.
        kind: the kind of a property of sizes among them, as in ``SampleProperty``, or an empty string.
    """

    axes: tuple[str, ...]
    text: str
    kind: str = ""


def separate(
    failed: Sequence[SampleCase],
    passed: Sequence[SampleCase],
    base: SampleCase,
    axes_of: Callable[[SampleCase], tuple[str, ...]],
) -> Separation | None:
    """Return the property, or the two properties, that all ``failed`` samples have and none of the ``passed`` ones. If
    there are none, return the property that tells most of them apart and that the base sample does not have. Return
    None if no property tells any apart.

    ``base`` is the base sample of the op, which has small sizes and default scalars. ``axes_of(case)`` returns the axes
    of the ledger, such as ``layout``, in which a sample differs from it. If a sample without such an axis fails, the
    text is about the ``passed`` samples, and there are no axes.
    """
    if not passed:
        return None
    axes = [[*map(axes_of, cases)] for cases in (failed, passed)]
    if () in axes[0]:
        found = sorted(_properties(passed, failed, base, *axes[::-1]), key=lambda p: p.passing)
        return Separation((), f"all but those with {found[0].text}") if found and not found[0].passing else None
    found = sorted(_properties(failed, passed, base, *axes), key=lambda p: p.passing)
    alone = [p for p in found if not p.passing]
    if alone:
        return Separation((alone[0].axis,), f"exactly those with {alone[0].text}", alone[0].kind)
    for one, other in combinations(found[:FEW], 2):
        if not any(a and b for a, b in zip(one.holds, other.holds, strict=True)):
            text = f"exactly those with {one.text} and {other.text}"
            return Separation((one.axis, other.axis), text, one.kind or other.kind)
    # A property of the base sample, such as the usual values, says nothing alone: it is not why the others fail.
    unusual = {p.text for p in _properties(failed, [base], base, axes[0], [()])}
    best = next((p for p in found if p.text in unusual), None)
    if best is None or 2 * best.passing > len(passed):
        return None
    total = len(failed) + best.passing
    text = f"{len(failed)} of the {total} with {best.text}, and no other"
    return Separation((best.axis,), text, best.kind)


def _properties(
    failed: Sequence[SampleCase],
    passed: Sequence[SampleCase],
    base: SampleCase,
    failed_axes: Sequence[tuple[str, ...]],
    passed_axes: Sequence[tuple[str, ...]],
) -> Iterator[SampleProperty]:
    """Yield the properties that all ``failed`` samples have and not all ``passed`` ones, the most telling first.
    ``failed_axes`` and ``passed_axes`` have the axes of the ledger in which each of them differs from ``base``.
    """
    for axis, what, read in _readers(base):
        yield from _named_values(axis, what, [read(c) for c in failed], [read(c) for c in passed])
    varied = [axis for axis in failed_axes[0] if all(axis in axes for axes in failed_axes)]
    # A size is last, since the ranges of sizes say more.
    for axis in sorted(varied, key="size".__eq__):
        if axis == "size":
            yield from _numeric_properties(failed, passed, base)
        holds = tuple(axis in axes for axes in passed_axes)
        if axis != "scalar" and not all(holds):
            yield SampleProperty(axis, AXES[axis] if axis == "large size" else f"another {axis}", holds)
    if "size" not in varied:
        yield from _numeric_properties(failed, passed, base)


def _numeric_properties(
    failed: Sequence[SampleCase], passed: Sequence[SampleCase], base: SampleCase
) -> Iterator[SampleProperty]:
    """Yield the properties of numbers, which are scalars and the sizes of dims, that all ``failed`` samples have and
    not all ``passed`` ones. ``base`` is the base sample of the op.
    """
    scalars = [n for n, v in base.recipe.scalars if type(v) in (int, float)]
    pairs_of_dims = [*combinations([n for n, v in base.recipe.sizes if type(v) is int], 2)]
    for one, other in pairs_of_dims:
        holds = tuple(_number(c, one) == _number(c, other) for c in passed)
        # Dims differ in the base sample, so that equal ones say more than their size.
        if all(_number(c, one) == _number(c, other) for c in failed) and not all(holds):
            yield SampleProperty("size", f"{one} == {other}", holds, "equal")
    for axis, name in [*(("scalar", n) for n in scalars), *(("size", n) for n, _ in base.recipe.sizes)]:
        usual, (of_failed, of_passed) = base.env.get(name), [[_number(c, name) for c in g] for g in (failed, passed)]
        if axis == "scalar" and usual not in of_failed and usual in of_passed:
            yield SampleProperty(axis, f"another {name} than {usual}", tuple(v != usual for v in of_passed))
        yield from _ranges(axis, name, of_failed, of_passed)
    for one, other in pairs_of_dims:
        pairs = [[(_number(c, one), _number(c, other)) for c in cases] for cases in (failed, passed)]
        for sign, compared in (("<", operator.lt), (">", operator.gt)):
            holds = tuple(compared(a, b) for a, b in pairs[1])
            if all(compared(a, b) for a, b in pairs[0]) and not all(holds):
                yield SampleProperty("size", f"{one} {sign} {other}", holds)


def _readers(base: SampleCase) -> list[tuple[str, str, Any]]:
    """Return tuples (axis, words, function) of the properties that are no numbers. The function returns the value of a
    sample as a text, and the words come before it.
    """

    def rank(name: str) -> Any:
        """Return a function that returns the number of dims that a sample has in the place of the variadic ``name``."""
        return lambda case: str(len(size) if isinstance(size := case.env.get(name, ()), tuple) else 1)

    def layout(case: SampleCase) -> str:
        """Return the layouts of the sample's arguments, or ``contiguous``."""
        return ", ".join(f"{kind} {name}" for name, kind in case.recipe.layouts) or "contiguous tensors"

    variadic = [n for n, v in base.recipe.sizes if isinstance(v, tuple)]
    chosen = [n for n, v in base.recipe.scalars if type(v) not in (int, float)]
    return [
        *(("rank", f"dims in *{n}:", rank(n)) for n in variadic),
        ("absence", "no", lambda case: ", ".join(case.recipe.absent) or "tensor left out"),
        ("dtype", "", lambda case: ", ".join(sorted({v for _, v in case.recipe.dtypes}))),
        *(("scalar", f"{n} =", lambda case, n=n: repr(case.env.get(n))) for n in chosen),
        ("layout", "", layout),
        ("value", "values", lambda case: case.recipe.values),
    ]


def _named_values(axis: str, what: str, failed: list[str], passed: list[str]) -> Iterator[SampleProperty]:
    """Yield the property that a sample has one of the values of the ``failed`` ones, if these are few and not all of
    the ``passed`` ones have one of them.
    """
    kinds = sorted({*failed})
    holds = tuple(value in kinds for value in passed)
    if len(kinds) <= MOST_VALUES and not all(holds):
        yield SampleProperty(axis, f"{what} {' or '.join(kinds)}".strip(), holds)


def _number(case: SampleCase, name: str) -> Any:
    """Return a scalar of a sample, or the size of a dim. That of a variadic dim is its number of elements."""
    value = case.env.get(name, dict(case.recipe.sizes).get(name, 0))
    return count_elements(value) if isinstance(value, tuple) else value


def _ranges(axis: str, name: str, failed: list[Any], passed: list[Any]) -> Iterator[SampleProperty]:
    """Yield the properties that a scalar or a dim called ``name`` has the value of the ``failed`` samples, is at least
    or at most as large as there, or is no multiple of a number, as long as not all ``passed`` samples have them.
    """
    # NaN is neither larger nor smaller than another number, and unequal to itself.
    if any(type(v) not in (int, float) or v != v for v in (*failed, *passed)):
        return
    least, most = min(failed), max(failed)
    at = [(f"{name} == {least}", tuple(v == least for v in passed), "")] if least == most else []
    beyond = [(f"{name} >= {least}", tuple(v >= least for v in passed), "")]
    # A large size is more often a limit than a value of its own.
    found = beyond + at if axis == "size" and least > 1 else at + beyond
    found += [(f"{name} <= {most}", tuple(v <= most for v in passed), "")]
    for m in MULTIPLES if axis == "size" else ():
        if all(v % m for v in failed):
            found.append((f"{name} no multiple of {m}", tuple(bool(v % m) for v in passed), "tail"))
        elif not any(v % m for v in failed):
            found.append((f"{name} a multiple of {m}", tuple(not v % m for v in passed), ""))
    for text, holds, kind in found:
        if not all(holds):
            yield SampleProperty(axis, text, holds, "one" if axis == "size" and most == least == 1 else kind)
