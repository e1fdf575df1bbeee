"""A U-Net in capacity form: tensors in and out, all of fixed size."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import shiplap_sparse3d as sparse3d
from shiplap.packaging import package_model
from shiplap_sparse3d.demo.model import GroundNet
from shiplap_sparse3d.demo.tiles import POINT_FEATURES, VOXEL_FEATURES
from shiplap_testing.deployed import run_package
from tests.sparse3d.scenes import scene

GRID = (12, 10, 8)
ROWS, COARSE = 300, 250


class UNet(nn.Module):
    """Two levels, a skip connection, every kind of table."""

    def __init__(self, capacity: int | None = COARSE) -> None:
        super().__init__()
        self.enter = sparse3d.Sequential(sparse3d.SubMConv3d(5, 8, 3), sparse3d.BatchNorm(8), nn.ReLU())
        self.down = sparse3d.Sequential(
            sparse3d.SparseConv3d(8, 16, 2, 2, capacity=capacity),
            sparse3d.BatchNorm(16),
            nn.ReLU(),
            sparse3d.SubMConv3d(16, 16, 3),
        )
        self.up = sparse3d.SparseInverseConv3d(16, 8, 2)
        self.leave = sparse3d.Sequential(
            sparse3d.SubMConv3d(16, 8, 3), sparse3d.BatchNorm(8), nn.ReLU(), nn.Linear(8, 3)
        )

    def rows(self, x: sparse3d.SparseTensor) -> sparse3d.SparseTensor:
        x = self.enter(x)
        return self.leave(sparse3d.cat([x, self.up(self.down(x))]))

    def forward(self, feats: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
        y = self.rows(sparse3d.SparseTensor(feats, coords, GRID, 2, padded=True))
        return torch.where(y.is_voxel, y.feats, 0)


def padded(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = scene(n, GRID, 5, dtype=torch.float32).pad(ROWS)
    return x.feats, x.coords


# --- the demonstration's network, from coordinates to the answers of points -------------------------------------------

POINTS = 500
SCENES = (ROWS, 200, 90, 1, 0)  # voxels


class Demonstration(nn.Module):
    """``GroundNet`` on rows of which the last are padding: it builds every table itself."""

    def __init__(self) -> None:
        super().__init__()
        self.net = GroundNet(16, 3)

    def forward(self, feats: Tensor, coords: Tensor, points: Tensor, inverse: Tensor) -> Tensor:
        return self.net(sparse3d.SparseTensor(feats, coords, GRID, 2, padded=True), points, inverse)


def tile(voxels: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the network takes of one scene; each point lies in one of its voxels, if there is one."""
    x = scene(voxels, GRID, VOXEL_FEATURES, dtype=torch.float32).pad(ROWS)
    return x.feats, x.coords, torch.randn(POINTS, POINT_FEATURES), torch.randint(0, max(voxels, 1), (POINTS,))


def packed_scenes(folder: Path, device: str) -> tuple[Path, Path]:
    """One package of the demonstration's network, and five scenes with what they give here."""
    net = Demonstration().to(device).eval()
    with torch.no_grad():
        program = torch.export.export(net, tuple(t.to(device) for t in tile(200)))
        package_model(program, folder / "ground.pt2")
        tiles = [tile(n) for n in SCENES]
        answers = [net(*(t.to(device) for t in inputs)).cpu() for inputs in tiles]
    torch.save([(*inputs, answer) for inputs, answer in zip(tiles, answers, strict=True)], folder / "scenes.pt")
    return folder / "ground.pt2", folder / "scenes.pt"


def deployed(folder: Path, device: str) -> str:
    """What ``examples/deploy/deploy_scenes.cpp`` says of them, in an environment without Python."""
    return run_package(*packed_scenes(folder, device), device)
