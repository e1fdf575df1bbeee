"""``backward``: properties of a backward besides its values: order, repetition, threads, saved memory, second order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError, checkpoint

from shiplap.audit.check import Check, Observation, draws_otherwise
from shiplap.dispatch import Op
from shiplap.errors import error_line, short_error_line
from shiplap.sampling.case import SampleCase, arguments_by_name, plain_copies
from shiplap.sampling.compare import Reduction, bitwise_difference
from shiplap.sampling.compare_to_reference import reference_derivatives
from shiplap.sampling.rounding import compare_with_rounding
from shiplap.sampling.run import (
    call_op,
    floating_args,
    gradients_or_zeros,
    random_gradient,
    surrogate_results,
    why_no_backward,
)
from shiplap.sampling.samples import Samples, with_other_values
from shiplap.torch_private import same_storage

SECOND = "second gradient"  # the obligation of the ledger that an op may refuse
SAVE_FIX = "read tensors from saved, for which sl.op keeps them with save_for_backward, and keep none elsewhere"
ROUNDINGS = 32  # by which two sums of the same terms in another order may differ, each of the largest element
NARROW_ROUNDINGS = 2.0  # the same for 16 bits, where each of the two results is rounded once, and each to a neighbour
MANY = 16  # distinct elements of a gradient of which some have the usual error: of a few, each may be exact by chance


def backward_cases(samples: Samples) -> Iterable[SampleCase]:
    """Yield the samples on which the check ``backward`` calls the op.

    They are the base sample, a larger one, samples without optional arguments, samples with other scalars and with
    other numbers of dims, one with a long dim, and the base sample in each dtype of 16 bits.
    """
    narrow = (c for c in samples.dtypes() if {"float16", "bfloat16"} & set(dict(c.recipe.dtypes).values()))
    yield from chain(samples.plain(), islice(samples.grown(1), 1), samples.optionals(), samples.scalars())
    yield from chain(islice(samples.ranks(), 2), islice(samples.wide(), 1), narrow)


def observe_backward(op: Op, case: SampleCase) -> Observation:
    """Run the backward of the op under different conditions, such as twice, on another thread and under a checkpoint.
    The returned observation has the first problem that is found.
    """
    if reason := why_no_backward(op, case):
        return Observation(skip=reason)
    names = floating_args(op, case)
    otherwise = draws_otherwise(op, case)
    # Where results are random, gradients of single outputs and of shared arguments have no reference.
    looks = [
        _observe_repetition,
        _observe_gradient_memory,
        _observe_interleaving,
        _observe_other_thread,
        _observe_overwritten_input,
        _observe_checkpoint,
    ]
    for look in looks if otherwise else [*looks, _observe_single_outputs, _observe_shared_argument]:
        observation = look(op, case, names)
        if observation.problem:
            return observation
    if otherwise:
        note = "not compared with the reference, which draws other numbers"
        return Observation(note=note, declined=((SECOND, note),))
    return _observe_second_order(op, case, names)


AutogradGraph = tuple[list[Tensor], list[Tensor]]  # the outputs that carry a gradient, and the inputs
Forward = Callable[[tuple[Any, ...]], Sequence[Tensor]]  # an op or its reference, as a function of the arguments


def _record_call(op: Op, names: list[str], forward: Forward, args: tuple[Any, ...]) -> AutogradGraph:
    """Return ``(outputs, inputs)`` of an autograd graph. The outputs are those of ``forward(args)`` that require a
    gradient. The inputs are the arguments whose names are in ``names``, which are set to require one.
    """
    wanted = [v.requires_grad_() for n, v in arguments_by_name(op, args).items() if n in names]
    return [o for o in forward(args) if o.requires_grad], wanted


def _record_autograd_graph(op: Op, case: SampleCase, names: list[str]) -> AutogradGraph:
    """Return ``(outputs, inputs)`` of the autograd graph of one call of the op on copies of the sample's arguments. The
    inputs are the arguments whose names are in ``names``.
    """
    return _record_call(op, names, partial(call_op, op), case.fresh())


def _random_directions(outs: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Return random gradients for the tensors ``outs``, with their shapes and dtypes. Equal seeds give equal
    gradients.
    """
    rng = torch.Generator().manual_seed(seed)
    return [random_gradient(o, rng).to(o.device, o.dtype) for o in outs]


