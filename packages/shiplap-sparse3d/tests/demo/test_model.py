"""The network: one graph for every tile, the same numbers as eager, gradients everywhere."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from shiplap import torch_private
from shiplap_sparse3d.demo.model import GroundNet
from shiplap_sparse3d.demo.scan import Scan
from shiplap_sparse3d.demo.tiles import FeatureScaling, TrainingTile, make_tile
from shiplap_sparse3d.demo.train import TrainingRecipe, count_parameters, loss_of

SIZES = 400, 700, 1600
LEVELS, CHANNELS = 3, 8


def tile_of(points: int) -> TrainingTile:
    draw = torch.Generator().manual_seed(points)
    xyz = torch.rand(points, 3, generator=draw) * torch.tensor([90.0, 70.0, 10.0])
    return tile_from(Scan(xyz, torch.rand(points, generator=draw) < 0.5))


def tile_from(scan: Scan) -> TrainingTile:
    return make_tile(FeatureScaling.of([scan])[1][0], LEVELS)


@dataclass
class Compiled:
    """What one compiled network did with tiles of every size."""

    logits: list[tuple[Tensor, Tensor]]
    gradients: list[tuple[Tensor, Tensor]]
    counts: torch_private.CompileCounts


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    torch_private.reset_compiler()
    torch.manual_seed(0)
    net = GroundNet(CHANNELS, LEVELS)
    forward = torch.compile(net, fullgraph=True, backend="aot_eager")
    logits, gradients = [], []
    for tile in map(tile_of, SIZES):
        runs = []
        for f in (forward, net):
            net.zero_grad()
            loss_of(f, tile).backward()
            runs.append([p.grad.clone() for p in net.parameters()])
        gradients += zip(*runs, strict=True)
        args = tile.voxels, tile.points, tile.inverse
        logits.append((forward(*args).detach(), net(*args).detach()))
    counts = torch_private.compile_counts()
    torch_private.reset_compiler()
    return Compiled(logits, gradients, counts)


@pytest.mark.long
def test_one_graph_serves_every_size(compiled: Compiled) -> None:
    assert compiled.counts.graph_breaks == 0, compiled.counts.break_reasons
    assert compiled.counts.graphs == 1
    assert compiled.counts.recompiles == 0


def test_compiled_equals_eager(compiled: Compiled) -> None:
    for (a, b), size in zip(compiled.logits, SIZES, strict=True):
        assert tuple(a.shape) == (size,)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    for a, b in compiled.gradients:
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_gradients_are_finite_and_reach_every_weight(compiled: Compiled) -> None:
    for a, _ in compiled.gradients:
        assert bool(a.isfinite().all())
        assert float(a.abs().max()) > 0


def test_one_point_has_a_finite_logit() -> None:
    tile = tile_from(Scan(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([True])))
    logit = GroundNet(CHANNELS, LEVELS)(tile.voxels, tile.points, tile.inverse)
    assert tuple(logit.shape) == (1,)
    assert bool(logit.isfinite().all())


def test_points_may_come_in_any_order() -> None:
    tile, net = tile_of(800), GroundNet(CHANNELS, LEVELS)
    order = torch.randperm(800, generator=torch.Generator().manual_seed(0))
    logits = net(tile.voxels, tile.points, tile.inverse)
    torch.testing.assert_close(net(tile.voxels, tile.points[order], tile.inverse[order]), logits[order])


def test_one_width_everywhere() -> None:
    """Layers of one width share their kernels; a reduction over voxels would be guarded by their number."""
    recipe = TrainingRecipe()
    net = GroundNet(recipe.channels, recipe.levels)
    assert {m.conv.out_channels for m in net.modules() if hasattr(m, "conv")} == {recipe.channels}
    assert not [name for name, _ in net.named_parameters() if name.endswith("bias")]
    assert count_parameters(net) < 100_000
