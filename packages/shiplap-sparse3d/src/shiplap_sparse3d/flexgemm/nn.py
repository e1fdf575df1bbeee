"""``flex_gemm.nn``: modules of FlexGEMM 2.0's functions.

A module is called with features, coordinates, their shape (channels last) and the cache of an earlier call, and returns
what the function of the same name returns. The classes whose names end in ``2d``, ``3d`` and ``4d`` also take one
number for all axes.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shiplap.plugin_api import error
from shiplap_sparse3d.flexgemm.ops.convolution import Result, sparse_conv, submanifold_conv
from shiplap_sparse3d.flexgemm.ops.neighbor_cache import Ints, NeighborCache
from shiplap_sparse3d.flexgemm.ops.pool import REDUCTIONS, sparse_pool, submanifold_pool
from shiplap_sparse3d.flexgemm.ops.sample import sparse_pixel_shuffle, sparse_pixel_unshuffle, sparse_upsample
from shiplap_sparse3d.geometry import Axes, per_axis

__all__ = [
    "SparseConv",
    "SparseConv2d",
    "SparseConv3d",
    "SparseConv4d",
    "SparseConvTranspose",
    "SparseConvTranspose2d",
    "SparseConvTranspose3d",
    "SparseConvTranspose4d",
    "SparsePixelShuffle",
    "SparsePixelShuffle2d",
    "SparsePixelShuffle3d",
    "SparsePixelShuffle4d",
    "SparsePixelUnshuffle",
    "SparsePixelUnshuffle2d",
    "SparsePixelUnshuffle3d",
    "SparsePixelUnshuffle4d",
    "SparsePool",
    "SparsePool2d",
    "SparsePool3d",
    "SparsePool4d",
    "SparseUpsample",
    "SparseUpsample2d",
    "SparseUpsample3d",
    "SparseUpsample4d",
    "SubmanifoldConv",
    "SubmanifoldConv2d",
    "SubmanifoldConv3d",
    "SubmanifoldConv4d",
    "SubmanifoldPool",
    "SubmanifoldPool2d",
    "SubmanifoldPool3d",
    "SubmanifoldPool4d",
]


class FlexModule(nn.Module):
    """What the modules share: arguments per axis, and their text."""

    ndim: ClassVar[int | None] = None
    shown: ClassVar[tuple[str, ...]] = ()

    def _read_axes(self, value: Axes, name: str, least: int = 1) -> tuple[int, ...]:
        """Return one number for each axis. Raises SL208 for one number where the axes are not known."""
        if self.ndim is not None:
            return per_axis(value, name, self.ndim, least)
        if isinstance(value, int):
            where = f"{type(self).__name__}, argument {name!r}"
            raise error("SL208", where=where, got=value, expected="one number for each axis")
        return per_axis(value, name, len(value), least)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in self.shown)


class FlexConvolution(FlexModule):
    """What the convolutions share: ``weight [out_channels, *kernel, in_channels]``, ``bias``, and initial values."""

    shown: ClassVar[tuple[str, ...]] = (
        "in_channels",
        "out_channels",
        "kernel_size",
        "stride",
        "dilation",
        "padding",
        "algorithm",
    )

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Axes,
        stride: Axes | None = None,
        dilation: Axes | None = None,
        padding: Axes | None = None,
        bias: bool = True,
        algorithm: str | None = None,
        allow_tf32: bool | None = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel_size = self._read_axes(kernel_size, "kernel_size")
        ones = (1,) * len(self.kernel_size)
        self.stride = ones if stride is None else self._read_axes(stride, "stride")
        self.dilation = ones if dilation is None else self._read_axes(dilation, "dilation")
        self.padding = (0,) * len(ones) if padding is None else self._read_axes(padding, "padding", 0)
        self.algorithm, self.allow_tf32 = algorithm, allow_tf32
        self.weight = nn.Parameter(torch.empty(out_channels, *self.kernel_size, in_channels))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw initial values uniformly, as ``torch.nn.ConvNd`` does for ``in_channels * taps`` inputs."""
        fan_in = self.in_channels * math.prod(self.kernel_size)
        bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)


class SubmanifoldConv(FlexConvolution):
    """Submanifold convolution: ``(features, cache)`` on the voxels of the input.

    Args:
        in_channels, out_channels: of the features.
        kernel_size: per axis.
        dilation: per axis.
        bias: whether to add one.
        algorithm, allow_tf32: as in ``submanifold_conv``.
    """

    shown: ClassVar[tuple[str, ...]] = ("in_channels", "out_channels", "kernel_size", "dilation", "algorithm")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Axes,
        dilation: Axes | None = None,
        bias: bool = True,
        algorithm: str | None = None,
        allow_tf32: bool | None = None,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, None, dilation, None, bias, algorithm, allow_tf32)

    def forward(
        self, feats: Tensor, coords: Tensor, shape: Ints, neighbor_cache: NeighborCache | None = None
    ) -> tuple[Tensor, NeighborCache]:
        return submanifold_conv(
            feats,
            coords,
            shape,
            self.weight,
            self.bias,
            dilation=self.dilation,
            neighbor_cache=neighbor_cache,
            algorithm=self.algorithm,
            allow_tf32=self.allow_tf32,
        )


