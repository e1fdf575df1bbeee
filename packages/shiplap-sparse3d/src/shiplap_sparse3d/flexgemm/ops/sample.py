"""FlexGEMM 2.0's sampling: upsampling, pixel shuffles, and features at any points of a grid.

A voxel ``i`` lies at the whole number ``i``: a query at the coordinates of a voxel gets its features.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import torch
from torch import Tensor

from shiplap.plugin_api import error
from shiplap_sparse3d import pooling
from shiplap_sparse3d.coords import check_rows
from shiplap_sparse3d.flexgemm.algorithms import gather_rows
from shiplap_sparse3d.flexgemm.axes import functions_of_axes
from shiplap_sparse3d.flexgemm.ops.convolution import Result, on_outputs
from shiplap_sparse3d.flexgemm.ops.neighbor_cache import Ints, NeighborCache, neighbors_of_call
from shiplap_sparse3d.flexgemm.ops.utils import with_scene
from shiplap_sparse3d.grid_sample import indice_weighted_sum
from shiplap_sparse3d.offsets import offset_table

__all__ = [
    "sparse_grid_sample",
    "sparse_pixel_shuffle",
    "sparse_pixel_shuffle2d",
    "sparse_pixel_shuffle3d",
    "sparse_pixel_shuffle4d",
    "sparse_pixel_unshuffle",
    "sparse_pixel_unshuffle2d",
    "sparse_pixel_unshuffle3d",
    "sparse_pixel_unshuffle4d",
    "sparse_upsample",
    "sparse_upsample2d",
    "sparse_upsample3d",
    "sparse_upsample4d",
]

_PADDINGS = ("zeros", "normalize")


def _require_choice(where: str, name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ``SL208`` unless ``value``, the argument ``name`` of the function ``where``, is one of ``choices``."""
    if value not in choices:
        raise error("SL208", where=f"{where}, argument {name!r}", got=repr(value), expected=f"one of {choices}")


def _block_cache(
    where: str,
    coords: Tensor,
    shape: Ints,
    factor: Ints,
    output_coords: Tensor | None,
    output_shape: Ints | None,
    cache: NeighborCache | None,
    *,
    up: bool,
) -> NeighborCache:
    """Return the cache of neighbours for blocks of ``factor`` voxels that do not overlap. If ``up`` is true, each
    coarse voxel becomes a block of fine ones, and otherwise each block becomes a coarse voxel. If ``cache`` is given,
    it is checked and returned. Raise ``SL208`` for a factor below 1, and ``SL830`` for a cache that was built for other
    arguments.
    """
    if min(factor) < 1:
        raise error("SL208", where=f"{where}, the factor", got=tuple(factor), expected="1 or more per axis")
    return neighbors_of_call(
        where,
        coords,
        shape,
        cache,
        submanifold=False,
        output_coords=output_coords,
        output_shape=output_shape,
        transpose=up,
        kernel_size=factor,
        stride=factor,
        padding=(0,) * len(factor),
    )


def sparse_upsample(
    feats: Tensor,
    coords: Tensor,
    shape: Ints,
    scale_factor: Ints,
    *,
    mode: str = "nearest",
    padding_mode: str = "normalize",
    align_corners: bool = False,
    output_coords: Tensor | None = None,
    output_shape: Ints | None = None,
    neighbor_cache: NeighborCache | None = None,
) -> Result:
    """Return the features of the finer voxels, their coordinates, their shape and the cache of neighbours. Each voxel
    of the input becomes a block of ``scale_factor`` finer voxels.

    Args:
        feats: ``[n, c]``.
        coords: ``[n, batch columns + axes]``.
        shape: ``(*batch, *axes, channels)``.
        scale_factor: the number of finer cells per axis that a cell becomes.
        mode: ``"nearest"`` for the features of the coarse voxel, or ``"bilinear"`` for interpolation between the voxels
            around, on any number of axes.
        padding_mode: how ``"bilinear"`` treats missing voxels. With ``"normalize"`` weights are divided by their sum,
            and with ``"zeros"`` missing voxels count as zeros.
        align_corners: as in ``torch.nn.functional.interpolate``.
        output_coords, output_shape, neighbor_cache: as in ``sparse_conv_transpose``.

    Returns:
        The features, their coordinates, their shape, and the cache.
    """
    _require_choice("sparse_upsample", "mode", mode, ("nearest", "bilinear"))
    _require_choice("sparse_upsample", "padding_mode", padding_mode, _PADDINGS)
    if mode == "nearest" and align_corners:
        raise error("SL208", where="sparse_upsample", got="align_corners=True", expected="mode='bilinear' with it")
    check_rows("sparse_upsample", feats, coords.shape[0])
    cache = _block_cache(
        "sparse_upsample", coords, shape, scale_factor, output_coords, output_shape, neighbor_cache, up=True
    )
    if mode == "nearest":
        # Only a gradient needs the map of the way back, which is computed.
        back = cache.bwd_map if feats.requires_grad and torch.is_grad_enabled() else None
        return on_outputs(pooling.sum_pool(feats, cache.fwd_map, back), cache)
    lead, cells = coords.shape[1] - len(scale_factor), shape[coords.shape[1] - len(scale_factor) : coords.shape[1]]
    if align_corners:
        if any(s * w < 2 for s, w in zip(scale_factor, cells, strict=True)):
            got = f"{tuple(cells)} cells times {tuple(scale_factor)}"
            raise error("SL208", where="sparse_upsample, align_corners", got=got, expected="2 or more per axis")
        # The first cells of both grids coincide, and so do the last ones.
        scale = [(w - 1) / (s * w - 1) for w, s in zip(cells, scale_factor, strict=True)]
        shift = [0.0] * len(scale)
    else:
        # The centres of the finer cells in units of the coarser ones.
        scale, shift = [1 / s for s in scale_factor], [0.5 / s - 0.5 for s in scale_factor]
    factors = torch.tensor([[1.0] * lead + scale, [0.0] * lead + shift], device=coords.device)
    points = cache.output_coords.float() * factors[0] + factors[1]
    return on_outputs(_sample_linear(feats, coords, points, len(scale_factor), padding_mode)[0], cache)


