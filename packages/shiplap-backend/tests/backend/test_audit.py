"""The sweep survives what it looks for: a crash and a hang cost one operator and dtype, not the sweep."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shiplap_backend import BackendError, audit


class Processes:
    """Stands for the processes of a sweep: each answers for its cases until the one that kills it."""

    def __init__(self, deadly: audit.SweepCase) -> None:
        self.deadly, self.started = deadly, 0

    def __call__(self, project: Any, cases: Sequence[audit.SweepCase], samples: int) -> tuple[list[str], str]:
        self.started += 1
        lines = []
        for op, dtype in cases:
            lines.append(json.dumps({"start": op, "dtype": dtype}))
            if (op, dtype) == self.deadly:
                return lines, "exit status -11: "
            lines.append(json.dumps({"op": op, "dtype": dtype, **row(native=["aten::" + op])}))
        return lines, ""


def row(**changes: Any) -> dict[str, Any]:
    """What a process says of a case in which nothing happened, with ``changes``."""
    return {
        "samples": 1,
        "gradients": 0,
        "native": [],
        "fallback": {},
        "failure": "",
        "refused": "",
        "skipped": "",
        **changes,
    }


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_crash_costs_one_case(monkeypatch: pytest.MonkeyPatch, jobs: int) -> None:
    processes = Processes(("b", "f32"))
    monkeypatch.setattr(audit, "_read_sweep_lines", processes)
    monkeypatch.setattr(audit, "_CASES_PER_BATCH", 4)
    verdicts = list(audit.run_sweep(None, ["a", "b", "c"], ["f32", "i64"], jobs=jobs))  # type: ignore[arg-type]
    assert [(v.op, v.dtype) for v in verdicts] == [(op, dtype) for op in "abc" for dtype in ("f32", "i64")]
    assert [v.state for v in verdicts] == ["native", "native", "crash", "native", "native", "native"]
    assert verdicts[2].why == "exit status -11: "
    assert processes.started == 3  # two batches, and the rest of the first
    assert {k: n for k, n in audit.count_by_dtype(verdicts)["f32"].items() if n} == {"native": 2, "crash": 1}


def test_a_device_that_does_not_load_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        audit, "_read_sweep_lines", lambda *a, **k: ([], "exit status 1: No module named torch_nothing")
    )

    class Project:
        package = tmp_path / "torch_nothing"

    with pytest.raises(BackendError, match="sweep over the device cannot start"):
        list(audit.run_sweep(Project(), ["add"], ["f32"]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"native": ["aten::add.out"]}, "native"),
        ({"native": ["aten::add.out"], "fallback": {"aten::erfc.out": {"unregistered": 1}}}, "mixed"),
        ({"fallback": {"aten::erfc.out": {"unregistered": 1}}}, "fallback"),
        ({}, "core"),
        ({"native": ["aten::add.out"], "failure": "AssertionError: 1 for 2", "refused": "no"}, "fail"),
        ({"native": ["aten::add.out"], "refused": "NotImplementedError: sparse"}, "refused"),
        ({"samples": 0, "skipped": "Only runs on cuda"}, "left"),
    ],
)
def test_verdicts(changes: dict[str, Any], state: str) -> None:
    assert audit._parse_verdict({"op": "x", "dtype": "f32", **row(**changes)}).state == state
