"""Further networks of sparse layers' users, as they write them: with heads, points, losses of voxels, and own tensors.

They are our own, written before the exporter was looked at. A network takes plain tensors alone, as a file does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import shiplap_sparse3d as sparse3d
import shiplap_sparse3d.spconv as spconv
from tests.sparse3d.consumers.specimens import GRID, SPARE, Inputs, Specimen, block, cells, norm, residual

SCENES = 2
Window = tuple[int, int, int]


def same(ci: int, co: int, window: Window | int, key: str) -> Any:
    """A submanifold convolution with the padding that users write."""
    padding = window // 2 if isinstance(window, int) else tuple(size // 2 for size in window)
    return spconv.SubMConv3d(ci, co, kernel_size=window, padding=padding, bias=False, indice_key=key)


class Asymmetric(nn.Module):
    """Cylinder3D's block: two orders of two flat kernels, activations before norms, features that are assigned."""

    def __init__(self, ci: int, co: int, key: str) -> None:
        super().__init__()
        flat, tall = (1, 3, 3), (3, 1, 3)
        self.shortcut = nn.ModuleList([same(ci, co, flat, f"{key}a"), same(co, co, tall, f"{key}b")])
        self.main = nn.ModuleList([same(ci, co, tall, f"{key}b"), same(co, co, flat, f"{key}a")])
        self.norms = nn.ModuleList([norm(co) for _ in range(4)])

    def forward(self, x: Any) -> Any:
        ends = []
        for number, way in enumerate((self.shortcut, self.main)):
            y = x
            for step, conv in enumerate(way):
                y = conv(y)
                y.features = self.norms[2 * number + step](functional.leaky_relu(y.features))
            ends.append(y)
        ends[1].features = ends[1].features + ends[0].features
        return ends[1]


