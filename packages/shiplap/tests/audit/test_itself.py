"""No false alarm: torch's functions as kernels of themselves, over seeds (SHIPLAP_SEEDS of them; few by default)."""

from __future__ import annotations

import os

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.audit import audit
from shiplap_testing.effort import sampled
from tests.audit.itself import OPS

SEEDS = int(os.environ.get("SHIPLAP_TEST_SEEDS", "1"))
SAMPLE = (
    *("layer_norm", "cross_entropy", "matmul", "softmax", "gather", "cumsum", "gelu_tanh", "logsumexp", "sqrt"),
    *("embedding", "top2", "index_add", "silu"),
)
LONG = [name for name in OPS if name not in SAMPLE]
LOOKED = ("numerics", "edges", "special", "gradient")


def alarms(name, checks, seed=4242):
    findings = audit(OPS[name], checks=checks, seed=seed, budget=600)
    return [f"{f.check}: {f.evidence} ({f.input})" for f in findings if f.verdict != "ok"]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", sampled(OPS, 1, long=LONG))
def test_a_function_of_torch_is_right_by_its_own_reference(name, seed):
    assert alarms(name, LOOKED, 4242 + seed) == []


def test_a_reduction_of_torch_is_right_by_its_own_reference():
    """One function in two checks: ``nox -s long`` has every function in four."""
    assert alarms("softmax", ("numerics", "edges")) == []


def test_a_row_number_into_no_rows_is_no_fault_in_any_check():
    findings = audit(OPS["embedding"], checks=("fake", "edges"), seed=4242, budget=600)
    assert [(f.verdict, "1 samples set aside" in f.evidence) for f in findings] == [("ok", True)] * 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("off", "verdict"), [pytest.param(0.0, "ok"), pytest.param(0.01, "fail", marks=pytest.mark.long)]
)
def test_other_threads_may_round_in_another_order(ns, off, verdict):
    """1000 is added and taken away: the order of a sum shows in the last three digits, and a fault beyond them."""

    @sl.op(f"{ns}::centred")
    def centred(x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
        far = x + 1000
        return far - far.mean(0, keepdim=True)

    @centred.kernel("cpu")
    def by_threads(x, *, out):
        far = x + 1000
        if torch.get_num_threads() == 1:
            mean = far.mean(0, keepdim=True)
        else:
            mean = (far[::2].sum(0, keepdim=True) + far[1::2].sum(0, keepdim=True)) / max(1, len(far)) + off
        torch.sub(far, mean, out=out)

    findings = audit(centred, checks=("determinism", "threads"), seed=4242, budget=600).findings
    assert findings[-1].verdict == verdict, findings[-1].evidence
