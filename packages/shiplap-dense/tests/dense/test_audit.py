"""Every dense op passes its audit: all of it for ``mm``, all but the many sizes for ``conv2d``, which compiles graphs.

Those are the same templates with another index; tests/fuse compiles them. ``SHIPLAP_TEST_AUDITS=all`` is all for all.
"""

from __future__ import annotations

import os

import pytest

import shiplap as sl
from shiplap.audit import CHECKS
from shiplap_dense import losses, ops
from shiplap_testing.effort import sampled

ALL = os.environ.get("SHIPLAP_TEST_AUDITS") == "all"
WHOLE = ops.__all__ if ALL else ("mm", "conv2d")
COMPILES = {"compile", "opcheck", "requires_grad"}
LONG = {"sizes", "kernels"}
BMM = "bmm"  # the op of make test, without the two checks that take most of its time
DEAR = ("special", "gradient")
LATER = ("large", "transforms", "sharding")  # in nox -s long alone, as DEAR


@pytest.mark.parametrize("name", sampled(ops.__all__, long=("conv2d", "grouped_mm", "int8_mm", "mm")))
def test_a_dense_op_passes_its_audit(name):
    op = getattr(ops, name)
    checks = [c for c in CHECKS if (name in WHOLE or c not in COMPILES) and (name == "mm" or ALL or c not in LONG)]
    if name == BMM and not ALL:
        checks = [c for c in checks if c not in (*DEAR, *LATER)]
    if not op.kernels.get("cpu"):  # those for a GPU do not run here
        checks = [c for c in checks if c != "kernels"]
    report = sl.audit(op, checks=checks, budget=600)
    assert report.proven, str(report)
    assert sum(f.verdict == "ok" for f in report) >= 8


@pytest.mark.long
def test_the_checks_that_the_op_is_audited_without():
    checks = ["numerics", "determinism", *DEAR]
    report = sl.audit(getattr(ops, BMM), checks=[*checks, *LATER], budget=600)
    assert report.proven, str(report)
    verdicts = {f.check: f.verdict for f in report}
    assert [verdicts[check] for check in DEAR] == ["ok", "ok"], verdicts


LOSSES = ("linear_cross_entropy", "linear_cross_entropy_gradients", "linear_cross_entropy_with_gradients")


@pytest.mark.long
@pytest.mark.parametrize("name", LOSSES)
def test_an_op_of_a_loss_passes_its_audit(name):
    checks = [c for c in CHECKS if ALL or c not in LONG | COMPILES | {"transforms", "sharding", "large"}]
    report = sl.audit(getattr(losses, name), checks=checks, budget=600)
    assert report.proven, str(report)
