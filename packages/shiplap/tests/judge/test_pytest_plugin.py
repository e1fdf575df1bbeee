"""The marker and the fixtures, in a session of pytest of their own."""

import subprocess
import sys

import pytest

from shiplap_testing.forked import WITH_VERBS, python

pytest_plugins = ["pytester"]

KERNELS = """
import torch
def reference(x):
    return torch.relu(x) * 2
def good(x):
    return x.clamp_min(0).mul_(2)
def get_inputs():
    return [torch.randn(12, 16)]
"""
TESTS = """
import pytest
from shiplap.judge import checks, engine
checks.LATE_CALLS = 128
checks.ENDURANCE_CALLS = engine.ENDURANCE_CALLS = 40

@pytest.mark.judge("ref.py:reference", "good.py:candidate", "bad.py:candidate", seconds=240, rounds=5)
def test_kernels(judged):
    assert judged.min_speedup > 0

def test_function(shiplap_judge):
    assert shiplap_judge("ref.py:reference", "bad.py:candidate", timed=False).verdict == "refused"

def test_no_marker(judged):
    pass
"""


@pytest.fixture
def session(pytester):
    pytester.makepyfile(
        ref=KERNELS,
        good="def candidate(x):\n    return x.clamp_min(0).mul_(2)\n",
        bad="def candidate(x):\n    return x.mul(2)\n",
        test_them=TESTS,
    )
    return pytester


def test_a_function_judges_and_the_marker_is_missed(session):
    command = "-m", "pytest", "-p", "no:cacheprovider", "-v", "-rA", "-k", "not kernels"
    done = python(*command, cwd=session.path, imported=WITH_VERBS)
    pytest.LineMatcher(done.stdout.splitlines()).fnmatch_lines_random(
        ["PASSED test_them.py::test_function", "*SL312:*"]
    )


@pytest.mark.long
def test_a_marked_test_passes_when_its_kernel_is_accepted(session):
    done = python("-m", "pytest", "-p", "no:cacheprovider", "-v", "-rA", cwd=session.path, imported=WITH_VERBS)
    lines = done.stdout.splitlines()
    counts = pytest.RunResult.parse_summary_nouns(lines)
    counts.pop("warnings", 0)  # a fork has modules whose assertions pytest would have rewritten
    assert counts == {"passed": 2, "errors": 2}, done.stdout + done.stderr
    pytest.LineMatcher(lines).fnmatch_lines_random(
        [
            "PASSED test_them.py::test_kernels[[]good.py:candidate]",
            "ERROR test_them.py::test_kernels[[]bad.py:candidate]*",
            "*bad.py:candidate: refused*",
            "PASSED test_them.py::test_function",
            "*SL312:*",
        ]
    )


def test_the_marker_is_known(session):
    session.runpytest_subprocess("--markers").stdout.fnmatch_lines(["*judge(reference,*"])


def test_who_does_not_use_the_plugin_does_not_pay_for_torch():
    code = "import sys, shiplap_pytest; sys.exit('torch' in sys.modules or 'shiplap' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
