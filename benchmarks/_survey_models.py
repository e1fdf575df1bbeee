"""The models of ``survey.py``, for any module that has a ``SurveyModel``. Workers import this."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from _many_train import network
from torch import Tensor, nn

import shiplap_sparse3d as sparse3d


class Constant(nn.Module):
    """A network that gives each voxel the same logits, and sees nothing but it."""

    def forward(self, voxels: Any) -> Tensor:
        return voxels.feats[:, :1] * 0 + voxels.feats.new_tensor([0.0, 1.0])


class Small(nn.Module):
    """A U-Net of two levels with few channels, for a core of a CPU."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        c = channels
        self.stem, self.down = sparse3d.SubMConv3d(5, c, 3), sparse3d.SparseConv3d(c, 2 * c, 2, stride=2)
        self.coarse = nn.ModuleList(sparse3d.SubMConv3d(2 * c, 2 * c, 3) for _ in range(4))
        self.up, self.head = sparse3d.SparseInverseConv3d(2 * c, c, 2), sparse3d.SubMConv3d(c, 3, 3)

    def forward(self, x: Any) -> Any:
        fine = self.stem(x)
        x = self.down(fine)
        for layer in self.coarse:
            x = layer(x.replace(x.feats.relu()))
        return self.head(fine + self.up(x))


class Wide(nn.Module):
    """The network of ``many_gpus.py``."""

    def __init__(self, channels: tuple[int, ...] = (64, 128, 256)) -> None:
        super().__init__()
        self.first, self.net = sparse3d.SubMConv3d(5, 4, 1), network(3, channels)

    def forward(self, x: Any) -> Any:
        return self.net(self.first(x))


def constant(library: Any) -> Any:
    """Voxels of one metre, two classes."""
    return library.SurveyModel(Constant(), (1.0, 1.0, 1.0), (1, 2))


def small(library: Any, channels: int = 16) -> Any:
    """Voxels of six feet, three classes, as the packaged scan."""
    torch.manual_seed(0)
    return library.SurveyModel(Small(channels).eval(), (6.0, 6.0, 6.0), (1, 2, 5))


def medium(library: Any) -> Any:
    """The small network with sixteen times the channels."""
    return small(library, 256)


def wide(library: Any) -> Any:
    """Voxels of one metre, three classes."""
    torch.manual_seed(2)
    return library.SurveyModel(Wide().eval(), (1.0, 1.0, 1.0), (1, 2, 5))


MODELS = {"constant": constant, "small": small, "medium": medium, "wide": wide}
