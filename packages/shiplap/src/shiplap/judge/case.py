"""The state of one judgement while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shiplap.judge.options import JudgeBudget, JudgeOptions
from shiplap.judge.problem import JudgeProblem
from shiplap.judge.result import Reason, Timed
from shiplap.judge.target import JudgeSubject, JudgeTarget
from shiplap.sampling.ledger import Ledger
from shiplap.sandbox.candidate import CandidateError

ProgressReport = Callable[[str, int, int], None]


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
