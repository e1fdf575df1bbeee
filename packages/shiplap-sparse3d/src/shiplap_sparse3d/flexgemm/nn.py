"""``flex_gemm.nn``: modules of FlexGEMM 2.0's functions.

A module is called with features, coordinates, their shape (channels last) and the cache of an earlier call, and returns
what the function of the same name returns. The classes whose names end in ``2d``, ``3d`` and ``4d`` also take one
number for all axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shiplap.plugin_api import error
from shiplap_sparse3d.axes import Axes, per_axis
from shiplap_sparse3d.flexgemm.axes import classes_of_axes
from shiplap_sparse3d.flexgemm.ops.convolution import Result, sparse_conv, sparse_conv_transpose, submanifold_conv
from shiplap_sparse3d.flexgemm.ops.neighbor_cache import Ints, NeighborCache
from shiplap_sparse3d.flexgemm.ops.pool import REDUCTIONS, sparse_pool, submanifold_pool
from shiplap_sparse3d.flexgemm.ops.sample import sparse_pixel_shuffle, sparse_pixel_unshuffle, sparse_upsample

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
    """The base of FlexGEMM's modules. A call of a module calls one function, with attributes of the module as further
    arguments.

    Attributes:
        ndim: the number of spatial axes, or None if the arguments of the module decide it.
        function: the function that a call of the module calls.
        arguments: the names of the attributes that are passed to the function.
    """

    ndim: ClassVar[int | None] = None
    function: ClassVar[Callable[..., Any]]
    arguments: ClassVar[tuple[str, ...]] = ()

    def _read_axes(self, value: Axes, name: str, least: int = 1) -> tuple[int, ...]:
        """Return ``value`` as a tuple with one number for each spatial axis. ``value`` is one number for each axis, or
        a single number for all axes if the class has a fixed number of axes (``ndim``). ``name`` is the argument's name
        in messages. Raise ``SL208`` for a number below ``least``, and for a single number if ``ndim`` is None.
        """
        if self.ndim is not None:
            return per_axis(value, name, self.ndim, least)
        # Without the number of axes a single number cannot be expanded.
        if isinstance(value, int):
            where = f"{type(self).__name__}, argument {name!r}"
            raise error("SL208", where=where, got=value, expected="one number for each axis")
        return per_axis(value, name, len(value), least)

    def _call_function(self, *voxels: Any, **options: Any) -> Any:
        """Return the result of the module's ``function`` for the positional arguments ``voxels`` and the keyword
        arguments ``options``. The attributes that ``arguments`` lists are passed as further keyword arguments.
        """
        return self.function(*voxels, **{name: getattr(self, name) for name in self.arguments}, **options)

    def extra_repr(self) -> str:
        """Return the arguments of the module as ``name=value``, separated by commas, for its ``repr``. The weight, the
        bias and ``allow_tf32`` are left out.
        """
        sizes = ("in_channels", "out_channels", "kernel_size")
        shown = dict.fromkeys(
            name for name in (*sizes, *self.arguments) if name not in ("weight", "bias", "allow_tf32")
        )
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in shown if hasattr(self, name))


class ModuleOnInputs(FlexModule):
    """The base of the modules whose outputs lie on the voxels of the input. A call returns the features and the cache
    of neighbours.
    """

    def forward(
        self, feats: Tensor, coords: Tensor, shape: Ints, neighbor_cache: NeighborCache | None = None
    ) -> tuple[Tensor, NeighborCache]:
        """Return the features ``[n, c]`` on the voxels of the input, and the cache of their neighbours. The cache can
        be passed as ``neighbor_cache`` to further calls on the same ``coords``. If ``neighbor_cache`` is None, a new
        cache is built. Raise ``SL830`` for a ``neighbor_cache`` that was built for other arguments.
        """
        made: tuple[Tensor, NeighborCache] = self._call_function(feats, coords, shape, neighbor_cache=neighbor_cache)
        return made


class ModuleOnOutputs(FlexModule):
    """The base of the modules whose outputs lie on other voxels than the inputs. A call returns ``(features,
    coordinates, shape, cache)``.
    """

    def forward(
        self,
        feats: Tensor,
        coords: Tensor,
        shape: Ints,
        output_coords: Tensor | None = None,
        output_shape: Ints | None = None,
        neighbor_cache: NeighborCache | None = None,
    ) -> Result:
        """Return the features of the outputs, their coordinates, their shape (channels last), and the cache of
        neighbours.

        If ``output_coords``, ``output_shape`` or ``neighbor_cache`` is None, it is computed from the inputs. Raise
        ``SL830`` if ``neighbor_cache`` was built for other arguments.
        """
        given = {"output_coords": output_coords, "output_shape": output_shape, "neighbor_cache": neighbor_cache}
        made: Result = self._call_function(feats, coords, shape, **given)
        return made


class FlexConvolution(FlexModule):
    """The base of the convolutions. An instance holds ``weight [out_channels, *kernel_size, in_channels]``, ``bias`` or
    None, and the arguments of the convolution.
    """

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
        """Create the weight ``[out, *kernel, in]``, and the bias if ``bias`` is true. Otherwise the layer has no bias.
        By default stride and dilation are 1 and the padding is 0. Raise ``SL208`` for sizes of the wrong number or too
        small.
        """
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
        """Set ``weight`` and ``bias`` to random values, uniform between -b and b. The bound is ``b = 1 /
        sqrt(in_channels * taps)``, as in ``torch.nn.Conv3d``, where ``taps`` is the product of the kernel size.
        """
        fan_in = self.in_channels * math.prod(self.kernel_size)
        bound = 1 / math.sqrt(fan_in) if fan_in else 0.0
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)


class SubmanifoldConv(FlexConvolution, ModuleOnInputs):
    """A submanifold convolution, whose outputs lie on the voxels of the input. It turns ``feats [n, in_channels]`` into
    ``[n, out_channels]`` and returns ``(features, cache)``.

    Args:
        in_channels, out_channels: the numbers of channels of the input and of the output.
        kernel_size: the number of taps per axis.
        dilation: the spacing of the taps per axis.
        bias: whether to add a bias.
        algorithm, allow_tf32: as in ``submanifold_conv``.
    """

    function = staticmethod(submanifold_conv)
    arguments = ("weight", "bias", "dilation", "algorithm", "allow_tf32")

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
        """Create the weight ``[out, *kernel, in]``, and the bias if ``bias`` is true. Otherwise the layer has no bias.
        The layer has no stride and no padding.
        """
        super().__init__(in_channels, out_channels, kernel_size, None, dilation, None, bias, algorithm, allow_tf32)


class SparseConv(FlexConvolution, ModuleOnOutputs):
    """A strided convolution, which turns ``feats [n, in_channels]`` into ``[m, out_channels]``. It returns ``(features,
    coordinates, shape, cache)``.

    Args:
        in_channels, out_channels, kernel_size, dilation, bias, algorithm, allow_tf32: as in :class:`SubmanifoldConv`.
        stride, padding: one number per axis, by default 1 and 0.
    """

    function = staticmethod(sparse_conv)
    arguments = ("weight", "bias", "stride", "dilation", "padding", "algorithm", "allow_tf32")


class SparseConvTranspose(SparseConv):
    """A transposed convolution onto a finer grid, which turns ``feats [n, in_channels]`` into ``[m, out_channels]``.
    The arguments and the results are those of :class:`SparseConv`. To reuse the cache of a convolution that led from
    the finer grid to this one, pass the cache's attribute ``T`` as ``neighbor_cache``.
    """

    function = staticmethod(sparse_conv_transpose)


class SubmanifoldPool(ModuleOnInputs):
    """A pooling of the window around each voxel of the input, which turns ``feats [n, c]`` into ``[n, c]``. It returns
    ``(features, cache)``.

    Args:
        kernel_size: the size of the window per axis.
        reduce: ``"sum"``, ``"mean"``, ``"max"``, ``"min"`` or ``"prod"``.
    """

    function = staticmethod(submanifold_pool)
    arguments = ("kernel_size", "reduce")

    def __init__(self, kernel_size: Axes, reduce: str = "mean") -> None:
        """Set the size of the window and the reduction. Raise ``SL208`` for unknown reductions."""
        super().__init__()
        self.kernel_size, self.reduce = self._read_axes(kernel_size, "kernel_size"), _check_reduce(reduce)


class SparsePool(ModuleOnOutputs):
    """A strided pooling, which turns ``feats [n, c]`` into ``[m, c]``. It returns ``(features, coordinates, shape,
    cache)``.

    Args:
        kernel_size, reduce: as in :class:`SubmanifoldPool`.
        stride: the step between windows per axis, by default ``kernel_size``.
        padding: the padding per axis, by default 0.
    """

    function = staticmethod(sparse_pool)
    arguments = ("kernel_size", "stride", "padding", "reduce")

    def __init__(
        self, kernel_size: Axes, stride: Axes | None = None, padding: Axes | None = None, reduce: str = "mean"
    ) -> None:
        """Set the window and the reduction. By default the stride is ``kernel_size`` and the padding is 0. Raise
        ``SL208`` for unknown reductions.
        """
        super().__init__()
        self.kernel_size, self.reduce = self._read_axes(kernel_size, "kernel_size"), _check_reduce(reduce)
        self.stride = self.kernel_size if stride is None else self._read_axes(stride, "stride")
        self.padding = (0,) * len(self.stride) if padding is None else self._read_axes(padding, "padding", 0)


class SparseUpsample(ModuleOnOutputs):
    """An upsampling of each voxel to a block of ``scale_factor`` voxels, which turns ``feats [n, c]`` into ``[m, c]``.
    It returns ``(features, coordinates, shape, cache)``.

    Args:
        scale_factor: the number of finer cells per axis that a cell becomes.
        mode, padding_mode: as in ``sparse_upsample``.
    """

    function = staticmethod(sparse_upsample)
    arguments = ("scale_factor", "mode", "padding_mode")

    def __init__(self, scale_factor: Axes, mode: str = "nearest", padding_mode: str = "normalize") -> None:
        """Set the factor for each axis and the modes. Each call checks the modes."""
        super().__init__()
        self.scale_factor = self._read_axes(scale_factor, "scale_factor")
        self.mode, self.padding_mode = mode, padding_mode


class SparsePixelShuffle(ModuleOnOutputs):
    """A pixel shuffle onto finer voxels, which turns ``feats [n, V * c]`` into ``[n * V, c]`` for ``V =
    prod(upscale_factor)``. It returns ``(features, coordinates, shape, cache)``.
    """

    function = staticmethod(sparse_pixel_shuffle)
    arguments = ("upscale_factor",)

    def __init__(self, upscale_factor: Axes) -> None:
        """Set the factor for each axis."""
        super().__init__()
        self.upscale_factor = self._read_axes(upscale_factor, "upscale_factor")


class SparsePixelUnshuffle(ModuleOnOutputs):
    """A pixel unshuffle onto coarser voxels, which turns ``feats [n, c]`` into ``[m, V * c]`` for ``V =
    prod(downscale_factor)``. It returns ``(features, coordinates, shape, cache)``.
    """

    function = staticmethod(sparse_pixel_unshuffle)
    arguments = ("downscale_factor",)

    def __init__(self, downscale_factor: Axes) -> None:
        """Set the factor for each axis."""
        super().__init__()
        self.downscale_factor = self._read_axes(downscale_factor, "downscale_factor")


def _check_reduce(reduce: str) -> str:
    """Return ``reduce`` unchanged. Raise ``SL208`` unless it is one of ``REDUCTIONS`` (sum, mean, max, min, prod)."""
    if reduce not in REDUCTIONS:
        raise error("SL208", where="pooling, argument 'reduce'", got=repr(reduce), expected=f"one of {REDUCTIONS}")
    return reduce


SubmanifoldConv2d, SubmanifoldConv3d, SubmanifoldConv4d = classes_of_axes(SubmanifoldConv)
SparseConv2d, SparseConv3d, SparseConv4d = classes_of_axes(SparseConv)
SparseConvTranspose2d, SparseConvTranspose3d, SparseConvTranspose4d = classes_of_axes(SparseConvTranspose)
SubmanifoldPool2d, SubmanifoldPool3d, SubmanifoldPool4d = classes_of_axes(SubmanifoldPool)
SparsePool2d, SparsePool3d, SparsePool4d = classes_of_axes(SparsePool)
SparseUpsample2d, SparseUpsample3d, SparseUpsample4d = classes_of_axes(SparseUpsample)
SparsePixelShuffle2d, SparsePixelShuffle3d, SparsePixelShuffle4d = classes_of_axes(SparsePixelShuffle)
SparsePixelUnshuffle2d, SparsePixelUnshuffle3d, SparsePixelUnshuffle4d = classes_of_axes(SparsePixelUnshuffle)
