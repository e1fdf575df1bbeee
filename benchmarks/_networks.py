"""Two networks as users of spconv write them, against a module with its interface: a U-Net and a detector's backbone.

The widths and depths are those of Pointcept's SpUNet (base 32) and of OpenPCDet's VoxelBackBone8x; the code is ours.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["NETWORKS", "shell"]


def shell(res: int, device: str) -> Tensor:
    """``int32 [n, 4]``: the cells of a sphere's surface in a grid of ``res`` cells along each axis."""
    at = torch.arange(res, device=device) - (res - 1) / 2
    radius = (at[:, None, None] ** 2 + at[None, :, None] ** 2 + at[None, None, :] ** 2).sqrt()
    cells = ((radius <= res / 2) & (radius >= res / 2 - 1.25)).nonzero().int()
    return torch.nn.functional.pad(cells, (1, 0)).contiguous()


def norm(channels: int) -> nn.BatchNorm1d:
    return nn.BatchNorm1d(channels, eps=1e-3, momentum=0.01)


def layer(sp: Any, conv: nn.Module, channels: int) -> Any:
    """A convolution, a batch norm and an activation."""
    return sp.SparseSequential(conv, norm(channels), nn.ReLU())


class Block(nn.Module):
    """Two submanifold convolutions and what they were given; a matrix product where widths differ."""

    def __init__(self, sp: Any, ci: int, co: int, key: str) -> None:
        super().__init__()
        self.proj: nn.Module = nn.Identity()
        if ci != co:
            self.proj = sp.SparseSequential(sp.SubMConv3d(ci, co, 1, bias=False), norm(co))
        self.conv1 = sp.SubMConv3d(ci, co, 3, padding=1, bias=False, indice_key=key)
        self.conv2 = sp.SubMConv3d(co, co, 3, padding=1, bias=False, indice_key=key)
        self.bn1, self.bn2, self.relu = norm(co), norm(co), nn.ReLU()

    def forward(self, x: Any) -> Any:
        out = self.conv1(x)
        out = out.replace_feature(self.relu(self.bn1(out.features)))
        out = self.conv2(out)
        out = out.replace_feature(self.bn2(out.features))
        return out.replace_feature(self.relu(out.features + self.proj(x).features))


class Blocks(nn.Module):
    def __init__(self, sp: Any, ci: int, co: int, depth: int, key: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(sp, ci if i == 0 else co, co, key) for i in range(depth))

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class SpUNet(nn.Module):
    """Four levels down by kernels of 2, four up by inverse layers, joined with what the level held before."""

    WIDTHS = (32, 64, 128, 256, 256, 128, 96, 96)
    DEPTHS = (2, 3, 4, 6, 2, 2, 2, 2)

    def __init__(self, sp: Any, channels: int = 4, classes: int = 20, base: int = 32) -> None:
        super().__init__()
        self.sp, steps = sp, 4
        self.enter = layer(sp, sp.SubMConv3d(channels, base, 5, padding=1, bias=False, indice_key="stem"), base)
        self.down, self.encode = nn.ModuleList(), nn.ModuleList()
        self.up, self.decode = nn.ModuleList(), nn.ModuleList()
        wide, kept = base, [base, *self.WIDTHS[: steps - 1]]
        for s in range(steps):
            co = self.WIDTHS[s]
            key = f"spconv{s + 1}"
            self.down.append(layer(sp, sp.SparseConv3d(wide, co, 2, stride=2, bias=False, indice_key=key), co))
            self.encode.append(Blocks(sp, co, co, self.DEPTHS[s], f"subm{s + 1}"))
            wide = co
        for s in reversed(range(steps)):
            co = self.WIDTHS[-1 - s]
            key = f"spconv{s + 1}"
            self.up.append(layer(sp, sp.SparseInverseConv3d(wide, co, 2, indice_key=key, bias=False), co))
            self.decode.append(Blocks(sp, co + kept[s], co, self.DEPTHS[-1 - s], f"subm{s}"))
            wide = co
        self.final = sp.SubMConv3d(wide, classes, 1, padding=1, bias=True)

    def forward(self, features: Tensor, coords: Tensor, shape: list[int]) -> Tensor:
        x = self.enter(self.sp.SparseConvTensor(features, coords, shape, 1))
        levels = [x]
        for down, encode in zip(self.down, self.encode, strict=True):
            x = encode(down(x))
            levels.append(x)
        x = levels.pop()
        for up, decode in zip(self.up, self.decode, strict=True):
            x, kept = up(x), levels.pop()
            x = decode(x.replace_feature(torch.cat((x.features, kept.features), dim=1)))
        result: Tensor = self.final(x).features
        return result


class VoxelBackBone8x(nn.Module):
    """Three steps of stride 2, two submanifold layers after each, the last level flattened along the first axis."""

    def __init__(self, sp: Any, channels: int = 4) -> None:
        super().__init__()
        self.sp = sp

        def subm(ci: int, co: int, key: str) -> Any:
            return layer(sp, sp.SubMConv3d(ci, co, 3, padding=1, bias=False, indice_key=key), co)

        def down(ci: int, co: int, key: str, kernel: Any = 3, stride: Any = 2, padding: Any = 1) -> Any:
            conv = sp.SparseConv3d(ci, co, kernel, stride=stride, padding=padding, bias=False, indice_key=key)
            return layer(sp, conv, co)

        self.enter = subm(channels, 16, "subm1")
        self.conv1 = subm(16, 16, "subm1")
        self.conv2 = sp.SparseSequential(down(16, 32, "spconv2"), subm(32, 32, "subm2"), subm(32, 32, "subm2"))
        self.conv3 = sp.SparseSequential(down(32, 64, "spconv3"), subm(64, 64, "subm3"), subm(64, 64, "subm3"))
        self.conv4 = sp.SparseSequential(
            down(64, 64, "spconv4", padding=(0, 1, 1)), subm(64, 64, "subm4"), subm(64, 64, "subm4")
        )
        self.out = down(64, 128, "down2", kernel=(3, 1, 1), stride=(2, 1, 1), padding=0)

    def forward(self, features: Tensor, coords: Tensor, shape: list[int]) -> Tensor:
        x = self.sp.SparseConvTensor(features, coords, shape, 1)
        x = self.conv4(self.conv3(self.conv2(self.conv1(self.enter(x)))))
        result: Tensor = self.out(x).features
        return result


NETWORKS: dict[str, type[nn.Module]] = {"SpUNet": SpUNet, "VoxelBackBone8x": VoxelBackBone8x}
