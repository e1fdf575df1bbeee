"""The state of one judgement, and the checks of a candidate beside its results: many calls, parameters, gradients,
operators.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod

import torch
from torch import Tensor

from shiplap.judge.options import JudgeBudget, JudgeOptions, StepDeadline
from shiplap.judge.problem import Args, JudgeProblem
from shiplap.judge.result import Reason, Timed
from shiplap.judge.target import JudgeSubject, JudgeTarget
from shiplap.judge.variants import SECRET_RANDOM, InputForm
from shiplap.sampling.compare import Reduction
from shiplap.sampling.compare_to_reference import compare_with_rounding
from shiplap.sampling.ledger import Ledger
from shiplap.sandbox.candidate import CandidateError, TargetProcess
from shiplap.sandbox.proc_filesystem import ProcessResources, read_process_resources
from shiplap.sandbox.protocol import OperatorUse

ProgressReport = Callable[[str, int, int], None]
ENDURANCE_CALLS, EARLY_CALLS = 100, 30  # calls in all, and calls after which lazy allocations are over
LEAKS_PER_CALL, LEAKED_BYTES = 0.5, 32 << 20  # a leak: files or threads for each further call, or bytes in all
GRADIENT_FORMS = 4  # other forms on which gradients are compared
GRADIENT_LAYOUTS = ("plain", "one", "turned")  # memory layouts of the gradients of results, in turn


@dataclass
class JudgeSession:
    """The request of one judgement, and the findings so far.

    Attributes:
        subject: the reference, with the arguments that its constructor takes.
        candidate, reference: the module and the name of both.
        report: called with ``(stage, done, total)``.
        reasons: the faults of the candidate. One is enough for a refusal.
        missing: a comparison that was not made, and why. One is enough for an incomplete verdict.
        unchecked: properties that the verdict does not cover.
        timings: one entry for each timed form.
        calls: the number of calls whose results were compared.
        ledger: the cells to which these calls belong.
        tried: the axes of the ledger that some form varies.
    """

    options: JudgeOptions
    subject: JudgeSubject
    candidate: JudgeTarget
    reference: JudgeTarget
    report: ProgressReport
    budget: JudgeBudget
    reasons: list[Reason] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    unchecked: list[str] = field(default_factory=list)
    timings: list[Timed] = field(default_factory=list)
    calls: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    tried: set[str] = field(default_factory=set)

    @property
    def problem(self) -> JudgeProblem:
        """The problem of the subject, which draws inputs and computes expected results."""
        return self.subject.problem

    @contextmanager
    def record_faults(self, label: str) -> Iterator[None]:
        """A context that turns an error of the candidate into a reason, with ``label`` as its input."""
        try:
            yield
        except CandidateError as e:
            self.reasons.append(Reason(e.check, e.evidence, label))


@dataclass
class Endurance:
    """A series of calls of one form, and the resources that the process held early in the series.

    Attributes:
        made: the number of calls so far.
        own: the seconds of these calls.
    """

    problem: JudgeProblem
    witness: TargetProcess
    pace: StepDeadline
    made: int = 0
    own: float = 0.0
    _early: ProcessResources = field(default_factory=ProcessResources)

    def run(self, form: InputForm, args: Args, ends: float) -> None:
        """Call the candidate ``ENDURANCE_CALLS`` times on new values, or until ``ends``. Raises CandidateError."""
        while self.made < ENDURANCE_CALLS and time.monotonic() < ends:
            with self.pace.step(self.witness.prisoner):
                self.own += self.witness.call(args, self.problem.expect_effects(form, args)).wall
                self.made += 1
                # Allocators, caches and thread pools are filled by now, so later growth is a leak.
                if self.made == EARLY_CALLS:
                    self._early = self._held_resources()
                args = self.problem.draw(form)
        if self.made == ENDURANCE_CALLS and (
            leak := describe_leak(self._early, self._held_resources(), ENDURANCE_CALLS - EARLY_CALLS)
        ):
            raise CandidateError("leaks", leak)

    def _held_resources(self) -> ProcessResources:
        """Return the resources of the process, without the arguments and results that it keeps on request."""
        now, (files, size) = read_process_resources(self.witness.prisoner.pid), self.witness.kept
        return ProcessResources(now.files - files, now.threads, now.memory - size)


def describe_leak(before: ProcessResources, after: ProcessResources, calls: int) -> str:
    """Return a description of the resource that grows with each call, or an empty text."""
    for what, first, last in (("files", before.files, after.files), ("threads", before.threads, after.threads)):
        if last - first >= LEAKS_PER_CALL * calls:
            return f"{last - first} more {what} after {calls} more calls"
    if after.memory - before.memory > LEAKED_BYTES:
        return f"{(after.memory - before.memory) / 2**20:.0f} MiB more after {calls} more calls of the smallest shapes"
    return ""


def change_parameters(
    state: dict[str, Tensor], load: Callable[[dict[str, Tensor]], bool], *, zeros: bool = True
) -> bool:
    """Change the parameters in ``state``, and load them with ``load``. Return False if that is not
    possible.

    Each number is multiplied by a random factor of its own, so that positive numbers stay positive. With ``zeros``, a
    parameter of zeros only, as a bias often is at first, gets positive numbers.
    """
    other = {k: _scaled_parameter(v, zeros=zeros) for k, v in state.items()}
    if not other or not load(other):
        return False
    state.update(other)
    return True


def _scaled_parameter(value: Tensor, *, zeros: bool) -> Tensor:
    """Return random values of the same signs and about the same sizes as those of a parameter."""
    if not value.is_floating_point():
        return value.clone()
    rng = torch.Generator().manual_seed(SECRET_RANDOM.getrandbits(62))
    if zeros and not value.any():
        return (0.1 + 0.4 * torch.rand(value.shape, generator=rng)).to(value.device, value.dtype)
    factor = 0.5 + torch.rand(value.shape, generator=rng, dtype=torch.float64)
    return (value.double() * factor.to(value.device)).to(value.dtype)


def check_new_parameters(case: JudgeSession, witness: TargetProcess, form: InputForm) -> None:
    """Change the parameters of reference and candidate, then compare a call and the state of the module after it.

    A candidate that computed something from the first values of its parameters has wrong results now.
    """
    problem, pace = case.problem, StepDeadline(case.budget.last)
    state = case.subject.state
    with case.record_faults(f"{form.label}, other parameters"), pace.step(witness.prisoner):
        for zeros in (True, False):
            if not change_parameters(state, lambda new: witness.renew(new) and problem.renew(new), zeros=zeros):
                if state:
                    case.missing["parameters"] = (
                        "other values of the parameters: the candidate lacks some of the reference's, so that nothing "
                        "shows that it uses them; name its parameters as the reference does"
                    )
                return
            args = problem.draw(form)
            # A zero parameter must stay zero, so try again with zeros unchanged.
            if zeros and not problem.gives_numbers(args):
                continue
            kept = problem.kept_after(args)
            witness.call(args, problem.expect_effects(form, args))
            case.calls += 1
            problem.compare_kept(kept, witness.read_module_state(kept))
            return


def compare_gradients(case: JudgeSession, witness: TargetProcess, forms: Sequence[InputForm], ends: float) -> None:
    """Compare gradients on the first form twice, on timed forms, and on a secret choice of others.

    No further form is begun after ``ends``.
    """
    wanted = case.options.gradients
    if not (case.subject.gradients if wanted is None else wanted):
        case.unchecked.append("gradients")
        return
    others = [f for f in forms if (f.shapes, f.recipe) != (forms[0].shapes, forms[0].recipe)]
    others = SECRET_RANDOM.sample(others, min(GRADIENT_FORMS, len(others)))
    compared = 0
    for number, form in enumerate((forms[0], *(f for f in forms if f.timed), *others, forms[0])):
        if compared and time.monotonic() > ends:
            case.missing["gradients"] = f"only {compared} were reached in the time"
            return
        with case.record_faults(f"gradients of {form.label}"):
            compared += _compare_form_gradients(case, witness, form, GRADIENT_LAYOUTS[number % len(GRADIENT_LAYOUTS)])
        if case.reasons:
            return
    if not compared:
        case.unchecked.append("gradients: the reference has none")


def _compare_form_gradients(case: JudgeSession, witness: TargetProcess, form: InputForm, way: str) -> bool:
    """Compare the gradients on one form. Return False if the reference has none there. Raises CandidateError."""
    args = case.problem.draw(form)
    try:
        outs = [o for o in case.problem.expect_effects(form, args).own if o.is_floating_point()]
        seeds = [_draw_output_gradient(o, way) for o in outs]
        own = case.problem.gradients(args, seeds, wide=False)
        wide = case.problem.gradients(args, seeds, wide=True)
    except Exception:  # the reference refuses these values, or has no gradient
        return False
    got = witness.gradients(args, seeds, own, case.problem.parameters)
    if len(got) < len(own):
        own, wide = own[: len(got)], wide[: len(got)]
        note = "gradients of parameters: the candidate has none of the same names"
        case.unchecked += [note] if note not in case.unchecked else []
    # A gradient may sum over all elements of a result.
    sums = Reduction(max(1, max((o.numel() for o in own), default=1)))
    recompute = partial(case.problem.gradients, args, seeds, wide=True)
    if problem := compare_with_rounding(got, own, wide, sums, recompute, case.problem.tolerance).problem:
        raise CandidateError("gradients", problem)
    return True


def _draw_output_gradient(result: Tensor, way: str) -> Tensor:
    """Return a random gradient of ``result`` in the memory layout ``way``.

    The layouts are rows, columns (``"turned"``), and one number for all elements (``"one"``), as behind a sum.
    """
    if way == "one":
        return torch.randn((), dtype=torch.float64).to(result.device, result.dtype).expand(result.shape)
    if way == "turned":
        turned = torch.randn(result.shape[::-1], dtype=torch.float64).to(result.device, result.dtype)
        return turned.permute(*reversed(range(result.dim())))
    return torch.randn(result.shape, dtype=torch.float64).to(result.device, result.dtype)


def describe_resubmission(reference: list[OperatorUse] | str, candidate: list[OperatorUse] | str) -> str:
    """Return why a candidate is the reference again, or an empty text.

    The condition is that a call runs each operator of the reference: on the same shapes or, if the reference runs
    several operators, on as many elements in rows of the same length.
    """
    if isinstance(reference, str) or isinstance(candidate, str) or not reference:
        return ""
    same = not Counter(map(str, reference)) - Counter(map(str, candidate))
    wanted, ran = _count_operator_elements(reference), _count_operator_elements(candidate)
    if not same and (len(wanted) < 2 or any(ran[what] < count for what, count in wanted.items())):
        return ""
    names = ", ".join(dict.fromkeys(use.name for use in reference))
    return f"it runs the framework's own operators as the reference does: {names}"[:300]


def _count_operator_elements(operators: list[OperatorUse]) -> Counter[str]:
    """Count the elements on which each operator ran, keyed by operator and length of rows.

    An operator that runs on parts of a tensor therefore counts as much as one that runs on the whole.
    """
    done: Counter[str] = Counter()
    for use in operators:
        shapes = [s for s in use.shapes if s]
        plain = [[n for n in s if isinstance(n, int)] for s in shapes]  # others are lists of shapes
        count = sum(prod(sizes) for sizes, s in zip(plain, shapes, strict=True) if len(sizes) == len(s))
        done[f"{use.name} {[s[-1] for s in shapes]}"] += count or 1
    return done
