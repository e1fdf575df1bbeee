"""``aliases``: one tensor, or overlapping views of one, as several arguments give the results of separate copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations

from torch import Tensor

from shiplap.audit.check import Check, Observation
from shiplap.dispatch import Op
from shiplap.errors import ArgumentError, error_line
from shiplap.sampling.case import SampleCase
from shiplap.sampling.compare_to_reference import against_reference
from shiplap.sampling.run import reference_effects, run_on
from shiplap.sampling.samples import Samples


def aliases_cases(samples: Samples) -> Iterable[SampleCase]:
    """Yield the samples on which the check ``aliases`` calls the op. They are the base sample, larger ones, and one
    whose sizes are all equal.
    """
    yield from samples.plain()
    yield from samples.grown(2)
    # With all sizes equal, most pairs of arguments have one shape.
    equal = {name: 6 for name, size in samples.base.sizes if type(size) is int}
    if (case := samples.make(samples.base.but(sizes=equal))) is not None:
        yield case


def observe_aliases(op: Op, case: SampleCase) -> Observation:
    """Call the op with arguments that share memory. The returned observation has a problem if a result differs from the
    reference's on the same arguments, or if the call raises an error other than a refusal.
    """
    tried = 0
    for what, args in _aliased_arguments(op, case):
        try:
            own = reference_effects(op, args)
        except Exception:
            continue  # the declaration's own body does not take it
        try:
            got = run_on(op, args)
        except ArgumentError:
            continue  # refused, as SL210 does
        except Exception as e:
            return Observation(f"{what}: raised {error_line(e)}")
        tried += 1
        difference = against_reference(op, case.with_args(args), got, own, measured=False)
        if difference.problem:
            return Observation(f"{what}: {difference.problem}")
    return Observation(note=f"{tried} ways") if tried else Observation(skip="no two arguments can be one tensor")


def _aliased_arguments(op: Op, case: SampleCase) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Yield ``(description, arguments)`` in which two tensor arguments are one tensor, are overlapping views, or are
    transposes of each other. In the last ones, a list argument holds one tensor several times. Yield nothing for an op
    that mutates arguments.
    """
    places = [i for i, a in enumerate(op.spec.args) if a.tensor is not None and not a.mutated]
    # Overlap with a mutated argument is refused by SL210.
    if op.spec.mutated:
        return
    for i, j in combinations(places, 2):
        args = list(case.fresh())
        a, b = args[i], args[j]
        names = f"{op.spec.args[i].name} and {op.spec.args[j].name}"
        # Integers are often indices into another argument, and the same numbers would be out of range.
        if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.dtype != b.dtype or not a.is_floating_point():
            continue
        if a.shape == b.shape:
            args[j] = args[i]
            yield f"{names} are one tensor", tuple(args)
            if a.dim() and a.numel():
                # The second view begins one row behind the first.
                room = a.new_zeros(a.numel() + a[0].numel())
                room[: a.numel()] = a.reshape(-1)
                args = list(case.fresh())
                args[i], args[j] = room[: a.numel()].view(a.shape), room[a[0].numel() :].view(a.shape)
                yield f"{names} are overlapping views", tuple(args)
                yield from _views_from_one_start(op, case, i, j, names)
        elif a.dim() == b.dim() == 2 and a.shape == b.mT.shape:
            args[j] = args[i].mT
            if not op.spec.args[j].contiguous:
                yield f"{names} are one tensor, transposed", tuple(args)
    for place in places:
        if op.spec.args[place].many and isinstance(members := case.args[place], list) and members:
            args = list(case.fresh())
            args[place] = [args[place][0]] * len(members)
            yield f"{op.spec.args[place].name} holds one tensor several times", tuple(args)


def _views_from_one_start(
    op: Op, case: SampleCase, i: int, j: int, names: str
) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Yield ``(description, arguments)`` in which two arguments are views that begin at one address but have different
    strides. ``i`` and ``j`` are the positions of the two arguments, and ``names`` has their names for the description.
    """
    if op.spec.args[j].contiguous:
        return
    args = list(case.fresh())
    a = args[i]
    if a.dim() >= 2 and a.shape[-1] == a.shape[-2] > 1:
        args[j] = a.mT
        yield f"{names} are one tensor, {op.spec.args[j].name} transposed", tuple(args)
    args = list(case.fresh())
    a, b = args[i], args[j]
    # Twice the room, so that each of the two views has elements of its own.
    room = a.new_zeros((*a.shape[:-1], 2 * a.shape[-1]))
    room[..., : a.shape[-1]], room[..., 1::2] = a, b
    room = room.reshape(-1)
    args[i] = room[: a.numel()].view(a.shape)
    args[j] = room[: 2 * a.numel() : 2].view(a.shape)
    yield f"{names} are a tensor and every second element of it", tuple(args)


CHECK = Check(
    "aliases",
    order=130,
    observes="arguments that are one tensor, or overlap, give what copies of them give",
    observe=observe_aliases,
    cases=aliases_cases,
    needs=("numerics",),
    fix="write to no input, also for a moment, and keep nothing by the address of an argument",
)
