"""Sparse 3D convolution: voxels, tables, convolution and modules, traceable by ``torch.compile(fullgraph=True)``."""

from shiplap.kernels.sparse3d import cpu as _cpu  # noqa: F401  (attaches to the ops)
from shiplap.kernels.sparse3d import lowlevel_samples as _lowlevel_samples  # noqa: F401  (attaches to the ops)
from shiplap.kernels.sparse3d import samples as _samples  # noqa: F401  (attaches to the ops)
from shiplap.kernels.sparse3d.bounded import out_coords_bounded
from shiplap.kernels.sparse3d.cuda import conv as _conv  # noqa: F401  (attaches to the ops)
from shiplap.kernels.sparse3d.cuda import lowlevel as _lowlevel  # noqa: F401  (attaches to the ops)
from shiplap.kernels.sparse3d.cuda import synchronize
from shiplap.kernels.sparse3d.grid_sample import (
    grid_sample_3d,
    indice_weighted_sum,
    indice_weighted_sum_grad,
    nearest_map,
    trilinear_map,
)
from shiplap.kernels.sparse3d.hashing import (
    hash_insert,
    hash_insert_3d,
    hash_insert_3d_index,
    hash_lookup,
    hash_lookup_3d,
    init_hashmap,
)
from shiplap.kernels.sparse3d.nn import (
    BatchNorm,
    GenerativeConv1d,
    GenerativeConv2d,
    GenerativeConv3d,
    GlobalPool,
    Sequential,
    SparseAvgPool1d,
    SparseAvgPool2d,
    SparseAvgPool3d,
    SparseConv1d,
    SparseConv2d,
    SparseConv3d,
    SparseConvTranspose1d,
    SparseConvTranspose2d,
    SparseConvTranspose3d,
    SparseInverseConv1d,
    SparseInverseConv2d,
    SparseInverseConv3d,
    SparseMaxPool1d,
    SparseMaxPool2d,
    SparseMaxPool3d,
    SparseModule,
    SubMConv1d,
    SubMConv2d,
    SubMConv3d,
)
from shiplap.kernels.sparse3d.ops import (
    conv,
    conv_table,
    conv_weight_grad,
    out_coords,
    segment_mean,
    sort_table,
    subm_table,
    tap_blocks,
    transpose_table,
    unique_coords,
)
from shiplap.kernels.sparse3d.plan import Plan
from shiplap.kernels.sparse3d.planning import conv_plan, subm_plan
from shiplap.kernels.sparse3d.pooling import (
    avg_pool,
    global_max_pool,
    global_pool,
    global_sum_pool,
    max_pool,
    max_pool_grad,
    max_pool_with_taps,
    sum_pool,
)
from shiplap.kernels.sparse3d.postprocess import (
    masked_gemm_kernels,
    masked_gemm_signals,
)
from shiplap.kernels.sparse3d.serialize import (
    decode_seq,
    encode_seq,
    hilbert_decode,
    hilbert_encode,
    z_order_decode,
    z_order_encode,
)
from shiplap.kernels.sparse3d.tensor import Geometry, SparseTensor, Strided, cat, voxelize

__all__ = [
    "BatchNorm", "GenerativeConv1d", "GenerativeConv2d", "GenerativeConv3d", "Geometry", "GlobalPool", "Plan",
    "Sequential", "SparseAvgPool1d", "SparseAvgPool2d", "SparseAvgPool3d", "SparseConv1d", "SparseConv2d",
    "SparseConv3d", "SparseConvTranspose1d", "SparseConvTranspose2d", "SparseConvTranspose3d", "SparseInverseConv1d",
    "SparseInverseConv2d", "SparseInverseConv3d", "SparseMaxPool1d", "SparseMaxPool2d", "SparseMaxPool3d",
    "SparseModule", "SparseTensor", "Strided", "SubMConv1d", "SubMConv2d", "SubMConv3d", "avg_pool", "cat", "conv",
    "conv_plan", "conv_table", "conv_weight_grad", "decode_seq", "encode_seq", "global_max_pool", "global_pool",
    "global_sum_pool", "grid_sample_3d", "hash_insert", "hash_insert_3d", "hash_insert_3d_index", "hash_lookup",
    "hash_lookup_3d", "hilbert_decode", "hilbert_encode", "indice_weighted_sum", "indice_weighted_sum_grad",
    "init_hashmap", "masked_gemm_kernels", "masked_gemm_signals", "max_pool", "max_pool_grad", "max_pool_with_taps",
    "nearest_map", "out_coords", "out_coords_bounded", "segment_mean", "sort_table", "subm_plan", "subm_table",
    "sum_pool", "synchronize", "tap_blocks", "transpose_table", "trilinear_map", "unique_coords", "voxelize",
    "z_order_decode", "z_order_encode",
]  # fmt: skip