def _pull_gradients(outs: list[Tensor], wanted: list[Tensor], seed: int, **keywords: Any) -> list[Tensor]:
    """Return the gradients of the tensors ``wanted``, given random gradients of ``outs`` that are drawn from ``seed``.
    A tensor without a gradient gets zeros. ``keywords`` are passed to ``torch.autograd.grad``.
    """
    return gradients_or_zeros(outs, wanted, _random_directions(outs, seed), **keywords)


@dataclass(frozen=True)
class _RoundedGradients:
    """The gradients of one backward, with which those of other backwards of the same values are compared.

    Attributes:
        op, case: the op and the sample.
        names: the arguments of which the gradients are.
        expected: the gradients of the backward.
    """

    op: Op
    case: SampleCase
    names: list[str]
    expected: Sequence[Tensor]

    def difference(self, got: Sequence[Tensor], than: str) -> str:
        """Return the message of :func:`bitwise_difference` for the gradients ``got`` of another backward, or an empty
        string if they differ by the rounding of a sum whose terms were added in another order, as atomic additions on a
        GPU are.
        """
        problem = bitwise_difference(got, self.expected, than)
        if not problem or not all(map(_are_close, got, self.expected)):
            return problem
        narrow = any(t.itemsize == 2 and t.is_floating_point() for t in self.expected)
        return problem if narrow and not self._are_close_in_16_bits(got) else ""

    def _are_close_in_16_bits(self, got: Sequence[Tensor]) -> bool:
        """Return whether each element of the gradients ``got`` differs from the expected one by at most two roundings,
        and by twice the error that the expected gradients have anyway.

        A backward that adds up in float32 rounds once, at the end, and so do all its repetitions. One that adds up in
        16 bits has an error that shows against the gradients of the reference in float64, and that grows with the
        length of its sums. Without such gradients, or with a few distinct elements, this length stands for the error.
        """
        wide = self._gradients_of_reference()
        for at, (g, e) in enumerate(zip(got, self.expected, strict=True)):
            if e.itemsize != 2 or not e.numel():
                continue
            eps, left, right = torch.finfo(e.dtype).eps, g.detach().double(), e.detach().double()
            finite = torch.isfinite(left) & torch.isfinite(right)
            largest = float(torch.where(finite, right, 0.0).abs().max())
            usual = eps * self.case.numel**0.5 * largest
            if wide is not None and len(torch.unique(right.abs())) >= MANY:
                off = torch.where(finite & torch.isfinite(wide[at]), right - wide[at], 0.0).abs()
                usual = min(usual, 2 * float(off.max()))
            allowed = NARROW_ROUNDINGS * eps * right.abs() + usual
            if not bool((~finite | ((left - right).abs() <= allowed)).all()):
                return False
        return True

    def _gradients_of_reference(self) -> list[Tensor] | None:
        """Return the gradients of the reference in float64, or None if there are none, or none that can be compared."""

        def derive(forward: Forward, args: tuple[Any, ...]) -> list[Tensor]:
            """Return the gradients of ``forward`` at ``args`` for the directions of the sample."""
            return _pull_gradients(*_record_call(self.op, self.names, forward, args), self.case.seed)

        if draws_otherwise(self.op, self.case):
            return None
        try:
            _, wide, _ = reference_derivatives(self.op, self.case, derive)
        except Exception:  # a reference may refuse float64 by any exception
            return None
        alike = [w.shape for w in wide] == [e.shape for e in self.expected]
        return [w.detach().double() for w in wide] if alike else None


