"""Defects of the later half that an earlier audit missed: each is flagged now, and its sound twin is not."""

from __future__ import annotations

import pytest

from shiplap.audit import audit
from shiplap_testing.defects import defects
from shiplap_testing.effort import sampled

SEED = 20261123
MISSED = {
    "garbage collection left off": "process",
    "environment variable left set": "process",
    "tangent of the second argument alone": "transforms",
    "pooling of sliced channels-last images": "edges",
    "a view of an argument that is returned": "fresh",
    "halves rounded away from zero": "numerics",
    "gradient of a clamp without its ends": "gradient",
}


LONG = ("tangent of the second argument alone", "pooling of sliced channels-last images")


@pytest.mark.parametrize("name", sampled(MISSED, long=LONG))
def test_what_was_missed_is_flagged_and_its_twin_is_not(name):
    defect, check = defects()[name], MISSED[name]
    (finding,) = audit(defect.make_bad(), checks=[check], seed=SEED, budget_s=600)
    assert finding.verdict == "fail", finding
    assert "crashed" not in finding.evidence
    (finding,) = audit(defect.make_good(), checks=[check], seed=SEED, budget_s=600)
    assert finding.verdict == "ok", finding
