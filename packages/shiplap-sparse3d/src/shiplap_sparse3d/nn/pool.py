"""Pooling modules."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from shiplap.plugin_api import error
from shiplap_sparse3d import pooling
from shiplap_sparse3d.geometry import Axes, per_axis
from shiplap_sparse3d.nn.module import SparseModule
from shiplap_sparse3d.plan import Plan
from shiplap_sparse3d.tensor import SparseTensor

__all__ = [
    "GlobalPool",
    "SparseAvgPool1d",
    "SparseAvgPool2d",
    "SparseAvgPool3d",
    "SparseMaxPool1d",
    "SparseMaxPool2d",
    "SparseMaxPool3d",
]


class WindowPool(SparseModule):
    """Pooling over the voxels of a window, onto every voxel that an input reaches.

    Args:
        kernel_size: size of the window, one int or one per axis.
        stride: step between windows (default: ``kernel_size``).
        padding, dilation: as in convolution. Padded cells hold no voxel.
        capacity: rows of the result if fixed, see ``Geometry.strided``.

    Shape: ``feats [n, c] -> [m, c]`` on the coarser grid.
    """

    ndim = 3

    def __init__(
        self,
        kernel_size: Axes,
        stride: Axes | None = None,
        padding: Axes = 0,
        dilation: Axes = 1,
        capacity: int | None = None,
    ) -> None:
        super().__init__()
        self.kernel_size = per_axis(kernel_size, "kernel_size", self.ndim, 1)
        self.stride = self.kernel_size if stride is None else per_axis(stride, "stride", self.ndim, 1)
        self.padding = per_axis(padding, "padding", self.ndim, 0)
        self.dilation, self.capacity = per_axis(dilation, "dilation", self.ndim, 1), capacity

    def forward(self, x: SparseTensor) -> SparseTensor:
        self._check_axes(x, self.ndim)
        step = x.geometry.pooled(self.kernel_size, self.stride, self.padding, self.dilation, capacity=self.capacity)
        return SparseTensor(self._pool(x.feats, step.plan), geometry=step.geometry)

    def _pool(self, feats: Tensor, plan: Plan) -> Tensor:
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}, dilation={self.dilation}"


class SparseMaxPool3d(WindowPool):
    __doc__ = (WindowPool.__doc__ or "").replace("Pooling over", "The largest value of", 1)

    def _pool(self, feats: Tensor, plan: Plan) -> Tensor:
        return pooling.max_pool(feats, plan.table, plan.back[0] if plan.back else None)


class SparseAvgPool3d(WindowPool):
    __doc__ = (WindowPool.__doc__ or "").replace("Pooling over", "The mean of", 1)

    def _pool(self, feats: Tensor, plan: Plan) -> Tensor:
        return pooling.avg_pool(feats, plan.table, plan.back[0] if plan.back else None)


class SparseMaxPool2d(SparseMaxPool3d):
    """:class:`SparseMaxPool3d` for voxels with two axes."""

    ndim = 2


class SparseMaxPool1d(SparseMaxPool3d):
    """:class:`SparseMaxPool3d` for voxels with one axis."""

    ndim = 1


class SparseAvgPool2d(SparseAvgPool3d):
    """:class:`SparseAvgPool3d` for voxels with two axes."""

    ndim = 2


class SparseAvgPool1d(SparseAvgPool3d):
    """:class:`SparseAvgPool3d` for voxels with one axis."""

    ndim = 1


class GlobalPool(SparseModule):
    """One row a scene, over all of its voxels; zeros for a scene without any.

    Args:
        mode: ``"max"``, ``"avg"`` or ``"sum"``.

    Shape: ``feats [n, c] -> [batch_size, c]``, a plain tensor.
    """

    def __init__(self, mode: Literal["max", "avg", "sum"] = "avg") -> None:
        super().__init__()
        if mode not in ("max", "avg", "sum"):
            raise error("SL208", where="GlobalPool, mode", got=repr(mode), expected="'max', 'avg' or 'sum'")
        self.mode = mode

    def forward(self, x: SparseTensor) -> Tensor:
        self._check_gradient(x)
        return pooling.global_pool(x.feats, x.geometry.coords, x.batch_size, self.mode)

    def extra_repr(self) -> str:
        return repr(self.mode)
