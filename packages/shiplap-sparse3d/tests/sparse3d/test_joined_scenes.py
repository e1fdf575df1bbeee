"""Scenes that are put together in a graph, whose number of voxels is a sum that the data decide, through norms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shiplap_sparse3d as sparse3d
import shiplap_sparse3d.spconv as spconv
from shiplap import torch_private
from shiplap_testing.effort import sampled

GRID = (16, 16, 16)
Parts = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def known_features(feats: Tensor, cells: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of indices are a sum, those of the features are known."""
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    scenes = torch.cat([torch.full((size,), b, dtype=torch.int32) for b, size in enumerate(sizes)])
    return feats, torch.cat([scenes[:, None], cells], 1)


def split_scenes(feats: Tensor, cells: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Both are cut and put together again."""
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    parts = zip(torch.split(feats, sizes), torch.split(cells, sizes), strict=True)
    made = [(f * 1, torch.cat([torch.full_like(c[:, :1], b), c], 1)) for b, (f, c) in enumerate(parts)]
    return torch.cat([f for f, _ in made]), torch.cat([c for _, c in made])


def masked_scenes(feats: Tensor, cells: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Each scene is chosen by a mask, once for the features and once for the cells."""
    masks = [cells[:, 0] % 2 == b for b in range(2)]
    coords = [torch.cat([torch.full_like(cells[mask][:, :1], b), cells[mask]], 1) for b, mask in enumerate(masks)]
    return torch.cat([feats[mask] for mask in masks]), torch.cat(coords)


def native(container: type[nn.Sequential], last: nn.Module) -> nn.Sequential:
    layers = [sparse3d.SubMConv3d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU(), sparse3d.SparseConv3d(8, 8, 2, 2), last]
    return container(*layers)


def run_native(net: nn.Module, feats: Tensor, coords: Tensor) -> Tensor:
    return net(sparse3d.SparseTensor(feats, coords, GRID, 2)).feats


def run_joined(net: nn.Module, feats: Tensor, coords: Tensor) -> Tensor:
    x = sparse3d.SparseTensor(feats, coords, GRID, 2)
    return net(sparse3d.cat([x[1], x[0]], 0)).feats


def run_spconv(net: nn.Module, feats: Tensor, coords: Tensor) -> Tensor:
    return net(spconv.SparseConvTensor(feats, coords, [*GRID], 2)).features


NETWORKS: dict[str, tuple[Callable[..., Tensor], Callable[[], nn.Module]]] = {
    "Sequential": (run_native, lambda: native(sparse3d.Sequential, nn.Sequential(nn.BatchNorm1d(8), nn.GELU()))),
    "Sequential, group norm": (run_native, lambda: native(sparse3d.Sequential, nn.GroupNorm(2, 8))),
    "torch.nn.Sequential": (run_native, lambda: native(nn.Sequential, nn.BatchNorm1d(8))),
    "torch.nn.Sequential, group norm": (run_native, lambda: native(nn.Sequential, nn.GroupNorm(2, 8))),
    "cat": (run_joined, lambda: native(nn.Sequential, nn.LayerNorm(8))),
    "spconv": (run_spconv, lambda: spconv.SparseSequential(spconv.SubMConv3d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU())),
}
CASES = [
    ("Sequential", split_scenes, True),
    ("Sequential", masked_scenes, False),
    ("Sequential, group norm", known_features, False),
    ("torch.nn.Sequential", masked_scenes, True),
    ("torch.nn.Sequential", split_scenes, False),
    ("torch.nn.Sequential, group norm", known_features, True),
    ("cat", known_features, True),
    ("spconv", known_features, True),
    ("spconv", split_scenes, True),
    ("spconv", masked_scenes, False),
]


@pytest.mark.parametrize(("name", "parts", "training"), sampled([pytest.param(*case) for case in CASES], 2))
def test_joined_scenes_pass_norms_in_one_graph(name: str, parts: Parts, training: bool) -> None:
    torch.manual_seed(0)
    run, build = NETWORKS[name]
    net = build().train(training)
    before: dict[str, Any] = copy.deepcopy(net.state_dict())
    torch_private.reset_compiler()
    options = {"capture_scalar_outputs": True, "capture_dynamic_output_shape_ops": True}
    with torch._dynamo.config.patch(**options):
        compiled = torch.compile(lambda *given: run(net, *parts(*given)), fullgraph=True, backend="eager")
        cells = torch.unique(torch.randint(0, 16, (90, 3)), dim=0).int()
        given = torch.randn(len(cells), 4), cells, torch.tensor([40, len(cells)])
        got = compiled(*given)
        got.sum().backward()
        learned = copy.deepcopy(net.state_dict())
        net.load_state_dict(before)
        expected = run(net, *parts(*given))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    for key, value in net.state_dict().items():
        torch.testing.assert_close(learned[key], value, rtol=1e-4, atol=1e-5, msg=key)


def occupied_cells(volume: Tensor) -> tuple[Tensor, Tensor]:
    """Return the features and the coordinates of the cells of ``volume [scenes, *axes, c]`` that are not zero. Each of
    the two counts the cells anew.
    """
    rows = volume.reshape(-1, volume.shape[-1])
    return rows[rows.abs().sum(1) > 0], volume.abs().sum(-1).nonzero().int()


TRAINED: dict[str, Callable[[], nn.Module]] = {
    "native": lambda: nn.Sequential(sparse3d.SubMConv3d(4, 6, 3), nn.ReLU(), sparse3d.SubMConv3d(6, 5, 3)),
    "spconv": lambda: spconv.SparseSequential(spconv.SubMConv3d(4, 6, 3), nn.ReLU(), spconv.SubMConv3d(6, 5, 3)),
}


@pytest.mark.parametrize("name", sampled(TRAINED, long=["spconv"]))
def test_features_and_voxels_that_are_counted_apart_train_in_one_graph(name: str) -> None:
    """A dense volume made sparse: the backward compares rows of features with rows of tables, of two counts."""
    torch.manual_seed(0)
    torch_private.reset_compiler()
    net, run = TRAINED[name]().double(), run_native if name == "native" else run_spconv

    def loss(volume: Tensor) -> Tensor:
        return run(net, *occupied_cells(volume)).square().sum()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            volume = torch.randn(2, *GRID, 4, dtype=torch.float64) * (torch.rand(2, *GRID, 1) < 0.05)
            leaves = [volume.requires_grad_(), *net.parameters()]
            got = torch.autograd.grad(compiled(volume), leaves)
            torch.testing.assert_close(got, torch.autograd.grad(loss(volume), leaves))
