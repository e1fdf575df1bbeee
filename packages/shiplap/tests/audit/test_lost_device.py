"""A kernel that leaves a GPU unusable: its check fails, and no later check blames the op or the auditor."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.audit import engine, session


@pytest.mark.parametrize("isolate", [False, True])
def test_checks_after_a_lost_device_are_incomplete(ns: str, monkeypatch: pytest.MonkeyPatch, isolate: bool) -> None:
    @sl.op(f"{ns}::f")
    def f(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 2

    asked: list[str] = []

    def fault(device: str) -> str:
        asked.append(device)
        return "an illegal memory access" if len(asked) == 4 else ""  # before and after the first call, and two checks

    monkeypatch.setattr(session, "device_fault", fault)
    report = sl.audit(f, checks=("numerics", "edges", "schema"), seed=0, isolate=isolate)
    assert [finding.verdict for finding in report] == ["ok", "fail", "incomplete"]
    failed, after = report.findings[1:]
    assert failed.evidence.startswith("a call in this check has left the device unusable: an illegal memory access")
    assert after.evidence == "was not run: the device cannot be used since a call in the check edges"


@pytest.mark.parametrize("isolate", [False, True])
def test_a_device_that_is_lost_at_once_is_a_finding(ns: str, monkeypatch: pytest.MonkeyPatch, isolate: bool) -> None:
    """Samples cannot be made on such a device, so that the audit ended with the error of the device."""

    @sl.op(f"{ns}::f")
    def f(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 2

    def fault(device: str) -> str:
        return next(faults)

    def raw(samples: object) -> dict[str, str]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(session, "device_fault", fault)
    monkeypatch.setattr(session, "absent_axes", raw)
    faults = iter(["", "an illegal memory access"])
    report = sl.audit(f, checks=("numerics", "edges"), seed=0, isolate=isolate)
    assert [finding.verdict for finding in report] == ["fail", "incomplete"]
    first, after = report.findings
    assert first.evidence == "the first call of the op has left the device unusable: an illegal memory access"
    assert after.evidence == "was not run: the device cannot be used since the first call of the op"

    faults = iter(["an illegal memory access"])  # of another op, which was audited before in this process
    report = sl.audit(f, checks=("numerics", "edges"), seed=0, isolate=isolate)
    assert [finding.verdict for finding in report] == ["incomplete", "incomplete"]
    assert "an earlier call has left the device unusable" in report.findings[0].evidence


def test_a_check_that_does_not_apply_is_no_matter_of_time(ns: str) -> None:
    @sl.op(f"{ns}::f")
    def f(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 2

    checks = ("numerics", "bound", "compile", "cuda_graph", "cudagraph_trees")
    report = sl.audit(f, checks=checks, budget=0, isolate=False)
    assert [finding.verdict for finding in report] == ["incomplete", "skip", "incomplete", "skip", "skip"]


def test_the_cpu_is_never_lost() -> None:
    assert session.device_fault("cpu") == ""


def test_audits_in_one_process_run_one_after_the_other(ns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that trace or capture at the same time disturb each other, and so does a measurement of costs."""

    @sl.op(f"{ns}::f")
    def f(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 2

    running, most = [], []

    def run_session(op: sl.Op, *rest: object, **more: object) -> None:
        running.append(op)
        most.append(len(running))
        time.sleep(0.01)  # another thread would begin meanwhile
        running.pop()

    monkeypatch.setattr(engine, "run_session", run_session)
    monkeypatch.setattr(engine, "can_isolate", lambda device: False)
    with ThreadPoolExecutor(6) as pool:
        audits = [pool.submit(sl.audit, f, checks="schema", isolate=False) for _ in range(4)]
        audits += [pool.submit(engine.measure_cost_isolated, f, "cpu", run_session) for _ in range(2)]
        for each in audits:
            each.result(timeout=60)
    assert most == [1] * 6
