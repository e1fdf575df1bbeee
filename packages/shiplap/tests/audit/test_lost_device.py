"""A kernel that leaves a GPU unusable: its check fails, and no later check blames the op or the auditor."""

from __future__ import annotations

import pytest
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.audit import session


@pytest.mark.parametrize("isolate", [False, True])
def test_checks_after_a_lost_device_are_incomplete(ns: str, monkeypatch: pytest.MonkeyPatch, isolate: bool) -> None:
    @sl.op(f"{ns}::f")
    def f(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 2

    asked: list[str] = []

    def fault(device: str) -> str:
        asked.append(device)
        return "an illegal memory access" if len(asked) == 2 else ""

    monkeypatch.setattr(session, "device_fault", fault)
    report = sl.audit(f, checks=("numerics", "edges", "schema"), seed=0, isolate=isolate)
    assert [finding.verdict for finding in report] == ["ok", "fail", "incomplete"]
    failed, after = report.findings[1:]
    assert failed.evidence.startswith("a call in this check has left the device unusable: an illegal memory access")
    assert after.evidence == "was not run: the device cannot be used since a call in the check edges"


def test_the_cpu_is_never_lost() -> None:
    assert session.device_fault("cpu") == ""
