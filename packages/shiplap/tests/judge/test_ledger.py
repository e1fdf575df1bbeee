"""What a judgement has not looked at makes its verdict incomplete, and has a name."""

from __future__ import annotations

import pytest

import shiplap as sl
from shiplap.judge import JudgeOptions
from shiplap.sandbox.supervisor import Bounds

START = "import torch\nfrom torch import nn\nF = nn.functional\n"
NORM = (
    START
    + """
class Model(nn.Module):
    def __init__(self, width):
        super().__init__(); self.ln = nn.LayerNorm(width)
    def forward(self, x): return self.ln(x)
def get_init_inputs(): return [32]
def get_inputs(): return [torch.randn(8, 32)]
"""
)
WITHOUT_WEIGHTS = (
    START
    + """
class ModelNew(nn.Module):
    def __init__(self, width): super().__init__()
    def forward(self, x):
        v, m = torch.var_mean(x, 1, unbiased=False, keepdim=True)
        return (x - m) * torch.rsqrt(v + 1e-5)
"""
)
MASKED = (
    START
    + """
def reference(x, mask): return torch.where(mask, x, 0) @ torch.ones(x.shape[1], x.shape[1])
def get_inputs(): return [torch.randn(16, 12), torch.ones(16, 12, dtype=torch.bool)]
"""
)
WITHOUT_MASK = START + "def candidate(x, mask): return x @ x.new_ones(x.shape[1], x.shape[1])\n"
OPTIONAL = (
    START
    + """
def reference(x, bias=None): return torch.relu(x if bias is None else x + bias)
def get_inputs(): return [torch.randn(16, 12), None]
"""
)
WITHOUT_BIAS = START + "def candidate(x, bias=None): return torch.where(x > 0, x, x * 0)\n"


@pytest.fixture
def judged(launcher, tmp_path):
    (tmp_path / "candidate").mkdir()

    def run(reference, text, **options):
        (tmp_path / "problem.py").write_text(reference)
        (tmp_path / "candidate" / "it.py").write_text(text)
        rest = {"seconds": 60, "rounds": 5, "bounds": Bounds(), "timed": False, **options}
        return sl.judge(tmp_path / "problem.py", tmp_path / "candidate" / "it.py", launcher=launcher, **rest)

    return run


def test_a_candidate_without_the_parameters_of_the_reference_is_not_accepted(judged):
    result = judged(NORM, WITHOUT_WEIGHTS)
    assert result.verdict == "incomplete", result
    assert "name its parameters as the reference does" in dict(result.missing)["parameters"]


def test_a_mask_that_is_always_true_is_varied(judged):
    result = judged(MASKED, WITHOUT_MASK)
    assert result.verdict == "refused", result
    assert "other flags in tensors" in result.reasons[0].input


def test_an_argument_that_is_always_none_makes_the_verdict_incomplete(judged):
    result = judged(OPTIONAL, WITHOUT_BIAS)
    assert result.verdict == "incomplete", str(result)
    assert "argument 1 is always None" in dict(result.missing)["absence"]


def test_the_ledger_names_what_was_looked_at(judged):
    result = judged(
        MASKED, START + "def candidate(x, mask): return (x * mask).sum(1, keepdim=True).repeat(1, x.shape[1])\n"
    )
    cells = {str(c): c for c in result.ledger if c.required}
    assert result.verdict == "accepted", result
    left_out = {name for name, c in cells.items() if c.state == "does not apply"}
    assert left_out == {"scalar x value", "absence x value"}, "it has no plain and no optional argument"
    assert {c.state for name, c in cells.items() if name not in left_out} == {"covered"}
    assert cells["order of calls x value"].samples >= 1
    assert result.as_json()["ledger"]
    assert JudgeOptions().vary_shapes


@pytest.mark.long
def test_shapes_that_the_caller_does_not_ask_for_do_not_apply(judged):
    result = judged(
        MASKED,
        START + "def candidate(x, mask): return (x * mask).sum(1, keepdim=True).expand_as(x).clone()\n",
        vary_shapes=False,
    )
    (cell,) = [c for c in result.ledger if str(c) == "size x value"]
    assert (cell.state, cell.reason) == ("does not apply", "the caller asks for the shapes of the inputs alone")
