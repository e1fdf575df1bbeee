"""``flex_gemm.ops``."""

from shiplap_sparse3d.flexgemm.ops import grid_sample, serialize, spconv

__all__ = ["grid_sample", "serialize", "spconv"]
