"""A device with memory and streams of its own: the example is built, and the files `discrete_*.py` run on it.

They run in a process of its own, since a process has one generated device, and touching the device's memory ends it.
So do the tests that are written for OpenVINO's device and ask nothing of OpenVINO: on the example with memory of its
own, and on the one that shares the host's.
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
from tests.backend.conftest import OF_OPENVINO, OF_SHARED_MEMORY
from tests.backend.examples import DISCRETE, EXAMPLE, built
from tests.backend.profiling import NO_KERNELS

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


OF_A_DEVICE = [Path(__file__).with_name(name) for name in ("runtime", "test_modules.py", "test_defects.py")]
# What a test may say for not running there: what it asks for is another device's, and its counterpart is in CASES.
REASONS = {OF_OPENVINO, OF_SHARED_MEMORY, NO_KERNELS}


@pytest.mark.parametrize(("name", "example", "least"), [("tinyc", EXAMPLE, 250), ("discrete", DISCRETE, 240)])
def test_tests_that_need_no_openvino(request: pytest.FixtureRequest, name: str, example: Path, least: int) -> None:
    project = built(request.config, name, example)
    options = ("-q", "-rfEs", "-p", "no:cacheprovider", "-n", "0", "--tb=short", "-m", "long or not long")
    options += ("--ignore", str(OF_A_DEVICE[0] / "test_native.py"))  # all of OpenVINO's metadata
    command = [sys.executable, "-m", "pytest", *options, *map(str, OF_A_DEVICE)]
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "SHIPLAP_BACKEND_EXAMPLE": str(project.root)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-20000:] + run.stderr[-5000:]
    reasons = set(re.findall(r"^SKIPPED \[\d+\] [^ ]+: (.*)$", run.stdout, re.M))
    assert {r for r in reasons if not r.startswith("could not import")} <= REASONS
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed
    assert int(passed[1]) >= least


def test_the_database_of_operators(request: pytest.FixtureRequest) -> None:
    """Every operator in float32, in processes that may crash: the memory faults where the host touches it."""
    project = built(request.config, "discrete", DISCRETE)
    verdicts = list(audit.run_sweep(project, audit.operator_names(project), ["f32"], samples=1))
    assert [v for v in verdicts if v.state in ("fail", "crash")] == []
    assert sum(v.samples > 0 for v in verdicts) >= 400
