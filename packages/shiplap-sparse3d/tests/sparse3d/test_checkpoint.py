"""Activation checkpoints around stages that take and return sparse tensors, eagerly and in graphs."""

from __future__ import annotations

from operator import attrgetter

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import shiplap_sparse3d as sparse3d
import shiplap_sparse3d.spconv as spconv
from shiplap import torch_private
from shiplap.torch_private.dynamo import checkpoints_keep_objects
from shiplap_testing.effort import sampled
from tests.sparse3d.consumers.specimens import cells

GRID = (8, 10, 6)
NAME = attrgetter("__name__")
MUTATES = "skip_fwd_side_effects_in_bwd_under_checkpoint"


@pytest.fixture(autouse=True)
def fresh():
    torch_private.reset_compiler()
    yield
    torch_private.reset_compiler()


def stage(channels: int) -> nn.Module:
    conv = spconv.SubMConv3d(channels, channels, 3, indice_key="k")
    return spconv.SparseSequential(conv, nn.BatchNorm1d(channels), nn.ReLU())


class Stages(nn.Module):
    """As TRELLIS and PTv3 checkpoint their blocks: the tables were built before."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = spconv.SubMConv3d(4, 8, 3, indice_key="k")
        self.stages = nn.ModuleList([stage(8), stage(8)])

    def forward(self, features: Tensor, indices: Tensor) -> Tensor:
        x = self.enter(spconv.SparseConvTensor(features, indices, list(GRID), 2))
        for each in self.stages:
            x = checkpoint(each, x, use_reentrant=False)
        return x.features


class Levels(nn.Module):
    """Tables are built under one checkpoint, and needed under another."""

    def __init__(self) -> None:
        super().__init__()
        self.down = spconv.SparseConv3d(4, 8, 3, 2, 1, indice_key="d")
        self.up = spconv.SparseInverseConv3d(8, 8, 3, indice_key="d")

    def forward(self, features: Tensor, indices: Tensor) -> Tensor:
        x = spconv.SparseConvTensor(features, indices, list(GRID), 2)
        x = checkpoint(self.down, x, use_reentrant=False)
        return checkpoint(self.up, input=x, use_reentrant=False).features


class Own(nn.Module):
    """Shiplap's own layers, and a number beside the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = sparse3d.SubMConv3d(4, 8, 3), sparse3d.SubMConv3d(8, 8, 3)

    def scaled(self, x: sparse3d.SparseTensor, by: float) -> sparse3d.SparseTensor:
        x = self.second(x)
        return x.replace(x.feats * by)

    def forward(self, features: Tensor, indices: Tensor) -> Tensor:
        x = self.first(sparse3d.SparseTensor(features, indices, GRID, 2))
        return checkpoint(self.scaled, x, 0.5, use_reentrant=False).feats


def trained(run: nn.Module, net: nn.Module, scene: tuple[Tensor, Tensor]) -> list[Tensor]:
    """The result and all gradients; statistics of batch norm are as before."""
    state = {name: value.clone() for name, value in net.state_dict().items()}
    net.zero_grad()
    out = run(*scene)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    net.load_state_dict(state)
    return [out.detach(), *(p.grad.clone() for p in net.parameters())]


def agree(net: nn.Module, *, fullgraph: bool) -> None:
    compiled = torch.compile(net, fullgraph=fullgraph, backend="aot_eager")
    for seed, n in enumerate((90, 130)):
        scene = cells(n, seed, GRID)
        torch.testing.assert_close(trained(compiled, net, scene), trained(net, net, scene), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", sampled([Stages, Levels, Own], long=["Stages", "Levels"], name=NAME))
def test_a_plain_compile_of_checkpointed_stages_is_eager(make):
    torch.manual_seed(0)
    agree(make(), fullgraph=False)


@pytest.mark.long
@pytest.mark.parametrize("make", sampled([Stages, Own], long=["Stages"], name=NAME))
def test_checkpointed_stages_are_in_one_graph(make):
    if not checkpoints_keep_objects():
        pytest.skip("Dynamo makes a graph that does not run of objects that come from a checkpoint")
    torch.manual_seed(0)
    agree(make(), fullgraph=True)


@pytest.mark.long
@pytest.mark.parametrize("make", sampled([Stages, Levels, Own], long=["Stages", "Own"], name=NAME))
def test_tables_may_be_built_under_a_checkpoint_where_torch_is_told_so(make):
    torch.manual_seed(0)
    with torch._dynamo.config.patch({MUTATES: True}):
        agree(make(), fullgraph=True)


def test_a_checkpoint_in_a_graph_is_one(monkeypatch):
    """What is inside runs again in the backward pass."""
    torch.manual_seed(0)
    net, runs = Own(), []

    def counted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        runs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    with torch._dynamo.config.patch({MUTATES: True}):
        torch.compile(net, fullgraph=True, backend=counted)(*cells(60, 0, GRID))
    assert any("checkpoint" in name for name in runs[0])


def test_a_tree_of_sparse_tensors_takes_any_leaf():
    """Torch 2.11 maps the arguments of a checkpoint to None to find their devices."""
    x = spconv.SparseConvTensor(*cells(40, 0, GRID), list(GRID), 2)
    pytree.tree_map(lambda t: None, (x, sparse3d.SparseTensor(x.features, x.indices, GRID, 2)))
    names = pytree.tree_map(lambda t: str(t.dtype), x)
    assert (names.features, names.indices) == ("torch.float32", "torch.int32")
    assert names.indice_dict == {}
