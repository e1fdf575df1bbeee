"""``backward``: properties of a backward besides its values: order, repetition, threads, saved memory, second order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain, combinations, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError, checkpoint

from shiplap.audit.check import Check, Observation
from shiplap.dispatch import Op
from shiplap.sampling.case import Case, tree_map
from shiplap.sampling.compare import Reduction, bitwise
from shiplap.sampling.compare_to_reference import settle
from shiplap.sampling.run import (
    call,
    differentiated,
    direction,
    drawn_otherwise,
    floating_args,
    has_backward,
    in_short,
    last_line,
    widen,
)
from shiplap.sampling.samples import Samples, other
from shiplap.torch_private import same_storage

SECOND = "second gradient"  # the obligation of the ledger that an op may refuse
SAVE = "read tensors from saved, for which sl.op keeps them with save_for_backward, and keep none elsewhere"


def cases(samples: Samples) -> Iterable[Case]:
    """Yield plain, larger, optional and scalar samples, and one wide one."""
    yield from chain(samples.plain(), islice(samples.grown(1), 1), samples.optionals(), samples.scalars())
    yield from chain(islice(samples.ranks(), 2), islice(samples.wide(), 1))


def observe(op: Op, case: Case) -> Observation:
    """Run the backward in all the ways that the check covers."""
    if reason := has_backward(op, case):
        return Observation(skip=reason)
    names = floating_args(op, case)
    otherwise = drawn_otherwise(op, case)
    # Where results are random, gradients of single outputs and of shared arguments have no reference.
    looks = [_repeated, _owned, _interleaved, _threaded, _overwritten, _checkpointed]
    for look in looks if otherwise else [*looks, _single_outputs, _twice_one]:
        observation = look(op, case, names)
        if observation.problem:
            return observation
    if otherwise:
        note = "not compared with the reference, which draws other numbers"
        return Observation(note=note, declined=((SECOND, note),))
    return _second_order(op, case, names)


def _graph(op: Op, case: Case, names: list[str]) -> tuple[list[Tensor], list[Tensor]]:
    """Return ``(outputs that carry a gradient, inputs)`` of a recorded call."""
    args = tuple(v.requires_grad_() if a.name in names else v for a, v in zip(op.spec.args, case.fresh(), strict=True))
    wanted = [v for a, v in zip(op.spec.args, args, strict=True) if a.name in names]
    return [o for o in call(op, args) if o.requires_grad], wanted


def _directions(outs: Sequence[Tensor], seed: int) -> list[Tensor]:
    """Return random gradients of the outputs."""
    rng = torch.Generator().manual_seed(seed)
    return [direction(o, rng).to(o.device, o.dtype) for o in outs]


def _pull(outs: list[Tensor], wanted: list[Tensor], seed: int, **keywords: Any) -> list[Tensor]:
    """Return the gradients of ``wanted`` for random gradients of the outputs, zeros where there is none."""
    gradients = torch.autograd.grad(outs, wanted, _directions(outs, seed), allow_unused=True, **keywords)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(gradients, wanted, strict=True)]


def _repeated(op: Op, case: Case, names: list[str]) -> Observation:
    """Run the backward of one graph twice, and check that ``grad_output`` stays as it was."""
    outs, wanted = _graph(op, case, names)
    directions = _directions(outs, case.seed)
    kept = [d.clone() for d in directions]
    first = torch.autograd.grad(outs, wanted, directions, allow_unused=True, retain_graph=True)
    if problem := bitwise(directions, kept, "before the backward"):
        return Observation(f"the backward writes to the gradient of the output: {problem}", fix="work on a copy")
    there = [g for g in first if g is not None]
    before = [g.clone() for g in there]
    second = torch.autograd.grad(outs, wanted, kept, allow_unused=True)
    if problem := bitwise([g for g in second if g is not None], before, "the first time"):
        return Observation(f"the backward of one graph, a second time: {problem}", fix=SAVE)
    if problem := bitwise(there, before, "before the second backward"):
        return Observation(f"a gradient changed when the backward ran again: {problem}", fix="allocate gradients anew")
    return Observation()


def _interleaved(op: Op, case: Case, names: list[str]) -> Observation:
    """Run the backwards of two graphs in the order of their forwards, as in a network that calls the op twice."""
    expected = _pull(*_graph(op, case, names), case.seed)
    for between in _others(op, case):
        first, second = _graph(op, case, names), _graph(op, between, names)
        got = _pull(*first, case.seed)
        kept = [g.clone() for g in got]
        _pull(*second, case.seed + 1)
        if problem := bitwise(got, kept, "before"):
            return Observation(f"a gradient changed when another graph's backward ran: {problem}", fix=SAVE)
        if problem := bitwise(got, expected, "alone"):
            return Observation(f"with another call between forward and backward: {problem}", fix=SAVE)
    return Observation()


def _others(op: Op, case: Case) -> Iterator[Case]:
    """Yield calls that come between: with other values, and of the plain sample with another scalar and with other
    sizes.
    """
    yield other(op, case)
    samples = Samples(op, case.seed, case.device)
    if case.recipe == samples.base:
        scalars = (c for c in samples.scalars() if c.recipe != case.recipe)
        more = [*islice(scalars, 1), *islice(samples.grown(1), 1)]
        yield from (c for c in more if c.form == case.form and not has_backward(op, c))


def _threaded(op: Op, case: Case, names: list[str]) -> Observation:
    """Run a backward on another thread."""
    outs, wanted = _graph(op, case, names)
    expected = _pull(outs, wanted, case.seed, retain_graph=True)
    with ThreadPoolExecutor(1) as pool:
        try:
            got = pool.submit(_pull, outs, wanted, case.seed).result()
        except Exception as e:
            return Observation(f"a backward on another thread raised {last_line(e)}", fix=SAVE)
    problem = bitwise(got, expected, "on this one")
    return Observation(f"a backward on another thread: {problem}" if problem else "", fix=SAVE)


def _overwritten(op: Op, case: Case, names: list[str]) -> Observation:
    """Write to an input after the forward: autograd has to raise, or the gradient must not depend on the input."""
    expected = _pull(*_graph(op, case, names), case.seed)
    changed = {a.name: v for a, v in zip(op.spec.args, other(op, case).fresh(), strict=True)}
    for name in names:
        leaves = {a.name: v for a, v in zip(op.spec.args, case.fresh(), strict=True)}
        wanted = [leaves[n].requires_grad_() for n in names]
        # An intermediate tensor, because autograd forbids in-place writes to a leaf.
        used = {n: v * 1 if n in names else v for n, v in leaves.items()}
        outs = [o for o in call(op, tuple(used.values())) if o.requires_grad]
        if used[name].shape != changed[name].shape:
            continue
        with torch.no_grad():
            used[name].copy_(changed[name])
        try:
            got = _pull(outs, wanted, case.seed)
        except RuntimeError:
            continue  # noticed
        if problem := bitwise(got, expected, "with the input left alone"):
            return Observation(f"{name} was overwritten after the forward, unnoticed by autograd: {problem}", fix=SAVE)
    return Observation()


def _checkpointed(op: Op, case: Case, names: list[str]) -> Observation:
    """Repeat the call by a checkpoint in the backward. A checkpoint returns each saved tensor once."""
    if op.spec.random:
        return Observation()  # a generator is not where it was
    expected = _pull(*_graph(op, case, names), case.seed)
    args = tuple(v.requires_grad_() if a.name in names else v for a, v in zip(op.spec.args, case.fresh(), strict=True))
    wanted = [v for a, v in zip(op.spec.args, args, strict=True) if a.name in names]
    outs = checkpoint(lambda *given: call(op, given), *args, use_reentrant=False)
    try:
        got = _pull([o for o in outs if o.requires_grad], wanted, case.seed)
    except CheckpointError as e:
        return Observation(f"under torch.utils.checkpoint: {last_line(e)}", fix="read ctx.saved_tensors once")
    problem = bitwise(got, expected, "without")
    return Observation(f"under torch.utils.checkpoint: {problem}" if problem else "", fix=SAVE)


def _by_reference(op: Op, args: tuple[Any, ...]) -> list[Tensor]:
    """Return the outputs of the reference that carry a gradient."""
    return [o for o in differentiated(op, args) if o.requires_grad]


def _references(op: Op, case: Case, names: list[str], widened: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return ``(outputs that carry a gradient, inputs)`` of the reference, in float64 if ``widened``."""
    plain = tree_map(lambda t: t.detach().clone(memory_format=torch.contiguous_format), case.args)
    args = tree_map(widen, plain) if widened else plain
    given = {a.name: v for a, v in zip(op.spec.args, args, strict=True)}
    wanted = [given[n].requires_grad_() for n in names]
    return _by_reference(op, args), wanted


