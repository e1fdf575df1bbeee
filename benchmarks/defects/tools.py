"""The checkers on the scoreboard: functions of an op and a seed that return whether they report a failure, and what."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import shiplap as sl
from shiplap.audit import SampleCase, Samples
from shiplap.sampling.case import tree_map, widen_tensor

Answer = tuple[bool | None, list[str]]  # None: no answer
Tool = Callable[[sl.Op, int], Answer]
PATIENCE = 120.0  # seconds for a checker that has no limit of its own
SAMPLES = 3  # inputs for a checker that makes none itself


class _FoundError(Exception):
    """Raised to end an audit at the first check that fails."""


def run_shiplap(op: sl.Op, seed: int, *, first: bool = False) -> Answer:
    """Audit the op with all checks and the default budget; the most harmful cause comes first.

    ``first`` ends the audit with the first check that fails.
    """

    def end(finding: sl.Finding) -> None:
        if first and finding.verdict == "fail":
            raise _FoundError(_describe(finding))

    try:
        report = sl.audit(op, seed=seed, progress=end)
    except _FoundError as e:
        return True, [str(e)]
    return report.verdict == "failed", [_describe(f) for f, *_ in report.causes] or [report.headline]


def _describe(finding: sl.Finding) -> str:
    return f"{finding.check}: {finding.evidence} | input {finding.input} | varied {finding.varied} | fix {finding.fix}"


def run_shiplap_first(op: sl.Op, seed: int) -> Answer:
    """Audit the op until a check fails."""
    return run_shiplap(op, seed, first=True)


def run_none(op: sl.Op, seed: int) -> Answer:
    """Check nothing."""
    return False, []


def _calls(op: sl.Op, seed: int) -> Iterator[SampleCase]:
    """Yield ordinary inputs: small, distinct sizes and larger ones, normally distributed values, contiguous memory."""
    samples = Samples(op, seed)
    yield samples.build(samples.base)
    yield from samples.grown(SAMPLES - 1)


def _leaves(op: sl.Op, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with gradients required of floating-point tensors, for an op that has a gradient."""
    if op.gradient is None or op.spec.mutated:
        return args
    floats = (isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) for v in args)
    return tuple(v.detach().requires_grad_() if float_ else v for v, float_ in zip(args, floats, strict=True))


def run_opcheck(op: sl.Op, seed: int) -> Answer:
    """Run ``torch.library.opcheck`` on ordinary inputs, which require gradients where the op has one."""
    failures = []
    for case in _calls(op, seed):
        args, named = op.spec.split(_leaves(op, case.fresh()))
        results = torch.library.opcheck(op.overload, args, named, raise_exception=False)
        failures += [f"{name}: {str(result)[:300]}" for name, result in results.items() if result != "SUCCESS"]
    return bool(failures), failures


def run_gradcheck(op: sl.Op, seed: int) -> Answer:
    """Run ``torch.autograd.gradcheck`` and ``gradgradcheck`` in float64 where the op takes it and has a gradient."""
    if op.gradient is None or op.spec.mutated:
        return False, ["the op has no gradient"]
    failures = []
    for case in list(_calls(op, seed))[:1]:
        args = _leaves(op, tree_map(widen_tensor, case.fresh()))
        for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
            try:
                check(lambda *a: op(*a), args, nondet_tol=0.0)
            except sl.ShiplapError as e:
                if e.id not in ("SL204", "SL205", "SL313"):  # float64 or a second derivative is refused
                    failures.append(f"{check.__name__}: {str(e)[:300]}")
            except Exception as e:
                failures.append(f"{check.__name__}: {str(e)[:300]}")
    return bool(failures), failures


def run_assert_close(op: sl.Op, seed: int) -> Answer:
    """Compare results and gradients with the reference's on ordinary inputs, as a unit test does."""
    failures = []
    for case in _calls(op, seed):
        try:
            results = []
            for function in (op, op.reference):
                args = _leaves(op, case.fresh())
                positional, named = op.spec.split(args)
                outs = function(*positional, **named)
                outs = [o for o in (outs if isinstance(outs, (tuple, list)) else [outs]) if isinstance(o, Tensor)]
                inputs = [v for v in args if isinstance(v, Tensor)]
                graded = [o for o in outs if o.requires_grad]
                wanted = [v for v in inputs if v.requires_grad]
                grads = torch.autograd.grad(sum(o.square().sum() for o in graded).abs(), wanted) if graded else ()
                results.append([*outs, *inputs, *grads])
            if not op.spec.random:
                torch.testing.assert_close(*results, equal_nan=True)
        except Exception as e:
            failures.append(f"{case.label}: {type(e).__name__}: {str(e)[:300]}")
    return bool(failures), failures


def in_child(tool: Tool) -> Tool:
    """Return a checker that runs in a process of its own: an op that ends it is found, one that hangs is not."""

    def run(op: sl.Op, seed: int) -> Answer:
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)

        def work() -> None:
            warnings.simplefilter("ignore")
            try:
                sender.send(tool(op, seed))
            except Exception as e:
                sender.send((None, [f"{type(e).__name__}: {str(e)[:300]}"]))

        child = context.Process(target=work)
        child.start()
        sender.close()
        try:
            if receiver.poll(PATIENCE):
                return receiver.recv()
            return None, [f"no answer after {PATIENCE:.0f} s"]
        except EOFError:
            child.join()
            return True, [f"the process ended with {child.exitcode}"]
        finally:
            child.kill()
            child.join()

    return run


TOOLS: dict[str, Tool] = {
    "shiplap": run_shiplap,
    "shiplap-first": run_shiplap_first,
    "opcheck": in_child(run_opcheck),
    "gradcheck": in_child(run_gradcheck),
    "assert_close": in_child(run_assert_close),
    "none": run_none,
}
