"""Every shipped op passes its full audit, on a fresh seed, within a minute of CPU time."""

from __future__ import annotations

import os

import pytest

import shiplap as sl
from shiplap.kernels.sparse3d import bounded, grid_sample, hashing, ops, planning, pooling, postprocess, serialize

MODULES = (bounded, grid_sample, hashing, ops, planning, pooling, postprocess, serialize)
OPS = [value for module in MODULES for name in module.__all__ if isinstance(value := vars(module)[name], sl.Op)]


def worked() -> float:
    """Seconds of this process and its children: other work on the machine does not count."""
    return sum(os.times()[:4])


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.spec.opname)
def test_a_shipped_op_passes_its_full_audit(op):
    began = worked()
    findings = sl.audit(op, budget_s=600)
    assert [f"{f.check}: {f.evidence} [{f.input}]" for f in findings if f.verdict == "fail"] == []
    assert sum(f.verdict == "ok" for f in findings) >= 12
    assert worked() - began < 60