def sparse_pixel_shuffle(
    feats: Tensor,
    coords: Tensor,
    shape: Ints,
    upscale_factor: Ints,
    output_coords: Tensor | None = None,
    output_shape: Ints | None = None,
    neighbor_cache: NeighborCache | None = None,
) -> Result:
    """Return features ``[n * V, c]`` on the blocks of ``V = prod(upscale_factor)`` finer voxels, their coordinates,
    their shape and the cache of neighbours.

    A row of ``feats [n, V * c]`` holds the ``c`` channels of the first voxel of the block, then those of the second,
    and so on. The other arguments are those of :func:`sparse_upsample`. Raise ``SL202`` if ``V`` does not divide the
    channels.
    """
    where, parts = "sparse_pixel_shuffle", math.prod(upscale_factor)
    check_rows(where, feats, coords.shape[0])
    if feats.shape[1] % max(parts, 1):
        expected = f"a multiple of {parts}, the voxels of a block"
        raise error("SL202", where=f"{where}, argument 'feats'", got=f"{feats.shape[1]} channels", expected=expected)
    cache = _block_cache(where, coords, shape, upscale_factor, output_coords, output_shape, neighbor_cache, up=True)
    parent, slot = cache.fwd_map.max(1)  # each finer voxel lies in one block
    rows = torch.where(parent >= 0, parent * parts + slot, -1)
    return on_outputs(gather_rows(feats.reshape(feats.shape[0] * parts, -1), rows), cache)


def sparse_pixel_unshuffle(
    feats: Tensor,
    coords: Tensor,
    shape: Ints,
    downscale_factor: Ints,
    output_coords: Tensor | None = None,
    output_shape: Ints | None = None,
    neighbor_cache: NeighborCache | None = None,
) -> Result:
    """Return features ``[m, V * c]`` on coarser voxels, their coordinates, their shape and the cache of neighbours. A
    row holds the channels of the ``V = prod(downscale_factor)`` finer voxels of its block one after the other, with
    zeros for missing voxels. This is the inverse of :func:`sparse_pixel_shuffle`, and the other arguments are those of
    :func:`sparse_upsample`.
    """
    where = "sparse_pixel_unshuffle"
    check_rows(where, feats, coords.shape[0])
    cache = _block_cache(where, coords, shape, downscale_factor, output_coords, output_shape, neighbor_cache, up=False)
    return on_outputs(gather_rows(feats, cache.fwd_map).flatten(1), cache)


# --- at any points ----------------------------------------------------------------------------------------------------


def _rows_at(coords: Tensor, cells: Tensor, corners: list[tuple[int, ...]]) -> Tensor:
    """Return the row of ``coords`` whose voxel lies at each of ``cells [m, d]`` plus each of ``corners``, as ``int32
    [m, corners]``, or -1 if there is none. ``cells`` are whole numbers, of an integer or a floating-point dtype. NaN
    and numbers beyond int32 have no voxel.
    """
    wide = with_scene(coords)
    far = (cells.abs() < 2**31 - 1).all(1, keepdim=True)  # False for NaN as well
    wanted = torch.where(far, cells, 0).int()
    wanted = torch.cat([torch.where(far, 0, -1).int(), wanted], 1)  # the scene -1 has no voxels
    taps = torch.tensor([[0, *corner] for corner in corners], dtype=torch.int32, device=coords.device)
    return offset_table(wide, wanted, taps, [1] * wide.shape[1])


