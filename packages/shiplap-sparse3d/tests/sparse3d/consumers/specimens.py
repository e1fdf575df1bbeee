"""Small networks with the constructs of spconv's users, each against a namespace: the facade's, or the dense one's.

They are our own, written from the list of constructs in docs/consumers.md. A specimen takes plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import shiplap_sparse3d.flexgemm as flex_gemm

GRID = (8, 16, 16)  # z, y, x
SPARE = 8  # cells beside the voxels: 96 in Pointcept, which are many for a dense reference
Inputs = tuple[Any, ...]


def cells(n: int, seed: int, grid: tuple[int, ...] = GRID, scenes: int = 2, channels: int = 4) -> tuple[Tensor, Tensor]:
    """Features and ``int32 [n, 1 + axes]`` distinct rows by scenes; every scene has some."""
    rng = torch.Generator().manual_seed(seed)
    volume = int(np.prod(grid))
    chosen = torch.randperm(scenes * volume, generator=rng)[:n].sort().values
    chosen[-1] = scenes * volume - 1 - seed % 3
    rows = torch.stack(torch.unravel_index(chosen, (scenes, *grid)), 1).int()
    return torch.randn(n, channels, generator=rng), rows


def norm(channels: int) -> nn.BatchNorm1d:
    return nn.BatchNorm1d(channels, eps=1e-3, momentum=0.01)


def block(sp: Any, ci: int, co: int, key: str, kind: str = "subm", **window: Any) -> nn.Module:
    """Convolution, norm, activation."""
    if kind == "subm":
        conv = sp.SubMConv3d(ci, co, 3, bias=False, indice_key=key)
    elif kind == "spconv":
        conv = sp.SparseConv3d(ci, co, bias=False, indice_key=key, **window)
    else:
        conv = sp.SparseInverseConv3d(ci, co, 3, indice_key=key, bias=False)
    return sp.SparseSequential(conv, norm(co), nn.ReLU())


class VoxelBackBone(nn.Module):
    """OpenPCDet: ``grid_size[::-1] + [1, 0, 0]``, levels by strides, the last one flattened onto the ground."""

    def __init__(self, sp: Any, part: Callable[..., nn.Module] | None = None) -> None:
        super().__init__()
        self.sp, part = sp, part or partial(block, sp)
        self.sparse_shape = np.array(GRID[::-1])[::-1] + [1, 0, 0]  # noqa: RUF005 - a sum
        self.enter = part(4, 8, "subm1")
        self.conv2 = sp.SparseSequential(
            block(sp, 8, 12, "spconv2", "spconv", kernel_size=3, stride=2, padding=1), part(12, 12, "subm2")
        )
        self.conv3 = sp.SparseSequential(
            block(sp, 12, 16, "spconv3", "spconv", kernel_size=3, stride=2, padding=(0, 1, 1)), part(16, 16, "subm3")
        )
        self.out = block(sp, 16, 16, "spconv_down2", "spconv", kernel_size=(2, 1, 1), stride=(2, 1, 1), padding=0)

    def forward(self, features: Tensor, coords: Tensor, batch_size: int) -> Tensor:
        x = self.sp.SparseConvTensor(
            features=features, indices=coords.int(), spatial_shape=self.sparse_shape, batch_size=batch_size
        )
        out = self.out(self.conv3(self.conv2(self.enter(x)))).dense()
        n, c, d, h, w = out.shape
        return out.view(n, c * d, h, w)


def residual(sp: Any, ci: int, co: int, key: str) -> nn.Module:
    """A block that adds its input by ``replace_feature``, as VoxelResBackBone8x and SparseEncoder do."""

    class Residual(sp.SparseModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = sp.SubMConv3d(co, co, 3, padding=1, bias=True, indice_key=key), norm(co)
            self.conv2, self.bn2 = sp.SubMConv3d(co, co, 3, padding=1, bias=True, indice_key=key), norm(co)
            self.relu = nn.ReLU()

        def forward(self, x: Any) -> Any:
            out = self.conv1(x)
            out = out.replace_feature(self.relu(self.bn1(out.features)))
            out = self.conv2(out)
            out = out.replace_feature(self.bn2(out.features))
            return out.replace_feature(self.relu(out.features + x.features))

    enter = sp.SparseSequential(sp.SubMConv3d(ci, co, 3, padding=1, bias=False, indice_key=key), norm(co), nn.ReLU())
    return sp.SparseSequential(enter, Residual(), Residual())


class UNetV2(nn.Module):
    """OpenPCDet and mmdet3d: inverse layers, lateral joins, channels reduced by a view and a sum."""

    def __init__(self, sp: Any) -> None:
        super().__init__()
        self.sp = sp
        self.enter = block(sp, 4, 8, "subm1")
        self.down = block(sp, 8, 16, "spconv2", "spconv", kernel_size=3, stride=2, padding=1)
        self.lateral, self.merge = residual(sp, 16, 16, "subm2"), block(sp, 32, 16, "subm2")
        self.up, self.last = block(sp, 16, 8, "spconv2", "inverse"), block(sp, 8, 8, "subm1")

    def forward(self, features: Tensor, coords: Tensor, batch_size: int) -> Tensor:
        x = self.enter(self.sp.SparseConvTensor(features, coords.int(), list(GRID), batch_size))
        bottom = self.down(x)
        side = self.lateral(bottom)
        side = side.replace_feature(torch.cat((bottom.features, side.features), dim=1))
        merged = self.merge(side)
        n, _ = side.features.shape
        reduced = side.replace_feature(side.features.view(n, merged.features.shape[1], -1).sum(dim=2))
        merged = merged.replace_feature(merged.features + reduced.features)
        return self.last(self.up(merged)).features


class VoxelNeXt(nn.Module):
    """Levels laid over each other by scaled indices, then summed on the ground with ``torch.unique``."""

    def __init__(self, sp: Any) -> None:
        super().__init__()
        self.sp, self.enter = sp, block(sp, 4, 8, "subm1")
        self.conv2 = block(sp, 8, 8, "spconv2", "spconv", kernel_size=3, stride=2, padding=1)
        self.conv3 = block(sp, 8, 8, "spconv3", "spconv", kernel_size=3, stride=2, padding=1)
        self.head = sp.SparseSequential(sp.SubMConv2d(8, 8, 3, bias=True, indice_key="ground"), norm(8), nn.ReLU())

    def forward(self, features: Tensor, coords: Tensor, batch_size: int) -> Tensor:
        x = self.enter(self.sp.SparseConvTensor(features, coords.int(), list(GRID), batch_size))
        y = self.conv2(x)
        z = self.conv3(y)
        z.indices[:, 1:] *= 2
        y = y.replace_feature(torch.cat([y.features, z.features]))
        y.indices = torch.cat([y.indices, z.indices])
        ground, inverse = torch.unique(y.indices[:, [0, 2, 3]], dim=0, return_inverse=True)
        total = y.features.new_zeros((ground.shape[0], y.features.shape[1]))
        total = total.index_add(0, inverse, y.features)
        flat = self.sp.SparseConvTensor(total, ground, [s + 2 for s in y.spatial_shape[1:]], batch_size)
        return self.head(flat).dense()


class PillarRes(nn.Module):
    """Two axes, a dense convolution behind ``dense()``."""

    def __init__(self, sp: Any) -> None:
        super().__init__()
        self.sp = sp
        self.enter = sp.SparseSequential(
            sp.SubMConv2d(4, 8, 3, padding=1, bias=False, indice_key="a"), norm(8), nn.ReLU()
        )
        self.down = sp.SparseSequential(
            sp.SparseConv2d(8, 8, 3, 2, padding=1, bias=False, indice_key="d"), norm(8), nn.ReLU()
        )
        self.dense = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, features: Tensor, coords: Tensor, batch_size: int) -> Tensor:
        x = self.sp.SparseConvTensor(features, coords.int(), np.array(GRID[::-1])[[1, 0]], batch_size)
        return self.dense(self.down(self.enter(x)).dense())


class SparseEncoder(nn.Module):
    """mmdet3d: sequences of sequences, levels kept in a list."""

    def __init__(self, sp: Any) -> None:
        super().__init__()
        self.sp, self.enter = sp, block(sp, 4, 8, "subm1")
        self.encoder_layers = sp.SparseSequential(
            sp.SparseSequential(
                residual(sp, 8, 8, "res1"), block(sp, 8, 12, "sp1", "spconv", kernel_size=3, stride=2, padding=1)
            ),
            sp.SparseSequential(
                residual(sp, 12, 12, "res2"),
                block(sp, 12, 16, "sp2", "spconv", kernel_size=3, stride=2, padding=[0, 1, 1]),
            ),
        )
        self.out = block(sp, 16, 16, "out", "spconv", kernel_size=(3, 1, 1), stride=(2, 1, 1), padding=0)

    def forward(self, features: Tensor, coords: Tensor, batch_size: int) -> Tensor:
        x = self.enter(self.sp.SparseConvTensor(features, coords.int(), [17, 16, 16], batch_size))
        kept = []
        for layer in self.encoder_layers.children():
            x = layer(x)
            kept.append(x)
        out = self.out(kept[-1]).dense()
        return out.view(out.shape[0], -1, *out.shape[3:])


class SpUNet(nn.Module):
    """Pointcept: grid and number of scenes from the data (``tolist``), a skip connection, a point-wise last layer."""

    def __init__(self, sp: Any) -> None:
        super().__init__()
        self.sp = sp
        self.conv_input = sp.SparseSequential(
            sp.SubMConv3d(4, 8, kernel_size=5, padding=1, bias=False, indice_key="stem"), norm(8), nn.ReLU()
        )
        self.down = sp.SparseSequential(
            sp.SparseConv3d(8, 16, kernel_size=2, stride=2, bias=False, indice_key="spconv1"), norm(16), nn.ReLU()
        )
        self.encode = residual(sp, 16, 16, "subm1")
        self.up = sp.SparseSequential(
            sp.SparseInverseConv3d(16, 8, kernel_size=2, indice_key="spconv1", bias=False), norm(8), nn.ReLU()
        )
        self.final = sp.SubMConv3d(16, 5, kernel_size=1, padding=1, bias=True)

    def forward(self, features: Tensor, grid_coord: Tensor, batch: Tensor) -> Tensor:
        sparse_shape = torch.add(torch.max(grid_coord, dim=0).values, SPARE).tolist()
        x = self.sp.SparseConvTensor(
            features=features,
            indices=torch.cat([batch.unsqueeze(-1).int(), grid_coord.int()], dim=1).contiguous(),
            spatial_shape=sparse_shape,
            batch_size=batch[-1].tolist() + 1,
        )
        x = self.conv_input(x)
        y = self.up(self.encode(self.down(x)))
        y = y.replace_feature(torch.cat((y.features, x.features), dim=1))
        return self.final(y).features


class UBlock(nn.Module):
    """PointGroup, SoftGroup and second.pytorch: levels in each other, tensors made anew, features that are assigned."""

    def __init__(self, sp: Any, widths: tuple[int, ...] = (4, 8, 12), depth: int = 1) -> None:
        super().__init__()
        self.sp, self.last = sp, len(widths) == 1
        here = widths[0]
        self.norm1, self.conv1 = norm(here), sp.SubMConv3d(here, here, 3, padding=1, indice_key=f"subm{depth}")
        if not self.last:
            key, below = f"spconv{depth}", widths[1]
            down = sp.SparseConv3d(here, below, kernel_size=2, stride=2, bias=False, indice_key=key)
            self.conv = sp.SparseSequential(norm(here), nn.ReLU(), down)
            self.u = UBlock(sp, widths[1:], depth + 1)
            self.deconv = sp.SparseSequential(
                norm(below), nn.ReLU(), sp.SparseInverseConv3d(below, here, 2, indice_key=key, bias=False)
            )
            self.tail = sp.SubMConv3d(2 * here, here, 3, padding=1, indice_key=f"subm{depth}")

    def forward(self, *inputs: Any) -> Any:
        x = (
            inputs[0]
            if len(inputs) == 1
            else self.sp.SparseConvTensor(inputs[0], inputs[1].int(), list(GRID), inputs[2])
        )
        identity = self.sp.SparseConvTensor(x.features, x.indices, x.spatial_shape, x.batch_size)
        out = self.conv1(x)
        out.features = nn.functional.silu(self.norm1(out.features))
        out += identity
        if not self.last:
            kept = self.sp.SparseConvTensor(out.features, out.indices, out.spatial_shape, out.batch_size)
            up = self.deconv(self.u(self.conv(out)))
            out.features = torch.cat((kept.features, up.features), dim=1)
            out = self.tail(out)
        return out if len(inputs) == 1 else out.features


class PointBlock(nn.Module):
    """PTv3: a sparse convolution as positional encoding between layers that see the features only."""

    def __init__(self, sp: Any) -> None:
        super().__init__()
        self.sp = sp
        self.conv, self.linear, self.norm1 = (
            sp.SubMConv3d(4, 4, 3, bias=True, indice_key="stage0"),
            nn.Linear(4, 4),
            nn.LayerNorm(4),
        )
        self.qkv, self.proj, self.norm2 = nn.Linear(4, 12), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, features: Tensor, grid_coord: Tensor, batch: Tensor) -> Tensor:
        shape = torch.add(torch.max(grid_coord, dim=0).values, SPARE).tolist()
        indices = torch.cat([batch.unsqueeze(-1).int(), grid_coord.int()], dim=1).contiguous()
        x = self.sp.SparseConvTensor(features, indices, shape, batch[-1].tolist() + 1)
        feat = features + self.norm1(self.linear(self.conv(x).features))
        code = (grid_coord * grid_coord.new_tensor([1, 1 << 10, 1 << 20])).sum(1) + (batch << 40)
        order = torch.argsort(code)
        inverse = torch.zeros_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        q, k, v = self.qkv(self.norm2(feat))[order].unflatten(1, (3, 2, 2)).permute(1, 2, 0, 3)
        mixed = nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        feat = feat + self.proj(mixed.transpose(0, 1).flatten(1)[inverse])
        return x.replace_feature(feat).features


class Trellis(nn.Module):
    """TRELLIS: a tensor class of its own around spconv's, which copies private attributes and sorts by scenes."""

    def __init__(self, sp: Any) -> None:
        super().__init__()
        self.sp, self.conv1 = sp, sp.SubMConv3d(4, 8, 3, dilation=1, bias=True, indice_key="res", algo=None)
        self.norm, self.down = (
            nn.LayerNorm(8),
            sp.SparseConv3d(8, 8, 2, stride=2, padding=0, bias=True, indice_key=None),
        )

    def _like(self, data: Any, features: Tensor) -> Any:
        flat = data.features.reshape(data.features.shape[0], -1)
        sizes = data.spatial_shape, data.batch_size
        new = self.sp.SparseConvTensor(flat, data.indices, *sizes, data.grid, data.voxel_num, data.indice_dict)
        new._features = features
        for name in ("benchmark", "benchmark_record", "thrust_allocator", "_timer", "force_algo", "int8_scale"):
            setattr(new, name, getattr(data, name))
        return new

    def forward(self, features: Tensor, coords: Tensor) -> Tensor:
        batch_size = coords[:, 0].max().item() + 1
        shape = list(coords.max(0)[0] + 1)[1:]
        data = self.sp.SparseConvTensor(features.reshape(features.shape[0], -1), coords, shape, batch_size)
        data = self.conv1(self._like(data, features))
        data = self._like(data, nn.functional.silu(self.norm(data.features)))
        out = self.down(data)
        forward = out.indices[:, 0].argsort(stable=True)
        out = self.sp.SparseConvTensor(out.features[forward], out.indices[forward], out.spatial_shape, out.batch_size)
        return out.features * 2


