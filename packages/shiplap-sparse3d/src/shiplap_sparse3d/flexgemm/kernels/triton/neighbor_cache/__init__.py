"""``flex_gemm.kernels.triton.neighbor_cache``: neighbour maps and output voxels."""

from shiplap_sparse3d.flexgemm.kernels.triton.neighbor_cache.neighbor_map import (
    build_neighbor_map_from_kernel_delta,
    build_neighbor_map_from_kernel_size_dilation,
    transpose_neighbor_map,
)
from shiplap_sparse3d.flexgemm.kernels.triton.neighbor_cache.output_coords import (
    get_output_coords_kernel_delta,
    get_output_coords_kernel_size_dilation,
)

__all__ = [
    "build_neighbor_map_from_kernel_delta",
    "build_neighbor_map_from_kernel_size_dilation",
    "get_output_coords_kernel_delta",
    "get_output_coords_kernel_size_dilation",
    "transpose_neighbor_map",
]
