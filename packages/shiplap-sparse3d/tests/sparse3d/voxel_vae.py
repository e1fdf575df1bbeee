"""An autoencoder of voxels as TRELLIS.2 has one: it reads its grids from the coordinates, and keeps maps by level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shiplap_sparse3d.flexgemm.ops.spconv import sparse_submanifold_conv3d

Convolve = Callable[..., Any]


class Cells:
    """Features on voxels of a level, and what was computed for each level, shared by all."""

    def __init__(self, feats: Tensor, coords: Tensor, level: int, kept: dict[str, Any]) -> None:
        self.feats, self.coords, self.level, self.kept = feats, coords, level, kept

    def replace(self, feats: Tensor) -> Cells:
        """Return these voxels with other features."""
        return Cells(feats, self.coords, self.level, self.kept)

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returned when it was first called for this name and level."""
        key = f"{name} {self.level}"
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    @property
    def grid(self) -> list[int]:
        """The number of scenes, and of cells along each axis."""
        return self.keep("grid", lambda: (self.coords.max(0)[0] + 1).tolist())


def blocks_of(x: Cells) -> tuple[Tensor, Tensor, Tensor]:
    """Return the blocks of two cells per axis, the block of each voxel, and its place in it."""
    _, *cells = x.grid
    _, height, depth = ((size + 1) // 2 for size in cells)
    width = (cells[0] + 1) // 2
    b, cx, cy, cz = x.coords.unbind(1)
    code = ((b * width + cx // 2) * height + cy // 2) * depth + cz // 2
    # Graphs of torch 2.11 take the inverse to have the dtype of ``code``, and it is int64.
    code, block = code.long().unique(return_inverse=True)
    columns = [code // (width * height * depth), code // (height * depth) % width, code // depth % height, code % depth]
    return torch.stack(columns, 1).int(), block, cx % 2 * 4 + cy % 2 * 2 + cz % 2


def to_channels(x: Cells) -> Cells:
    """Return the blocks of ``x`` with the channels of their eight cells side by side."""
    coords, block, place = x.keep("blocks", lambda: blocks_of(x))
    feats = x.feats.new_zeros(coords.shape[0] * 8, x.feats.shape[1])
    feats[block * 8 + place] = x.feats
    return Cells(feats.reshape(coords.shape[0], -1), coords, x.level + 1, x.kept)


def to_cells(x: Cells, fine: Tensor) -> Cells:
    """Return the cells at ``fine`` of the blocks of ``x``."""
    _, block, place = x.kept[f"blocks {x.level - 1}"]
    feats = x.feats.reshape(x.feats.shape[0] * 8, -1)[block * 8 + place]
    return Cells(feats, fine, x.level - 1, x.kept)


class Layer(nn.Module):
    """A submanifold convolution of FlexGEMM 1.x, with the cache of its level."""

    def __init__(self, channels: int, wanted: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(wanted, 3, 3, 3, channels) / (5 * channels**0.5))
        self.bias = nn.Parameter(torch.randn(wanted) / 5)

    def forward(self, x: Cells, convolve: Convolve) -> Cells:
        """Return the convolution of ``x`` by ``convolve``, which takes FlexGEMM's arguments."""
        batches, *grid = x.grid
        shape = torch.Size([batches, x.feats.shape[1], *grid])
        feats, cache = convolve(x.feats, x.coords, shape, self.weight, self.bias, x.kept.get(f"map {x.level}"))
        x.kept[f"map {x.level}"] = cache
        return x.replace(feats)


class Block(nn.Module):
    """A convolution, a norm and two products, added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.norm = Layer(channels, channels), nn.LayerNorm(channels)
        self.mlp = nn.Sequential(nn.Linear(channels, 2 * channels), nn.SiLU(), nn.Linear(2 * channels, channels))

    def forward(self, x: Cells, convolve: Convolve) -> Cells:
        """Return the result on the same voxels."""
        return x.replace(x.feats + self.mlp(self.norm(self.conv(x, convolve).feats)))


class Resample(nn.Module):
    """Two convolutions around a step to blocks, or back from them, and the mean or repeated input beside them."""

    def __init__(self, channels: int, wanted: int, *, down: bool) -> None:
        super().__init__()
        self.wanted, self.down = wanted, down
        self.first = Layer(channels, wanted // 8 if down else wanted * 8)
        self.second, self.before, self.after = Layer(wanted, wanted), nn.LayerNorm(channels), nn.LayerNorm(wanted)

    def forward(self, x: Cells, convolve: Convolve, fine: Tensor | None = None) -> Cells:
        """Return the result on the blocks, or on the cells at ``fine``."""
        h = self.first(x.replace(functional.silu(self.before(x.feats))), convolve)
        if self.down:
            h, x = to_channels(h), to_channels(x)
            beside = x.feats.reshape(x.feats.shape[0], self.wanted, -1).mean(-1)
        else:
            h, x = to_cells(h, fine), to_cells(x, fine)
            beside = x.feats.repeat_interleave(self.wanted // x.feats.shape[1], 1)
        h = self.second(h.replace(functional.silu(self.after(h.feats))), convolve)
        return h.replace(h.feats + beside)


class VoxelVae(nn.Module):
    """Two levels down and up again."""

    def __init__(self, widths: tuple[int, int] = (8, 16)) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, widths[0]), nn.Linear(widths[0], 7)
        self.fine, self.coarse = Block(widths[0]), Block(widths[1])
        self.down, self.up = Resample(*widths, down=True), Resample(*widths[::-1], down=False)

    def forward(self, feats: Tensor, coords: Tensor, convolve: Convolve = sparse_submanifold_conv3d) -> Tensor:
        """Return seven features of each voxel."""
        x = self.fine(Cells(self.enter(feats), coords, 0, {}), convolve)
        x = self.coarse(self.down(x, convolve), convolve)
        return self.leave(self.up(x, convolve, coords).feats)


def dense_convolution(feats, coords, shape, weight, bias, cache):
    """The same by a convolution over the whole grid, read at the voxels."""
    where = tuple(coords.long().unbind(1))
    volume = feats.new_zeros(shape[0], *shape[2:], feats.shape[1]).index_put(where, feats).movedim(-1, 1)
    return functional.conv3d(volume, weight.movedim(-1, 1), bias, padding=1).movedim(1, -1)[where], None


def scenes_of(*grids, dtype=torch.float64, device="cpu"):
    """Yield features and coordinates of two scenes in each of the grids."""
    for grid in grids:
        coords = (torch.rand(2, *grid) < 0.2).nonzero().int().to(device)
        yield torch.randn(len(coords), 6, dtype=dtype, device=device).requires_grad_(), coords