class Trellis2(nn.Module):
    """TRELLIS.2: flex_gemm with settings of the process in every forward, and a cache of neighbours."""

    def __init__(self, sp: Any) -> None:
        super().__init__()
        self.dense = sp if hasattr(sp, "_Conv") else None
        self.weight, self.bias = nn.Parameter(torch.randn(6, 3, 3, 3, 4)), nn.Parameter(torch.randn(6))

    def forward(self, features: Tensor, coords: Tensor) -> Tensor:
        if self.dense is not None:
            x = self.dense.SparseConvTensor(features, coords, GRID, 2)
            return x.at(nn.functional.conv3d(x.dense(), self.weight.movedim(-1, 1), self.bias, padding=1))
        flex_gemm.ops.spconv.set_algorithm("masked_implicit_gemm_splitk")
        flex_gemm.ops.spconv.set_hashmap_ratio(2.0)
        shape, cache = torch.Size([2, 4, *GRID]), None
        for _ in range(2):
            out, cache = flex_gemm.ops.spconv.sparse_submanifold_conv3d(
                features, coords, shape, self.weight, self.bias, cache, (1, 1, 1)
            )
        return out


class Mnist(nn.Module):
    """spconv's example: ``from_dense`` of channels last, a norm first, a pool, dense layers behind."""

    def __init__(self, sp: Any) -> None:
        super().__init__()
        self.sp = sp
        self.net = sp.SparseSequential(
            nn.BatchNorm1d(1),
            sp.SubMConv2d(1, 6, 3, 1),
            nn.ReLU(),
            sp.SubMConv2d(6, 8, 3, 1),
            sp.SparseMaxPool2d(2, 2),
            sp.ToDense(),
        )
        self.fc = nn.Linear(8 * 7 * 7, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.sp.SparseConvTensor.from_dense(images.reshape(-1, 14, 14, 1))
        return nn.functional.log_softmax(self.fc(torch.flatten(self.net(x), 1)), dim=1)


def _scene(n: int, seed: int) -> Inputs:
    return *cells(n, seed), 2


def _ground(n: int, seed: int) -> Inputs:
    return *cells(n, seed, GRID[1:]), 2


def _cloud(n: int, seed: int) -> Inputs:
    features, coords = cells(n, seed)
    return features, coords[:, 1:].long(), coords[:, 0].long()


def _images(n: int, seed: int) -> Inputs:
    rng = torch.Generator().manual_seed(seed)
    return (torch.randn(3, 14, 14, generator=rng) * (torch.rand(3, 14, 14, generator=rng) < n / 600),)


@dataclass(frozen=True)
class Specimen:
    """A network, what it takes, and whether a compiled graph of it has sizes that only the data knows."""

    make: Callable[[Any], nn.Module]
    inputs: Callable[[int, int], Inputs]


SPECIMENS = {
    "VoxelBackBone8x": Specimen(VoxelBackBone, _scene),
    "VoxelResBackBone8x": Specimen(lambda sp: VoxelBackBone(sp, partial(residual, sp)), _scene),
    "UNetV2": Specimen(UNetV2, _scene),
    "VoxelNeXt": Specimen(VoxelNeXt, _scene),
    "PillarRes18": Specimen(PillarRes, _ground),
    "SparseEncoder": Specimen(SparseEncoder, _scene),
    "SpUNet": Specimen(SpUNet, _cloud),
    "UBlock": Specimen(UBlock, _scene),
    "PTv3": Specimen(PointBlock, _cloud),
    "TRELLIS": Specimen(Trellis, lambda n, seed: cells(n, seed)),
    "TRELLIS.2": Specimen(Trellis2, lambda n, seed: cells(n, seed)),
    "mnist": Specimen(Mnist, _images),
}
