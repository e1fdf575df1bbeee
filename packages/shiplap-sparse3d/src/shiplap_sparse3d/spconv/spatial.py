"""The module ``spconv.pytorch.spatial``."""

from __future__ import annotations

import torch

from shiplap_sparse3d import ops as kernels
from shiplap_sparse3d.spconv.core import SparseConvTensor, check_sparse, indices_of
from shiplap_sparse3d.spconv.modules import SparseModule
from shiplap_sparse3d.spconv.tracing import one_node

__all__ = ["RemoveDuplicate"]


class RemoveDuplicate(SparseModule):
    """A layer that keeps the first voxel of each cell. The voxels of its output are in ascending order of their
    coordinates, and its ``indice_dict`` is empty.
    """

    @one_node
    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        """Return a sparse tensor with the first voxel of each cell of ``x``. The voxels are in ascending order, and
        ``indice_dict`` is empty.
        """
        check_sparse("RemoveDuplicate", x)
        cells, inverse, _ = kernels.distinct_voxels(x.geometry.coords)
        rows = torch.arange(inverse.shape[0], device=inverse.device)
        first = torch.full_like(cells[:, 0], inverse.shape[0], dtype=torch.int64)
        first = first.scatter_reduce(0, inverse.long(), rows, "amin")
        features = x.features.index_select(0, first)
        return SparseConvTensor(features, indices_of(cells, x.ndim), x.spatial_shape, x.batch_size, x.grid)