class SparseConv(FlexConvolution):
    """Strided convolution: ``(features, coordinates, shape, cache)``.

    Args:
        in_channels, out_channels, kernel_size, dilation, bias, algorithm, allow_tf32: as in :class:`SubmanifoldConv`.
        stride, padding: per axis.
    """

    transposed: ClassVar[bool] = False

    def forward(
        self,
        feats: Tensor,
        coords: Tensor,
        shape: Ints,
        output_coords: Tensor | None = None,
        output_shape: Ints | None = None,
        neighbor_cache: NeighborCache | None = None,
    ) -> Result:
        return sparse_conv(
            feats,
            coords,
            shape,
            self.weight,
            self.bias,
            transposed=self.transposed,
            stride=self.stride,
            dilation=self.dilation,
            padding=self.padding,
            output_coords=output_coords,
            output_shape=output_shape,
            neighbor_cache=neighbor_cache,
            algorithm=self.algorithm,
            allow_tf32=self.allow_tf32,
        )


class SparseConvTranspose(SparseConv):
    """Transposed convolution; a cache is the ``.T`` of that of a convolution. Otherwise as :class:`SparseConv`."""

    transposed = True


class SubmanifoldPool(FlexModule):
    """Pooling onto the voxels of the input: ``(features, cache)``.

    Args:
        kernel_size: per axis.
        reduce: ``"sum"``, ``"mean"``, ``"max"``, ``"min"`` or ``"prod"``.
    """

    shown: ClassVar[tuple[str, ...]] = ("kernel_size", "reduce")

    def __init__(self, kernel_size: Axes, reduce: str = "mean") -> None:
        super().__init__()
        self.kernel_size, self.reduce = self._read_axes(kernel_size, "kernel_size"), _check_reduce(reduce)

    def forward(
        self, feats: Tensor, coords: Tensor, shape: Ints, neighbor_cache: NeighborCache | None = None
    ) -> tuple[Tensor, NeighborCache]:
        return submanifold_pool(feats, coords, shape, self.kernel_size, self.reduce, neighbor_cache)


class SparsePool(FlexModule):
    """Strided pooling: ``(features, coordinates, shape, cache)``.

    Args:
        kernel_size, reduce: as in :class:`SubmanifoldPool`.
        stride: per axis (default: ``kernel_size``).
        padding: per axis.
    """

    shown: ClassVar[tuple[str, ...]] = ("kernel_size", "stride", "padding", "reduce")

    def __init__(
        self, kernel_size: Axes, stride: Axes | None = None, padding: Axes | None = None, reduce: str = "mean"
    ) -> None:
        super().__init__()
        self.kernel_size, self.reduce = self._read_axes(kernel_size, "kernel_size"), _check_reduce(reduce)
        self.stride = self.kernel_size if stride is None else self._read_axes(stride, "stride")
        self.padding = (0,) * len(self.stride) if padding is None else self._read_axes(padding, "padding", 0)

    def forward(
        self,
        feats: Tensor,
        coords: Tensor,
        shape: Ints,
        output_coords: Tensor | None = None,
        output_shape: Ints | None = None,
        neighbor_cache: NeighborCache | None = None,
    ) -> Result:
        window = self.kernel_size, self.stride, self.padding
        rest = output_coords, output_shape, neighbor_cache
        return sparse_pool(feats, coords, shape, *window, self.reduce, *rest)


class SparseUpsample(FlexModule):
    """Upsampling to blocks of ``scale_factor`` voxels: ``(features, coordinates, shape, cache)``.

    Args:
        scale_factor: per axis.
        mode, padding_mode: as in ``sparse_upsample``.
    """

    shown: ClassVar[tuple[str, ...]] = ("scale_factor", "mode", "padding_mode")

    def __init__(self, scale_factor: Axes, mode: str = "nearest", padding_mode: str = "normalize") -> None:
        super().__init__()
        self.scale_factor = self._read_axes(scale_factor, "scale_factor")
        self.mode, self.padding_mode = mode, padding_mode

    def forward(
        self,
        feats: Tensor,
        coords: Tensor,
        shape: Ints,
        output_coords: Tensor | None = None,
        output_shape: Ints | None = None,
        neighbor_cache: NeighborCache | None = None,
    ) -> Result:
        return sparse_upsample(
            feats,
            coords,
            shape,
            self.scale_factor,
            mode=self.mode,
            padding_mode=self.padding_mode,
            output_coords=output_coords,
            output_shape=output_shape,
            neighbor_cache=neighbor_cache,
        )


