"""FlexGEMM 2.0's pooling: the reduction of the rows under the taps, over the neighbours of a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from shiplap.plugin_api import error
from shiplap_sparse3d import pooling
from shiplap_sparse3d.coords import check_rows
from shiplap_sparse3d.flexgemm.ops.convolution import Result, sparse_grid, spread, whole_shape
from shiplap_sparse3d.flexgemm.ops.neighbor_cache import (
    Ints,
    NeighborCache,
    build_neighbor_cache,
    resolve_offset,
)
from shiplap_sparse3d.geometry import Axes, per_axis

__all__ = [
    "sparse_pool",
    "sparse_pool2d",
    "sparse_pool3d",
    "sparse_pool4d",
    "submanifold_pool",
    "submanifold_pool2d",
    "submanifold_pool3d",
    "submanifold_pool4d",
]

REDUCTIONS = ("sum", "mean", "max", "min", "prod")


def reduce_neighbors(feats: Tensor, cache: NeighborCache, reduce: str) -> Tensor:
    """Return the reduction of the rows under the taps of each output, zeros where there is none.

    Raises SL208 for another reduction than ``REDUCTIONS``.
    """
    if reduce not in REDUCTIONS:
        raise error("SL208", where="pooling, argument 'reduce'", got=repr(reduce), expected=f"one of {REDUCTIONS}")
    table = cache.fwd_map
    if reduce == "prod":
        hits = table >= 0
        rows = torch.cat([feats, feats.new_ones(1, feats.shape[1])])[table.long()]  # a miss reads the ones
        return torch.where(hits.any(1, keepdim=True), rows.prod(1), 0)
    back = cache.bwd_map if feats.requires_grad and torch.is_grad_enabled() else None
    if reduce == "min":
        return -pooling.max_pool(-feats, table, back)
    if reduce == "max":
        return pooling.max_pool(feats, table, back)
    pooled: Tensor = pooling.sum_pool(feats, table, back, reduce == "mean")
    return pooled


def submanifold_pool(
    feats: Tensor,
    input_coords: Tensor,
    shape: Ints,
    kernel_size: Ints,
    reduce: str = "mean",
    neighbor_cache: NeighborCache | None = None,
) -> tuple[Tensor, NeighborCache]:
    """Pooling onto the voxels of the input: the features, and the cache.

    Args:
        feats: ``[n, c]``.
        input_coords: ``[n, batch columns + axes]``.
        shape: ``(*batch, *axes, channels)``.
        kernel_size: size of the window per axis.
        reduce: ``"sum"``, ``"mean"``, ``"max"``, ``"min"`` or ``"prod"`` of the rows that are there.
        neighbor_cache: of an earlier call, or of a submanifold convolution with this kernel.
    """
    check_rows("submanifold_pool", feats, input_coords.shape[0])
    if neighbor_cache is None:
        neighbor_cache = build_neighbor_cache(
            input_coords,
            submanifold=True,
            kernel_size=kernel_size,
            input_sparse_shape=sparse_grid("submanifold_pool", input_coords, shape),
        )
    else:
        neighbor_cache.assert_match(
            input_coords=input_coords,
            output_coords=input_coords,
            is_transposed=False,
            kernel_size=kernel_size,
            dilation=(1,) * len(kernel_size),
        )
    return reduce_neighbors(feats, neighbor_cache, reduce), neighbor_cache


def sparse_pool(
    feats: Tensor,
    input_coords: Tensor,
    shape: Ints,
    kernel_size: Ints,
    stride: Ints | None = None,
    padding: Ints | None = None,
    reduce: str = "mean",
    output_coords: Tensor | None = None,
    output_shape: Ints | None = None,
    neighbor_cache: NeighborCache | None = None,
) -> Result:
    """Strided pooling: the features, their coordinates, their shape, and the cache.

    Args:
        feats, input_coords, shape, kernel_size, reduce: as in :func:`submanifold_pool`.
        stride: step between windows (default: ``kernel_size``).
        padding: per axis.
        output_coords, output_shape, neighbor_cache: as in ``sparse_conv``.
    """
    check_rows("sparse_pool", feats, input_coords.shape[0])
    step, ones = kernel_size if stride is None else stride, (1,) * len(kernel_size)
    pads = (0,) * len(kernel_size) if padding is None else padding
    if neighbor_cache is None:
        neighbor_cache = build_neighbor_cache(
            input_coords,
            output_coords,
            submanifold=False,
            kernel_size=kernel_size,
            stride=step,
            padding=pads,
            input_sparse_shape=sparse_grid("sparse_pool", input_coords, shape),
            output_sparse_shape=sparse_grid("sparse_pool", input_coords, output_shape),
        )
    else:
        neighbor_cache.assert_match(
            input_coords=input_coords,
            output_coords=output_coords,
            is_transposed=False,
            kernel_size=kernel_size,
            stride=step,
            dilation=ones,
            offset=resolve_offset(kernel_size, ones, pads, None),
        )
    out = reduce_neighbors(feats, neighbor_cache, reduce)
    return out, neighbor_cache.output_coords, whole_shape(neighbor_cache.output_sparse_shape, out), neighbor_cache


def _pool_on_axes(
    ndim: int,
    feats: Tensor,
    input_coords: Tensor,
    shape: Ints,
    window: tuple[Axes, Axes | None, Axes | None],
    reduce: str,
    output_coords: Tensor | None,
    output_shape: Ints | None,
    neighbor_cache: NeighborCache | None,
) -> Result:
    kernel, *rest = window
    read = spread(ndim, stride=rest[0], padding=rest[1])
    return sparse_pool(
        feats,
        input_coords,
        shape,
        per_axis(kernel, "kernel_size", ndim),
        read["stride"],
        read["padding"],
        reduce,
        output_coords,
        output_shape,
        neighbor_cache,
    )


def submanifold_pool2d(
    feats: Tensor,
    input_coords: Tensor,
    shape: Ints,
    kernel_size: Axes,
    reduce: str = "mean",
    neighbor_cache: NeighborCache | None = None,
) -> tuple[Tensor, NeighborCache]:
    """:func:`submanifold_pool` for two axes."""
    kernel = per_axis(kernel_size, "kernel_size", 2)
    return submanifold_pool(feats, input_coords, shape, kernel, reduce, neighbor_cache)


def sparse_pool2d(
    feats: Tensor,
    input_coords: Tensor,
    shape: Ints,
    kernel_size: Axes,
    stride: Axes | None = None,
    padding: Axes | None = None,
    reduce: str = "mean",
    output_coords: Tensor | None = None,
    output_shape: Ints | None = None,
    neighbor_cache: NeighborCache | None = None,
) -> Result:
    """:func:`sparse_pool` for two axes."""
    window = kernel_size, stride, padding
    return _pool_on_axes(2, feats, input_coords, shape, window, reduce, output_coords, output_shape, neighbor_cache)


def submanifold_pool3d(
    feats: Tensor,
    input_coords: Tensor,
    shape: Ints,
    kernel_size: Axes,
    reduce: str = "mean",
    neighbor_cache: NeighborCache | None = None,
) -> tuple[Tensor, NeighborCache]:
    """:func:`submanifold_pool` for three axes."""
    kernel = per_axis(kernel_size, "kernel_size", 3)
    return submanifold_pool(feats, input_coords, shape, kernel, reduce, neighbor_cache)


def sparse_pool3d(
    feats: Tensor,
    input_coords: Tensor,
    shape: Ints,
    kernel_size: Axes,
    stride: Axes | None = None,
    padding: Axes | None = None,
    reduce: str = "mean",
    output_coords: Tensor | None = None,
    output_shape: Ints | None = None,
    neighbor_cache: NeighborCache | None = None,
) -> Result:
    """:func:`sparse_pool` for three axes."""
    window = kernel_size, stride, padding
    return _pool_on_axes(3, feats, input_coords, shape, window, reduce, output_coords, output_shape, neighbor_cache)


def submanifold_pool4d(
    feats: Tensor,
    input_coords: Tensor,
    shape: Ints,
    kernel_size: Axes,
    reduce: str = "mean",
    neighbor_cache: NeighborCache | None = None,
) -> tuple[Tensor, NeighborCache]:
    """:func:`submanifold_pool` for four axes."""
    kernel = per_axis(kernel_size, "kernel_size", 4)
    return submanifold_pool(feats, input_coords, shape, kernel, reduce, neighbor_cache)


def sparse_pool4d(
    feats: Tensor,
    input_coords: Tensor,
    shape: Ints,
    kernel_size: Axes,
    stride: Axes | None = None,
    padding: Axes | None = None,
    reduce: str = "mean",
    output_coords: Tensor | None = None,
    output_shape: Ints | None = None,
    neighbor_cache: NeighborCache | None = None,
) -> Result:
    """:func:`sparse_pool` for four axes."""
    window = kernel_size, stride, padding
    return _pool_on_axes(4, feats, input_coords, shape, window, reduce, output_coords, output_shape, neighbor_cache)
