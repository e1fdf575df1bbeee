"""Defects beyond small plain samples: each is flagged, and its sound twin is not."""

from __future__ import annotations

import pytest

from shiplap.audit import audit
from shiplap.audit.checks.process import PROCESS_SETTINGS
from shiplap_testing.effort import sampled
from shiplap_testing.zoo import power_gradient, power_places
from shiplap_testing.zoo.power import PAIRS

SEED = 20261122
LONG = (
    "sum in 16 bits",
    "product with three large dims",
    "elements past two to the 20",
    "config that is not chosen",
    "tail of a split sum",
    "maximum without column 128",
    "columns past 256",
    "gradient of a bias added up in 16 bits",
    "wrong beyond the grain",
    "fails at exactly 1000",
    "more coefficients than three",
    "softmax of a masked row",
    "variance of squares",
    "negative shift",
    "infinity clamped",
    "bias of channels last",
    "a mode left out",
    "gradient past 128",
    "kernel behind supports",
    "noise above 512",
    "negative zero",
    "gradient of ties",
    "mask of two among three",
    "k cut at 64",
)
assert power_gradient.M is not None  # they add to PAIRS
assert power_places.Image is not None


@pytest.fixture(autouse=True)
def settings():
    """What a defect changes is set back: where autograd does not work in forks, the audit runs in this process."""
    before = [(write, read()) for _, read, write, _ in PROCESS_SETTINGS]
    yield
    for write, value in before:
        write(value)


@pytest.mark.parametrize("pair", sampled(PAIRS, 2, long=LONG), ids=str)
def test_a_defect_is_flagged(pair):
    (finding,) = audit(pair.bad, checks=[pair.flagged_by], seed=SEED, budget=600)
    assert finding.verdict == "fail", finding


@pytest.mark.parametrize("pair", sampled(PAIRS, 1, long=LONG), ids=str)
def test_its_twin_is_not_flagged(pair):
    (finding,) = audit(pair.twin, checks=[pair.flagged_by], seed=SEED, budget=600)
    assert finding.verdict == "ok", finding