class SparsePixelShuffle(FlexModule):
    """Pixel shuffle onto finer voxels: ``(features, coordinates, shape, cache)``."""

    shown: ClassVar[tuple[str, ...]] = ("upscale_factor",)

    def __init__(self, upscale_factor: Axes) -> None:
        super().__init__()
        self.upscale_factor = self._read_axes(upscale_factor, "upscale_factor")

    def forward(self, feats: Tensor, coords: Tensor, shape: Ints, *rest: Any, **options: Any) -> Result:
        return sparse_pixel_shuffle(feats, coords, shape, self.upscale_factor, *rest, **options)


class SparsePixelUnshuffle(FlexModule):
    """Pixel unshuffle onto coarser voxels: ``(features, coordinates, shape, cache)``."""

    shown: ClassVar[tuple[str, ...]] = ("downscale_factor",)

    def __init__(self, downscale_factor: Axes) -> None:
        super().__init__()
        self.downscale_factor = self._read_axes(downscale_factor, "downscale_factor")

    def forward(self, feats: Tensor, coords: Tensor, shape: Ints, *rest: Any, **options: Any) -> Result:
        return sparse_pixel_unshuffle(feats, coords, shape, self.downscale_factor, *rest, **options)


def _check_reduce(reduce: str) -> str:
    if reduce not in REDUCTIONS:
        raise error("SL208", where="pooling, argument 'reduce'", got=repr(reduce), expected=f"one of {REDUCTIONS}")
    return reduce


class SubmanifoldConv2d(SubmanifoldConv):
    """:class:`SubmanifoldConv` for two axes."""

    ndim = 2


class SubmanifoldConv3d(SubmanifoldConv):
    """:class:`SubmanifoldConv` for three axes."""

    ndim = 3


class SubmanifoldConv4d(SubmanifoldConv):
    """:class:`SubmanifoldConv` for four axes."""

    ndim = 4


class SparseConv2d(SparseConv):
    """:class:`SparseConv` for two axes."""

    ndim = 2


class SparseConv3d(SparseConv):
    """:class:`SparseConv` for three axes."""

    ndim = 3


class SparseConv4d(SparseConv):
    """:class:`SparseConv` for four axes."""

    ndim = 4


class SparseConvTranspose2d(SparseConvTranspose):
    """:class:`SparseConvTranspose` for two axes."""

    ndim = 2


class SparseConvTranspose3d(SparseConvTranspose):
    """:class:`SparseConvTranspose` for three axes."""

    ndim = 3


class SparseConvTranspose4d(SparseConvTranspose):
    """:class:`SparseConvTranspose` for four axes."""

    ndim = 4


class SubmanifoldPool2d(SubmanifoldPool):
    """:class:`SubmanifoldPool` for two axes."""

    ndim = 2


class SubmanifoldPool3d(SubmanifoldPool):
    """:class:`SubmanifoldPool` for three axes."""

    ndim = 3


class SubmanifoldPool4d(SubmanifoldPool):
    """:class:`SubmanifoldPool` for four axes."""

    ndim = 4


class SparsePool2d(SparsePool):
    """:class:`SparsePool` for two axes."""

    ndim = 2


class SparsePool3d(SparsePool):
    """:class:`SparsePool` for three axes."""

    ndim = 3


class SparsePool4d(SparsePool):
    """:class:`SparsePool` for four axes."""

    ndim = 4


class SparseUpsample2d(SparseUpsample):
    """:class:`SparseUpsample` for two axes."""

    ndim = 2


class SparseUpsample3d(SparseUpsample):
    """:class:`SparseUpsample` for three axes."""

    ndim = 3


class SparseUpsample4d(SparseUpsample):
    """:class:`SparseUpsample` for four axes."""

    ndim = 4


class SparsePixelShuffle2d(SparsePixelShuffle):
    """:class:`SparsePixelShuffle` for two axes."""

    ndim = 2


class SparsePixelShuffle3d(SparsePixelShuffle):
    """:class:`SparsePixelShuffle` for three axes."""

    ndim = 3


class SparsePixelShuffle4d(SparsePixelShuffle):
    """:class:`SparsePixelShuffle` for four axes."""

    ndim = 4


class SparsePixelUnshuffle2d(SparsePixelUnshuffle):
    """:class:`SparsePixelUnshuffle` for two axes."""

    ndim = 2


class SparsePixelUnshuffle3d(SparsePixelUnshuffle):
    """:class:`SparsePixelUnshuffle` for three axes."""

    ndim = 3


class SparsePixelUnshuffle4d(SparsePixelUnshuffle):
    """:class:`SparsePixelUnshuffle` for four axes."""

    ndim = 4
