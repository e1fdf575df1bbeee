"""Weights cut for the ranks of a tensor-parallel group: the rule, its refusals, and (slow) two ranks at work."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shiplap_slidesparse as slidesparse
from shiplap.errors import ShiplapError
from shiplap_slidesparse import formats
from shiplap_slidesparse.parallel import plan_cuts
from shiplap_slidesparse.tensor_parallel import slice_of
from shiplap_testing import ranks
from shiplap_testing.places import PLACES


def block(pattern: str = "6:8", mode: str = "int8") -> nn.Module:
    torch.manual_seed(1)
    model = nn.ModuleDict({"up": nn.Linear(16, 48), "down": nn.Linear(48, 20), "head": nn.Linear(20, 6)})
    slidesparse.convert(model, pattern, mode, skip=("head",))
    return model


PLAN = {"up": "colwise", "down": "rowwise", "head": "colwise_gather_output"}


@pytest.mark.parametrize("mode", ["int8", "bf16"])
def test_parts_are_those_of_the_whole_and_of_the_pattern(mode):
    whole = block(mode=mode)
    cuts = plan_cuts(whole, PLAN, 3)
    assert [(c.name, c.style, c.unit) for c in cuts] == [("up", "colwise", 1), ("down", "rowwise", 8)]
    parts = {c.name: [slice_of(c.layer, c.style, rank, 3) for rank in range(3)] for c in cuts}
    for name, dim in (("up", 0), ("down", 1)):
        assert torch.equal(torch.cat([p[0].float() for p in parts[name]], dim), whole[name].weight.float())
    windows = torch.cat([formats.slide_weight(p[0], "6:8")[:, :24] for p in parts["down"]], 1)  # k' is 32 with padding
    assert torch.equal(windows, formats.slide_weight(whole["down"].weight, "6:8")[:, :72])
    x = torch.randn(4, 16)
    packed = [
        slidesparse.pack(weight, "6:8", mode, scale=None if scale is None else scale.view(-1))
        for weight, scale, _ in parts["up"]
    ]
    biases = [bias for _, _, bias in parts["up"]]
    inner = x if mode == "int8" else x.bfloat16()
    outs = [slidesparse.matmul(inner, p, b.to(inner.dtype)) for p, b in zip(packed, biases, strict=True)]
    assert torch.equal(torch.cat(outs, 1).float(), whole["up"](x))


@pytest.mark.parametrize(
    ("plan", "world", "reason"),
    [
        (
            {"down": "rowwise"},
            4,
            r"shard: down(.|\n)*48 columns for 4 ranks(.|\n)*the same number of groups of 8 on each rank",
        ),
        ({"up": "colwise"}, 5, r"shard: up(.|\n)*48 features of the output for 5 ranks"),
        ({"up": "sequence_parallel"}, 2, r"shard: up(.|\n)*style 'sequence_parallel'(.|\n)*colwise, rowwise"),
        ({"gate": "colwise"}, 2, r"cuts no linear layer: \{'gate': 'colwise'\}"),
    ],
    ids=["groups", "rows", "style", "nothing"],
)
def test_what_cannot_be_cut_is_named_before_anything_is(plan, world, reason):
    with pytest.raises(ShiplapError, match=rf"SL211(.|\n)*{reason}"):
        plan_cuts(block(), plan, world)


def test_layers_that_take_and_give_all_features_stay_whole():
    """As GLM-4's plan has them: the output of one is gathered, and the next takes its part of it."""
    plan = {"up": "colwise_gather_output", "down": "rowwise_split_input", "head": "colwise"}
    assert [c.name for c in plan_cuts(block(), plan, 2)] == ["head"]


def test_names_are_wildcards_as_transformers_writes_them():
    model = nn.ModuleDict({"model": nn.ModuleList([block(), block()])})
    assert [c.name for c in plan_cuts(model, {"*.down": "rowwise"}, 2)] == ["model.0.down", "model.1.down"]
    assert [c.name for c in plan_cuts(model, {"model.1.up": "colwise"}, 2)] == ["model.1.up"]


@pytest.fixture(scope="module", params=PLACES)
def reported(request) -> dict[str, str]:
    return ranks.outcomes("tests.slidesparse.rank_cells", kind=request.param)


EXPECTED = ranks.table("slidesparse")
LONG = ("DDP, compiled", "FSDP2, compiled")


@pytest.mark.docs
@pytest.mark.parametrize("name", [name for name in EXPECTED if name not in LONG])
def test_two_ranks_do_what_the_page_says(name, reported):
    assert reported.get(name, ranks.NO_SUCH_CELL) == EXPECTED[name]


@pytest.mark.long
@pytest.mark.parametrize("kind", PLACES)
def test_two_ranks_do_what_the_page_says_for_longer(kind):
    assert ranks.outcomes("tests.slidesparse.rank_cells", *LONG, kind=kind) == {name: EXPECTED[name] for name in LONG}


@pytest.mark.docs
def test_every_combination_is_on_the_page(reported):
    assert set(reported) <= set(EXPECTED)


@pytest.mark.long
@pytest.mark.parametrize("kind", PLACES)
def test_other_models_do_what_the_page_says(kind):
    wanted = ranks.table("converted layers")
    one = "two dimensions"  # takes four ranks
    assert ranks.outcomes("tests.slidesparse.rank_networks", one, world=4, kind=kind) == {one: wanted[one]}
    names = [name for name in wanted if name != one and wanted[name] != ranks.NO_SUCH_CELL]
    assert ranks.outcomes("tests.slidesparse.rank_networks", *names, kind=kind) == {
        name: wanted[name] for name in names
    }


@pytest.mark.long
@pytest.mark.parametrize("kind", PLACES)
def test_two_ranks_save_what_four_load(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("SAVED", str(tmp_path))
    cells, save, load = "tests.slidesparse.rank_cells", "save for others", "load from others"
    assert ranks.outcomes(cells, save, kind=kind) == {save: "equal (saved)"}
    loaded = ranks.outcomes(cells, load, world=4, kind=kind)
    assert loaded == {"load from others": "equal (same bits)"}


def test_a_weight_that_is_written_to_stays_packed_if_it_holds_the_same():
    layer = block()["up"]
    for _ in range(2):
        layer.weight.data.add_(0)
        with torch.no_grad():
            layer.weight.copy_(layer.weight.clone())
        assert not layer.fresh
        layer(torch.randn(2, 16))
        assert layer.fresh
    with torch.no_grad():
        layer.weight.copy_(-layer.weight)
    with pytest.warns(match="runs dense"):
        layer(torch.randn(2, 16))
    assert not layer.fresh
