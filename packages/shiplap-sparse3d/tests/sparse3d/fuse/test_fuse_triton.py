"""The Triton templates of sparse3d without a GPU: each case of ``triton_cases.py`` in Triton's interpreter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shiplap_testing.effort import EFFORTS
from shiplap_testing.forked import interpreted

pytest.importorskip("triton")


@pytest.fixture(scope="module", params=EFFORTS)
def cases(request) -> dict[str, dict]:
    script = Path(__file__).with_name("triton_cases.py")
    done = interpreted(script, request.param)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {case["name"]: case for case in rows}


def test_every_case_is_the_reference(cases, request):
    assert len(cases) >= (25 if request.node.callspec.params["cases"] == "every" else 10)
    assert {name: c["error"] for name, c in cases.items() if not c["error"] <= c["tolerance"]} == {}


def test_what_is_fused(cases):
    """One kernel for a table of one part; partial sums are added by the kernel of the operation that follows."""
    assert len(cases["fused 1"]["kernels"]) == 1
    assert len(cases["fused 3"]["kernels"]) == 2
    assert len(cases["prologue"]["kernels"]) == 1
    assert all(c["chosen"] == ["conv"] for c in cases.values() if "chosen" in c)


def test_a_wrong_template_is_refused(cases):
    assert "wrong" in cases["planted"]["verdicts"]
