"""A device with memory and streams of its own: the example is built, and the files `discrete_*.py` run on it.

They run in a process of its own, since a process has one generated device, and touching the device's memory ends it.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shiplap_backend import audit
from tests.backend.examples import DISCRETE, built

pytestmark = pytest.mark.long  # building the device takes a minute; tests of the other runtimes are the sample

CASES = [
    Path(__file__).with_name(name) for name in ("discrete_cases.py", "discrete_models.py", "discrete_operators.py")
]
NAMES = [
    node.name
    for path in CASES
    for node in ast.parse(path.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> tuple[dict[str, set[str]], str]:
    """The outcomes of each case's parameters by the case's name, and what pytest printed."""
    project = built(request.config, "discrete", DISCRETE)
    options = ("-q", "-rA", "-p", "no:cacheprovider", "-n", "0", "--tb=short")
    command = [sys.executable, "-m", "pytest", *options, *map(str, CASES)]
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "SHIPLAP_DISCRETE_PROJECT": str(project.root)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    by_name: dict[str, set[str]] = {}
    for outcome, name in re.findall(r"^(PASSED|FAILED|ERROR) \S*::(test_\w+)", run.stdout, re.M):
        by_name.setdefault(name, set()).add(outcome)
    return by_name, run.stdout[-20000:] + run.stderr[-5000:]


@pytest.mark.parametrize("name", NAMES)
def test_case(outcomes: tuple[dict[str, set[str]], str], name: str) -> None:
    by_name, printed = outcomes
    assert by_name.get(name) == {"PASSED"}, printed


def test_the_database_of_operators(request: pytest.FixtureRequest) -> None:
    """Every operator in float32, in processes that may crash: the memory faults where the host touches it."""
    project = built(request.config, "discrete", DISCRETE)
    verdicts = list(audit.audit(project, audit.operators(project), ["f32"], samples=1))
    assert [v for v in verdicts if v.state in ("fail", "crash")] == []
    assert sum(v.samples > 0 for v in verdicts) >= 400
