"""``flex_gemm.kernels.triton``: hash maps of rows, and neighbour maps, by the names of FlexGEMM 2.0, and the settings
of 1.x in ``spconv``.
"""

from shiplap_sparse3d.flexgemm.kernels.triton import spconv
from shiplap_sparse3d.flexgemm.kernels.triton.hashmap import hashmap_build, hashmap_lookup, hashmap_unique
from shiplap_sparse3d.flexgemm.kernels.triton.neighbor_cache import (
    build_neighbor_map_from_kernel_delta,
    build_neighbor_map_from_kernel_size_dilation,
    get_output_coords_kernel_delta,
    get_output_coords_kernel_size_dilation,
    transpose_neighbor_map,
)

__all__ = [
    "build_neighbor_map_from_kernel_delta",
    "build_neighbor_map_from_kernel_size_dilation",
    "get_output_coords_kernel_delta",
    "get_output_coords_kernel_size_dilation",
    "hashmap_build",
    "hashmap_lookup",
    "hashmap_unique",
    "spconv",
    "transpose_neighbor_map",
]
