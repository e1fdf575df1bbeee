"""An autoencoder that reads grids from coordinates is a dense network, and one graph for scenes of every size."""

from __future__ import annotations

import pytest
import torch

from shiplap import torch_private
from tests.sparse3d.voxel_vae import VoxelVae, dense_convolution, scenes_of

GRIDS = (8, 6, 7), (5, 9, 8), (10, 4, 6), (7, 7, 9), (6, 10, 5)


def assert_equal_with_gradients(got, want, leaves):
    torch.testing.assert_close(got, want)
    cotangent = torch.randn_like(want)
    for mine, wanted in zip(*(torch.autograd.grad(r, leaves, cotangent) for r in (got, want)), strict=True):
        torch.testing.assert_close(mine, wanted)


def test_it_is_a_dense_network():
    model = VoxelVae().double()
    for scene in scenes_of(*GRIDS[:2]):
        leaves = [scene[0], *model.parameters()]
        assert_equal_with_gradients(model(*scene), model(*scene, dense_convolution), leaves)


@pytest.mark.long
def test_it_is_one_graph_with_one_recompilation_for_five_scenes(fresh_compiler):
    model = VoxelVae().double()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for scene in scenes_of(*GRIDS):
        leaves = [scene[0], *model.parameters()]
        assert_equal_with_gradients(compiled(*scene), model(*scene, dense_convolution), leaves)
    assert torch_private.compile_counts().recompiles <= 1
