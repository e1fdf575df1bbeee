"""Every op passes its audit: all of it for one op of each kind, all but what compiles graphs for the others.

With ``SHIPLAP_TEST_AUDITS=all`` all of it for all; what is left out otherwise is the same code with another dtype.
"""

from __future__ import annotations

import importlib
import os

import pytest

import shiplap as sl
from shiplap.kernels.slidesparse import layers, ops

OPS = [op for module in (ops, layers) for name in module.__all__ if isinstance(op := getattr(module, name), sl.Op)]
WHOLE = OPS if os.environ.get("SHIPLAP_TEST_AUDITS") == "all" else [ops.quantise_fp8, layers.linear_int8]
COMPILES = {"compile", "opcheck", "requires_grad"}


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.spec.opname)
def test_an_op_passes_its_audit(op: sl.Op) -> None:
    checks = [c for c in importlib.import_module("shiplap.audit").CHECKS if op in WHOLE or c not in COMPILES]
    findings = sl.audit(op, checks=checks, budget_s=300)
    assert [f"{f.check}: {f.evidence} [{f.input}]" for f in findings if f.verdict == "fail"] == []
    assert sum(f.verdict == "ok" for f in findings) >= (15 if op in WHOLE else 12)


def test_the_samples_are_not_empty() -> None:
    """An argument ``n`` in whole tiles was once drawn as 0: an audit of nothing passes."""
    verify = importlib.import_module("shiplap.verify.samples")
    for op in OPS:
        case = verify.Samples(op, 0).build(verify.Samples(op, 0).base)
        assert all(size > 0 for name, size in case.env.items() if isinstance(size, int) and name != "layout")
