"""No false alarm: torch's functions as kernels of themselves, over seeds (SHIPLAP_SEEDS of them; few by default)."""

from __future__ import annotations

import os

import pytest

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


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("name", sampled(OPS, long=LONG))
def test_a_function_of_torch_is_right_by_its_own_reference(name, seed):
    findings = audit(OPS[name], checks=LOOKED, seed=4242 + seed, budget_s=600)
    assert [f"{f.check}: {f.evidence} ({f.input})" for f in findings if f.verdict != "ok"] == []
