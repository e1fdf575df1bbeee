"""The sweep survives what it looks for: a crash and a hang cost one operator, not the sweep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shiplap.backend import audit
from shiplap.errors import BackendError


class Processes:
    """Stands for the processes of a sweep: each answers for its operators until the one that kills it."""

    def __init__(self, deadly: str) -> None:
        self.deadly, self.started = deadly, 0

    def __call__(self, project: Any, arguments: list[str], timeout: float = 0) -> tuple[list[str], str]:
        self.started += 1
        lines = []
        for name in arguments[1].split(","):
            lines.append(json.dumps({"start": name, "dtype": "f32"}))
            if name == self.deadly:
                return lines, "exit status -11: "
            row = {"op": name, "dtype": "f32", "samples": 2, "native": ["aten::" + name], "fallback": {}, "failure": ""}
            lines.append(json.dumps(row))
        return lines, ""


def test_a_crash_costs_one_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = Processes("b")
    monkeypatch.setattr(audit, "_lines", processes)
    verdicts = list(audit.audit(None, ["a", "b", "c"], ["f32"]))  # type: ignore[arg-type]
    assert [(v.op, v.state) for v in verdicts] == [("a", "native"), ("b", "crash"), ("c", "native")]
    assert processes.started == 2
    assert audit.table(verdicts) == {"f32": {"crash": 1, "native": 2}}


def test_a_device_that_does_not_load_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "_lines", lambda *a, **k: ([], "exit status 1: No module named torch_nothing"))

    class Project:
        package = tmp_path / "torch_nothing"

    with pytest.raises(BackendError, match="backend cannot be swept"):
        list(audit.audit(Project(), ["add"], ["f32"]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "state"),
    [
        ({"native": ["aten::add.out"], "fallback": {}, "failure": ""}, "native"),
        ({"native": ["aten::add.out"], "fallback": {"aten::erfc.out": {"unregistered": 1}}, "failure": ""}, "mixed"),
        ({"native": [], "fallback": {"aten::erfc.out": {"unregistered": 1}}, "failure": ""}, "fallback"),
        ({"native": [], "fallback": {}, "failure": ""}, "composite"),
        ({"native": ["aten::add.out"], "fallback": {}, "failure": "AssertionError: 1 for 2"}, "fail"),
    ],
)
def test_verdicts(row: dict[str, Any], state: str) -> None:
    assert audit._verdict({"op": "x", "dtype": "f32", "samples": 1, **row}).state == state