class Cylinder3D(nn.Module):
    """Flat kernels, a pool of two axes, inverse layers, a gate of three one-dimensional kernels, a dense result."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.block2, self.block3 = (
            Asymmetric(4, 8, "pre"),
            Asymmetric(8, 16, "d2"),
            Asymmetric(16, 32, "d3"),
        )
        self.pool2 = spconv.SparseConv3d(16, 16, 3, stride=2, padding=1, bias=False, indice_key="down2")
        self.pool3 = spconv.SparseConv3d(32, 32, 3, stride=(2, 2, 1), padding=1, bias=False, indice_key="down3")
        self.up3 = spconv.SparseInverseConv3d(32, 32, kernel_size=3, bias=False, indice_key="down3")
        self.up2 = spconv.SparseInverseConv3d(32, 16, kernel_size=3, bias=False, indice_key="down2")
        gates = (3, 1, 1), (1, 3, 1), (1, 1, 3)
        self.gates = nn.ModuleList([same(16, 16, window, f"recon{i}") for i, window in enumerate(gates)])
        self.gate_norms = nn.ModuleList([norm(16) for _ in gates])
        self.logits = spconv.SubMConv3d(32, 5, kernel_size=3, stride=1, padding=1, bias=True, indice_key="logit")

    def forward(self, features: Tensor, coords: Tensor) -> Tensor:
        x = self.enter(spconv.SparseConvTensor(features, coords.int(), [*GRID], SCENES))
        level2 = self.block2(x)
        level3 = self.block3(self.pool2(level2))
        y = self.up3(self.pool3(level3))
        y = self.up2(y.replace_feature(y.features + level3.features))
        y = y.replace_feature(y.features + level2.features)
        gates = [n(g(y).features).sigmoid() for g, n in zip(self.gates, self.gate_norms, strict=True)]
        gated = y.replace_feature((gates[0] + gates[1] + gates[2]) * y.features)
        out: Tensor = self.logits(gated.replace_feature(torch.cat((gated.features, y.features), 1))).dense()
        return out


class SPVCNN(nn.Module):
    """Points and voxels: voxels of points in the network, features back at the points, by interpolation."""

    def __init__(self) -> None:
        super().__init__()

        def layer(ci: int, co: int, stride: int = 1) -> nn.Module:
            conv = sparse3d.SparseConv3d(ci, co, 2, stride=2) if stride == 2 else sparse3d.SubMConv3d(ci, co, 3)
            return sparse3d.Sequential(conv, sparse3d.BatchNorm(co), nn.ReLU(True))

        self.stem, self.down = layer(4, 8), sparse3d.Sequential(layer(8, 8, 2), layer(8, 16))
        self.up, self.mix = sparse3d.SparseInverseConv3d(16, 8, 2), layer(16, 8)
        self.point = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.enter, self.classifier = nn.Linear(4, 8), nn.Linear(8, 7)

    def forward(self, features: Tensor, points: Tensor, batch: Tensor) -> Tensor:
        cloud = sparse3d.PointTensor(features, points, batch)
        x = self.stem(cloud.voxelize(GRID, SCENES))
        beside = self.enter(features) + cloud.sample(x).feats
        y = self.mix(sparse3d.cat([self.up(self.down(x)), x]))
        out: Tensor = self.classifier(cloud.sample(y).feats + self.point(beside))
        return out


class Basic(nn.Module):
    """MinkowskiEngine's residual block, with sparse tensors as operands."""

    def __init__(self, ci: int, co: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = sparse3d.SubMConv3d(ci, co, kernel_size=3, bias=False), sparse3d.BatchNorm(co)
        self.conv2, self.norm2 = sparse3d.SubMConv3d(co, co, kernel_size=3, bias=False), sparse3d.BatchNorm(co)
        self.downsample = sparse3d.SubMConv3d(ci, co, kernel_size=1, bias=False) if ci != co else None

    def forward(self, x: Any) -> Any:
        out = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return torch.relu(out + (x if self.downsample is None else self.downsample(x)))


class MinkUNet(nn.Module):
    """Strides that keep every cell, a transposed layer onto the encoder's voxels, a pool of scenes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv0, self.bn0 = sparse3d.SubMConv3d(4, 8, kernel_size=5, bias=False), sparse3d.BatchNorm(8)
        self.conv1 = sparse3d.SparseConv3d(8, 8, kernel_size=2, stride=2, out_coords="floor", bias=False)
        self.block1, self.block2, self.block5 = Basic(8, 16), Basic(16, 16), Basic(32, 16)
        self.conv2 = sparse3d.SparseConv3d(16, 16, kernel_size=3, stride=2, out_coords="floor", bias=False)
        self.convtr4 = sparse3d.SparseConvTranspose3d(16, 16, kernel_size=2, stride=2, bias=False)
        self.convtr7 = sparse3d.SparseInverseConv3d(16, 8, kernel_size=2, bias=False)
        self.final, self.whole = sparse3d.SubMConv3d(16, 3, kernel_size=1, bias=True), sparse3d.GlobalPool("max")

    def forward(self, features: Tensor, coords: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.relu(self.bn0(self.conv0(sparse3d.SparseTensor(features, coords, GRID, SCENES))))
        second = self.block1(functional.relu(self.conv1(first)))
        third = self.block2(self.conv2(second))
        out = self.block5(sparse3d.cat([self.convtr4(third, second), second]))
        return self.final(sparse3d.cat([self.convtr7(out), first])).feats, self.whole(third)


class CenterPoint(nn.Module):
    """Means of the points of a voxel, a residual backbone, a neck and heads by name, the best cells."""

    def __init__(self) -> None:
        super().__init__()
        down = partial(block, spconv, kind="spconv", kernel_size=3, stride=2)
        self.enter = residual(spconv, 4, 8, "res1")
        self.conv2 = spconv.SparseSequential(down(8, 16, "sp2", padding=1), residual(spconv, 16, 16, "res2"))
        self.conv3 = down(16, 16, "sp3", padding=(0, 1, 1))
        self.neck = nn.Sequential(
            nn.ZeroPad2d(1),
            nn.Conv2d(32, 16, 3, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 8, 2, 2),
        )
        self.heads = nn.ModuleDict({name: nn.Conv2d(8, co, 3, padding=1) for name, co in (("hm", 3), ("center", 2))})

    def forward(self, voxels: Tensor, num_points: Tensor, coords: Tensor) -> dict[str, Tensor]:
        total = voxels.sum(dim=1, keepdim=False)
        mean = total / torch.clamp_min(num_points.view(-1, 1), min=1.0).type_as(voxels)
        x = spconv.SparseConvTensor(mean.contiguous(), coords.int(), [9, *GRID[1:]], SCENES)
        ground = self.conv3(self.conv2(self.enter(x))).dense()
        n, c, d, h, w = ground.shape
        maps = self.neck(ground.view(n, c * d, h, w))
        heads = {name: head(maps) for name, head in self.heads.items()}
        scores, cells_ = torch.topk(heads["hm"].sigmoid().flatten(2, 3), 10)
        return {"scores": scores, "cells": cells_, **heads}


class PVRCNN(nn.Module):
    """Key points that take features of the nearest voxels of their scene, and of the ground by interpolation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = block(spconv, 4, 8, "s1")
        self.conv2 = block(spconv, 8, 16, "sp2", "spconv", kernel_size=3, stride=2, padding=1)
        self.near = nn.Sequential(nn.Linear(16 + 3, 16), nn.ReLU(), nn.Linear(16, 16))
        self.fuse, self.cls = nn.Linear(16 + 64, 16), nn.Linear(16, 1)
        self.register_buffer("voxel_size", torch.tensor([0.1, 0.1, 0.2]))

    def forward(self, features: Tensor, coords: Tensor, keypoints: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv2(self.conv1(spconv.SparseConvTensor(features, coords, [*GRID], SCENES)))
        ground = x.dense().flatten(1, 2)
        pooled = []
        for scene in range(SCENES):
            mask = x.indices[:, 0] == scene
            centres = (x.indices[mask][:, 1:].flip(1).float() + 0.5) * 2 * self.voxel_size
            points = keypoints[scene]
            nearest = torch.topk((points[:, None] - centres).square().sum(-1), 2, dim=1, largest=False).indices
            grouped = torch.cat([x.features[mask][nearest], centres[nearest] - points[:, None]], -1)
            place = points[:, :2] / 1.6 * 2 - 1
            below = functional.grid_sample(ground[scene : scene + 1], place[None, :, None], align_corners=False)
            pooled.append(torch.cat([self.near(grouped).max(dim=1).values, below[0, :, :, 0].T], 1))
        point = self.fuse(torch.cat(pooled))
        return point * torch.sigmoid(self.cls(point)), x.features


class Decoder(nn.Module):
    """A decoder of shapes: voxels that split, of which those that a score chooses stay, and split again."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm = sparse3d.SubMConv3d(4, 16, 3), nn.LayerNorm(16)
        self.up, self.middle = sparse3d.SparsePixelShuffle3d(2), sparse3d.SubMConv3d(2, 8, 3)
        self.score, self.groups = nn.Linear(8, 1), nn.GroupNorm(2, 8)
        self.up2, self.out = sparse3d.SparseUpsample3d(2), sparse3d.SubMConv3d(8, 4, 3, bias=True)

    def forward(self, latent: Tensor, coords: Tensor) -> tuple[Tensor, Tensor]:
        h = self.enter(sparse3d.SparseTensor(latent, coords, GRID, SCENES))
        h = self.middle(self.up(h.replace(functional.silu(self.norm(h.feats)))))
        h = functional.silu(self.groups(h))
        h = self.out(self.up2(h[self.score(h.feats)[:, 0] > 0]))
        return h.feats.tanh(), h.coords


class Classifier(nn.Module):
    """An inverse layer in a sequence, a pool, two pools of scenes, dense layers with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = spconv.SparseSequential(
            spconv.SubMConv3d(4, 8, 3, indice_key="c0"),
            norm(8),
            nn.ReLU(),
            spconv.SparseConv3d(8, 16, 3, 2, 1, indice_key="c1"),
            nn.ReLU(),
            spconv.SparseInverseConv3d(16, 8, 3, indice_key="c1"),
            spconv.SparseMaxPool3d(2, 2),
            spconv.SubMConv3d(8, 16, 3, indice_key="c2"),
            nn.ReLU(),
        )
        self.most, self.mean = spconv.SparseGlobalMaxPool(), spconv.SparseGlobalAvgPool()
        self.head = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10))

    def forward(self, features: Tensor, indices: Tensor) -> Tensor:
        x = self.net(spconv.SparseConvTensor(features, indices, [*GRID], SCENES))
        return functional.log_softmax(self.head(torch.cat([self.most(x), self.mean(x)], dim=-1)), -1)


