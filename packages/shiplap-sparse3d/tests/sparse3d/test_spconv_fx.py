"""``torch.fx.symbolic_trace`` of networks of spconv's layers: each layer is a node, and the graph computes the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shiplap_sparse3d.spconv as spconv
from tests.sparse3d.scenes import scene

GRID = [9, 8, 7]


class Doubled(spconv.SubMConv3d):
    """A layer with a ``forward`` of its own around spconv's."""

    def forward(self, input: spconv.SparseConvTensor) -> spconv.SparseConvTensor:
        out = super().forward(input)
        return out.replace_feature(out.features * 2)


class Residual(spconv.SparseModule):
    """A block whose own ``forward`` is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = Doubled(6, 6, 3, indice_key="a"), nn.BatchNorm1d(6), spconv.SparseReLU()

    def forward(self, x: spconv.SparseConvTensor) -> spconv.SparseConvTensor:
        out = self.conv(x)
        return self.relu(out.replace_feature(self.norm(out.features) + x.features))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = spconv.SparseSequential(spconv.SubMConv3d(4, 6, 3, indice_key="a"), nn.BatchNorm1d(6), nn.ReLU())
        self.block = spconv.SparseSequential(Residual(), spconv.SparseBatchNorm(6))
        self.down = spconv.SparseConv3d(6, 6, 2, 2, indice_key="down")
        self.up = spconv.SparseInverseConv3d(6, 6, 2, indice_key="down")
        self.pool, self.join, self.dense = spconv.SparseMaxPool3d(2, 2), spconv.JoinTable(), spconv.ToDense()

    def forward(self, features: Tensor, indices: Tensor) -> Tensor:
        x = self.enter(spconv.SparseConvTensor(features, indices=indices.int(), spatial_shape=GRID, batch_size=2))
        side = self.block(x)
        return self.dense(self.pool(self.join([self.up(self.down(side)), x])))


def arguments(n: int) -> tuple[Tensor, Tensor]:
    x = scene(n, tuple(GRID), 4, batch_size=2, dtype=torch.float32)
    return x.feats, x.coords.long()


@pytest.mark.parametrize("training", [False, True])
def test_a_traced_network_computes_the_same(training):
    net = Net().train(training)
    traced = torch.fx.symbolic_trace(net)
    traced.graph.lint()
    for n in (40, 70):
        scene_of_n = arguments(n)
        torch.testing.assert_close(traced(*scene_of_n), net(*scene_of_n), rtol=0, atol=0)
    called = {str(node.target) for node in traced.graph.nodes if node.op == "call_module"}
    assert {"enter.0", "block.0.norm", "block.0.relu", "block.1", "down", "up", "pool", "join", "dense"} <= called
    assert "block.0.conv" not in called  # its own forward is traced, and not run a second time


def test_a_layer_that_is_replaced_in_the_graph_is_the_one_that_runs():
    traced = torch.fx.symbolic_trace(Net().eval())
    scene_of_40 = arguments(40)
    before = traced(*scene_of_40)
    assert torch.equal(traced(*scene_of_40), before)
    traced.down = spconv.SparseConv3d(6, 6, 2, 2, indice_key="down")
    assert not torch.equal(traced(*scene_of_40), before)


def test_tracing_leaves_tensors_and_compilation_alone():
    net = Net().eval()
    torch.fx.symbolic_trace(net)
    features, indices = arguments(40)
    assert type(spconv.SparseConvTensor(features, indices.int(), GRID, 2)) is spconv.SparseConvTensor
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(features, indices), net(features, indices))
