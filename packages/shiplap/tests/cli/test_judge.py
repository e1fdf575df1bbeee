"""``shiplap judge``: words, exit statuses, JSON and a page."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from shiplap.judge import checks

REFERENCE = """
import torch
class Model(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.linear = torch.nn.Linear(n, 8)
    def forward(self, x):
        return torch.relu(self.linear(x))
def get_inputs():
    return [torch.randn(12, 16)]
def get_init_inputs():
    return [16]
"""
CANDIDATE = """
import torch
class ModelNew(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.linear = torch.nn.Linear(n, 8)
    def forward(self, x):
        return (x @ self.linear.weight.t()).add_(self.linear.bias).clamp_(min=LEAST)
"""


@pytest.fixture
def files(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(checks, "LATE_CALLS", 128)  # as for the tests of the judge
    (tmp_path / "ref.py").write_text(REFERENCE)
    (tmp_path / "good.py").write_text(CANDIDATE.replace("LEAST", "0"))
    (tmp_path / "bad.py").write_text(CANDIDATE.replace("LEAST", "-1"))
    return tmp_path


@pytest.mark.long
def test_a_class_with_parameters_is_accepted_as_json_and_as_a_page(run: Any, files: Any) -> None:
    page = files / "page.html"
    options = "--seconds", "60", "--rounds", "5", "--json", "--html", str(page)
    result = run("judge", str(files / "ref.py"), str(files / "good.py"), *options)
    verdict = json.loads(result.stdout)
    assert (result.exit_code, verdict["verdict"]) == (0, "accepted"), verdict
    assert all(t["rounds"] == 5 * t["batch"] for t in verdict["timings"]), "calls of five rounds, in batches"
    assert verdict["speedup"] > verdict["min_speedup"] > 0
    assert "good.py: accepted" in page.read_text()


def test_a_wrong_one_is_refused_with_the_input(run: Any, files: Any) -> None:
    result = run("judge", str(files / "ref.py"), str(files / "bad.py"), "--seconds", "30")
    assert result.exit_code == 1
    assert re.match(r"bad.py: refused\n  values +fail +result 0: \[", result.stdout), result.stdout
    assert "on 12x16 drawn" in result.stdout


@pytest.mark.long
def test_one_file_for_both_is_incomplete(run: Any, files: Any) -> None:
    (files / "both.py").write_text(REFERENCE + CANDIDATE.replace("LEAST", "0"))
    both = str(files / "both.py")
    result = run("judge", both, both + ":ModelNew", "--seconds", "60", "--rounds", "5")
    assert result.exit_code == 3, result.stdout
    assert re.search("separation +incomplete ", result.stdout)


@pytest.mark.parametrize(
    ("text", "id"),
    [
        ("x = 1\n", "SL501: the target has no reference of this name"),
        ("def reference(x):\n    return x\n", "SL615"),
        ("1 / 0\n", "SL601"),
    ],
)
def test_a_reference_that_cannot_be_used_is_an_error(run: Any, files: Any, text: str, id: str) -> None:
    (files / "ref.py").write_text(text)
    result = run("judge", str(files / "ref.py"), str(files / "good.py"))
    assert result.exit_code == 2
    assert result.stderr.startswith(id)


def test_a_reference_that_fails_on_its_inputs_is_an_error(run: Any, files: Any) -> None:
    text = "import torch\ndef reference(x):\n    return x @ x\ndef get_inputs():\n    return [torch.ones(2, 3)]\n"
    (files / "ref.py").write_text(text)
    result = run("judge", str(files / "ref.py"), str(files / "good.py"))
    assert result.stderr.startswith("SL616")