def _single_outputs(op: Op, case: Case, names: list[str]) -> Observation:
    """Compare the gradient of one output, where the others were not used."""
    count = len(_graph(op, case, names)[0])
    for at in range(count) if count > 1 else ():

        def pulled(graph: tuple[list[Tensor], list[Tensor]], at: int = at) -> list[Tensor]:
            return _pull([graph[0][at]], graph[1], case.seed)

        if len(_references(op, case, names, True)[0]) != count:
            return Observation()
        wide = pulled(_references(op, case, names, True))
        difference = settle(
            pulled(_graph(op, case, names)),
            pulled(_references(op, case, names, False)),
            wide,
            Reduction(max(1, case.numel)),
            lambda: pulled(_references(op, case, names, True)),
            op.spec.tolerated,
        )
        if difference.problem:
            return Observation(f"the gradient of output {at} alone: {difference.problem}")
    return Observation()


def _twice_one(op: Op, case: Case, names: list[str]) -> Observation:
    """Pass one tensor as two arguments: its gradient is the sum."""
    for i, j in combinations(names, 2):
        given = {a.name: v for a, v in zip(op.spec.args, case.args, strict=True)}
        if given[i].shape != given[j].shape or given[i].dtype != given[j].dtype:
            continue

        def pulled(widened: bool, own: bool, i: str = i, j: str = j) -> list[Tensor]:
            args = tree_map(widen, case.fresh()) if widened else case.fresh()
            values = {a.name: v for a, v in zip(op.spec.args, args, strict=True)}
            x = values[i].requires_grad_()
            values[j] = x
            made = tuple(values.values())
            outs = _by_reference(op, made) if own else [o for o in call(op, made) if o.requires_grad]
            return _pull(outs, [x], case.seed)

        try:
            wide, own = pulled(True, True), pulled(False, True)
        except RuntimeError:
            return Observation()
        second = partial(pulled, True, True)
        difference = settle(pulled(False, False), own, wide, Reduction(max(1, case.numel)), second, op.spec.tolerated)
        if difference.problem:
            return Observation(
                f"{i} and {j} are one tensor, its gradient {difference.problem.removeprefix('result 0: ')}"
            )
    return Observation()


