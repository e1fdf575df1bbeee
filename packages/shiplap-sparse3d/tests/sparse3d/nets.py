"""A U-Net in capacity form: tensors in and out, all of fixed size."""

from __future__ import annotations

import torch
from torch import nn

import shiplap_sparse3d as sparse3d
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
