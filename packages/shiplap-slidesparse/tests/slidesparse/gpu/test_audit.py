"""The audit of every slidesparse op on a GPU, all checks. Long: ``-n 8`` and one op a worker, or ``-k`` one op."""

from __future__ import annotations

import pytest

from shiplap.audit import audit
from shiplap.dispatch import Op
from shiplap_slidesparse import layers, ops
from tests.slidesparse.gpu.cases import CUDA, MARKS
from tests.slidesparse.gpu.cases import sparse as sparse

pytestmark = [*MARKS, pytest.mark.slow]
# fp16 products of cuSPARSELt may end the process: test_slidesparse.py has them in one of their own.
OPS = [v for m in (ops, layers) for v in vars(m).values() if isinstance(v, Op) and "fp16" not in v.spec.opname]
SEED = 20261121


@pytest.mark.parametrize("op", list(dict.fromkeys(OPS)), ids=lambda op: op.spec.opname)
def test_no_check_fails(sparse, op):
    findings = audit(op, seed=SEED, device=CUDA, budget=60)
    for f in findings:
        print(f"{op.spec.opname:16} {f.check:18} {f.verdict:5} {f.evidence[:160]}")
    assert [f"{f.check}: {f.evidence}" for f in findings if f.verdict == "fail"] == []
    assert {f.check for f in findings if f.verdict == "ok"} >= {"cuda_graph", "workspace", "fake"}
