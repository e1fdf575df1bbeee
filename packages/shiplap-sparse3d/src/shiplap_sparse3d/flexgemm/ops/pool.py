"""FlexGEMM 2.0's pooling: the reduction of the rows under the taps, over the neighbours of a cache."""

from __future__ import annotations

import torch
from torch import Tensor

from shiplap.plugin_api import error
from shiplap_sparse3d import pooling
from shiplap_sparse3d.coords import check_rows
from shiplap_sparse3d.flexgemm.axes import functions_of_axes
from shiplap_sparse3d.flexgemm.ops.convolution import Result, on_outputs
from shiplap_sparse3d.flexgemm.ops.neighbor_cache import Ints, NeighborCache, neighbors_of_call

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
    """Return the reduction (sum, mean, max, min or prod) of the input rows under the taps of each output, ``[m, c]``.
    An output without an input under its taps gets zeros. Raise ``SL208`` if ``reduce`` is not one of ``REDUCTIONS``.
    """
    if reduce not in REDUCTIONS:
        raise error("SL208", where="pooling, argument 'reduce'", got=repr(reduce), expected=f"one of {REDUCTIONS}")
    table = cache.fwd_map
    if reduce == "prod":
        hits = table >= 0
        rows = torch.cat([feats, feats.new_ones(1, feats.shape[1])])[table.long()]  # a miss reads the ones
        return torch.where(hits.any(1, keepdim=True), rows.prod(1), 0)
    # Only a gradient needs the map of the way back, which is computed.
    back = cache.bwd_map if feats.requires_grad and torch.is_grad_enabled() else None
    # The kernels have a maximum only.
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
    """Return the pooled features ``[n, c]`` on the voxels of the input, and the cache of their neighbours. Raise
    ``SL208`` for an unknown reduction, and ``SL830`` for a cache that was built for other arguments.

    Args:
        feats: ``[n, c]``.
        input_coords: ``[n, batch columns + axes]``.
        shape: ``(*batch, *axes, channels)``.
        kernel_size: the size of the window per axis.
        reduce: ``"sum"``, ``"mean"``, ``"max"``, ``"min"`` or ``"prod"`` of the input rows in the window.
        neighbor_cache: the cache of an earlier call, or of a submanifold convolution with this kernel. If it is None, a
            new one is built.
    """
    where = "submanifold_pool"
    check_rows(where, feats, input_coords.shape[0])
    cache = neighbors_of_call(where, input_coords, shape, neighbor_cache, submanifold=True, kernel_size=kernel_size)
    return reduce_neighbors(feats, cache, reduce), cache


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
    """Return the features of a strided pooling, their coordinates, their shape and the cache of neighbours. Raise
    ``SL208`` for an unknown reduction, and ``SL830`` for a cache that was built for other arguments.

    Args:
        feats, input_coords, shape, kernel_size, reduce: as in :func:`submanifold_pool`.
        stride: the step between windows, by default ``kernel_size``.
        padding: the padding per axis, by default 0.
        output_coords, output_shape, neighbor_cache: as in ``sparse_conv``.
    """
    where = "sparse_pool"
    check_rows(where, feats, input_coords.shape[0])
    cache = neighbors_of_call(
        where,
        input_coords,
        shape,
        neighbor_cache,
        submanifold=False,
        output_coords=output_coords,
        output_shape=output_shape,
        kernel_size=kernel_size,
        stride=kernel_size if stride is None else stride,
        padding=(0,) * len(kernel_size) if padding is None else padding,
    )
    return on_outputs(reduce_neighbors(feats, cache, reduce), cache)


submanifold_pool2d, submanifold_pool3d, submanifold_pool4d = functions_of_axes(submanifold_pool, "kernel_size")
sparse_pool2d, sparse_pool3d, sparse_pool4d = functions_of_axes(sparse_pool, "kernel_size", "stride", "padding")
