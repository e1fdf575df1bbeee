"""Modules over ``SparseTensor``, in one, two and three axes."""

from shiplap_sparse3d.nn.container import Sequential
from shiplap_sparse3d.nn.conv import (
    GenerativeConv1d,
    GenerativeConv2d,
    GenerativeConv3d,
    SparseConv1d,
    SparseConv2d,
    SparseConv3d,
    SparseConvTranspose1d,
    SparseConvTranspose2d,
    SparseConvTranspose3d,
    SparseInverseConv1d,
    SparseInverseConv2d,
    SparseInverseConv3d,
    SubMConv1d,
    SubMConv2d,
    SubMConv3d,
)
from shiplap_sparse3d.nn.module import SparseModule
from shiplap_sparse3d.nn.norm import BatchNorm, SyncBatchNorm
from shiplap_sparse3d.nn.pool import (
    GlobalPool,
    SparseAvgPool1d,
    SparseAvgPool2d,
    SparseAvgPool3d,
    SparseMaxPool1d,
    SparseMaxPool2d,
    SparseMaxPool3d,
)

__all__ = [
    "BatchNorm",
    "GenerativeConv1d",
    "GenerativeConv2d",
    "GenerativeConv3d",
    "GlobalPool",
    "Sequential",
    "SparseAvgPool1d",
    "SparseAvgPool2d",
    "SparseAvgPool3d",
    "SparseConv1d",
    "SparseConv2d",
    "SparseConv3d",
    "SparseConvTranspose1d",
    "SparseConvTranspose2d",
    "SparseConvTranspose3d",
    "SparseInverseConv1d",
    "SparseInverseConv2d",
    "SparseInverseConv3d",
    "SparseMaxPool1d",
    "SparseMaxPool2d",
    "SparseMaxPool3d",
    "SparseModule",
    "SubMConv1d",
    "SubMConv2d",
    "SubMConv3d",
    "SyncBatchNorm",
]