def _sample_linear(
    feats: Tensor, coords: Tensor, points: Tensor, axes: int, padding_mode: str
) -> tuple[Tensor, Tensor]:
    """Return the features ``[m, c]`` interpolated between the voxels around each of ``points [m, d]``, and the sum of
    the weights of the voxels that exist, ``[m]``.

    Only the last ``axes`` columns are interpolated. If ``padding_mode`` is ``"normalize"``, weights are divided by
    their sum. Otherwise missing voxels count as zeros.
    """
    lead = points.shape[1] - axes
    corners = [(*[0] * lead, *corner) for corner in product((0, 1), repeat=axes)]
    # Batch columns are whole numbers, between which nothing is interpolated.
    lowest = torch.cat([points[:, :lead].round(), points[:, lead:].floor()], 1)
    part = (points - lowest)[:, None, lead:]
    ahead = torch.tensor(corners, device=points.device)[:, lead:].bool()
    weights = torch.where(ahead, part, 1 - part).prod(2).float()
    rows = _rows_at(coords, lowest, corners)
    weights = torch.where(rows >= 0, weights, 0)
    total = weights.sum(1)
    if padding_mode == "normalize":
        # Where no voxel exists all weights are 0, and remain so.
        weights = weights / total[:, None].clamp_min(1e-12)
    return indice_weighted_sum(feats, rows, weights), total


def sparse_grid_sample(
    feats: Tensor,
    coords: Tensor,
    grid: Tensor,
    *,
    mode: str = "linear",
    padding_mode: str = "normalize",
    n_spatial_dims: int | None = None,
    return_mask: bool = False,
) -> Any:
    """Return the features ``[..., c]`` of sparse voxels at the points ``grid [..., d]``, or a tuple of them and a mask
    if ``return_mask`` is true. With the mode ``"linear"`` they are differentiable with respect to ``feats`` and
    ``grid``.

    Args:
        feats: ``[n, c]``.
        coords: ``[n, d]``, distinct.
        grid: points in units of voxels. Numbers of an integer dtype are cells.
        mode: ``"linear"`` interpolates between the voxels around a point. ``"nearest"`` takes the nearest voxel, or
            zeros if it does not exist.
        padding_mode: that of :func:`sparse_upsample`, for the mode ``"linear"``.
        n_spatial_dims: the number of columns, from the last one on, that are spatial axes. The columns before them are
            batch indices. If it is None, all columns are axes.
        return_mask: whether to return a second tensor ``[...]``. For the mode ``"nearest"`` and for integer points it
            is true where the voxel exists. Otherwise it is the sum of the weights of the voxels that exist.

    Raises:
        ArgumentError: ``SL211`` for duplicate voxels, ``SL208`` for points of other columns.
    """
    where = "sparse_grid_sample"
    _require_choice(where, "mode", mode, ("nearest", "linear"))
    _require_choice(where, "padding_mode", padding_mode, _PADDINGS)
    check_rows(where, feats, coords.shape[0])
    columns = coords.shape[1]
    axes = columns if n_spatial_dims is None else n_spatial_dims
    if grid.shape[-1] != columns or not 0 < axes <= columns:
        got = f"points {tuple(grid.shape)}, {axes} axes"
        raise error("SL208", where=where, got=got, expected=f"{columns} columns as coords has, 1 to {columns} axes")
    points = grid.reshape(-1, columns)
    if mode == "nearest" or not points.is_floating_point():
        cells = points.float().round() if points.is_floating_point() else points
        rows = _rows_at(coords, cells, [(0,) * columns])
        sampled, mask = gather_rows(feats, rows[:, 0]), rows[:, 0] >= 0
    else:
        sampled, mask = _sample_linear(feats, coords, points.float(), axes, padding_mode)
    out = sampled.view(*grid.shape[:-1], feats.shape[1])
    return (out, mask.view(grid.shape[:-1])) if return_mask else out


# --- for two to four axes ---------------------------------------------------------------------------------------------

sparse_upsample2d, sparse_upsample3d, sparse_upsample4d = functions_of_axes(sparse_upsample, "scale_factor")
sparse_pixel_shuffle2d, sparse_pixel_shuffle3d, sparse_pixel_shuffle4d = functions_of_axes(
    sparse_pixel_shuffle, "upscale_factor"
)
sparse_pixel_unshuffle2d, sparse_pixel_unshuffle3d, sparse_pixel_unshuffle4d = functions_of_axes(
    sparse_pixel_unshuffle, "downscale_factor"
)
