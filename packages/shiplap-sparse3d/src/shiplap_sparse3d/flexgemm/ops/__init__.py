"""``flex_gemm.ops``: the functions of FlexGEMM 2.0, and modules of both forms."""

from shiplap_sparse3d.flexgemm.ops import (
    convolution,
    grid_sample,
    neighbor_cache,
    pool,
    sample,
    serialize,
    spconv,
    utils,
)
from shiplap_sparse3d.flexgemm.ops.convolution import *
from shiplap_sparse3d.flexgemm.ops.neighbor_cache import *
from shiplap_sparse3d.flexgemm.ops.pool import *
from shiplap_sparse3d.flexgemm.ops.sample import *
from shiplap_sparse3d.flexgemm.ops.utils import coalesce_coords, sort_coords, sparse_to_dense

__all__ = ["coalesce_coords", "grid_sample", "serialize", "sort_coords", "sparse_to_dense", "spconv", "utils"]
__all__ += ["convolution", "neighbor_cache", "pool", "sample"]
__all__ += convolution.__all__
__all__ += neighbor_cache.__all__
__all__ += pool.__all__
__all__ += sample.__all__
