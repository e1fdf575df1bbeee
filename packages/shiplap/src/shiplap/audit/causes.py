"""Causes of findings: the axis that all failing samples vary, a fix for that axis, and faults of the environment."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from shiplap.audit.separation import Separation
from shiplap.dispatch import Op
from shiplap.sampling.case import SampleCase, tensors_among
from shiplap.sampling.finding import Finding
from shiplap.sampling.ledger import is_large
from shiplap.sampling.run import all_finite, reference_effects
from shiplap.sampling.values import AROUND_PREFIX
from shiplap.sandbox.machine_lack import DEVICE_LACK_TEXT, LACK_TEXTS

# An axis in which all failing samples differ from the first one, and the repair of that. The most telling comes first.
AXIS_FIXES = {
    "rank": "flatten all dims in the place of the variadic one, whatever their number is",
    "absence": "handle the call without the optional tensor",
    "dtype": "handle this dtype, or leave it out: declare dtypes= of the kernel, or a narrower annotation",
    "scalar": "compute with the value of the scalar, or exclude this value with requires=",
    "layout": "read the strides of every argument, or declare contiguous=(...)",
    "offset": "begin at the first element of the tensor, not at the start of its storage",
    "alignment": "test the address before a vector load, or load single elements",
    "large size": "compute numbers of elements and offsets in 64 bits, loop over all tiles: smaller samples are right",
    "size": "loop over all tiles, mask the last one, and take no path that only other sizes have tested",
}
# Kind of a property of sizes that all failing samples have → the repair.
SIZE_FIXES = {
    "one": "handle a dim of size 1 as any other size: a stride of it means nothing, and it is no broadcast one",
    "equal": "tell dims apart by their places in the declaration: they may have the same size",
    "tail": "handle the elements behind the last whole tile, vector or group: the size need not be a multiple of it",
}
EMPTY_FIX = "return early where a tensor has no elements, with results of the declared sizes"
REQUIRES_FIX = (
    "the reference itself is not finite there: exclude the value of the scalar with requires=, such as requires='a > 0'"
)
WRAPPED_FIX = "widen integers before a product or a sum, and not its result: it has wrapped around in the narrow dtype"
STATE_FIX = "keep nothing from call to call, or tell calls apart by every argument and by the contents of tensors"
THRESHOLD_FIX = "branch where the reference does: values at or next to a number in the code are wrong"
OWN_FIXES = ("special",)  # checks whose fix follows from the kind of values, also where another axis varies
# Kinds of values with which alone samples fail → the repair.
VALUE_FIXES = {
    kind: fix
    for kinds, fix in {
        ("nan", "masked nan"): "propagate NaN where the reference does, and select with where() where it does not",
        ("infinite", "masked"): (
            "do with infinities and wholly masked rows what the reference does: an infinity minus itself is NaN"
        ),
        ("zeros", "mostly zero"): "guard each division by a sum, a norm or a scale that may be zero",
        ("subnormal", "tiny"): (
            "compute with numbers as small as these: do not round them to zero or raise them to a constant, and divide "
            "by them instead of multiplying by a reciprocal, which is infinite"
        ),
        ("shared",): (
            "treat equal numbers of several tensors as the reference does. If the op relies on what a builder of "
            "samples draws otherwise, let it draw such numbers itself"
        ),
        ("ties", "constant"): "treat elements that are equal as the reference does, also all of them",
        ("large", "overflowing", "beyond float16", "saturating"): (
            "keep intermediate results in range: subtract the maximum before exp, and sum in float32"
        ),
        ("cancelling",): "keep the digits of nearly equal numbers: subtract before squaring, and compare exactly",
        ("negative", "below zero"): "handle numbers below zero as the reference does",
        ("powers", "extreme", "ends"): (
            "handle negative numbers and the ends of the dtype as the reference does: round quotients to the same "
            "side, and widen before a sum or a product"
        ),
    }.items()
    for kind in kinds
}
# Errors of the machine, and the step that helps. None of them says anything about the op.
ENVIRONMENT_FAULTS = {
    r"Could not run '[^']+' with arguments from the '(\w+)' backend": (
        "the op has no kernel for {0}: audit it with device= of a device that it has a kernel for"
    ),
    r"InvalidCxxCompiler|No working C\+\+ compiler found": (
        "this machine has no working C++ compiler: install one (c++, g++ or clang++), or name it in CXX"
    ),
    r"Failed to find C compiler": "this machine has no C compiler, which Triton needs: install one, or name it in CC",
    r"No space left on device": "the disk is full: free some space, or set TMPDIR",
    r"can't start new thread": "this machine starts no further thread: end other processes, or raise its limit",
}
# Obligations of failing checks, the most harmful first: a wrong value is served, the rest raises or is slow.
# Memory that nobody wrote comes before the wrong values that follow from it.
HARM = (
    *("workspace", "numerics", "edges", "special", "sizes", "kernels"),
    *("gradient", "backward", "addresses", "aliases", "fresh"),
)
VALUE_CHECKS = ("numerics", "edges", "special", "sizes")  # which compare a plain call with the reference
# Checks that compare the same results in another way, and fail with them.
REPEATING_CHECKS = ("kernels", "threads", "compile", "sharding", "addresses", "fresh", "workspace")
# The axis of samples without elements, which no recipe names.
EMPTY = "empty"


def environment_fault(text: str) -> str:
    """Return advice that names what the machine lacks, such as a compiler, if the error text ``text`` shows such a
    fault. Return an empty string if it does not.
    """
    for pattern, advice in ENVIRONMENT_FAULTS.items():
        if match := re.search(pattern, text):
            return advice.format(*match.groups())
    return ""


def lack_in_reasons(reasons: Iterable[str]) -> str:
    """Return the first of ``reasons`` that names a resource which the machine lacks, such as memory, with advice behind
    it. Each reason is a text that says why something was not observed. Return an empty string if none names a lack.
    """
    for reason in reasons:
        if advice := environment_fault(reason):
            return advice
        if any(re.search(text, reason) for text in (*LACK_TEXTS.values(), DEVICE_LACK_TEXT)):
            return f"{reason}: the machine lacks it, so free some and audit again"
    return ""


def varied_of(failed: Sequence[tuple[SampleCase, tuple[str, ...]]]) -> tuple[str, ...]:
    """Return the names of the properties, such as ``layout``, in which all failing samples differ from the base sample
    (small sizes, default scalars).

    ``failed`` has pairs of a failing sample and the properties in which it differs. ``"empty"`` comes first if no
    sample has an element.
    """
    common = set.intersection(*(set(axes) for _, axes in failed))
    axes = tuple(axis for axis in (*AXIS_FIXES, "value") if axis in common)
    return (EMPTY, *axes) if all(case.numel == 0 for case, _ in failed) else axes


def fix_of(
    op: Op, check: str, usual: str, case: SampleCase, varied: Sequence[str], separation: Separation | None = None
) -> str:
    """Return advice on how to repair a fault that the check named ``check`` has found.

    ``varied`` names the properties, such as ``layout``, in which all failing samples differ from the base sample, and
    ``separation`` those that tell the failing samples from the passing ones, if some do. If there is advice for one of
    these, it is returned. Otherwise ``usual``, the advice of the check, is returned. If a scalar value makes the
    reference return infinity or NaN on the smallest failing sample ``case``, the advice is to exclude that value. If
    values are what varied, the advice is about the kind of those in ``case``, such as ``ties``.
    """
    if "scalar" in varied and not _reference_is_finite(op, case):
        return REQUIRES_FIX
    if EMPTY in varied:
        return EMPTY_FIX
    axes = separation.axes if separation is not None and separation.axes else varied
    telling = [axis for axis in AXIS_FIXES if axis in axes]
    if not telling or (check in OWN_FIXES and "value" in axes):
        if "value" in axes and case.recipe.values.startswith(AROUND_PREFIX):
            return THRESHOLD_FIX
        return VALUE_FIXES.get(case.recipe.values, usual) if "value" in axes else usual
    if telling[0] == "size":
        if is_large(tensors_among(case.args)):
            return AXIS_FIXES["large size"]
        if separation is not None and separation.kind:
            return SIZE_FIXES[separation.kind]
    return AXIS_FIXES[telling[0]]


def names_of_varied(failed: Sequence[SampleCase], base: SampleCase) -> dict[str, tuple[str, ...]]:
    """Return the names of the scalars and of the dims that have other values in all ``failed`` samples than in the base
    sample ``base``, under the keys ``"scalar"`` and ``"size"``.
    """
    groups = {"scalar": dict(base.recipe.scalars), "size": dict(base.recipe.sizes)}
    return {
        axis: tuple(name for name in names if all(case.env.get(name) != base.env.get(name) for case in failed))
        for axis, names in groups.items()
    }


def _reference_is_finite(op: Op, case: SampleCase) -> bool:
    """Return whether all results of the op's reference on the sample ``case`` are finite. Return True if the reference
    raises an exception, since another finding reports that.
    """
    try:
        results = reference_effects(op, case.args)
    except Exception:  # another finding says so
        return True
    return all_finite(results)


def group_by_cause(findings: Sequence[Finding]) -> tuple[tuple[Finding, ...], ...]:
    """Return the failed findings in groups, where the findings of a group probably have one cause. The most harmful
    group comes first, and in each group the most harmful finding.

    Two findings have one cause if their failing samples differ from the base sample in the same properties, such as
    ``layout``. Findings without such a property are grouped by check, except those of ``REPEATING_CHECKS``, which join
    the most harmful wrong value. If the base sample itself has a wrong value, so have samples of other sizes.
    """
    groups: dict[str, list[Finding]] = {}
    failed = [f for f in findings if f.verdict == "fail"]
    wrong = [f for f in failed if f.check in VALUE_CHECKS and not f.varied.startswith(EMPTY)]
    first = min(wrong, key=_rank_of_harm, default=None)
    for finding in failed:
        joins = first is not None and not finding.varied and finding.check in REPEATING_CHECKS
        if first is not None and first.check == "numerics" and not first.varied:
            joins = finding.varied in ("", "size") and finding.check in (*VALUE_CHECKS, *REPEATING_CHECKS)
        named = first if first is not None and joins else finding
        groups.setdefault(named.varied or f"the check {named.check}", []).append(finding)
    ranked = [sorted(group, key=_rank_of_harm) for group in groups.values()]
    return tuple(tuple(group) for group in sorted(ranked, key=lambda group: _rank_of_harm(group[0])))


def _rank_of_harm(finding: Finding) -> tuple[bool, int, bool]:
    """Return the sort key of a failed finding, by which the most harmful finding comes first.

    Findings that fail only on tensors without elements come last. The others are sorted by their checks, in the order
    of ``HARM``. Of one check, findings whose failing samples have no varied property in common come first.
    """
    rank = HARM.index(finding.check) if finding.check in HARM else len(HARM)
    return finding.varied.startswith(EMPTY), rank, bool(finding.varied)
