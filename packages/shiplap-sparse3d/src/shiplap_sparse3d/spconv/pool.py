"""Pooling layers over windows and over scenes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from shiplap_sparse3d import pooling
from shiplap_sparse3d.plan import Plan
from shiplap_sparse3d.spconv import indices
from shiplap_sparse3d.spconv.core import (
    ConvAlgo,
    LayerWindow,
    SparseConvTensor,
    autocast_features,
    check_ndim,
    check_sparse,
    expand_nd,
)
from shiplap_sparse3d.spconv.maximum import max_pool_from_zero
from shiplap_sparse3d.spconv.modules import SparseModule
from shiplap_sparse3d.spconv.tracing import one_node

__all__ = [
    "ALL_POOL_LAYERS",
    "SparseAvgPool",
    "SparseAvgPool1d",
    "SparseAvgPool2d",
    "SparseAvgPool3d",
    "SparseGlobalAvgPool",
    "SparseGlobalMaxOrAvgPool",
    "SparseGlobalMaxPool",
    "SparseMaxPool",
    "SparseMaxPool1d",
    "SparseMaxPool2d",
    "SparseMaxPool3d",
    "SparseMaxPool4d",
]

Ints = int | Sequence[int]


class IndicePool(SparseModule):
    """A pooling over the existing voxels of a window. Subclasses compute a maximum or a mean.

    Args:
        kernel_size, stride, padding, dilation: as in torch. A stride of None is the kernel size.
        indice_key: a new name, under which an inverse convolution finds the record of voxels and neighbours.
        subm: whether the outputs lie on the voxels of the input.
        algo, record_voxel_count, name: as in :class:`SparseConvolution`.
    """

    ALGO: ClassVar[ConvAlgo | None] = None

    def __init__(
        self,
        ndim: int,
        kernel_size: Ints = 3,
        stride: Ints | None = 1,
        padding: Ints = 0,
        dilation: Ints = 1,
        indice_key: str | None = None,
        subm: bool = False,
        algo: ConvAlgo | None = None,
        record_voxel_count: bool = False,
        name: str | None = None,
    ) -> None:
        """Create the pool. The class describes the arguments.

        Raise ``SL208`` if the number of axes is not supported or differs from the number of sizes.
        """
        super().__init__(name=name)
        check_ndim(type(self).__name__, ndim)
        self.ndim, self.subm, self.indice_key = ndim, subm, indice_key
        self.kernel_size = expand_nd(ndim, kernel_size)
        self.stride = list(self.kernel_size) if stride is None else expand_nd(ndim, stride)
        self.padding, self.dilation = expand_nd(ndim, padding), expand_nd(ndim, dilation)
        taps = 1
        for size in self.kernel_size:
            taps *= size
        # spconv's own limit of taps for pools.
        self.algo = indices.choose_algorithm(self.ALGO or algo, taps, 128)
        self.record_voxel_count = record_voxel_count
        if record_voxel_count and not subm:
            self.register_buffer(indices.COUNT, torch.zeros(1, dtype=torch.int32))

    def get_max_num_voxels(self) -> Tensor | None:
        """Return the buffer with the largest number of output voxels so far, ``int32 [1]``. Return None for a layer
        without ``record_voxel_count``.
        """
        return getattr(self, indices.COUNT, None)

    def _reduce(self, features: Tensor, plan: Plan) -> Tensor:
        """Return the features of the outputs, ``[m, c]``, computed from ``features [n, c]``, those of the inputs.
        ``plan`` holds the neighbour tables, whose rows are in the order of the outputs. Subclasses compute a maximum or
        a mean.
        """
        raise NotImplementedError

    @one_node
    def forward(self, input: SparseConvTensor) -> SparseConvTensor:
        """Return the pooled features of ``input`` as a sparse tensor. The record of its voxels and neighbours is stored
        under ``indice_key``, where an inverse convolution finds it.

        Raise ``SL208`` if an earlier layer has used the key.
        """
        where, window = type(self).__name__, LayerWindow(self.kernel_size, self.stride, self.padding, self.dilation)
        checkpointed = check_sparse(where, input)
        if input.find_indice_pair(self.indice_key) is not None:
            raise indices.key_taken_error(where, self.indice_key)
        # ``pooled``: the plan of convolutions is built when an inverse layer needs it.
        build = {"subm": self.subm, "training": self.training, "pooled": True}
        data = indices.build_record(where, input, window, self.algo, **build)
        # In spconv autocast narrows pooling, too.
        features = self._reduce(autocast_features(input.features), data.pool_plan)
        output = input.move(features, data.out_geometry, data.out_indices, data.out_spatial_shape, checkpointed)
        if self.indice_key is not None:
            output.indice_dict[self.indice_key] = data
        indices.count_voxels(self.get_max_num_voxels(), features.shape[0])
        return output

    def extra_repr(self) -> str:
        """Return the sizes and the algorithm of the layer as a string, for its ``repr``."""
        text = ", ".join(f"{n}={getattr(self, n)}" for n in ("kernel_size", "stride", "padding", "dilation"))
        return f"{text}, algo={self.algo}"


class SparseMaxPool(IndicePool):
    """A pooling that returns the largest value of the voxels in each window, or 0 if that is larger. spconv starts from
    zero, and this layer does the same.
    """

    def _reduce(self, features: Tensor, plan: Plan) -> Tensor:
        """Return, for each output and channel, the larger of zero and the largest of its inputs, ``[m, c]``. ``plan``
        holds the neighbour tables.
        """
        return max_pool_from_zero(features, plan.table, None if plan.back is None else plan.back[0])


class SparseAvgPool(IndicePool):
    """A pooling that returns the mean of the voxels in each window. The sum is divided by the number of voxels, and not
    by the volume of the window.
    """

    ALGO = ConvAlgo.MaskImplicitGemm  # whatever was asked for, as in spconv: inverse layers look at it

    def _reduce(self, features: Tensor, plan: Plan) -> Tensor:
        """Return, for each output, the mean of its inputs, ``[m, c]``. ``plan`` holds the neighbour tables."""
        return pooling.avg_pool(features, plan.table, None if plan.back is None else plan.back[0])


class _PoolOfRank(IndicePool):
    """The base of the pools whose number of spatial axes, ``NDIM``, is fixed by the class. If ``stride`` is None, it is
    the kernel size.
    """

    NDIM: ClassVar[int]

    def __init__(
        self,
        kernel_size: Ints,
        stride: Ints | None = None,
        padding: Ints = 0,
        dilation: Ints = 1,
        indice_key: str | None = None,
        algo: ConvAlgo | None = None,
        record_voxel_count: bool = False,
        name: str | None = None,
    ) -> None:
        """Create the pool for the number of axes of the class. If ``stride`` is None, it is the kernel size."""
        super().__init__(
            self.NDIM,
            kernel_size,
            stride,
            padding,
            dilation,
            indice_key,
            algo=algo,
            record_voxel_count=record_voxel_count,
            name=name,
        )


class SparseMaxPool1d(_PoolOfRank, SparseMaxPool):
    """A pooling that returns the maximum over each window, or 0 if that is larger, on voxels with one spatial axis,
    ``[n, c]`` -> ``[m, c]``. If ``stride`` is None, it is the kernel size. The arguments are those of
    :class:`IndicePool`.
    """

    NDIM = 1


class SparseMaxPool2d(_PoolOfRank, SparseMaxPool):
    """A pooling that returns the maximum over each window, or 0 if that is larger, on voxels with two spatial axes,
    ``[n, c]`` -> ``[m, c]``. If ``stride`` is None, it is the kernel size. The arguments are those of
    :class:`IndicePool`.
    """

    NDIM = 2


class SparseMaxPool3d(_PoolOfRank, SparseMaxPool):
    """A pooling that returns the maximum over each window, or 0 if that is larger, on voxels with three spatial axes,
    ``[n, c]`` -> ``[m, c]``. If ``stride`` is None, it is the kernel size. The arguments are those of
    :class:`IndicePool`.
    """

    NDIM = 3


class SparseMaxPool4d(_PoolOfRank, SparseMaxPool):
    """A maximum pooling on voxels with four spatial axes, which is not supported. Its constructor raises ``SL208``."""

    NDIM = 4


class SparseAvgPool1d(_PoolOfRank, SparseAvgPool):
    """A pooling that returns the mean of the existing voxels in each window, on voxels with one spatial axis, ``[n,
    c]`` -> ``[m, c]``. If ``stride`` is None, it is the kernel size. The arguments are those of :class:`IndicePool`.
    """

    NDIM = 1


class SparseAvgPool2d(_PoolOfRank, SparseAvgPool):
    """A pooling that returns the mean of the existing voxels in each window, on voxels with two spatial axes, ``[n,
    c]`` -> ``[m, c]``. If ``stride`` is None, it is the kernel size. The arguments are those of :class:`IndicePool`.
    """

    NDIM = 2


class SparseAvgPool3d(_PoolOfRank, SparseAvgPool):
    """A pooling that returns the mean of the existing voxels in each window, on voxels with three spatial axes, ``[n,
    c]`` -> ``[m, c]``. If ``stride`` is None, it is the kernel size. The arguments are those of :class:`IndicePool`.
    """

    NDIM = 3


class SparseGlobalMaxOrAvgPool(SparseModule):
    """A pooling that returns the mean or the maximum of the features of each scene, ``[n, c]`` -> ``[batch_size, c]``.
    A scene without voxels gets zeros.
    """

    def __init__(self, is_mean: bool, name: str | None = None) -> None:
        """Create the pool. It takes the mean of each scene if ``is_mean`` is true, and otherwise the maximum."""
        super().__init__(name=name)
        self.is_mean = is_mean

    @one_node
    def forward(self, input: SparseConvTensor) -> Tensor:
        """Return the mean of the features of each scene, or the maximum if ``is_mean`` is false, as ``[batch_size,
        c]``. A scene without voxels gets zeros.
        """
        check_sparse(type(self).__name__, input)
        coords, scenes = input.geometry.coords, input.batch_size
        return pooling.global_pool(input.features, coords, scenes, "avg" if self.is_mean else "max")


class SparseGlobalMaxPool(SparseGlobalMaxOrAvgPool):
    """A pooling that returns the maximum of the features of each scene, ``[n, c]`` -> ``[batch_size, c]``. A scene
    without voxels gets zeros.
    """

    def __init__(self, name: str | None = None) -> None:
        """Create a pool that takes the maximum of each scene."""
        super().__init__(is_mean=False, name=name)


class SparseGlobalAvgPool(SparseGlobalMaxOrAvgPool):
    """A pooling that returns the mean of the features of each scene, ``[n, c]`` -> ``[batch_size, c]``. A scene without
    voxels gets zeros.
    """

    def __init__(self, name: str | None = None) -> None:
        """Create a pool that takes the mean of each scene."""
        super().__init__(is_mean=True, name=name)


ALL_POOL_LAYERS = {
    *(SparseMaxPool, SparseMaxPool1d, SparseMaxPool2d, SparseMaxPool3d, SparseMaxPool4d),
    *(SparseAvgPool, SparseAvgPool1d, SparseAvgPool2d, SparseAvgPool3d),
}
