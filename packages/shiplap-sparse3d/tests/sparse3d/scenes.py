"""Random sparse scenes for the sparse3d tests: distinct voxels of a small grid, in random order."""

from __future__ import annotations

import torch

import shiplap_sparse3d as sparse3d


def scene(
    n: int,
    shape: tuple[int, int, int],
    channels: int,
    *,
    batch_size: int = 2,
    dtype: torch.dtype = torch.float64,
    seed: int | None = None,
) -> sparse3d.SparseTensor:
    """``n`` distinct voxels of ``batch_size`` grids, unsorted, with normal features, on the default device."""
    rng, here = torch.Generator("cpu").manual_seed(torch.seed() % 2**32 if seed is None else seed), {"device": "cpu"}
    volume = shape[0] * shape[1] * shape[2]
    cells = torch.randperm(batch_size * volume, generator=rng, **here)[:n]
    b, rest = cells // volume, cells % volume
    coords = torch.stack([b, rest // (shape[1] * shape[2]), rest // shape[2] % shape[1], rest % shape[2]], 1).int()
    feats = torch.randn(n, channels, generator=rng, dtype=dtype, **here)
    device = torch.get_default_device()
    return sparse3d.SparseTensor(feats.to(device), coords.to(device), shape, batch_size)


def at(dense: torch.Tensor, coords: torch.Tensor) -> torch.Tensor:
    """Rows of a dense ``[b, c, x, y, z]`` volume at ``coords``."""
    b, x, y, z = coords.long().unbind(1)
    return dense[b, :, x, y, z]
