"""Sparse 3D convolution: voxels, tables, convolution and modules, traceable by ``torch.compile(fullgraph=True)``."""

from shiplap.kernels.sparse3d import samples as _samples  # noqa: F401  (attaches to the ops)
from shiplap.kernels.sparse3d.nn import Sequential, SparseConv3d, SparseInverseConv3d, SubMConv3d
from shiplap.kernels.sparse3d.ops import (
    conv,
    conv_table,
    conv_weight_grad,
    out_coords,
    segment_mean,
    sort_table,
    subm_table,
    transpose_table,
    unique_coords,
)
from shiplap.kernels.sparse3d.plan import Plan
from shiplap.kernels.sparse3d.pooling import avg_pool, global_pool, max_pool
from shiplap.kernels.sparse3d.tensor import Geometry, SparseTensor, Strided, voxelize

__all__ = [
    "Geometry", "Plan", "Sequential", "SparseConv3d", "SparseInverseConv3d", "SparseTensor", "Strided", "SubMConv3d",
    "avg_pool", "conv", "conv_table", "conv_weight_grad", "global_pool", "max_pool", "out_coords", "segment_mean",
    "sort_table", "subm_table", "transpose_table", "unique_coords", "voxelize",
]  # fmt: skip
