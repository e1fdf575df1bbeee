"""Defects of the later half that an earlier audit missed: each is flagged now, and its sound twin is not."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.audit import audit
from shiplap.audit.checks.threads import INTERPRETER_MODULE
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
    "vmap rule that moves the batch of the first argument only": "transforms",
    "all parts as long as the first": "special",
}


LONG = (
    "tangent of the second argument alone",
    "pooling of sliced channels-last images",
    "all parts as long as the first",
    "gradient of a clamp without its ends",
)


@pytest.mark.parametrize("name", sampled(MISSED, long=LONG))
def test_what_was_missed_is_flagged(name):
    (finding,) = audit(defects()[name].make_bad(), checks=[MISSED[name]], seed=SEED, budget=600)
    assert finding.verdict == "fail", finding
    assert "crashed" not in finding.evidence


@pytest.mark.parametrize("name", sampled(MISSED, 1, long=LONG))
def test_its_twin_is_not_flagged(name):
    (finding,) = audit(defects()[name].make_good(), checks=[MISSED[name]], seed=SEED, budget=600)
    assert finding.verdict == "ok", finding


def test_no_threads_are_started_for_what_tritons_interpreter_runs(ns, monkeypatch):
    """Not even where the launcher finds its kernel by way of another module."""
    stand_in = ModuleType(INTERPRETER_MODULE)
    exec("def launch(x, out):\n    out.copy_(x * 2)", vars(stand_in))
    monkeypatch.setitem(sys.modules, INTERPRETER_MODULE, stand_in)

    @sl.op(f"{ns}::doubled")
    def doubled(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 2

    @doubled.kernel("cpu")
    def _(x, *, out):
        vars(sys.modules[INTERPRETER_MODULE])["launch"](x, out)

    (finding,) = audit(doubled, checks=["threads"], seed=SEED)
    assert finding.verdict == "skip", finding
    assert "one thread" in finding.evidence
