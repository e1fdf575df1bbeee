"""Audits, on the GPU, of every op of slidesparse."""

from __future__ import annotations

import pytest

from shiplap.audit import audit
from shiplap.dispatch import Op
from shiplap_slidesparse import layers, ops
from shiplap_testing.effort import DEVICE_CHECKS
from tests.slidesparse.gpu.cases import CUDA, MARKS
from tests.slidesparse.gpu.cases import sparse as sparse

pytestmark = [*MARKS, pytest.mark.slow]
# fp16 products of cuSPARSELt may end the process: test_slidesparse.py has them in one of their own.
OPS = [v for m in (ops, layers) for v in vars(m).values() if isinstance(v, Op) and "fp16" not in v.spec.opname]
SEED = 20261121
# A quantisation in Triton, a product of cuSPARSELt and a layer that calls both get all checks.
WHOLE = ("quantise_fp8", "sparse_mm_int8", "linear_fp8")
EXPECTED = ("cuda_graph", "workspace", "fake")


@pytest.mark.parametrize("op", list(dict.fromkeys(OPS)), ids=lambda op: op.spec.opname)
def test_no_check_fails(sparse, op):
    checks = None if op.spec.opname in WHOLE else {*DEVICE_CHECKS, *EXPECTED}
    findings = audit(op, checks=checks, seed=SEED, device=CUDA, budget=60)
    for f in findings:
        print(f"{op.spec.opname:16} {f.check:18} {f.verdict:5} {f.evidence[:160]}")
    assert [f"{f.check}: {f.evidence}" for f in findings if f.verdict == "fail"] == []
    assert {f.check for f in findings if f.verdict == "ok"} >= {*EXPECTED}
