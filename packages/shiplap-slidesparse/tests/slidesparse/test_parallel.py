"""Weights cut for the ranks of a tensor-parallel group: the rule, its refusals, and (slow) two ranks at work."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import shiplap_slidesparse as slidesparse
from shiplap.errors import ShiplapError
from shiplap_slidesparse import formats
from shiplap_slidesparse.parallel import cut, planned
from shiplap_testing.paths import REPOSITORY


def block(pattern: str = "6:8", mode: str = "int8") -> nn.Module:
    torch.manual_seed(1)
    model = nn.ModuleDict({"up": nn.Linear(16, 48), "down": nn.Linear(48, 20), "head": nn.Linear(20, 6)})
    slidesparse.convert(model, pattern, mode, skip=("head",))
    return model


PLAN = {"up": "colwise", "down": "rowwise", "head": "colwise_gather_output"}


@pytest.mark.parametrize("mode", ["int8", "bf16"])
def test_parts_are_those_of_the_whole_and_of_the_pattern(mode):
    whole = block(mode=mode)
    ranks = [copy.deepcopy(whole) for _ in range(3)]
    for rank, model in enumerate(ranks):
        cuts = planned(model, PLAN, 3)
        assert [(c.name, c.style, c.unit) for c in cuts] == [("up", "colwise", 1), ("down", "rowwise", 8)]
        for each in cuts:
            cut(each, rank, 3)
        assert model["up"].fresh
        assert model["down"].fresh
    for name, dim in (("up", 0), ("down", 1)):
        assert torch.equal(torch.cat([m[name].weight.float() for m in ranks], dim), whole[name].weight.float())
    windows = torch.cat([formats.slide(m["down"].weight, "6:8")[:, :24] for m in ranks], 1)  # k' is 32 with padding
    assert torch.equal(windows, formats.slide(whole["down"].weight, "6:8")[:, :72])
    x = torch.randn(4, 16)
    assert torch.equal(torch.cat([m["up"](x) for m in ranks], 1), whole["up"](x))
    assert [m["down"].bias is None for m in ranks] == [False, True, True]


@pytest.mark.parametrize(
    ("plan", "world", "reason"),
    [
        ({"down": "rowwise"}, 4, r"shard: down(.|\n)*48 columns for 4 ranks(.|\n)*as many whole groups of 8 on each"),
        ({"up": "colwise"}, 5, r"shard: up(.|\n)*48 features of the output for 5 ranks"),
        ({"up": "sequence_parallel"}, 2, r"shard: up(.|\n)*style 'sequence_parallel'(.|\n)*colwise, rowwise"),
        ({"gate": "colwise"}, 2, r"cuts no linear layer: \{'gate': 'colwise'\}"),
    ],
    ids=["groups", "rows", "style", "nothing"],
)
def test_what_cannot_be_cut_is_named_before_anything_is(plan, world, reason):
    with pytest.raises(ShiplapError, match=rf"SL211(.|\n)*{reason}"):
        planned(block(), plan, world)


def test_layers_that_take_and_give_all_features_stay_whole():
    """As GLM-4's plan has them: the output of one is gathered, and the next takes its part of it."""
    plan = {"up": "colwise_gather_output", "down": "rowwise_split_input", "head": "colwise"}
    assert [c.name for c in planned(block(), plan, 2)] == ["head"]


def test_names_are_wildcards_as_transformers_writes_them():
    model = nn.ModuleDict({"model": nn.ModuleList([block(), block()])})
    assert [c.name for c in planned(model, {"*.down": "rowwise"}, 2)] == ["model.0.down", "model.1.down"]
    assert [c.name for c in planned(model, {"model.1.up": "colwise"}, 2)] == ["model.1.up"]


@pytest.mark.slow
@pytest.mark.skipif("SHIPLAP_TEST_RANKS" not in os.environ, reason="two processes of torch: set SHIPLAP_TEST_RANKS")
def test_two_ranks_agree_with_the_whole_model():
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-port=0",
        "--standalone",
        "--module",
        "tests.slidesparse.shard_step",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("agrees") == 2
