"""``flex_gemm.ops``."""

from shiplap.kernels.sparse3d.flexgemm.ops import grid_sample, serialize, spconv

__all__ = ["grid_sample", "serialize", "spconv"]
