"""``arguments``: a call that does not fit the declaration is refused with a catalogue error, and writes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shiplap.audit.check import Check, Observation
from shiplap.declare import Arg
from shiplap.dispatch import Op
from shiplap.errors import ShiplapError, error_line
from shiplap.sampling.case import SampleCase, tensors_among, tree_map
from shiplap.sampling.compare import bitwise_difference
from shiplap.sampling.run import call_op, is_adopted, reference_effects, why_reference_missing
from shiplap.sampling.samples import Samples


@dataclass(frozen=True)
class WrongCall:
    """Arguments ``args`` that an op must refuse. ``what`` describes what is wrong with them, and ``ids`` are the ids of
    the errors with which the op may refuse them. If ``narrower`` is true, only the declaration forbids them, and an
    adopted op (an op of another library) may accept them.
    """

    what: str
    args: tuple[Any, ...]
    ids: tuple[str, ...]
    narrower: bool = False  # an adopted op may well take more than its declaration says


def observe_arguments(op: Op, case: SampleCase) -> Observation:
    """Make wrong calls of the op. The returned observation has a problem if a call is accepted, is refused with a wrong
    error, or was refused after it wrote to an argument.

    An adopted op (an op of another library) may also accept a call if it returns the results of the reference, and may
    refuse it with any error.
    """
    adopted = is_adopted(op)
    # An adopted op may accept more than its declaration, so narrower restrictions are not tested on it.
    bad_calls = [b for b in _wrong_calls(op, case) if not (adopted and b.narrower)]
    for bad in bad_calls:
        problem = _why_adopted_op_wrong(op, bad) if adopted else _why_not_refused(op, bad)
        if problem:
            return Observation(f"{bad.what}: {problem}")
    kinds = Counter(b.what.split(":")[0] for b in bad_calls)
    shown = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
    if adopted:
        shown += "; adopted: refused in its own words, or accepted as the reference does"
    return Observation(note=shown) if bad_calls else Observation(skip="no argument can be made wrong")


def _why_not_refused(op: Op, bad: WrongCall) -> str:
    """Return a message that says what is wrong with the op's reaction to a wrong call. Return an empty string if the op
    raises one of the expected errors and has written to no argument.
    """
    kept = [t.detach().clone() for t in _tensors_with_data(bad.args)]
    try:
        call_op(op, bad.args)
    except Exception as e:
        # Native code raises plain exceptions, whose catalogue error the op finds.
        refusal = e if isinstance(e, ShiplapError) else op.refusal(e)
        if refusal is None:
            return f"raised {error_line(e)}, expected {' or '.join(bad.ids)}"
        if refusal.id not in bad.ids:
            return f"refused with {refusal.id} ({refusal.what}), expected {' or '.join(bad.ids)}"
        if op.spec.name not in refusal.where:
            return f"{refusal.id} does not say which op: where = {refusal.where!r}"
    else:
        return "was accepted"
    changed = bitwise_difference([t.detach() for t in _tensors_with_data(bad.args)], kept, "before the call")
    return f"was refused after something was written: {changed}" if changed else ""


def _why_adopted_op_wrong(op: Op, bad: WrongCall) -> str:
    """Return a message that says what is wrong with an adopted op's reaction to a wrong call, or an empty string if
    nothing is wrong.

    An adopted op belongs to another library and is only declared here. It may refuse with any error, or return results
    that are close to those of the reference (see ``_about_equal``).
    """
    copies = tree_map(torch.clone, bad.args)
    try:
        got = call_op(op, copies)
    except Exception:
        return ""
    if any(t.is_meta for t in tensors_among(bad.args)):
        return ""  # torch asked the fake, which computes no values
    try:
        pairs = list(zip(got, reference_effects(op, bad.args)[: len(got)], strict=True))
        same = all(_about_equal(g, e) for g, e in pairs)
    except Exception as e:
        if why_reference_missing(e):
            raise
        return f"was accepted; the reference raised {error_line(e)}"
    return "" if same else "was accepted, with a result that is not the reference's"


def _about_equal(a: Tensor, b: Tensor) -> bool:
    """Return whether ``a`` and ``b`` have the same shape and device, and values within 1 percent."""
    return a.shape == b.shape and a.device == b.device and torch.allclose(a, b, 1e-2, 1e-2, equal_nan=True)


def _tensors_with_data(args: tuple[Any, ...]) -> list[Tensor]:
    """Return the tensors among the arguments that have data. Tensors on the meta device have none."""
    return [t for t in tensors_among(args) if t.device.type != "meta"]


def _wrong_calls(op: Op, case: SampleCase) -> Iterator[WrongCall]:
    """Yield wrong calls of the op.

    Some have a wrong tensor for a tensor argument, others a value outside the choices of an ``Enum`` or ``Literal``
    argument. The last ones violate a declared precondition.
    """
    for position, arg in enumerate(op.spec.args):
        value = case.args[position]
        if isinstance(value, Tensor):
            for what, wrong, ids, narrower in _wrong_tensors(op, case, arg, value):
                args = list(case.fresh())
                args[position] = wrong
                yield WrongCall(what, tuple(args), ids, narrower)
        elif arg.choices:
            args = list(case.fresh())
            args[position] = _other_choice(arg)
            yield WrongCall(f"wrong choice: {arg.name}={args[position]!r}", tuple(args), ("SL221",))
    yield from _calls_against_requires(op, case)


def _other_choice(arg: Arg) -> str | int:
    """Return a value of the argument's type that is not among the values to which an ``Enum`` or ``Literal`` restricts
    the argument.
    """
    if arg.scalar == "str":
        return max(map(str, arg.choices)) + "x"
    return max(map(int, arg.choices)) + 1


def _wrong_tensors(
    op: Op, case: SampleCase, arg: Arg, t: Tensor
) -> Iterator[tuple[str, Tensor, tuple[str, ...], bool]]:
    """Yield ``(description, wrong tensor, expected error ids, narrower)`` for the tensor ``t`` of the argument ``arg``.
    If ``narrower`` is true, an adopted op (an op of another library) may accept the wrong tensor. Otherwise every op
    must refuse it.
    """
    assert arg.tensor is not None
    kind, name = arg.tensor, arg.name
    if not kind.variadic:
        yield f"wrong rank: {name} with a dim more", t.clone().unsqueeze(0), ("SL201",), False
        if t.dim():
            less = t.flatten(0, 1) if t.dim() > 1 else t.new_zeros(())
            yield f"wrong rank: {name} with a dim less", less.clone(), ("SL201",), False
        for axis in _axes_of_fixed_size(op, case, arg):
            wrong = torch.cat([t, t.narrow(axis, 0, 1)], axis).clone()
            yield f"wrong size: {name}, axis {axis}", wrong, ("SL202", "SL203"), False
    # The first of these that the declaration does not admit is enough.
    for dtype in (torch.float32, torch.int32, torch.bool, torch.complex64):
        if kind.dtypes and str(dtype).removeprefix("torch.") not in kind.dtypes:
            yield f"wrong dtype: {name} {dtype}", torch.zeros_like(t, dtype=dtype), ("SL204",), True
            break
    if len(tensors_among(case.args)) > 1:
        yield f"wrong device: {name} on meta", t.to("meta"), ("SL206",), False
    if arg.mutated and t.dim() and t.shape[0] > 1:
        yield f"overlapping: {name} expanded", t[:1].clone().expand(t.shape), ("SL210",), True
    if arg.contiguous and t.dim() > 1 and min(t.shape[-2:]) > 1:
        yield f"wrong layout: {name} transposed", t.mT.contiguous().mT, ("SL207",), True


def _axes_of_fixed_size(op: Op, case: SampleCase, arg: Arg) -> Iterator[int]:
    """Yield the indices of the dims of the argument ``arg`` whose size is fixed by another argument, by an expression
    or by the declaration itself.
    """
    assert arg.tensor is not None
    present = [a for a, v in zip(op.spec.args, case.args, strict=True) if a.tensor and isinstance(v, Tensor)]
    names = Counter(name for a in present for name in _dim_of_each_axis(op, case, a) if name)
    computed = {n for n, _ in op.spec.dims if n not in op.spec.broadcasts.values()} | {a.name for a in op.spec.scalars}
    for axis, (dim, name) in enumerate(zip(arg.tensor.dims, _dim_of_each_axis(op, case, arg), strict=True)):
        size = case.args[op.spec.args.index(arg)].shape[axis]
        fixed = dim.kind in ("fixed", "expr") or names[name] > 1 or name in computed
        if fixed and size > (1 if dim.of else 0):
            yield axis


def _dim_of_each_axis(op: Op, case: SampleCase, arg: Arg) -> list[str]:
    """Return, for each axis of an argument, the name of its dim, or an empty string if the declaration fixes or
    computes its size. For a dim annotated ``#n``, which broadcasts, the name is ``n`` unless the axis has size 1.
    """
    value = case.args[op.spec.args.index(arg)]
    dims = arg.tensor.dims if arg.tensor is not None else ()
    if arg.tensor is None or arg.tensor.variadic:
        return [d.text if d.kind == "name" and not d.of else "" for d in dims]
    return [d.along(n) if d.kind == "name" else "" for d, n in zip(dims, value.shape, strict=True)]


def _calls_against_requires(op: Op, case: SampleCase) -> Iterator[WrongCall]:
    """Yield, for each declared precondition, the first call found that violates it, with one int argument changed. A
    precondition that no such change violates is left out.
    """
    for expr in op.spec.requires:
        for position, arg in enumerate(op.spec.args):
            if arg.scalar not in ("int", "list[int]") or arg.name not in expr.names:
                continue
            # Negative, empty and huge values break most preconditions on ints. Of an argument with choices any other
            # value is refused before its preconditions are looked at.
            for value in arg.choices or (-1, 0, 1 << 20):
                old = case.args[position]
                wrong = [value] * len(old) if isinstance(old, list) else value
                if _violates_requirement(expr, {**case.env, arg.name: wrong}):
                    args = list(case.fresh())
                    args[position] = wrong
                    what = f"violated requirement: {expr} with {arg.name}={wrong}"
                    yield WrongCall(what, tuple(args), ("SL208", "SL202", "SL203"))
                    break


def _violates_requirement(expr: Any, env: dict[str, Any]) -> bool:
    """Return whether the declared precondition ``expr`` is false for ``env``, which maps names of dims and scalars to
    values. Return False if it cannot be evaluated.
    """
    try:
        return not expr(env)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return False


CHECK = Check(
    "arguments",
    order=90,
    observes="wrong calls are refused with an error that names op and argument, and nothing is written",
    observe=observe_arguments,
    cases=Samples.plain,
    obligations=(),
    fix="check before the first write; sl.op derives these checks from the declaration",
)
