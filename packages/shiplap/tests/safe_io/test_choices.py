"""Attacks through a table of choices: no config that a kernel does not declare reaches it."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.declare.config import Config
from shiplap.dispatch import tuned_choices
from shiplap.errors import ShiplapNotice
from shiplap.tuning import thaw
from shiplap_testing.effort import sampled

UNDECLARED = [
    {},
    {"tile": 0},
    {"tile": -4},
    {"tile": 2**70},
    {"tile": 2**63 - 1},
    {"tile": 3},
    {"tile": "2"},
    {"tile": 2.5},
    {"Tile": 2},
    {"tile": 2, "more": 1},
    {"tile": float("nan")},
]


@pytest.fixture
def op(ns):
    """An op whose kernels say with which tile they were run."""

    @sl.op(f"{ns}::told")
    def told(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return torch.zeros_like(x)

    @told.kernel("cpu", name="plain")
    def plain(x):
        return x + 0.5

    @told.kernel("cpu", name="fixed", configs=[{"tile": 1}, {"tile": 2}])
    def fixed(x, *, tile):
        assert type(tile) is int
        return x + tile

    @told.kernel("cpu", name="derived", configs=lambda sizes: [{"tile": 100}, {"tile": 100 + sizes["n"]}])
    def derived(x, *, tile):
        assert type(tile) is int
        return x + tile

    thaw()
    yield told
    thaw()


def force(op, kernel, config, n=4):
    call = op.bind([torch.zeros(n)])
    key = ("cpu", *op.rule.key(call))
    tuned_choices.install_choice_entries(
        [tuned_choices.ChoiceEntry(op.spec.name, op.identity, key, kernel, Config.of(config))]
    )


def ran(op, n=4):
    return float(op(torch.zeros(n))[0])


@pytest.mark.parametrize("config", sampled(UNDECLARED, 4), ids=str)
@pytest.mark.parametrize("kernel", ["fixed", "derived"])
def test_an_undeclared_config_is_ignored_and_said(op, kernel, config):
    force(op, kernel, config)
    with pytest.warns(ShiplapNotice, match=f"a stored choice is not used: kernel {kernel} declares no config"):
        assert ran(op) == 100, "the declared default of the kernel that is tried first"


def test_a_config_of_a_kernel_without_any_is_ignored(op):
    force(op, "plain", {"tile": 1})
    with pytest.warns(ShiplapNotice, match="kernel plain declares no config"):
        assert ran(op) == 100
    force(op, "plain", {})
    assert ran(op) == 0.5


def test_a_declared_config_serves_with_its_declared_type(op):
    for written in (2, 2.0):
        force(op, "fixed", {"tile": written})
        assert ran(op) == 2
    force(op, "fixed", {"tile": True})
    assert ran(op) == 1


def test_a_derived_config_serves_the_sizes_that_declare_it(op):
    force(op, "derived", {"tile": 104})
    assert ran(op, 4) == 104
    with pytest.warns(ShiplapNotice, match="for these sizes"):
        assert ran(op, 3) == 100, "of the same bucket, and no config of its own"
    assert ran(op, 4) == 104


def test_a_key_of_another_length_meets_no_call(op):
    for key in (("cpu",), ("cpu", 4), ("cpu", 4, "Float=float32", "c", "c"), ()):
        if key:
            tuned_choices.install_choice_entries(
                [tuned_choices.ChoiceEntry(op.spec.name, op.identity, key, "fixed", Config.of({"tile": 2}))]
            )
    assert ran(op) == 100
