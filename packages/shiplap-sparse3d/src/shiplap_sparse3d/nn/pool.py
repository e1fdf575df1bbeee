"""Pooling modules."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from shiplap.plugin_api import error
from shiplap_sparse3d import pooling
from shiplap_sparse3d.axes import Axes, per_axis
from shiplap_sparse3d.nn.module import SparseModule, origin_of
from shiplap_sparse3d.plan import Plan
from shiplap_sparse3d.scenes import require_sparse
from shiplap_sparse3d.tensor import SparseTensor

__all__ = [
    "GlobalPool",
    "SparseAvgPool1d",
    "SparseAvgPool2d",
    "SparseAvgPool3d",
    "SparseAvgPool4d",
    "SparseMaxPool1d",
    "SparseMaxPool2d",
    "SparseMaxPool3d",
    "SparseMaxPool4d",
    "SparseSumPool1d",
    "SparseSumPool2d",
    "SparseSumPool3d",
    "SparseSumPool4d",
    "SparseUnpool1d",
    "SparseUnpool2d",
    "SparseUnpool3d",
    "SparseUnpool4d",
]


class WindowPool(SparseModule):
    """Pooling over the voxels in a window. The outputs are all cells at which the window contains an input voxel.

    Args:
        kernel_size: the size of the window, one int or one per axis.
        stride: the step between windows, by default ``kernel_size``.
        padding, dilation: as in a convolution. Padded cells contain no voxel.
        capacity: the number of rows of the result if it is fixed, see ``Geometry.strided``.

    Shape: ``feats [n, c] -> [m, c]`` on the coarser grid.
    """

    ndim = 3

    def __init__(
        self,
        kernel_size: Axes,
        stride: Axes | None = None,
        padding: Axes = 0,
        dilation: Axes = 1,
        *,
        capacity: int | None = None,
        **others: Any,
    ) -> None:
        """Set the window. If ``stride`` is None, it is the kernel size. Raise ``SL209`` for arguments of torch's pools
        that have no meaning here.
        """
        super().__init__()
        # Arguments of torch's pools are accepted with their default values only.
        usual = {"ceil_mode": False, "return_indices": False, "divisor_override": None}
        self._refuse_arguments({k: v for k, v in others.items() if k not in usual or v is not usual[k]})
        self.kernel_size = per_axis(kernel_size, "kernel_size", self.ndim, 1)
        # As in torch's pools.
        self.stride = self.kernel_size if stride is None else per_axis(stride, "stride", self.ndim, 1)
        self.padding = per_axis(padding, "padding", self.ndim, 0)
        self.dilation = per_axis(dilation, "dilation", self.ndim, 1)
        self.capacity = None if capacity is None else self._whole_number(capacity, "capacity", 0)

    def forward(self, x: SparseTensor) -> SparseTensor:
        """Return the pooled features of ``x`` as a sparse tensor on all cells at which the window contains a voxel.
        Raise ``SL201`` for another number of axes.
        """
        self._check_axes(x, self.ndim)
        step = x.geometry.pooled(self.kernel_size, self.stride, self.padding, self.dilation, capacity=self.capacity)
        return SparseTensor(self._pool(x.feats, step.plan), geometry=step.geometry)

    def _pool(self, feats: Tensor, plan: Plan) -> Tensor:
        """Return the features of the outputs, ``[m, c]``, computed from the features of the inputs, ``feats [n, c]``.
        ``plan`` holds the neighbour tables, whose rows are in the order of the outputs. A subclass computes a maximum,
        a mean or a sum.
        """
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Return the kernel size, the stride, the padding and the dilation as a string, for the module's ``repr``."""
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}, dilation={self.dilation}"


class SparseMaxPool3d(WindowPool):
    __doc__ = (WindowPool.__doc__ or "").replace("Pooling over", "The largest value of", 1)

    def _pool(self, feats: Tensor, plan: Plan) -> Tensor:
        """Return the largest of the inputs in the window of each output, channel by channel, ``[m, c]``. ``plan`` holds
        the neighbour tables.
        """
        return pooling.max_pool(feats, plan.table, plan.back[0] if plan.back else None)


class SparseAvgPool3d(WindowPool):
    __doc__ = (WindowPool.__doc__ or "").replace("Pooling over", "The mean of", 1)

    def _pool(self, feats: Tensor, plan: Plan) -> Tensor:
        """Return the mean of the inputs in each output's window, ``[m, c]``. ``plan`` holds the neighbour tables."""
        return pooling.avg_pool(feats, plan.table, plan.back[0] if plan.back else None)


class SparseSumPool3d(WindowPool):
    __doc__ = (WindowPool.__doc__ or "").replace("Pooling over", "The sum of", 1)

    def _pool(self, feats: Tensor, plan: Plan) -> Tensor:
        """Return the sum of the inputs in each output's window, ``[m, c]``. ``plan`` holds the neighbour tables."""
        return pooling.sum_pool(feats, plan.table, plan.back[0] if plan.back else None)


