"""The audits of the demonstration: every verdict is counted, and two processors audit two ops at the same time."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

import shiplap as sl
from shiplap_sparse3d.demo import audits

VERDICTS = ("ok", "ok", "fail", "skip", "incomplete", "incomplete")


class Report(list[Any]):
    """The findings of an audit with each verdict once or more, of the op whose name is ``failed``."""

    def __init__(self, op: sl.Op, checks: tuple[str, ...] | None, seed: int, budget: float) -> None:
        super().__init__(type("Finding", (), {"verdict": verdict}) for verdict in VERDICTS)
        self.failed = (op.spec.name, f"{len(checks or ())} checks, {budget:g} s")


@pytest.mark.parametrize(
    ("quick", "processors", "at_once", "checks", "seconds"),
    [
        (True, 2, 2, 5, [4, 4, 16 / 3, 16 / 3, 8, 8, 16, 16]),
        (False, 1, 1, 0, [128 / left for left in range(8, 0, -1)]),
        (False, 8, 2, 0, [16, 16, 64 / 3, 64 / 3, 32, 32, 64, 64]),
    ],
)
def test_verdicts_are_counted_by_op(
    monkeypatch: pytest.MonkeyPatch, quick: bool, processors: int, at_once: int, checks: int, seconds: list[float]
) -> None:
    made: list[int] = []

    def pool(workers: int) -> ThreadPoolExecutor:
        made.append(workers)
        return ThreadPoolExecutor(workers)

    monkeypatch.setattr(sl, "audit", Report)
    monkeypatch.setattr(audits, "ThreadPoolExecutor", pool)
    monkeypatch.setattr(audits, "time", SimpleNamespace(monotonic=lambda: 100.0))  # no audit takes any time
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    stages: list[tuple[int, int]] = []
    found = audits.audit_network_ops(quick, lambda stage, done, total, note: stages.append((done, total)))
    assert list(found) == [op.spec.name for op in audits.OPS]
    said = [f"{checks} checks, {s:g} s" for s in seconds]
    assert [v.failed for v in found.values()] == list(zip(found, said, strict=True))
    assert all(v == audits.AuditVerdicts(2, 1, 1, v.failed, 2) for v in found.values())
    assert stages == [(done, len(audits.OPS)) for done in range(len(audits.OPS) + 1)]
    assert made == [at_once]


def test_slow_audits_share_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now, budgets = [0.0], []

    def audit(op: sl.Op, checks: object, seed: int, budget: float) -> Report:
        budgets.append(budget)
        now[0] += budget + 10.0  # an audit overruns its time by a sample
        return Report(op, None, seed, budget)

    monkeypatch.setattr(sl, "audit", audit)
    monkeypatch.setattr(audits, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    audits.audit_network_ops(False, lambda stage, done, total, note: None)
    assert budgets[0] == 16.0
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[-1] == 1.0  # each op is audited, also when no time is left
