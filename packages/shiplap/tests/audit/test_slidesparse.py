"""The three faults of SlideSparse's repository that users met: each is caught, the first without a GPU."""

from __future__ import annotations

import pytest

from shiplap.audit import audit, sample
from shiplap.audit.checks import fake
from shiplap_testing.zoo import gpu, stateful
from shiplap_testing.zoo.bad import compiler
from tests.audit.common import look


def promised(k, length):
    case = sample(compiler.slide, f"sizes(n=2, k={k}), scalars(L={length}), dtypes(Float='float32')", 1)
    return fake.CHECK.look(compiler.slide, case).problem


@pytest.mark.parametrize(("k", "length", "real", "wrong"), [(112, 12, 224, 192), (16, 14, 64, 32)])
def test_fake_and_real_disagree_on_sizes(k, length, real, wrong):
    assert f"shape (2, {real}) is real, (2, {wrong}) is promised" in promised(k, length)


@pytest.mark.parametrize(("k", "length"), [(96, 12), (112, 14), (112, 8)])
def test_where_they_agree_nothing_is_said(k, length):
    assert promised(k, length) == ""


@pytest.mark.long
def test_generated_samples_find_it_without_being_told_where():
    """No seed knows of 112: the sizes that every op is tried on are enough."""
    for seed in range(3):
        assert look(compiler.slide, "fake", seed).verdict == "fail"


@pytest.mark.parametrize("name", ["C: workspace of the process", "C: plan cache in a static array"])
def test_workspace_and_plan_cache_show_in_the_library_without_a_gpu(name):
    (specimen,) = (s for s in stateful.SPECIMENS if s.name == name)
    (finding,) = audit(specimen.op, checks=["stateless"], seed=1)
    assert finding.verdict == "fail"


def test_workspace_and_plan_cache_are_in_the_zoo_of_graphs():
    """What they do under replay is in tests/gpu."""
    says = {s.name: gpu.EVIDENCE[s.name] for s in gpu.BAD}
    assert says["workspace replaced by a larger one"] == "memory that was freed"
    assert says["plan cache filled during capture"] == "recorded but not computed"