def _no_second(reason: str) -> Observation:
    """Return the observation of a sample on which gradients of gradients do not exist, or are refused."""
    return Observation(note=reason, declined=((SECOND, reason),))


def _owned(op: Op, case: Case, names: list[str]) -> Observation:
    """Check that no gradient is memory of an argument or of a result, which a caller would change in place with it."""
    outs, wanted = _graph(op, case, names)
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


def _second_order(op: Op, case: Case, names: list[str]) -> Observation:
    """Compare the gradient of the gradient, by the inputs and by the gradient of the output, where autograd can compute
    it.
    """

    def second(graph: tuple[list[Tensor], list[Tensor]]) -> list[Tensor | None]:
        outs, wanted = graph
        pulled = [d.requires_grad_() for d in _directions(outs, case.seed)]
        grads = torch.autograd.grad(outs, wanted, pulled, allow_unused=True, create_graph=True)
        there = [g for g in grads if g is not None and g.requires_grad]
        if not there:
            return [None] * len([*wanted, *pulled])
        rng = torch.Generator().manual_seed(case.seed + 7)
        parts = [torch.view_as_real(g) if g.is_complex() else g for g in there]
        total = [(g.double() * torch.randn(g.shape, generator=rng).to(g.device).double()).sum() for g in parts]
        return list(torch.autograd.grad(torch.stack(total).sum(), [*wanted, *pulled], allow_unused=True))

    def whole(gradients: list[Tensor | None], graph: tuple[list[Tensor], list[Tensor]]) -> list[Tensor]:
        like = [*graph[1], *graph[0]]
        return [torch.zeros_like(t) if g is None else g for g, t in zip(gradients, like, strict=True)]

    try:
        own_graph, wide_graph = _references(op, case, names, False), _references(op, case, names, True)
        own, wide = whole(second(own_graph), own_graph), whole(second(wide_graph), wide_graph)
    except Exception as e:
        return _no_second(f"second order: not of the reference: {in_short(e)}")
    graph = _graph(op, case, names)
    if len(graph[0]) != len(own_graph[0]):  # the reference may give a result of which no input is a part
        return _no_second("second order: not of the reference: another number of its results has a gradient")
    try:
        gradients = second(graph)
    except Exception as e:  # once differentiable: it says so
        return _no_second(f"second order is refused: {in_short(e)}")

    def recompute() -> list[Tensor]:
        fresh = _references(op, case, names, True)
        return whole(second(fresh), fresh)

    got = whole(gradients, graph)
    judged = settle(got, own, wide, Reduction(max(1, case.numel)), recompute, op.spec.tolerated)
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
    observe=observe,
    cases=cases,
    obligations=("gradient", "second gradient"),
    varies=("order of calls", "thread"),
    needs=("determinism", "gradient"),
    fix=SAVE,
    patience=60.0,
)