class SparseUnpool3d(SparseModule):
    """An unpooling that reverses an earlier layer, a pooling or a strided convolution that made the voxels of the
    input. Its outputs are the input voxels of that layer, each with the features of the voxels to which it contributed.

    If no layer made the input's voxels, the result lies on all cells of the finer grid that these voxels span.

    Args:
        kernel_size: the kernel size of that layer.
        stride: the stride of that layer, which is the default and the only accepted value.
        mode: ``"sum"`` or ``"mean"`` of the voxels to which an output voxel contributed. With windows that do not
            overlap there is one such voxel, and both modes copy its features (nearest upsampling).

    Shape: ``feats [m, c] -> [n, c]`` on the input voxels of that layer.

    Raises:
        ArgumentError: ``SL208`` if the input comes from a layer with another window.
    """

    ndim = 3

    def __init__(
        self, kernel_size: Axes, stride: Axes | None = None, mode: Literal["sum", "mean"] = "sum", **others: Any
    ) -> None:
        """Set the window, and whether overlapping windows are summed or averaged. Raise ``SL208`` for an unknown
        mode.
        """
        super().__init__()
        self._refuse_arguments(others)
        if mode not in ("sum", "mean"):
            raise error("SL208", where=f"{type(self).__name__}, mode", got=repr(mode), expected="'sum' or 'mean'")
        self.kernel_size = per_axis(kernel_size, "kernel_size", self.ndim, 1)
        self.stride = None if stride is None else per_axis(stride, "stride", self.ndim, 1)
        self.mode = mode

    def forward(self, x: SparseTensor) -> SparseTensor:
        """Return the features of ``x`` spread over the input voxels of the layer that made the voxels of ``x``. If no
        layer made them, the features are spread over all finer cells that the window reaches. Raise ``SL208`` for a
        layer with another window.
        """
        self._check_axes(x, self.ndim)
        if x.geometry.parent is None:
            step = x.geometry.transposed(self.kernel_size, self.stride or self.kernel_size)
            there, plan = step.geometry, step.plan.unsorted().complete()
            table, back = plan.table, plan.back
        else:
            origin = origin_of(self, x, self.kernel_size, self.stride)
            there, plan = origin.geometry, origin.plain_plan
            assert plan.back is not None
            # The way back leads to the voxels before the step, and its gradient goes along the step.
            table, back = plan.back[0], (plan.table, None, None)
        feats = pooling.sum_pool(x.feats, table, back[0] if back else None, self.mode == "mean")
        return SparseTensor(feats, geometry=there)

    def extra_repr(self) -> str:
        """Return the kernel size and the mode as a string, for the module's ``repr``."""
        return f"kernel_size={self.kernel_size}, mode={self.mode!r}"


class SparseMaxPool4d(SparseMaxPool3d):
    """A :class:`SparseMaxPool3d` for voxels with four spatial axes."""

    ndim = 4


class SparseMaxPool2d(SparseMaxPool3d):
    """A :class:`SparseMaxPool3d` for voxels with two spatial axes."""

    ndim = 2


class SparseMaxPool1d(SparseMaxPool3d):
    """A :class:`SparseMaxPool3d` for voxels with one spatial axis."""

    ndim = 1


class SparseAvgPool4d(SparseAvgPool3d):
    """A :class:`SparseAvgPool3d` for voxels with four spatial axes."""

    ndim = 4


class SparseAvgPool2d(SparseAvgPool3d):
    """A :class:`SparseAvgPool3d` for voxels with two spatial axes."""

    ndim = 2


class SparseAvgPool1d(SparseAvgPool3d):
    """A :class:`SparseAvgPool3d` for voxels with one spatial axis."""

    ndim = 1


class SparseSumPool4d(SparseSumPool3d):
    """A :class:`SparseSumPool3d` for voxels with four spatial axes."""

    ndim = 4


class SparseSumPool2d(SparseSumPool3d):
    """A :class:`SparseSumPool3d` for voxels with two spatial axes."""

    ndim = 2


class SparseSumPool1d(SparseSumPool3d):
    """A :class:`SparseSumPool3d` for voxels with one spatial axis."""

    ndim = 1


class SparseUnpool4d(SparseUnpool3d):
    """A :class:`SparseUnpool3d` for voxels with four spatial axes."""

    ndim = 4


class SparseUnpool2d(SparseUnpool3d):
    """A :class:`SparseUnpool3d` for voxels with two spatial axes."""

    ndim = 2


class SparseUnpool1d(SparseUnpool3d):
    """A :class:`SparseUnpool3d` for voxels with one spatial axis."""

    ndim = 1


class GlobalPool(SparseModule):
    """A pooling over all voxels of each scene. A scene without voxels gets zeros.

    Args:
        mode: ``"max"``, ``"avg"`` or ``"sum"``.

    Shape: ``feats [n, c] -> [batch_size, c]``. The result is a ``torch.Tensor``.
    """

    def __init__(self, mode: Literal["max", "avg", "sum"] = "avg") -> None:
        """Set the reduction. Raise ``SL208`` for an unknown mode."""
        super().__init__()
        if mode not in ("max", "avg", "sum"):
            raise error("SL208", where="GlobalPool, mode", got=repr(mode), expected="'max', 'avg' or 'sum'")
        self.mode = mode

    def forward(self, x: SparseTensor) -> Tensor:
        """Return the maximum, mean or sum (by ``mode``) of the features of each scene, ``[batch_size, c]``. Padding
        rows are left out.
        """
        require_sparse("GlobalPool", x)
        self._check_gradient(x)
        return pooling.global_pool(x.feats, x.geometry.coords, x.batch_size, self.mode)

    def extra_repr(self) -> str:
        """Return the mode as a string, for the module's ``repr``."""
        return repr(self.mode)
