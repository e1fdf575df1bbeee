"""A convolution layer in a graph does what it does in eager, refuses the same, and costs Dynamo few frames."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo import symbolic_convert

import shiplap_sparse3d.spconv as spconv
from shiplap import ShiplapError
from shiplap.plugin_api.compiling import mark_dynamic, reset_compiler
from shiplap_sparse3d.spconv.core import ConvAlgo
from shiplap_testing.effort import sampled

FRAMES = 11  # of a layer that finds its table, the graph's own ones included; 16 before (torch 2.13), 25 (2.11)
COORDS = torch.tensor([[0, i, j, (i * j) % 6] for i in range(6) for j in range(6)], dtype=torch.int32)


def voxels():
    feats, coords = torch.randn(36, 4, generator=torch.Generator().manual_seed(0)), COORDS.clone()
    for tensor in (feats, coords):
        mark_dynamic(tensor, 0)
    return feats, coords


def sparse(feats, coords):
    return spconv.SparseConvTensor(feats, coords, [6, 6, 6], 1)


def frames_of(layers, monkeypatch):
    """How many functions Dynamo traces into for that many layers on one table."""
    net = spconv.SparseSequential(*(spconv.SubMConv3d(4, 4, 3, indice_key="a") for _ in range(layers))).eval()
    traced, run = [], symbolic_convert.InstructionTranslatorBase.run
    monkeypatch.setattr(symbolic_convert.InstructionTranslatorBase, "run", lambda self: traced.append(0) or run(self))
    reset_compiler()
    with torch.no_grad():
        torch.compile(lambda f, c: net(sparse(f, c)).features, backend="eager", fullgraph=True)(*voxels())
    monkeypatch.undo()
    return len(traced)


def test_a_layer_that_finds_its_table_is_few_frames(monkeypatch):
    """Most of what a second process waits for is Dynamo's trace, which no cache holds."""
    few, many = (frames_of(layers, monkeypatch) for layers in (2, 6))
    assert (many - few) / 4 <= FRAMES


class Everything(nn.Module):
    """Layers that build tables, find them, go back, add, activate and count."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter = spconv.SubMConv3d(4, 8, 3, indice_key="a")
        self.repeated = spconv.SubMConv3d(8, 8, 3, indice_key="a", bias=False)
        self.point = spconv.SubMConv3d(8, 8, 1, indice_key="p")
        self.down = spconv.SparseConv3d(8, 6, 2, 2, indice_key="d", record_voxel_count=True)
        self.below = spconv.SubMConv3d(6, 6, 3, indice_key="b")
        self.below.act_type = "ReLU"
        self.up = spconv.SparseInverseConv3d(6, 8, 2, indice_key="d")
        self.unnamed = spconv.SparseConv3d(8, 4, 3, 1, 1)

    def forward(self, feats, coords):
        x = self.repeated(self.enter(sparse(feats, coords)))
        x = self.point(self.repeated(x, x))
        y = self.repeated(self.up(self.below(self.down(x))), x)
        return self.unnamed(y).features


@pytest.mark.long
@pytest.mark.parametrize("training", sampled([False, True], long=["False"]))
def test_results_and_gradients_are_those_of_eager(training):
    feats, coords = voxels()
    results = []
    for wrapped in (lambda net: net, lambda net: torch.compile(net, backend="aot_eager", fullgraph=True)):
        reset_compiler()
        net = Everything().train(training)
        with torch.set_grad_enabled(training):
            out = wrapped(net)(feats, coords)
        grads = torch.autograd.grad(out.square().sum(), list(net.parameters())) if training else []
        results.append([out, net.down.get_max_num_voxels(), *grads])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)


def pair(first, second):
    def run(feats, coords):
        return second(first(sparse(feats, coords))).features

    return run


FIRST = spconv.SubMConv3d(4, 4, 3, indice_key="a")
WRONG = {
    "another kernel": pair(FIRST, spconv.SubMConv3d(4, 4, (3, 1, 3), indice_key="a")),
    "another dilation": pair(FIRST, spconv.SubMConv3d(4, 4, 3, dilation=2, indice_key="a")),
    "another algorithm": pair(FIRST, spconv.SubMConv3d(4, 4, 3, indice_key="a", algo=ConvAlgo.Native)),
    "a key that is taken": pair(FIRST, spconv.SparseConv3d(4, 4, 3, 1, 1, indice_key="a")),
    "no way back": pair(FIRST, spconv.SparseInverseConv3d(4, 4, 3, indice_key="a")),
    "a strided layer's key": pair(
        spconv.SparseConv3d(4, 4, 2, 2, indice_key="a"), spconv.SubMConv3d(4, 4, 3, indice_key="a")
    ),
    "other channels": pair(FIRST, spconv.SubMConv3d(5, 4, 3)),
    "a plain tensor": lambda feats, coords: FIRST(feats).features,
}


@pytest.mark.parametrize("wrong", sampled(WRONG, 1))
def test_what_is_wrong_is_said_in_the_same_words(wrong):
    messages = []
    for run in (WRONG[wrong], torch.compile(WRONG[wrong], backend="eager")):
        reset_compiler()
        with torch.no_grad(), pytest.raises(ShiplapError) as caught:
            run(*voxels())
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_another_grid_is_refused():
    layers = spconv.SubMConv3d(4, 4, 3, indice_key="a"), spconv.SubMConv3d(4, 4, 3, indice_key="a")

    def run(feats, coords):
        x = layers[0](sparse(feats, coords))
        x.spatial_shape = [6, 6, 7]
        return layers[1](x).features

    for each in (run, torch.compile(run, backend="eager")):
        reset_compiler()
        with torch.no_grad(), pytest.raises(ShiplapError, match="spatial_shape"):
            each(*voxels())


def test_voxels_that_were_exchanged_for_equal_ones_are_asked_about():
    """The record is found by its key, and its table serves as many voxels."""
    layers = spconv.SubMConv3d(4, 4, 3, indice_key="a"), spconv.SubMConv3d(4, 4, 3, indice_key="a")

    def run(feats, coords):
        x = layers[0](sparse(feats, coords))
        x.indices = x.indices.clone()
        return layers[1](x).features

    with torch.no_grad():
        torch.testing.assert_close(torch.compile(run, backend="eager")(*voxels()), run(*voxels()))
