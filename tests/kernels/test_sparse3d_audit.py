"""Every shipped op passes its full audit, on a fresh seed, within a minute."""

from __future__ import annotations

import time

import pytest

import shiplap as sl
from shiplap.kernels.sparse3d import bounded, grid_sample, hashing, ops, planning, pooling, postprocess, serialize

MODULES = (bounded, grid_sample, hashing, ops, planning, pooling, postprocess, serialize)
OPS = [value for module in MODULES for name in module.__all__ if isinstance(value := vars(module)[name], sl.Op)]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.spec.opname)
def test_a_shipped_op_passes_its_full_audit(op):
    began = time.monotonic()
    findings = sl.audit(op)
    assert [f"{f.check}: {f.evidence} [{f.input}]" for f in findings if f.verdict == "fail"] == []
    assert sum(f.verdict == "ok" for f in findings) >= 12
    assert time.monotonic() - began < 60