class OACNN(nn.Module):
    """Pointcept's adaptive relation: means and soft maxima over clusters of voxels, of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = block(spconv, 4, 8, "stem"), block(spconv, 8, 8, "k")
        self.proj, self.weight, self.adaptive, self.fuse = (
            nn.Linear(8, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 2),
            nn.Linear(16, 8),
        )
        self.final = spconv.SubMConv3d(8, 4, kernel_size=1)

    def forward(self, features: Tensor, grid_coord: Tensor, batch: Tensor) -> Tensor:
        rows = torch.cat([batch.unsqueeze(-1), grid_coord], dim=1).int().contiguous()
        x = self.stem(spconv.SparseConvTensor(features, rows, [n + SPARE for n in GRID], SCENES))
        given, made = x.features, []
        for size in (2, 4):
            cluster = torch.cat([batch.unsqueeze(-1), torch.div(grid_coord, size, rounding_mode="trunc")], 1)
            _, at, count = torch.unique(cluster, dim=0, return_inverse=True, return_counts=True)
            weight = self.weight(given)
            mean = weight.new_zeros(count.shape[0], 8).index_add_(0, at, weight) / count[:, None]
            share = torch.exp(weight - mean[at])
            total = torch.zeros_like(mean).scatter_add_(0, at[:, None].expand(-1, 8), share)
            share = share / (total[at] + 1e-6)
            made.append(torch.zeros_like(mean).index_add_(0, at, self.proj(given) * share)[at])
        chosen = torch.einsum("l n, l n c -> l c", torch.softmax(self.adaptive(given), dim=1), torch.stack(made, 1))
        x = x.replace_feature(self.fuse(torch.cat([given, chosen], 1)))
        out: Tensor = self.final(x.replace_feature(self.conv(x).features + x.features)).features
        return out


class PointSECOND(nn.Module):
    """Voxels of raw points in the network, layers of one call each, features back at the points."""

    def __init__(self) -> None:
        super().__init__()
        self.vfe = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU())
        self.net = sparse3d.Sequential(
            sparse3d.SubMConv3d(8, 8, 3),
            sparse3d.BatchNorm(8),
            sparse3d.SparseConv3d(8, 16, 3, 2, padding=1),
            nn.ReLU(),
            sparse3d.SparseAvgPool3d(2, 2),
            sparse3d.SubMConv3d(16, 16, 3, region="cross"),
            sparse3d.InstanceNorm(16),
            nn.GELU(),
        )
        self.head = nn.Conv2d(32, 4, 1)

    def forward(self, points: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        features, grid = self.vfe(points), (8, 16, 16)
        x, voxel = sparse3d.voxelize(
            points[:, :3], features, 0.5, batch=batch, spatial_shape=grid, batch_size=SCENES, origin=(0, 0, 0)
        )
        return self.head(self.net(x).dense().flatten(1, 2)), x.feats[voxel]


class LargeKernel(nn.Module):
    """A depthwise kernel of 343 taps, attention along a curve, shuffles, a transposed layer to a dense grid."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.deep = sparse3d.SubMConv3d(4, 8, 1), sparse3d.SubMConv3d(8, 8, 7, groups=8, bias=False)
        self.wide = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
        self.attention, self.unshuffle = sparse3d.SparseAttention(8, 2, 16), sparse3d.SparsePixelUnshuffle3d(2)
        self.down = sparse3d.SparseConv3d(8, 16, (1, 2, 2), stride=(1, 2, 2))
        self.up = sparse3d.SparseConvTranspose3d(16, 4, 3, stride=2, padding=1)

    def forward(self, features: Tensor, coords: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.enter(sparse3d.SparseTensor(features, coords, GRID, SCENES))
        x = self.attention(x + self.wide(self.deep(x).feats))
        return x.feats, self.unshuffle(x).feats, self.up(self.down(x) * 0.5).dense()


class Focal(nn.Module):
    """Voxels that a score chooses become a tensor of their own, are summed on the ground, and sorted by scores."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.score = block(spconv, 4, 8, "a"), spconv.SubMConv3d(8, 1, 3, padding=1, indice_key="a")
        self.conv = block(spconv, 8, 8, "b", "spconv", kernel_size=3, stride=2, padding=1)
        self.ground = spconv.SparseSequential(
            spconv.SubMConv2d(8, 8, 3, padding=1, bias=False, indice_key="2d"), norm(8), nn.ReLU()
        )
        self.head = nn.Linear(8, 3)

    def forward(self, features: Tensor, coords: Tensor) -> tuple[Tensor, Tensor]:
        x = self.enter(spconv.SparseConvTensor(features, coords.int(), [*GRID], SCENES))
        score = self.score(x).features.sigmoid()
        chosen = score.squeeze(-1) >= 0.5
        x = spconv.SparseConvTensor((x.features * score)[chosen], x.indices[chosen], x.spatial_shape, x.batch_size)
        x = self.conv(x)
        cell, at = torch.unique(x.indices[:, [0, 2, 3]], dim=0, return_inverse=True)
        total = x.features.new_zeros((cell.shape[0], x.features.shape[1]))
        total.index_add_(0, at, x.features)
        y = self.ground(spconv.SparseConvTensor(total, cell.int(), x.spatial_shape[1:], x.batch_size))
        heat = self.head(y.features).sigmoid()
        order = torch.sort(heat.max(dim=1).values, descending=True).indices
        return heat[order], y.indices[order]


# --- what they take ---------------------------------------------------------------------------------------------------


def _cloud(n: int, seed: int) -> Inputs:
    rng = torch.Generator().manual_seed(seed)
    points = torch.rand(n, 3, generator=rng) * (torch.tensor(GRID) - 1.01)
    return torch.randn(n, 4, generator=rng), points, (torch.arange(n) >= n // 2).long()


def _points(n: int, seed: int) -> Inputs:
    rng = torch.Generator().manual_seed(seed)
    size = torch.tensor([3.99, 7.99, 7.99, 1.0])
    return torch.rand(n, 4, generator=rng) * size, (torch.arange(n) >= n // 2).long()


def _voxels_of_points(n: int, seed: int) -> Inputs:
    rng, coords = torch.Generator().manual_seed(seed), cells(n, seed)[1]
    count = torch.randint(1, 6, (n,), generator=rng)
    return torch.randn(n, 5, 4, generator=rng) * (torch.arange(5) < count[:, None])[..., None], count, coords


def _with_key_points(n: int, seed: int) -> Inputs:
    return *cells(n, seed), torch.rand(2, 20, 3, generator=torch.Generator().manual_seed(seed)) * 1.5


def _labelled(n: int, seed: int) -> Inputs:
    features, coords = cells(n, seed)
    return features, coords[:, 1:].long(), coords[:, 0].long()


DETECTORS = {
    "Cylinder3D": Specimen(lambda _: Cylinder3D(), cells),
    "SPVCNN": Specimen(lambda _: SPVCNN(), _cloud),
    "MinkUNet": Specimen(lambda _: MinkUNet(), cells),
    "CenterPoint": Specimen(lambda _: CenterPoint(), _voxels_of_points),
    "PVRCNN": Specimen(lambda _: PVRCNN(), _with_key_points),
    "Decoder": Specimen(lambda _: Decoder(), cells),
    "Classifier": Specimen(lambda _: Classifier(), cells),
    "OACNN": Specimen(lambda _: OACNN(), _labelled),
    "PointSECOND": Specimen(lambda _: PointSECOND(), _points),
    "LargeKernel": Specimen(lambda _: LargeKernel(), cells),
    "Focal": Specimen(lambda _: Focal(), cells),
}
