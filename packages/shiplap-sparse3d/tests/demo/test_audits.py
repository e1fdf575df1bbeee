"""The audits of the demonstration: every verdict is counted, and two processors audit two ops at the same time."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import shiplap as sl
from shiplap_sparse3d.demo import audits

VERDICTS = ("ok", "ok", "fail", "skip", "incomplete", "incomplete")


class Report(list[Any]):
    """The findings of an audit with each verdict once or more, of the op whose name is ``failed``."""

    def __init__(self, op: sl.Op, checks: tuple[str, ...] | None, seed: int, budget: float) -> None:
        super().__init__(type("Finding", (), {"verdict": verdict}) for verdict in VERDICTS)
        self.failed = (op.spec.name, f"{len(checks or ())} checks, {budget} s")


@pytest.mark.parametrize(
    ("quick", "processors", "at_once", "said"),
    [(True, 2, 2, "5 checks, 4 s"), (False, 1, 1, "0 checks, 20 s"), (False, 8, 2, "0 checks, 20 s")],
)
def test_verdicts_are_counted_by_op(
    monkeypatch: pytest.MonkeyPatch, quick: bool, processors: int, at_once: int, said: str
) -> None:
    made: list[int] = []

    def pool(workers: int) -> ThreadPoolExecutor:
        made.append(workers)
        return ThreadPoolExecutor(workers)

    monkeypatch.setattr(sl, "audit", Report)
    monkeypatch.setattr(audits, "ThreadPoolExecutor", pool)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    stages: list[tuple[int, int]] = []
    found = audits.audit_network_ops(quick, lambda stage, done, total, note: stages.append((done, total)))
    assert list(found) == [op.spec.name for op in audits.OPS]
    assert all(v == audits.AuditVerdicts(2, 1, 1, (name, said), 2) for name, v in found.items())
    assert stages == [(done, len(audits.OPS)) for done in range(len(audits.OPS) + 1)]
    assert made == [at_once]
