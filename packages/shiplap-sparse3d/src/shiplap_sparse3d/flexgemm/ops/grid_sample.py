"""``flex_gemm.ops.grid_sample``."""

from shiplap_sparse3d.grid_sample import grid_sample_3d

__all__ = ["grid_sample_3d", "grid_sample_3d_torch"]

grid_sample_3d_torch = grid_sample_3d
"""FlexGEMM's second implementation of the same function, here the same."""
