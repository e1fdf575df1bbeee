"""Networks on the FlexGEMM facade, compiled by Inductor on a GPU: parts of an autoencoder, and the whole of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shiplap import torch_private
from shiplap_sparse3d.flexgemm.ops.spconv import sparse_submanifold_conv3d
from tests.sparse3d.voxel_vae import Block, Cells, Layer, Resample, VoxelVae, scenes_of, to_cells, to_channels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


class Part(nn.Module):
    """A part of the autoencoder between two products."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.enter = name, nn.Linear(6, 8)
        made = {"layer": Layer(8, 8), "block": Block(8), "down": Resample(8, 16, down=True)}
        made["up"] = Resample(16, 8, down=False)
        self.parts = nn.ModuleDict(made)

    def forward(self, feats: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
        x = Cells(self.enter(feats), coords, 0, {})
        if self.name == "cells":
            return to_cells(to_channels(x), coords).feats
        if self.name == "channels":
            return to_channels(x).feats
        if self.name in ("layer", "block"):
            return self.parts[self.name](x, sparse_submanifold_conv3d).feats
        x = self.parts["down"](x, sparse_submanifold_conv3d)
        return (self.parts["up"](x, sparse_submanifold_conv3d, coords) if self.name == "up" else x).feats


def compare(model: nn.Module, count: int) -> None:
    """Assert that the compiled model has the results and gradients of eager over some scenes."""
    torch_private.reset_compiler()
    compiled = torch.compile(model, fullgraph=True)
    for scene in scenes_of((16, 14, 18), (12, 20, 16), dtype=torch.float32, device="cuda"):
        leaves = [scene[0], *(p for p in model.parameters() if p.requires_grad)]
        results = compiled(*scene), model(*scene)
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)
        grads = [torch.autograd.grad(r.square().mean(), leaves, allow_unused=True) for r in results]
        for got, want in zip(*grads, strict=True):
            assert (got is None) == (want is None)
            if got is not None:
                torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-3)
        count -= 1
        if count == 0:
            break


@pytest.mark.long  # the autoencoder has them all
@pytest.mark.parametrize("name", ["channels", "cells", "layer", "block", "down", "up"])
def test_a_part_is_that_of_eager(name):
    compare(Part(name).cuda(), 1)


def test_an_autoencoder_is_that_of_eager():
    compare(VoxelVae().cuda(), 2)
