"""Every dense op with a gradient passes its full audit."""

from __future__ import annotations

import pytest

import shiplap as sl
from shiplap.kernels.dense import ops


@pytest.mark.parametrize("name", ops.__all__)
def test_a_dense_op_passes_its_audit(name):
    findings = sl.audit(getattr(ops, name), budget_s=600)
    assert [f"{f.check}: {f.evidence} [{f.input}]" for f in findings if f.verdict == "fail"] == []
    assert sum(f.verdict == "ok" for f in findings) >= 8
