"""Specimens of spconv's and flex_gemm's users: equal to dense PyTorch, one graph, and no error that eager has not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shiplap_sparse3d.spconv as spconv
from shiplap import torch_private
from shiplap_testing.effort import sampled
from tests.sparse3d.consumers import dense
from tests.sparse3d.consumers.specimens import SPECIMENS

SIZES = (90, 130, 77, 200, 150)


def network(name: str, *, training: bool = False) -> nn.Module:
    """The specimen on the facade, with statistics of batch norm that are not the initial ones."""
    torch.manual_seed(0)
    net = SPECIMENS[name].make(spconv).train(training)
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.uniform_(-0.1, 0.1)
            module.running_var.uniform_(0.5, 2)
    return net


def scenes(name: str) -> list[tuple[object, ...]]:
    return [SPECIMENS[name].inputs(n, seed) for seed, n in enumerate(SIZES)]


@pytest.fixture(
    params=sampled(
        SPECIMENS,
        long=(
            "mnist",  # trains below
            "PTv3",
            "VoxelResBackBone8x",
            "SparseEncoder",
            "UNetV2",
            "VoxelBackBone8x",
            "PillarRes18",
            "VoxelNeXt",
            "SpUNet",
            "UBlock",
            "TRELLIS",
        ),
    )
)
def name(request):
    torch_private.reset_compiler()
    yield request.param
    torch_private.reset_compiler()


def test_forward_and_gradients_are_those_of_dense_convolutions(name):
    ours, theirs = network(name).double(), SPECIMENS[name].make(dense).eval().double()
    theirs.load_state_dict(ours.state_dict())
    arguments = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in scenes(name)[0]]
    actual, expected = ours(*arguments), theirs(*arguments)
    torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-8)
    cotangent = torch.randn_like(expected)
    gradients = (
        torch.autograd.grad(y, list(n.parameters()), cotangent) for y, n in ((actual, ours), (expected, theirs))
    )
    for mine, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-6)


def agree(compiled: nn.Module, net: nn.Module, name: str, count: int) -> None:
    with torch.no_grad():
        for arguments in scenes(name)[:count]:
            torch.testing.assert_close(compiled(*arguments), net(*arguments), rtol=1e-4, atol=1e-4)


def test_one_graph_for_scenes_of_every_size(name):
    net = network(name)
    agree(torch.compile(net, fullgraph=True, backend="aot_eager"), net, name, 5)
    counts = torch_private.compile_counts()
    assert counts.graph_breaks == 0
    assert counts.recompiles <= 1


# Lines of these ask for numbers of the data (``tolist``, ``item``, ``torch.unique``), where torch breaks by itself.
ASK = {"VoxelNeXt", "SpUNet", "PTv3", "TRELLIS"}


def test_a_graph_that_may_break_raises_nothing_and_nothing_of_ours_breaks_it(name):
    net = network(name)
    agree(torch.compile(net, backend="eager"), net, name, 3)
    breaks = torch_private.compile_counts().break_reasons
    assert [b for b in breaks if "sparse3d" in b] == []
    assert bool(breaks) == (name in ASK)


@pytest.mark.long
@pytest.mark.parametrize("name", sampled(["mnist", "VoxelBackBone8x", "SpUNet"], long=["VoxelBackBone8x", "SpUNet"]))
def test_training_is_one_graph(name):
    torch_private.reset_compiler()
    net = network(name, training=True)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for arguments in scenes(name)[:3]:
        results = []
        for run in (compiled, net):
            net.zero_grad()
            run(*arguments).square().mean().backward()
            results.append([p.grad.clone() for p in net.parameters()])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert torch_private.compile_counts().recompiles <= 1
    torch_private.reset_compiler()
