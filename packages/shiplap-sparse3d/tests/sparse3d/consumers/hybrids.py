"""Networks that join sparse layers with pillars, attention, range images, four axes and heads of queries.

They are our own, written before they were exported for the first time. A network takes plain tensors alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

import shiplap_sparse3d as sparse3d
import shiplap_sparse3d.spconv as spconv
from tests.sparse3d.consumers.specimens import GRID, Inputs, Specimen, block, cells

SCENES = 2


class PointPillars(nn.Module):
    """Decorated points of pillars, their maxima, a scatter scene by scene, deconvolutions, and heads of anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(10, 16, bias=False), nn.BatchNorm1d(16, eps=1e-3, momentum=0.01)
        self.blocks, self.deblocks = nn.ModuleList(), nn.ModuleList()
        for ci, stride, up in ((16, 1, 1), (16, 2, 2)):
            layers = [nn.ZeroPad2d(1), nn.Conv2d(ci, 16, 3, stride, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
            self.blocks.append(nn.Sequential(*layers, nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()))
            self.deblocks.append(nn.Sequential(nn.ConvTranspose2d(16, 16, up, stride=up), nn.ReLU()))
        self.cls, self.box, self.direction = nn.Conv2d(32, 6, 1), nn.Conv2d(32, 14, 1), nn.Conv2d(32, 4, 1)

    def forward(self, voxels: Tensor, num_points: Tensor, coords: Tensor) -> dict[str, Tensor]:
        count = num_points.type_as(voxels).view(-1, 1, 1)
        cluster = voxels[:, :, :3] - voxels[:, :, :3].sum(dim=1, keepdim=True) / count
        centre = torch.zeros_like(voxels[:, :, :3])
        for axis, size in enumerate((0.16, 0.16, 4.0)):
            centre[:, :, axis] = voxels[:, :, axis] - (coords[:, 3 - axis].to(voxels.dtype).unsqueeze(1) * size + 0.08)
        points = torch.cat([voxels, cluster, centre], dim=-1)
        inside = torch.arange(points.shape[1], dtype=torch.int, device=points.device)[None] < num_points.int()[:, None]
        points = points * inside.unsqueeze(-1).type_as(points)
        pillars = functional.relu(self.norm(self.linear(points).permute(0, 2, 1)).permute(0, 2, 1)).max(dim=1)[0]
        maps = []
        for scene in range(SCENES):
            canvas = torch.zeros(16, GRID[1] * GRID[2], dtype=pillars.dtype, device=pillars.device)
            mask = coords[:, 0] == scene
            here = coords[mask, :]
            at = (here[:, 1] + here[:, 2] * GRID[2] + here[:, 3]).type(torch.long)
            canvas[:, at] = pillars[mask, :].t()
            maps.append(canvas)
        x = torch.stack(maps, 0).view(SCENES, 16, GRID[1], GRID[2])
        ups = []
        for down, up in zip(self.blocks, self.deblocks, strict=True):
            x = down(x)
            ups.append(up(x))
        x = torch.cat(ups, dim=1)
        cls, box = (head(x).permute(0, 2, 3, 1).contiguous() for head in (self.cls, self.box))
        direction = self.direction(x).permute(0, 2, 3, 1).contiguous().view(SCENES, -1, 2)
        return {"cls": cls.view(SCENES, -1, 3), "box": box.view(SCENES, -1, 7), "way": torch.max(direction, -1)[1]}


class DSVT(nn.Module):
    """Voxels in sets of a window, which attend to each other in two orders, with positions and masks of padding."""

    SIZE, WINDOW = 8, (2, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(spconv, 4, 16, "stem")
        self.position = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16))
        self.attention = nn.ModuleList([nn.MultiheadAttention(16, 4, batch_first=True) for _ in range(2)])
        self.norms, self.wide = nn.ModuleList([nn.LayerNorm(16) for _ in range(2)]), nn.Linear(16, 16)
        self.down = block(spconv, 16, 16, "down", "spconv", kernel_size=(2, 1, 1), stride=(2, 1, 1), padding=0)

    def forward(self, features: Tensor, coords: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(spconv.SparseConvTensor(features, coords.int(), [*GRID], SCENES))
        indices, given = x.indices.long(), x.features
        size = indices.new_tensor(self.WINDOW)
        window, inside = indices[:, 1:] // size, indices[:, 1:] % size
        number = ((indices[:, 0] * 4 + window[:, 0]) * 2 + window[:, 1]) * 2 + window[:, 2]
        position = self.position(inside.to(given.dtype) / size - 0.5)
        for axis, (attention, norm_) in enumerate(zip(self.attention, self.norms, strict=True)):
            line = inside[:, 2 - axis] * 64 + inside[:, 1 + axis] * 8 + inside[:, 0]
            order = torch.argsort(number * 1024 + line, stable=True)
            count = torch.bincount(number[order], minlength=64)
            start = torch.cumsum(count, 0) - count
            sets = torch.div(count + self.SIZE - 1, self.SIZE, rounding_mode="floor")
            first = torch.cumsum(sets, 0) - sets
            rank = torch.arange(order.shape[0], device=order.device) - start[number[order]]
            at = (first[number[order]] + rank // self.SIZE) * self.SIZE + rank % self.SIZE
            # As many sets as voxels are enough.
            held = torch.full((order.shape[0] * self.SIZE,), -1, dtype=torch.long, device=order.device)
            held = held.scatter(0, at, order).view(-1, self.SIZE)
            empty = held < 0
            query = (given + position)[held.clamp(min=0)]
            mask = empty & ~empty.all(dim=1, keepdim=True)
            mixed = attention(query, query, given[held.clamp(min=0)], key_padding_mask=mask, need_weights=False)[0]
            back = torch.empty_like(order).scatter_(0, order, at)
            given = norm_(given + mixed.reshape(-1, 16)[back])
            given = given + functional.gelu(self.wide(given))
        out = self.down(x.replace_feature(given))
        return out.features, out.dense().flatten(1, 2)


class RPVNet(nn.Module):
    """Points, voxels and a range image, which give each other features by scatters and gathers, under a soft gate."""

    def __init__(self) -> None:
        super().__init__()
        self.point, self.voxel = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU()), block(spconv, 8, 8, "v")
        self.range = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Hardswish(), nn.Dropout2d(0.2))
        self.gate, self.out = nn.Linear(24, 3), nn.Linear(8, 5)

    def forward(self, points: Tensor, batch: Tensor) -> Tensor:
        given = self.point(points)
        cell = points[:, :3].floor().int().clamp(min=0)
        rows, at, count = torch.unique(
            torch.cat([batch[:, None].int(), cell], 1), dim=0, return_inverse=True, return_counts=True
        )
        sums = given.new_zeros(rows.shape[0], 8).scatter_add_(0, at[:, None].expand(-1, 8), given)
        voxels = self.voxel(spconv.SparseConvTensor(sums / count[:, None], rows, [4, 8, 8], SCENES))
        depth = points[:, :3].norm(dim=1).clamp(min=1e-3)
        yaw, pitch = torch.atan2(points[:, 1], points[:, 0]), torch.asin(points[:, 2] / depth)
        u = (yaw / torch.pi * 2 * 16).long().clamp(0, 15)
        v = (pitch / torch.pi * 2 * 8).long().clamp(0, 7)
        pixel = (batch * 8 + v) * 16 + u
        image = given.new_full((SCENES * 8 * 16, 8), -1.0)
        image = image.scatter_reduce(0, pixel[:, None].expand(-1, 8), given, reduce="amax", include_self=True)
        image = self.range(image.view(SCENES, 8, 16, 8).permute(0, 3, 1, 2))
        place = torch.stack([u * 2 / 15 - 1, v * 2 / 7 - 1], 1).to(given.dtype)
        ranged = torch.zeros_like(given)
        for scene in range(SCENES):
            seen = functional.grid_sample(image[scene : scene + 1], place[None, :, None], align_corners=True)[
                0, :, :, 0
            ]
            ranged = torch.where((batch == scene)[:, None], seen.t(), ranged)
        three = torch.stack([given, voxels.features[at], ranged], 1)
        share = torch.softmax(self.gate(three.flatten(1)), dim=1)
        out: Tensor = self.out((three * share[:, :, None]).sum(1))
        return out


class Squeeze(nn.Module):
    """Channels under a gate that the mean of their scene decides."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mean = sparse3d.GlobalPool("avg")
        self.gate = nn.Sequential(nn.Linear(channels, 4), nn.ReLU(inplace=True), nn.Linear(4, channels), nn.Sigmoid())

    def forward(self, x: sparse3d.SparseTensor) -> sparse3d.SparseTensor:
        return x.replace(x.feats * self.gate(self.mean(x))[x.coords[:, 0].long()])


class SENet(nn.Module):
    """Residual blocks of squeezed channels, a kernel under weight norm, strides in two axes, deep supervision."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = weight_norm(sparse3d.SubMConv3d(4, 8, 3, bias=False))
        self.norm, self.squeeze = sparse3d.BatchNorm(8), Squeeze(8)
        self.down = sparse3d.SparseConv3d(8, 16, (1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1), bias=False)
        self.norm2, self.act, self.squeeze2 = sparse3d.BatchNorm(16), nn.PReLU(16), Squeeze(16)
        self.side, self.up, self.head = (
            nn.Linear(16, 3),
            sparse3d.SparseInverseConv3d(16, 8, (1, 3, 3)),
            nn.Linear(8, 3),
        )

    def forward(self, features: Tensor, coords: Tensor) -> tuple[Tensor, Tensor]:
        x = self.enter(sparse3d.SparseTensor(features, coords, GRID, SCENES))
        x = x + self.squeeze(functional.elu(self.norm(x)))
        y = self.norm2(self.down(x))
        y = self.squeeze2(y.replace(self.act(y.feats)))
        z = x + self.up(y)
        return self.head(z.feats).log_softmax(-1), self.side(y.feats)


class Sequence4D(nn.Module):
    """Voxels of several sweeps as a fourth axis, strides in time, and the mean over time on the ground."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = sparse3d.Sequential(
            sparse3d.SubMConv4d(4, 8, 3, bias=False), sparse3d.BatchNorm(8), nn.LeakyReLU(0.1)
        )
        window = (3, 1, 2, 2)
        self.down = sparse3d.Sequential(
            sparse3d.SparseConv4d(8, 12, window, stride=window, bias=False), sparse3d.BatchNorm(12), nn.ReLU()
        )
        self.up, self.out = sparse3d.SparseInverseConv4d(12, 8, window, bias=False), nn.Linear(16, 4)

    def forward(self, features: Tensor, coords: Tensor) -> tuple[Tensor, Tensor]:
        x = self.enter(sparse3d.SparseTensor(features, coords, (3, 4, 8, 8), SCENES))
        up = self.up(self.down(x))
        ground, at = torch.unique(x.coords[:, [0, 3, 4]].long(), dim=0, return_inverse=True)
        mean = x.feats.new_zeros(ground.shape[0], 8).index_reduce_(0, at, x.feats, "mean", include_self=False)
        return self.out(sparse3d.cat([up, x]).feats), mean


class TransFusion(nn.Module):
    """Peaks of a heat map become queries, which attend to the ground and to each other; boxes are decoded from them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.conv = block(spconv, 4, 8, "a"), block(spconv, 8, 8, "b", "spconv", kernel_size=3, stride=2)
        self.shared, self.heat = nn.Conv2d(24, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        self.classes, self.position = nn.Conv1d(3, 16, 1), nn.Linear(2, 16)
        self.own, self.cross = nn.MultiheadAttention(16, 2), nn.MultiheadAttention(16, 2)
        self.norms = nn.ModuleList([nn.LayerNorm(16) for _ in range(2)])
        heads = {"center": 2, "height": 1, "dim": 3, "rot": 2}
        self.heads = nn.ModuleDict(
            {name: nn.Sequential(nn.Conv1d(16, 16, 1), nn.ReLU(), nn.Conv1d(16, co, 1)) for name, co in heads.items()}
        )

    def forward(self, features: Tensor, coords: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.conv(self.enter(spconv.SparseConvTensor(features, coords.int(), [*GRID], SCENES))).dense()
        n, c, d, h, w = x.shape
        ground = self.shared(x.view(n, c * d, h, w))
        heat = self.heat(ground).sigmoid()
        peaks = torch.zeros_like(heat)
        peaks[:, :, 1:-1, 1:-1] = functional.max_pool2d(heat, kernel_size=3, stride=1, padding=0)
        heat = (heat * (heat == peaks)).view(n, 3, -1)
        top = heat.view(n, -1).argsort(dim=-1, descending=True, stable=True)[..., :12]
        label, at = top // heat.shape[-1], top % heat.shape[-1]
        flat = ground.view(n, 16, -1)
        query = flat.gather(index=at[:, None, :].expand(-1, 16, -1), dim=-1)
        query = query + self.classes(functional.one_hot(label, num_classes=3).permute(0, 2, 1).float())
        grid_y, grid_x = torch.meshgrid(torch.arange(h) + 0.5, torch.arange(w) + 0.5, indexing="ij")
        place = torch.stack([grid_x, grid_y], -1).view(1, -1, 2).to(x.device)
        chosen = place.expand(n, -1, -1).gather(1, at[..., None].expand(-1, -1, 2))
        q, key = query.permute(2, 0, 1), flat.permute(2, 0, 1)
        there, own = self.position(place).permute(1, 0, 2), self.position(chosen).permute(1, 0, 2)
        q = self.norms[0](q + self.own(q + own, q + own, q)[0])
        q = self.norms[1](q + self.cross(q + own, key + there, key)[0])
        made = {name: head(q.permute(1, 2, 0)) for name, head in self.heads.items()}
        centre = made["center"] + chosen.permute(0, 2, 1)
        angle = torch.atan2(made["rot"][:, 0], made["rot"][:, 1])[:, None]
        box = torch.cat([centre, made["height"], made["dim"].clamp(max=3).exp(), angle], 1).permute(0, 2, 1)
        return box, heat.gather(2, at[:, None].expand(-1, 3, -1)), label


# --- what they take ---------------------------------------------------------------------------------------------------


def _pillars(n: int, seed: int) -> Inputs:
    rng, coords = torch.Generator().manual_seed(seed), cells(n, seed, (1, *GRID[1:]))[1]
    count = torch.randint(1, 6, (n,), generator=rng)
    return torch.randn(n, 5, 4, generator=rng) * (torch.arange(5) < count[:, None])[..., None], count, coords


def _points(n: int, seed: int) -> Inputs:
    rng = torch.Generator().manual_seed(seed)
    size = torch.tensor([3.99, 7.99, 7.99, 1.0])
    return torch.rand(n, 4, generator=rng) * size, (torch.arange(n) >= n // 2).long()


HYBRIDS = {
    "PointPillars": Specimen(lambda _: PointPillars(), _pillars),
    "DSVT": Specimen(lambda _: DSVT(), cells),
    "RPVNet": Specimen(lambda _: RPVNet(), _points),
    "SENet": Specimen(lambda _: SENet(), cells),
    "Sequence4D": Specimen(lambda _: Sequence4D(), lambda n, seed: cells(n, seed, (3, 4, 8, 8))),
    "TransFusion": Specimen(lambda _: TransFusion(), cells),
}
