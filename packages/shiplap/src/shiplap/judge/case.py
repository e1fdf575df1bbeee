"""A verdict in the making."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shiplap.judge.options import Budget, Options
from shiplap.judge.problem import Problem
from shiplap.judge.result import Reason, Timed
from shiplap.judge.target import Subject, Target
from shiplap.sandbox.candidate import Wrong

Report = Callable[[str, int, int], None]


@dataclass
class Case:
    """What is asked, and what was found so far."""

    options: Options
    subject: Subject
    candidate: Target
    reference: Target
    report: Report
    budget: Budget
    reasons: list[Reason] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    unchecked: list[str] = field(default_factory=list)
    timings: list[Timed] = field(default_factory=list)
    calls: int = 0

    @property
    def problem(self) -> Problem:
        return self.subject.problem

    @contextmanager
    def noting(self, label: str) -> Iterator[None]:
        try:
            yield
        except Wrong as e:
            self.reasons.append(Reason(e.check, e.evidence, label))