def _are_close(got: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors of one shape and dtype differ by at most a few roundings of their largest element."""
    if got.shape != expected.shape or got.dtype != expected.dtype or not (got.is_floating_point() or got.is_complex()):
        return torch.equal(got, expected)
    if not got.numel():
        return True
    wide = torch.promote_types(got.dtype, torch.float64)
    left, right = got.detach().to(wide), expected.detach().to(wide)
    largest = right.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    limit = ROUNDINGS * torch.finfo(got.dtype).eps * largest
    return torch.allclose(left, right, rtol=0.0, atol=limit, equal_nan=True)


def _observe_repetition(op: Op, case: SampleCase, names: list[str]) -> Observation:
    """Run the backward of one graph twice. The returned observation has a problem if the gradients differ by more
    than rounding, or if the backward writes to the gradients of the outputs or to gradients that it returned before.
    """
    outs, wanted = _record_autograd_graph(op, case, names)
    directions = _random_directions(outs, case.seed)
    # The first backward may write to the gradients that it is given.
    kept = [d.clone() for d in directions]
    first = torch.autograd.grad(outs, wanted, directions, allow_unused=True, retain_graph=True)
    if problem := bitwise_difference(directions, kept, "before the backward"):
        return Observation(f"the backward writes to the gradient of the output: {problem}", fix="work on a copy")
    there = [g for g in first if g is not None]
    before = [g.clone() for g in there]
    second = torch.autograd.grad(outs, wanted, kept, allow_unused=True)
    own = [n for n, g in zip(names, first, strict=True) if g is not None]
    compared = _RoundedGradients(op, case, own, before)
    if problem := compared.difference([g for g in second if g is not None], "the first time"):
        return Observation(f"the backward of one graph, a second time: {problem}", fix=SAVE_FIX)
    if problem := bitwise_difference(there, before, "before the second backward"):
        return Observation(f"a gradient changed when the backward ran again: {problem}", fix="allocate gradients anew")
    return Observation()


def _observe_interleaving(op: Op, case: SampleCase, names: list[str]) -> Observation:
    """Record two graphs, then run their backwards in the same order, as in a network that calls the op twice. The
    returned observation has a problem if the second call or its backward changes the gradients of the first.
    """
    expected = _pull_gradients(*_record_autograd_graph(op, case, names), case.seed)
    for between in _cases_in_between(op, case):
        first, second = _record_autograd_graph(op, case, names), _record_autograd_graph(op, between, names)
        got = _pull_gradients(*first, case.seed)
        # Copies, since the second backward may write into the memory of these gradients.
        kept = [g.clone() for g in got]
        _pull_gradients(*second, case.seed + 1)
        if problem := bitwise_difference(got, kept, "before"):
            return Observation(f"a gradient changed when another graph's backward ran: {problem}", fix=SAVE_FIX)
        if problem := _RoundedGradients(op, case, names, expected).difference(got, "alone"):
            return Observation(f"with another call between forward and backward: {problem}", fix=SAVE_FIX)
    return Observation()


def _cases_in_between(op: Op, case: SampleCase) -> Iterator[SampleCase]:
    """Yield samples for a call between the forward and the backward of ``case``. The first one has other values. If
    ``case`` is the op's base sample, samples with another scalar and with larger sizes follow.
    """
    yield with_other_values(op, case)
    samples = Samples(op, case.seed, case.device)
    if case.recipe == samples.base:
        scalars = (c for c in samples.scalars() if c.recipe != case.recipe)
        more = [*islice(scalars, 1), *islice(samples.grown(1), 1)]
        yield from (c for c in more if c.graph_key == case.graph_key and not why_no_backward(op, c))


def _observe_other_thread(op: Op, case: SampleCase, names: list[str]) -> Observation:
    """Run a backward on another thread. The returned observation has a problem if that raises an exception, or if the
    gradients differ by more than rounding from those on this thread.
    """
    outs, wanted = _record_autograd_graph(op, case, names)
    expected = _pull_gradients(outs, wanted, case.seed, retain_graph=True)
    with ThreadPoolExecutor(1) as pool:
        try:
            got = pool.submit(_pull_gradients, outs, wanted, case.seed).result()
        except Exception as e:
            return Observation(f"a backward on another thread raised {error_line(e)}", fix=SAVE_FIX)
    problem = _RoundedGradients(op, case, names, expected).difference(got, "on this one")
    return Observation(f"a backward on another thread: {problem}" if problem else "", fix=SAVE_FIX)


def _observe_overwritten_input(op: Op, case: SampleCase, names: list[str]) -> Observation:
    """Write to an input between the forward and the backward. The returned observation has a problem if autograd raises
    no error and the gradient differs from that without the write.
    """
    expected = _pull_gradients(*_record_autograd_graph(op, case, names), case.seed)
    changed = arguments_by_name(op, with_other_values(op, case).fresh())
    for name in names:
        leaves = arguments_by_name(op, case.fresh())
        wanted = [leaves[n].requires_grad_() for n in names]
        # An intermediate tensor, because autograd forbids in-place writes to a leaf.
        used = {n: v * 1 if n in names else v for n, v in leaves.items()}
        outs = [o for o in call_op(op, tuple(used.values())) if o.requires_grad]
        if used[name].shape != changed[name].shape:
            continue
        with torch.no_grad():
            used[name].copy_(changed[name])
        try:
            got = _pull_gradients(outs, wanted, case.seed)
        except RuntimeError:
            continue  # noticed
        if problem := _RoundedGradients(op, case, names, expected).difference(got, "with the input left alone"):
            return Observation(
                f"{name} was overwritten after the forward, unnoticed by autograd: {problem}", fix=SAVE_FIX
            )
    return Observation()


def _observe_checkpoint(op: Op, case: SampleCase, names: list[str]) -> Observation:
    """Run the backward under ``torch.utils.checkpoint``. The returned observation has a problem if the gradients differ
    from those without it.

    The checkpoint calls the op again in the backward, and lets the backward read each saved tensor only once.
    """
    if op.spec.random:
        return Observation()  # a generator is not where it was
    expected = _pull_gradients(*_record_autograd_graph(op, case, names), case.seed)

    def repeating(args: tuple[Any, ...]) -> Any:
        """Return the results of the op on ``args``, called inside a checkpoint. The checkpoint repeats the call in the
        backward.
        """
        return checkpoint(lambda *given: call_op(op, given), *args, use_reentrant=False)

    graph = _record_call(op, names, repeating, case.fresh())
    try:
        got = _pull_gradients(*graph, case.seed)
    except CheckpointError as e:
        return Observation(f"under torch.utils.checkpoint: {error_line(e)}", fix="read ctx.saved_tensors once")
    problem = _RoundedGradients(op, case, names, expected).difference(got, "without")
    return Observation(f"under torch.utils.checkpoint: {problem}" if problem else "", fix=SAVE_FIX)


def _why_derivative_differs(
    op: Op, case: SampleCase, derive: Callable[[Forward, tuple[Any, ...]], list[Tensor]]
) -> str:
    """Return a message that says how the derivatives of the op differ from those of the reference. ``derive(forward,
    args)`` computes the derivatives of either. The message is an empty string if they agree or if the reference has
    none.
    """
    try:
        own, wide, widened = reference_derivatives(op, case, derive)
    except RuntimeError:
        return ""
    got = derive(partial(call_op, op), case.fresh())
    return compare_with_rounding(got, own, wide, Reduction(max(1, case.numel)), widened, op.spec.tolerated).problem


def _observe_single_outputs(op: Op, case: SampleCase, names: list[str]) -> Observation:
    """For an op with several outputs, compare the gradient of each output alone with that of the reference. The
    returned observation has a problem if one differs.
    """
    count = len(_record_autograd_graph(op, case, names)[0])
    if count < 2:
        return Observation()
    try:
        by_reference = _record_call(op, names, partial(surrogate_results, op), plain_copies(case.args))
    except RuntimeError:  # autograd cannot run every reference, such as one in NumPy
        return Observation()
    if len(by_reference[0]) != count:
        return Observation()

    def alone(at: int, forward: Forward, args: tuple[Any, ...]) -> list[Tensor]:
        """Return the gradients of the inputs if only the output number ``at`` gets a gradient in the backward."""
        outs, wanted = _record_call(op, names, forward, args)
        return _pull_gradients([outs[at]], wanted, case.seed)

    for at in range(count):
        if problem := _why_derivative_differs(op, case, partial(alone, at)):
            return Observation(f"the gradient of output {at} alone: {problem}")
    return Observation()


def _observe_shared_argument(op: Op, case: SampleCase, names: list[str]) -> Observation:
    """Pass one tensor as two arguments. The returned observation has a problem if the gradient of this tensor, which is
    the sum of both gradients, differs from that of the reference.
    """
    given = arguments_by_name(op, case.args)

    def shared(i: str, j: str, forward: Forward, args: tuple[Any, ...]) -> list[Tensor]:
        """Return, in a list, the gradient of the argument ``i``, whose tensor is also passed as the argument ``j``."""
        values = arguments_by_name(op, args)
        values[j] = values[i]
        return _pull_gradients(*_record_call(op, [i], forward, tuple(values.values())), case.seed)

    for i, j in combinations(names, 2):
        # Only tensors of one kind can be passed for each other.
        if given[i].shape != given[j].shape or given[i].dtype != given[j].dtype:
            continue
        if problem := _why_derivative_differs(op, case, partial(shared, i, j)):
            return Observation(f"{i} and {j} are one tensor, its gradient {problem.removeprefix('result 0: ')}")
    return Observation()


def _declined_second_order(reason: str) -> Observation:
    """Return an observation without a problem. It records the ``reason`` why second-order gradients were not examined
    on the sample.
    """
    return Observation(note=reason, declined=((SECOND, reason),))


def _observe_gradient_memory(op: Op, case: SampleCase, names: list[str]) -> Observation:
    """Return an observation with a problem if a gradient shares memory with an input or a result. A write to one would
    then change the other.
    """
    outs, wanted = _record_autograd_graph(op, case, names)
    # A backward may take a short way for the gradient of a sum, which is one everywhere.
    gradients = torch.autograd.grad(outs, wanted, [torch.ones_like(o) for o in outs], allow_unused=True)
    others = [*((f"the input {n}", t) for n, t in zip(names, wanted, strict=True)), *(("a result", o) for o in outs)]
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is None or not gradient.numel():
            continue
        for what, t in others:
            if same_storage(gradient, t):
                return Observation(f"the gradient of {name} shares the memory of {what}", fix="return a copy: .clone()")
    return Observation()


def _observe_second_order(op: Op, case: SampleCase, names: list[str]) -> Observation:
    """Compare second-order gradients with those of the reference. The returned observation has a problem if they
    differ.

    They are taken with respect to the inputs and to the gradients of the outputs. If autograd cannot compute them, the
    observation notes the reason.
    """

    def second(outs: list[Tensor], wanted: list[Tensor]) -> list[Tensor | None]:
        """Return the gradients of a randomly weighted sum of the gradients of ``wanted``. They are taken with respect
        to the tensors ``wanted`` and to the gradients of ``outs``, in this order. None stands for a missing gradient.
        """
        pulled = [d.requires_grad_() for d in _random_directions(outs, case.seed)]
        grads = torch.autograd.grad(outs, wanted, pulled, allow_unused=True, create_graph=True)
        there = [g for g in grads if g is not None and g.requires_grad]
        if not there:
            return [None] * len([*wanted, *pulled])
        rng = torch.Generator().manual_seed(case.seed + 7)
        parts = [torch.view_as_real(g) if g.is_complex() else g for g in there]
        total = [(g.double() * torch.randn(g.shape, generator=rng).to(g.device).double()).sum() for g in parts]
        return list(torch.autograd.grad(torch.stack(total).sum(), [*wanted, *pulled], allow_unused=True))

    def whole(gradients: list[Tensor | None], outs: list[Tensor], wanted: list[Tensor]) -> list[Tensor]:
        """Return the second-order gradients ``gradients`` with zeros in place of None, in the shapes of the inputs and
        the outputs.
        """
        like = [*wanted, *outs]
        return [torch.zeros_like(t) if g is None else g for g, t in zip(gradients, like, strict=True)]

    def derive(forward: Forward, args: tuple[Any, ...]) -> list[Tensor]:
        """Return the second-order gradients of ``forward`` at ``args``, with zeros in place of missing ones."""
        graph = _record_call(op, names, forward, args)
        return whole(second(*graph), *graph)

    try:
        own, wide, widened = reference_derivatives(op, case, derive)
    except Exception as e:
        return _declined_second_order(f"second order: not of the reference: {short_error_line(e)}")
    graph = _record_autograd_graph(op, case, names)
    if len([*graph[1], *graph[0]]) != len(own):  # the reference may give a result of which no input is a part
        return _declined_second_order(
            "second order: not of the reference: another number of its results has a gradient"
        )
    try:
        gradients = second(*graph)
    except Exception as e:  # once differentiable: it says so
        return _declined_second_order(f"second order is refused: {short_error_line(e)}")

    got = whole(gradients, *graph)
    judged = compare_with_rounding(got, own, wide, Reduction(max(1, case.numel)), widened, op.spec.tolerated)
    if not judged.problem:
        return Observation()
    # All gradients missing means that the backward ran outside of autograd.
    silent = " (nothing of the backward was recorded)" if all(g is None for g in gradients) else ""
    return Observation(
        f"second order{silent}: {judged.problem}",
        fix="write the backward in operations that autograd records, or declare once_differentiable=True",
    )


CHECK = Check(
    "backward",
    order=96,
    observes="a backward repeated, interleaved, on another thread, after in-place writes, of single outputs, of one "
    "tensor used twice, and of second order, is right or refused",
    observe=observe_backward,
    cases=backward_cases,
    obligations=("gradient", "second gradient"),
    varies=("order of calls", "thread"),
    needs=("determinism", "gradient"),
    fix=SAVE_FIX,
    patience=60.0,
)
