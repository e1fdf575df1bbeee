"""Small networks with known receptive fields, and the survey models of the tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import shiplap_sparse3d as sparse3d
from shiplap_sparse3d import SparseTensor
from shiplap_sparse3d.survey import Points, SurveyModel, point_features

VOXEL = (6.0, 6.0, 6.0)  # feet, as the scan


class UNet(nn.Module):
    """A U-Net of submanifold convolutions, with ``levels`` grids."""

    def __init__(self, ci: int, channels: int, levels: int, classes: int) -> None:
        super().__init__()
        c = channels
        self.stem = sparse3d.SubMConv3d(ci, c, 3)
        self.encoder = nn.ModuleList(sparse3d.SubMConv3d(c, c, 3) for _ in range(levels))
        self.down = nn.ModuleList(sparse3d.SparseConv3d(c, c, 2, stride=2) for _ in range(levels - 1))
        self.up = nn.ModuleList(sparse3d.SparseInverseConv3d(c, c, 2) for _ in range(levels - 1))
        self.decoder = nn.ModuleList(sparse3d.SubMConv3d(c, c, 3) for _ in range(levels - 1))
        self.head = sparse3d.SubMConv3d(c, classes, 1)

    def forward(self, x: SparseTensor) -> SparseTensor:
        x, skips = self.encoder[0](self.stem(x)), []
        for down, encode in zip(self.down, self.encoder[1:], strict=True):
            skips.append(x)
            x = encode(relu(down(x)))
        for up, decode in zip(self.up, self.decoder, strict=True):
            x = decode(relu(up(x) + skips.pop()))
        return self.head(x)


def relu(x: SparseTensor) -> SparseTensor:
    return x.replace(torch.relu(torch.nn.functional.layer_norm(x.feats, x.feats.shape[1:])))


def build() -> SurveyModel:
    """Three levels (halo 16, stride 4) and fixed weights."""
    torch.manual_seed(0)
    net = UNet(5, 8, 3, 3)
    for weight in net.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    return SurveyModel(net, VOXEL, (1, 2, 5))


def lost() -> SurveyModel:
    """A function of the user that finds no weights."""
    raise KeyError("weights")


model = build()


def shifted(points: Points) -> Tensor:
    """Features that depend on where a part of the survey begins."""
    return torch.cat([point_features(points), (points.xyz - points.xyz.amin(0)).float()], 1)
