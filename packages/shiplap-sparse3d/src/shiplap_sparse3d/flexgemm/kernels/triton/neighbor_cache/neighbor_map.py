"""``flex_gemm.kernels.triton.neighbor_cache.neighbor_map``."""

from __future__ import annotations

import torch
from torch import Tensor

from shiplap_sparse3d.flexgemm.ops.neighbor_cache import Ints, build_neighbor_cache
from shiplap_sparse3d.ops import transpose_table

__all__ = [
    "build_neighbor_map_from_kernel_delta",
    "build_neighbor_map_from_kernel_size_dilation",
    "transpose_neighbor_map",
    "transpose_neighbor_map_torch",
]


def build_neighbor_map_from_kernel_size_dilation(
    input_coords: Tensor,
    output_coords: Tensor | None,
    kernel_size: Ints,
    stride: Ints | None = None,
    dilation: Ints | None = None,
    offset: Ints | None = None,
    hashmap: Tensor | None = None,
    symmetric: bool | None = None,
) -> Tensor:
    """Return the neighbour map of a box kernel, ``int32 [m, V]``. It holds the row of ``input_coords`` under each tap
    of each output, or -1 if there is no voxel.

    If ``output_coords`` is None, the inputs are the outputs. The default of ``stride`` and ``dilation`` is 1, and that
    of ``offset`` is 0, for each axis. ``hashmap`` and ``symmetric`` are not read.
    """
    outputs = input_coords if output_coords is None else output_coords
    cache = build_neighbor_cache(
        input_coords,
        outputs,
        submanifold=False,
        kernel_size=kernel_size,
        stride=stride,
        dilation=dilation,
        offset=offset,
    )
    return cache.fwd_map


def build_neighbor_map_from_kernel_delta(
    input_coords: Tensor,
    output_coords: Tensor | None,
    delta: Tensor,
    stride: Ints | None = None,
    offset: Ints | None = None,
    hashmap: Tensor | None = None,
    symmetric: bool | None = None,
) -> Tensor:
    """Return the neighbour map of the taps ``delta [V, axes]``, ``int32 [m, V]``. It holds the row of ``input_coords``
    at ``output * stride + offset + delta``, or -1 if there is no voxel.

    If ``output_coords`` is None, the inputs are the outputs. The default of ``stride`` is 1, and that of ``offset`` is
    0, for each axis. ``hashmap`` and ``symmetric`` are not read.
    """
    outputs = input_coords if output_coords is None else output_coords
    cache = build_neighbor_cache(
        input_coords, outputs, submanifold=False, kernel_delta=delta, stride=stride, offset=offset
    )
    return cache.fwd_map


def transpose_neighbor_map(neighbor_map: Tensor, num_input_coords: int) -> Tensor:
    """Return the transpose of ``neighbor_map [m, V]``, ``int32 [n, V]`` for ``n = num_input_coords``. It holds the
    output row that reads each input by each tap, or -1 if there is none.
    """
    table: Tensor = transpose_table(neighbor_map.view(torch.int32).contiguous(), num_input_coords)
    return table


transpose_neighbor_map_torch = transpose_neighbor_map
