"""``spconv.pytorch`` on shiplap: with ``import shiplap.kernels.sparse3d.spconv as spconv`` its models run here.

Names, parameter orders, weights and semantics are those of spconv 2.3; docs/spconv.md lists what differs.
"""

from shiplap.kernels.sparse3d.spconv import (
    constants,
    conv,
    core,
    functional,
    hash,
    identity,
    modules,
    ops,
    pool,
    tables,
    utils,
)
from shiplap.kernels.sparse3d.spconv.constants import SPCONV_VERSION_NUMBERS, __version__
from shiplap.kernels.sparse3d.spconv.conv import (
    SparseConv1d,
    SparseConv2d,
    SparseConv3d,
    SparseConv4d,
    SparseConvTranspose1d,
    SparseConvTranspose2d,
    SparseConvTranspose3d,
    SparseConvTranspose4d,
    SparseInverseConv1d,
    SparseInverseConv2d,
    SparseInverseConv3d,
    SparseInverseConv4d,
    SubMConv1d,
    SubMConv2d,
    SubMConv3d,
    SubMConv4d,
)
from shiplap.kernels.sparse3d.spconv.core import ConvAlgo, SparseConvTensor
from shiplap.kernels.sparse3d.spconv.identity import Identity
from shiplap.kernels.sparse3d.spconv.modules import (
    RemoveGrid,
    SparseBatchNorm,
    SparseIdentity,
    SparseModule,
    SparseReLU,
    SparseSequential,
    SparseSyncBatchNorm,
    ToDense,
    assign_name_for_sparse_modules,
)
from shiplap.kernels.sparse3d.spconv.pool import (
    SparseAvgPool1d,
    SparseAvgPool2d,
    SparseAvgPool3d,
    SparseGlobalAvgPool,
    SparseGlobalMaxPool,
    SparseMaxPool1d,
    SparseMaxPool2d,
    SparseMaxPool3d,
    SparseMaxPool4d,
)
from shiplap.kernels.sparse3d.spconv.tables import AddTable, AddTableMisaligned, ConcatTable, JoinTable

__all__ = [
    "SPCONV_VERSION_NUMBERS", "AddTable", "AddTableMisaligned", "ConcatTable", "ConvAlgo", "Identity", "JoinTable",
    "RemoveGrid", "SparseAvgPool1d", "SparseAvgPool2d", "SparseAvgPool3d", "SparseBatchNorm", "SparseConv1d",
    "SparseConv2d", "SparseConv3d", "SparseConv4d", "SparseConvTensor", "SparseConvTranspose1d",
    "SparseConvTranspose2d", "SparseConvTranspose3d", "SparseConvTranspose4d", "SparseGlobalAvgPool",
    "SparseGlobalMaxPool", "SparseIdentity", "SparseInverseConv1d", "SparseInverseConv2d", "SparseInverseConv3d",
    "SparseInverseConv4d", "SparseMaxPool1d", "SparseMaxPool2d", "SparseMaxPool3d", "SparseMaxPool4d", "SparseModule",
    "SparseReLU", "SparseSequential", "SparseSyncBatchNorm", "SubMConv1d", "SubMConv2d", "SubMConv3d", "SubMConv4d",
    "ToDense", "__version__", "assign_name_for_sparse_modules", "constants", "conv", "core", "functional", "hash",
    "identity", "modules", "ops", "pool", "tables", "utils",
]  # fmt: skip
