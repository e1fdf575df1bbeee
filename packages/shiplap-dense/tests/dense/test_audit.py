"""Every dense op passes its audit: all of it for ``mm`` and ``conv2d``, for the others all but what compiles graphs.

Those are the same templates with another index; tests/fuse compiles them. ``SHIPLAP_TEST_AUDITS=all`` is all for all.
"""

from __future__ import annotations

import os

import pytest

import shiplap as sl
from shiplap.audit import CHECKS
from shiplap_dense import ops

WHOLE = ops.__all__ if os.environ.get("SHIPLAP_TEST_AUDITS") == "all" else ("mm", "conv2d")
COMPILES = {"compile", "opcheck", "requires_grad"}


@pytest.mark.parametrize("name", ops.__all__)
def test_a_dense_op_passes_its_audit(name):
    checks = [c for c in CHECKS if name in WHOLE or c not in COMPILES]
    findings = sl.audit(getattr(ops, name), checks=checks, budget_s=600)
    assert [f"{f.check}: {f.evidence} [{f.input}]" for f in findings if f.verdict == "fail"] == []
    assert sum(f.verdict == "ok" for f in findings) >= 8
