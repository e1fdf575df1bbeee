"""``gradient``: the backward is the derivative of the reference, for every subset of inputs that may need one.

It is compared with autograd through the reference in float64. Where the op takes float64, it is compared with finite
differences of the op itself as well. A reference may stop a gradient, as ``detach()`` and straight-through estimators
do. Its autograd is the law, and finite differences are then declined.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, combinations, islice
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from shiplap.audit.check import Check, Observation, draws_otherwise
from shiplap.dispatch import Op
from shiplap.dispatch.outputs import fresh_results, result_values
from shiplap.dispatch.second_derivative import is_real_or_complex
from shiplap.errors import error_line
from shiplap.sampling.case import SampleCase, arguments_by_name, plain_copies, tensors_among, tree_map
from shiplap.sampling.compare import Reduction
from shiplap.sampling.compare_to_reference import reference_derivatives
from shiplap.sampling.layouts import LAYOUTS, apply_layout
from shiplap.sampling.pairwise import pairs_of_scalars
from shiplap.sampling.rounding import compare_with_rounding
from shiplap.sampling.run import (
    all_finite,
    call_op,
    can_carry_gradient,
    floating_args,
    gradients_or_zeros,
    needs_builder,
    random_gradient,
    reference_effects,
    reference_error,
    require_gradients,
    surrogate_results,
    why_no_backward,
)
from shiplap.sampling.samples import Samples
from shiplap.sampling.work_estimate import why_too_large

# Values at which derivatives jump, vanish or overflow.
KINK_VALUES = ("ties", "zeros", "saturating", "large", "mixed", "negative zero", "positive", "constant", "cancelling")
OVERFLOWING_VALUES = (
    "large",
    "beyond float16",
    "mixed",
    "saturating",
    "positive",
)  # what a 16-bit gradient may overflow at
MOST_ODD_SCALARS = 10  # odd scalars
MOST_TIED_SAMPLES = 2  # samples beyond one tile in which most numbers are equal
LARGE_SECONDS = 6.0  # seconds of processor time for a series of samples beyond one tile
INCOMING = ("expanded", "transposed", "strided", "offset", "padded", "reversed")  # layouts of the output's gradient
FEW_ELEMENTS = 300  # of a sample on which every subset of inputs is tried
HUGE = 1e300  # a difference that no two derivatives have; an infinite one times zero elements would be NaN
SLOW_LIMIT, FAST_LIMIT = 64, 4096  # elements: full Jacobian by finite differences, random projection of it
DECLINED = (
    "the reference stops or changes gradients: finite differences do not apply, and its autograd alone is the law"
)

AnyCallable = Any


class _NoGraph(RuntimeError):
    """No output of a call requires a gradient, so that there is nothing to differentiate."""


def gradient_cases(samples: Samples) -> Iterable[SampleCase]:
    """Yield the samples on which the check ``gradient`` calls the op.

    They are samples with other numbers of dims, dtypes, scalars and layouts, and with sizes of 0 and 1. Others have
    values at kinks, equal values, or values near overflow. Large samples are included as long as they are quick.
    """
    wide = (c for c in samples.dtypes() if {"float64", "complex128"} & set(dict(c.recipe.dtypes).values()))
    empty = (c for c in samples.edges() if 0 in dict(c.recipe.sizes).values())
    kinks = (samples.base.but(values=kind) for kind in KINK_VALUES)
    yield from chain(samples.plain(), wide, _varied_cases(samples))
    if not _reference_has_gradient(samples):
        yield from _in_double_precision(samples, _varied_cases(samples))
    yield from pairs_of_scalars(samples)
    yield from chain(islice(empty, 3), samples.dtypes(), samples.lists(), filter(None, map(samples.make, kinks)))
    yield from samples.thresholds()
    tied = [c.recipe.but(values="ties") for c in islice(samples.wide(), MOST_TIED_SAMPLES)]
    yield from filter(None, map(samples.make, tied))
    narrow = [c.recipe for c in samples.dtypes() if set(dict(c.recipe.dtypes).values()) & {"float16", "bfloat16"}]
    yield from filter(None, (samples.make(r.but(values=kind)) for r in narrow for kind in OVERFLOWING_VALUES))
    # Odd scalars may ask for outputs that do not fit into memory.
    odd = (c for c in samples.odd_scalars() if not why_too_large(samples.op, c))
    yield from islice(odd, MOST_ODD_SCALARS)
    long = (c for c in samples.long() if c.recipe.values == "positive")
    yield from _cases_while_quick(chain(samples.wide(), long))


def _varied_cases(samples: Samples) -> Iterator[SampleCase]:
    """Yield samples that each vary one property of the base sample. The property is the number of dims, an optional
    argument, a scalar, the sizes, or the memory layout.
    """
    grown = islice(samples.grown(1), 1)
    transposed = (c for c in samples.layouts() if dict(c.recipe.layouts).get("every") == "transposed")
    rows = (
        c for c in samples.edges() if c.numel and min((v for _, v in c.recipe.sizes if type(v) is int), default=1) <= 1
    )
    yield from chain(samples.ranks(), samples.optionals(), samples.scalars(), grown, transposed)
    yield from chain(islice(rows, 4), _unlike_by_memory(samples))


def _reference_has_gradient(samples: Samples) -> bool:
    """Return whether gradients of the op can be compared with those of its reference. They cannot if the op is random,
    since the reference may draw other numbers, or if autograd cannot differentiate the reference.
    """
    op, case = samples.op, samples.build(samples.base)
    if op.spec.random:
        return False
    try:
        outs = surrogate_results(op, require_gradients(op, case.fresh(), floating_args(op, case)))
    except Exception:  # each sample says what is wrong with the reference
        return True
    return any(o.requires_grad for o in outs)


def _in_double_precision(samples: Samples, cases: Iterable[SampleCase]) -> Iterator[SampleCase]:
    """Yield ``cases`` in float64, in which finite differences can be taken. Yield nothing if the declaration admits no
    float64.
    """
    names = {c: "float64" for c, t in samples.spec.dtype_classes.items() if "float64" in t.dtypes or not t.dtypes}
    made = (samples.make(c.recipe.but(dtypes=names)) for c in cases if names)
    yield from (c for c in made if c is not None)


def _unlike_by_memory(samples: Samples) -> Iterable[SampleCase]:
    """Yield samples in which all tensors begin behind the first element of their storage, or have gaps between their
    rows.
    """
    yield from (c for c in samples.layouts() if dict(c.recipe.layouts).get("every") in ("offset", "padded"))


def _cases_while_quick(cases: Iterable[SampleCase]) -> Iterable[SampleCase]:
    """Yield those samples of ``cases`` that are expected to be quick, until 12 s of processor time are used. The time
    of a sample is measured from its yield to the next request.

    The expected time of a sample grows with the square of its longest dim, beyond a fixed cost. This cost is the time
    of the quickest sample so far.
    """
    end = time.process_time() + 2 * LARGE_SECONDS
    took: dict[str, tuple[int, float]] = {}
    least = LARGE_SECONDS
    for case in cases:
        name, size = max(((n, v) for n, v in case.recipe.sizes if type(v) is int), key=lambda p: p[1], default=("", 1))
        before, seconds = took.get(name, (size, 0.0))
        # Attention-like costs grow with the square of one dim.
        if max(0.0, seconds - least) * (size / before) ** 2 > LARGE_SECONDS:
            continue
        began = time.process_time()
        yield case
        now = time.process_time()
        took[name] = size, now - began
        least = min(least, now - began)
        if now > end:
            return


def observe_gradient(op: Op, case: SampleCase) -> Observation:
    """Compare the gradients of several subsets of inputs with those of the reference and with finite differences. The
    returned observation has the first problem that is found. It is a ``skip`` if the reference refuses the sample or
    the op has no backward there.
    """
    if refused := reference_error(op, case.args):  # odd values come from the generator, not from the declaration
        return Observation(skip=f"the reference refuses it: {refused}", limited=needs_builder(op))
    if of_list := _why_list_gradients_differ(op, case):
        return Observation(of_list)
    if reason := why_no_backward(op, case):
        return Observation(skip=reason)
    names = floating_args(op, case)
    if draws_otherwise(op, case):
        return _observe_differences_alone(op, case, names, "the reference draws other numbers")
    if case.recipe.values != "normal" or case.numel > FEW_ELEMENTS:
        runs = [(names, True, ""), (names[:1], False, "")]
        # The base sample may be large. There, too, the gradients of the outputs come in every layout.
        runs += _runs_with_layouts(names) if case.recipe == Samples(op, case.seed, case.device).base else []
    else:
        runs = _gradient_runs(names)
    axes = ("layout", "offset") if any(layout for _, _, layout in runs) else ()
    worst = 0.0
    for subset, leaf, layout in runs:
        observation = _observe_against_reference(op, case, subset, leaf, layout)
        worst = max(worst, observation.error)
        if observation.note:  # the reference has no gradient there
            return _observe_differences_alone(op, case, names, observation.note)
        if observation.problem:
            how = f"{'leaf' if leaf else 'non-leaf'} inputs, gradients of {', '.join(subset)}"
            of = f", {layout} gradient of the output" if layout else ""
            return Observation(f"{how}{of}: {observation.problem}")
    plain = case.recipe.values == "normal"
    notes = []
    if plain and (problem := _why_differences_disagree(op, case, names)):
        if not _reference_changes_gradients(op, case, names):
            return Observation(problem)
        if problem := _why_differences_disagree(op, case, names, atol=HUGE):
            return Observation(problem)
        notes.append(DECLINED)
    few = case.numel <= FEW_ELEMENTS
    if plain and few and (problem := _why_infinity_lost(op, case, names)):
        return Observation(problem, fix="let infinity and NaN pass: a scaler of mixed precision waits for them")
    notes += filter(None, [_list_wasted_gradients(op, case, names) if few else ""])
    return Observation(error=worst, note=", ".join(notes), axes=axes)


def _observe_differences_alone(op: Op, case: SampleCase, names: list[str], why: str) -> Observation:
    """Compare the gradients of the arguments ``names`` with finite differences of the op alone. ``why`` says why they
    cannot be compared with gradients of the reference. If there are no finite differences either, the observation is a
    ``skip``, since nothing was compared.
    """
    if case.recipe.values != "normal":
        return Observation(skip=f"{why}, and finite differences say nothing of such values")
    problem = _why_differences_disagree(op, case, names)
    if problem is None:
        only = "finite differences are taken in float64 alone, of few elements and finite results"
        return Observation(skip=f"{why}, and {only}", limited=True)
    return Observation(problem, note=f"finite differences alone: {why}")


def _gradient_runs(names: list[str]) -> list[tuple[list[str], bool, str]]:
    """Return the gradient computations to compare, as tuples ``(names, leaf, layout)``. ``names`` are the inputs that
    need a gradient, and ``leaf`` says whether they are autograd leaves. ``layout`` is the layout of the output's
    gradient, and is empty for contiguous memory.
    """
    runs = [([n], True, "") for n in names] + ([(names, True, "")] if len(names) > 1 else [])
    runs += [(list(pair), True, "") for pair in combinations(names, 2)] if len(names) == 3 else []
    return [*runs, (names, False, ""), *_runs_with_layouts(names)]


def _runs_with_layouts(names: list[str]) -> list[tuple[list[str], bool, str]]:
    """Return one gradient computation ``(names, True, layout)`` for each layout in ``INCOMING``, as
    :func:`_gradient_runs` does. All of ``names`` need a gradient, and the output's gradient has the layout.
    """
    return [(names, True, layout) for layout in INCOMING]


def _observe_against_reference(op: Op, case: SampleCase, names: list[str], leaf: bool, layout: str) -> Observation:
    """Compare the gradients of the arguments ``names`` with those that autograd computes through the reference. The
    returned observation has a problem if they differ beyond rounding.

    If ``leaf`` is true, the arguments are autograd leaves. Otherwise they are results of another operation. ``layout``
    is the layout of the output's gradient, and is empty for contiguous memory.
    """

    def directions(outs: Sequence[Tensor]) -> list[Tensor]:
        """Return random gradients of the outputs in the layout ``layout``. Equal outputs get equal gradients, as those
        of the op and of its reference do.

        The layout may be that of the expanded gradient that ``sum().backward()`` passes.
        """
        rng = torch.Generator().manual_seed(case.seed)
        drawn = [random_gradient(o, rng).to(o.device, o.dtype) for o in outs]
        if case.recipe.values == "positive":  # sums of one sign lose what does not fit the accumulator
            drawn = [d.abs().to(d.dtype) for d in drawn]
        fits = [layout and d.dim() >= LAYOUTS[layout][0] for d in drawn]
        return [apply_layout(d, layout) if ok else d for d, ok in zip(drawn, fits, strict=True)]

    derive = partial(_gradients_of_inputs, op, names, directions)
    try:
        own, wide, widened = reference_derivatives(op, case, derive)
        rough = own
        if any(o.dtype in DOUBLE_DTYPES for o in own):
            rough = derive(partial(surrogate_results, op), tree_map(_to_single_precision, plain_copies(case.args)))
    except RuntimeError as e:
        if isinstance(e, _NoGraph) and _reference_differentiates_others(op, case, names):
            return Observation(_why_gradients_not_zero(names, lambda: derive(partial(call_op, op), case.fresh(), leaf)))
        # Where no result of the reference depends on its inputs, the op's own backward must still return.
        with suppress(_NoGraph):
            derive(partial(call_op, op), case.fresh(), leaf)
        return Observation(note=f"autograd cannot differentiate the reference: {error_line(e)}")
    got = derive(partial(call_op, op), case.fresh(), leaf)
    worst = 0.0
    for i, (name, g, o, w, r) in enumerate(zip(names, got, own, wide, rough, strict=True)):
        # In double precision the reference has no wider self: its rounding errors are those in single, scaled.
        rounded = w + (r - w) * DOUBLE_TO_SINGLE if g.dtype in DOUBLE_DTYPES else o
        sums = Reduction(_count_terms(op, case, name))
        repeated = partial(lambda i: [widened()[i]], i)
        difference = compare_with_rounding([g], [rounded], [w], sums, repeated, op.spec.tolerated)
        worst = max(worst, difference.error)
        if difference.problem:
            return Observation(f"d/d{name} {difference.problem.removeprefix('result 0: ')}", error=worst)
    return Observation(error=worst)


def _reference_differentiates_others(op: Op, case: SampleCase, names: list[str]) -> bool:
    """Return whether autograd differentiates the reference with respect to arguments other than ``names``. If it does,
    a reference without a gradient for ``names`` has stopped it, so that it is zero.
    """
    others = [n for n in floating_args(op, case) if n not in names]
    return any(o.requires_grad for o in surrogate_results(op, require_gradients(op, case.fresh(), others)))


def _why_gradients_not_zero(names: list[str], derived: Callable[[], list[Tensor]]) -> str:
    """Return a message that names an argument for which ``derived()`` returns a gradient other than zero. Return an
    empty string if there is none. ``names`` are the arguments of the gradients.
    """
    try:
        got = derived()
    except _NoGraph:
        return ""
    wrong = [f"d/d{n}" for n, g in zip(names, got, strict=True) if (g != 0).any()]
    return f"{', '.join(wrong)} is not zero, though autograd of the reference gives no gradient" if wrong else ""


# For these no wider dtype exists in which the reference could be evaluated.
DOUBLE_DTYPES = (torch.float64, torch.complex128)
# The ratio of the rounding errors, by which errors in single precision are scaled.
DOUBLE_TO_SINGLE = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps


def _to_single_precision(t: Tensor) -> Tensor:
    """Return ``t`` in single precision if it is in double precision, and otherwise ``t`` itself."""
    return t.to(torch.complex64 if t.is_complex() else torch.float32) if t.dtype in DOUBLE_DTYPES else t


def _gradients_of_inputs(
    op: Op, names: list[str], directions: AnyCallable, forward: AnyCallable, args: tuple[Any, ...], leaf: bool = True
) -> list[Tensor]:
    """Return the gradients of the results of ``forward(args)`` with respect to the arguments ``names``.

    ``directions(outputs)`` returns the gradients of the outputs. An unused input gets zeros. If ``leaf`` is true, the
    inputs are autograd leaves, and otherwise results of another operation. Raise ``_NoGraph`` if no output requires a
    gradient.
    """
    given = arguments_by_name(op, args)
    wanted = [given[n].requires_grad_() for n in names]
    # A product with 1 makes a non-leaf with the same values.
    used = args if leaf else tuple(v * 1 if n in names else v for n, v in given.items())
    outs = [o for o in forward(used) if is_real_or_complex(o)]
    pairs = [(o, d) for o, d in zip(outs, directions(outs), strict=True) if o.requires_grad]
    if not pairs:
        raise _NoGraph("no output requires a gradient")
    return gradients_or_zeros([o for o, _ in pairs], wanted, [d for _, d in pairs])


def _count_terms(op: Op, case: SampleCase, name: str) -> int:
    """Return an estimate of how many terms are summed for one element of the gradient of the argument ``name``. It is
    the product of the sizes of all dims that the argument does not have.
    """
    kind = op.spec.arg(name).tensor
    ones = {n for n, v in case.recipe.sizes if n in op.spec.broadcasts}
    mine = {d.text if d.text in ones else d.of or d.text for d in kind.dims} if kind else set()
    sizes = [v for n, v in case.recipe.sizes if n not in mine]
    return max(1, prod(prod(v) if isinstance(v, tuple) else v for v in sizes))


def _why_differences_disagree(op: Op, case: SampleCase, names: list[str], atol: float = 1e-5) -> str | None:
    """Return a message that says how the op's gradients differ from finite differences of the op itself in float64.
    Return an empty string if they agree, and None if they are not compared. With a huge ``atol``, every derivative
    agrees, and only undefined gradients and repeated calls are compared.

    They are not compared unless all results are finite and all arguments and results are in double precision, since
    rounding would hide small differences. They are not compared either if the declared gradient is that of another
    function, or if there are too many elements.
    """
    if op.gradient is not None and op.gradient.surrogate is not None:
        return None
    if any(o.dtype not in DOUBLE_DTYPES for o in reference_effects(op, case.args) if is_real_or_complex(o)):
        return None
    if not all_finite(reference_effects(op, case.args)):
        return None
    given = arguments_by_name(op, case.fresh())
    points = [given[n] for n in names]
    size = sum(p.numel() for p in points)
    if not 0 < size <= FAST_LIMIT or any(p.dtype not in DOUBLE_DTYPES for p in points):
        return None
    try:
        _check_differences(op, case, names, partial(call_op, op), atol=atol, nondet_tol=1e-9)
    except GradcheckError as e:
        return f"finite differences: {error_line(e)}"
    return ""


def _reference_changes_gradients(op: Op, case: SampleCase, names: list[str]) -> bool:
    """Return whether autograd of the reference disagrees with finite differences of the reference itself. It does where
    a gradient is stopped, as by ``detach()``, or declared otherwise, as by an ``autograd.Function``.
    """
    by_reference = partial(surrogate_results, op)
    try:
        _check_differences(op, case, names, by_reference, nondet_tol=math.inf, check_undefined_grad=False)
    except GradcheckError:
        return True
    return False


def _check_differences(op: Op, case: SampleCase, names: list[str], results: AnyCallable, **keywords: Any) -> None:
    """Raise ``GradcheckError`` if the gradients of ``results(args)`` with respect to the arguments ``names`` differ
    from its finite differences. ``keywords`` are passed to ``torch.autograd.gradcheck``.
    """
    given = arguments_by_name(op, case.fresh())
    points = [given[n] for n in names]

    def forward(*values: Tensor) -> Any:
        """Return the floating-point and complex results with ``values`` as the arguments ``names``. The other arguments
        are those of the sample.
        """
        fresh = case.fresh() if op.spec.random else given.values()  # a generator where it was
        rewound = dict(zip(given, fresh, strict=True))
        args = tuple({**rewound, **dict(zip(names, values, strict=True))}.values())
        return tuple(o for o in results(args) if is_real_or_complex(o))

    # gradcheck writes to its inputs, so they must own their memory and be dense.
    dense = [p.requires_grad_() for p in plain_copies(points)]
    fast = sum(p.numel() for p in points) > SLOW_LIMIT
    torch.autograd.gradcheck(forward, dense, fast_mode=fast, **keywords)


def _why_list_gradients_differ(op: Op, case: SampleCase) -> str:
    """Return a message that says how the gradients of all tensors, including those in lists, differ from the
    reference's. Return an empty string if they agree, or if the op has no list of tensors with gradients.
    """
    lists = [v for v in case.args if isinstance(v, list) and v and isinstance(v[0], Tensor)]
    if op.spec.mutated or not any(can_carry_gradient(t) for v in lists for t in v):
        return ""

    def pulled(forward: AnyCallable, args: tuple[Any, ...]) -> list[Tensor]:
        """Return the gradients of the results of ``forward(args)`` with respect to all tensors that can have one. The
        gradients of the outputs are random, and depend on the seed of the sample. The list is empty if no output
        requires a gradient.
        """
        leaves = [t.requires_grad_() for t in tensors_among(args) if can_carry_gradient(t)]
        outs = [o for o in forward(args) if o.requires_grad]
        rng = torch.Generator().manual_seed(case.seed)
        drawn = [random_gradient(o, rng).to(o.device, o.dtype) for o in outs]
        return gradients_or_zeros(outs, leaves, drawn) if outs else []

    try:
        own, wide, widened = reference_derivatives(op, case, pulled)
        got = pulled(partial(call_op, op), case.fresh())
    except RuntimeError as e:
        return "" if any(t in str(e) for t in ("SL304", "not implemented", "does not require grad")) else error_line(e)
    if not (wide and own and got):
        return ""  # no backward: requires_grad and has_backward say so
    difference = compare_with_rounding(got, own, wide, Reduction(max(1, case.numel)), widened, op.spec.tolerated)
    return difference.problem and f"gradients of all tensors, those in lists too: {difference.problem}"


def _why_infinity_lost(op: Op, case: SampleCase, names: list[str]) -> str:
    """Return a message that names an element where the op's gradient is finite but the reference's is infinite or NaN.
    Return an empty string if there is none.

    The gradient of the output is infinite or NaN in this comparison. Elements on which no output depends are left out,
    since a mask and a product with zero differ there. Only the base sample is compared.
    """
    if case.recipe != Samples(op, case.seed, case.device).base:
        return ""

    def pulled(forward: AnyCallable, value: float) -> list[Tensor]:
        """Return the gradients of ``forward`` with respect to the arguments ``names``. Every element of the outputs'
        gradients is ``value``.
        """
        return _gradients_of_inputs(
            op, names, lambda outs: [torch.full_like(o, value) for o in outs], forward, case.fresh()
        )

    by_reference = partial(surrogate_results, op)
    for value in (math.inf, math.nan):
        try:
            plain, own = pulled(by_reference, 1.0), pulled(by_reference, value)
        except RuntimeError:
            return ""
        got = pulled(partial(call_op, op), value)
        for name, p, o, g in zip(names, plain, own, got, strict=True):
            # Where the gradient is 0, an implementation may skip the product with the infinite value.
            swallowed = (p != 0) & ~torch.isfinite(o) & torch.isfinite(g)
            if swallowed.any():
                at = swallowed.nonzero()[0].tolist()
                return f"d/d{name} {at} is finite where the gradient of the output is {value}"
    return ""


def _list_wasted_gradients(op: Op, case: SampleCase, names: list[str]) -> str:
    """Return a message that names the gradients that a declared backward computes although no input needs them, which
    costs time. Return an empty string if there are none.
    """
    if op.gradient is None or len(names) < 2:
        return ""
    args = case.fresh()
    positional, named = op.spec.split(args)
    made = fresh_results(op.spec, args, op.overload(*positional, **named))
    results = result_values(made, len(op.spec.results))
    values = arguments_by_name(op, args) | dict(zip(op.spec.results, results, strict=True))
    # Exactly the names that the backward gets in a recorded call.
    keep = {a.name for a in op.spec.scalars} | set(op.gradient.saves)
    saved = SimpleNamespace(**{n: v for n, v in values.items() if n in keep})
    # As in a recorded call, a result that is absent or a number has no gradient.
    grads = tree_map(torch.ones_like, [v if isinstance(v, (Tensor, list)) else None for v in results])
    grad = grads[0] if len(grads) == 1 else grads
    wasted: set[str] = set()
    for name in names:
        needs = SimpleNamespace(**{a.name: a.name == name for a in op.spec.tensors})
        gradients = op.gradient.fn(grad, saved, needs)
        wasted |= {n for n, g in gradients.items() if g is not None and n != name}
    return f"also computed when not needed: d/d{', d/d'.join(sorted(wasted))}" if wasted else ""


CHECK = Check(
    "gradient",
    order=93,
    observes="gradients equal autograd through the reference in float64 and finite differences of the op, for leaf and "
    "non-leaf inputs and every single input alone",
    observe=observe_gradient,
    cases=gradient_cases,
    obligations=("gradient",),
    needs=("determinism",),
    patience=120.0,
    fix="correct the backward; it may be written in terms of the reference's own derivative",
)
