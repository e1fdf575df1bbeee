"""Every cheat is refused, and honest kernels are not."""

from pathlib import Path

import pytest

import shiplap as sl
from shiplap.sandbox.supervisor import Bounds
from shiplap_testing.effort import sampled
from tests.judge.cheats import CHEATS, HEAD

REFERENCE = """
import torch
def reference(x, w):
    return torch.tanh((x @ w) / 5.0) * 5.0
def get_inputs():
    return [torch.rand(96, 128) / 4, torch.rand(128, 64) / 4]
"""
BOUNDS = Bounds(memory=1 << 29)

HONEST = {
    "in place": "candidate = honest\n",
    "blocked": """
def candidate(x, w):
    return torch.cat([honest(part, w) for part in x.split(32)])
""",
    "einsum with float64": """
def candidate(x, w):
    return (torch.einsum("ik,kj->ij", x.double(), w.double()) / 5).tanh().mul(5).float()
""",
    "numpy": """
import numpy
def candidate(x, w):
    return torch.from_numpy(numpy.tanh(x.numpy() @ w.numpy() / numpy.float32(5)) * numpy.float32(5))
""",
    "transposed": """
def candidate(x, w):
    return (w.t() @ x.t()).t().div(5.0).tanh().mul(5.0)
""",
}


@pytest.fixture
def judged(launcher, tmp_path):
    (tmp_path / "problem.py").write_text(REFERENCE)

    def run(text: str, **options):
        folder = tmp_path / "candidate"
        folder.mkdir(exist_ok=True)
        (folder / "it.py").write_text(HEAD + text)
        rest = {"seconds": 60, "rounds": 5, "bounds": BOUNDS, **options}
        return sl.judge(tmp_path / "problem.py", folder / "it.py", launcher=launcher, **rest)

    return run


@pytest.mark.parametrize("name", sampled(CHEATS, len(CHEATS) // 12))
def test_a_cheat_is_refused(judged, name):
    result = judged(CHEATS[name])
    assert result.verdict == "refused", result
    assert result.speedup == result.min_speedup == 0.0


@pytest.mark.long  # make test judges an honest one in test_stages.py
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_kernel_is_accepted(judged, name, timed):
    """A machine that does much else may leave a time without a number; that is no reason against the kernel."""
    result = judged(HONEST[name], rounds=5, timed=timed)
    assert not result.reasons, result
    assert all(what.startswith("time of") for what, _ in result.missing), result
    assert result.verdict == ("incomplete" if result.missing else "accepted"), result
    assert result.calls > 100
    assert not timed or result.missing or 0 < result.min_speedup < result.speedup


def test_a_file_that_a_cheat_may_not_write_is_not_there(judged, tmp_path):
    judged(CHEATS["beside itself"])
    # Python keeps the compiled problem beside its source unless the environment forbids it.
    kept = {p.name for p in Path(tmp_path).rglob("*") if "__pycache__" not in p.parts}
    assert kept == {"candidate", "it.py", "problem.py"}


def test_a_device_that_the_sandbox_does_not_reach_is_incomplete_and_not_refused(judged):
    """No value of ``meta`` can be read, as none of a GPU that a locked process may not open."""
    result = judged(HONEST["in place"], device="meta")
    assert result.verdict == "incomplete", result
    assert "the sandboxed process cannot use meta" in dict(result.missing)["device"]
    assert not result.reasons
