"""FlexGEMM 2.0's convolutions: functions of features, coordinates, a shape with the channels last, and weights.

Each takes the neighbours of an earlier call as ``neighbor_cache`` and returns those that it used. The functions whose
names end in ``2d``, ``3d`` and ``4d`` also take one number for all axes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shiplap.plugin_api import error
from shiplap_sparse3d.coords import check_rows
from shiplap_sparse3d.flexgemm import config
from shiplap_sparse3d.flexgemm.ops.neighbor_cache import (
    Ints,
    NeighborCache,
    build_neighbor_cache,
    resolve_offset,
)
from shiplap_sparse3d.geometry import Axes, per_axis

__all__ = [
    "sparse_conv",
    "sparse_conv2d",
    "sparse_conv3d",
    "sparse_conv4d",
    "sparse_conv_transpose",
    "sparse_conv_transpose2d",
    "sparse_conv_transpose3d",
    "sparse_conv_transpose4d",
    "submanifold_conv",
    "submanifold_conv2d",
    "submanifold_conv3d",
    "submanifold_conv4d",
]

Result = tuple[Tensor, Tensor, torch.Size, NeighborCache]


def spread(ndim: int, **arguments: Axes | None) -> dict[str, tuple[int, ...] | None]:
    """Return each argument as one number for each of ``ndim`` axes; None stays None."""
    return {name: None if value is None else per_axis(value, name, ndim) for name, value in arguments.items()}


def sparse_grid(where: str, coords: Tensor, shape: Ints | None) -> torch.Size | None:
    """Return the grid of ``shape``, its first entries, one for each column of ``coords``. Raises SL208 for too few."""
    if shape is None:
        return None
    if len(shape) < coords.shape[1]:
        expected = f"(batch, axes, channels): at least {coords.shape[1]} sizes for coords {tuple(coords.shape)}"
        raise error("SL208", where=f"{where}, argument 'shape'", got=tuple(shape), expected=expected)
    return torch.Size(shape[: coords.shape[1]])


def whole_shape(grid: torch.Size | None, feats: Tensor) -> torch.Size:
    """Return the shape of ``feats`` on ``grid``, channels last. Raises SL208 where the grid is not known."""
    if grid is None:
        raise error("SL208", where="neighbor_cache", got="no output shape", expected="output_shape or input shape")
    return torch.Size([*grid, *feats.shape[1:]])


def _flat_weight(where: str, weight: Tensor, kernel_delta: Tensor | None, feats: Tensor) -> Tensor:
    """Return ``[co, taps, ci]``. Raises SL201 and SL202 for weights of other dims and channels."""
    if weight.dim() < 3 or (kernel_delta is not None and weight.dim() != 3):
        expected = "[Co, taps, Ci]" if kernel_delta is not None else "[Co, *kernel, Ci]"
        raise error("SL201", where=f"{where}, argument 'weight'", got=f"{weight.dim()} dims", expected=expected)
    if weight.shape[-1] != feats.shape[1]:
        got, expected = f"{feats.shape[1]} channels", f"{weight.shape[-1]}, those of weight"
        raise error("SL202", where=f"{where}, argument 'feats'", got=got, expected=expected)
    return weight.flatten(1, -2)


def submanifold_conv(
    feats: Tensor,
    coords: Tensor,
    shape: Ints,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    dilation: Ints | None = None,
    kernel_delta: Tensor | None = None,
    symmetric: bool | None = None,
    neighbor_cache: NeighborCache | None = None,
    algorithm: str | None = None,
    allow_tf32: bool | None = None,
) -> tuple[Tensor, NeighborCache]:
    """Submanifold convolution: outputs on the voxels of the input. Returns the features and the cache.

    Args:
        feats: ``[n, ci]``.
        coords: ``[n, batch columns + axes]``.
        shape: ``(*batch, *axes, channels)``.
        weight: ``[co, *kernel, ci]``, or ``[co, taps, ci]`` with ``kernel_delta``.
        bias: ``[co]`` or None.
        dilation: spacing of the taps per axis.
        kernel_delta: ``[taps, axes]`` offsets, in place of a box.
        symmetric: whether these are their own mirror image; found out by default.
        neighbor_cache: of an earlier call on this tensor of coords with such a kernel.
        algorithm: one of ``Algorithm``; default: ``config.DEFAULT_SPCONV_ALGORITHM``.
        allow_tf32: whether a GPU may round float32 factors; default: ``config.SPCONV_ALLOW_TF32``.

    Raises:
        ArgumentError: SL830 for the cache of another call, SL211 for duplicate voxels.
    """
    where = "submanifold_conv"
    flat = _flat_weight(where, weight, kernel_delta, feats)
    check_rows(where, feats, coords.shape[0])
    kernel = tuple(weight.shape[1:-1]) if kernel_delta is None else None
    if neighbor_cache is None:
        neighbor_cache = build_neighbor_cache(
            coords,
            submanifold=True,
            kernel_size=kernel,
            kernel_delta=kernel_delta,
            dilation=dilation,
            input_sparse_shape=sparse_grid(where, coords, shape),
            symmetric=symmetric,
        )
    else:
        spacing = None if kernel is None else tuple(dilation or (1,) * len(kernel))
        neighbor_cache.assert_match(
            input_coords=coords,
            output_coords=coords,
            is_transposed=False,
            kernel_delta=kernel_delta,
            kernel_size=kernel,
            dilation=spacing,
        )
    return _convolve(neighbor_cache, feats, flat, bias, algorithm, allow_tf32), neighbor_cache


def _convolve(
    cache: NeighborCache, feats: Tensor, flat: Tensor, bias: Tensor | None, algorithm: str | None, tf32: bool | None
) -> Tensor:
    chosen = config.DEFAULT_SPCONV_ALGORITHM if algorithm is None else algorithm
    return cache.convolve(feats, flat, bias, chosen, config.SPCONV_ALLOW_TF32 if tf32 is None else tf32)


def sparse_conv(
    feats: Tensor,
    coords: Tensor,
    shape: Ints,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    transposed: bool = False,
    kernel_delta: Tensor | None = None,
    stride: Ints | None = None,
    dilation: Ints | None = None,
    padding: Ints | None = None,
    offset: Ints | None = None,
    output_coords: Tensor | None = None,
    output_shape: Ints | None = None,
    neighbor_cache: NeighborCache | None = None,
    algorithm: str | None = None,
    allow_tf32: bool | None = None,
) -> Result:
    """Strided convolution: ``out[o] = sum_v weight[v] feats[o * stride - padding + dilation * v]``.

    Args:
        feats, coords, shape, weight, bias, kernel_delta, algorithm, allow_tf32: as in :func:`submanifold_conv`.
        transposed: whether it is a transposed convolution, see :func:`sparse_conv_transpose`.
        stride, dilation, padding: per axis.
        offset: per axis, of ``kernel_delta``.
        output_coords: the outputs; default: every voxel that an input reaches.
        output_shape: ``(*batch, *axes, channels)`` of them; default: as ``torch.nn.ConvNd``.
        neighbor_cache: of an earlier call. It brings its voxels and its shape.

    Returns:
        The features, their coordinates, their shape, and the cache.

    Raises:
        ArgumentError: SL830 for the cache of another call, SL211 for duplicate voxels.
    """
    where = "sparse_conv_transpose" if transposed else "sparse_conv"
    flat = _flat_weight(where, weight, kernel_delta, feats)
    check_rows(where, feats, coords.shape[0])
    if kernel_delta is None:
        kernel: tuple[int, ...] | None = tuple(weight.shape[1:-1])
        axes = weight.dim() - 2
        padding = (0,) * axes if padding is None else padding
    else:
        kernel, axes = None, kernel_delta.shape[1]
    if neighbor_cache is None:
        neighbor_cache = build_neighbor_cache(
            coords,
            output_coords,
            submanifold=False,
            kernel_size=kernel,
            kernel_delta=kernel_delta,
            stride=stride,
            dilation=dilation,
            padding=padding,
            offset=offset,
            input_sparse_shape=sparse_grid(where, coords, shape),
            output_sparse_shape=sparse_grid(where, coords, output_shape),
            transpose=transposed,
        )
    else:
        spacing = None if kernel is None else tuple(dilation or (1,) * axes)
        if kernel is not None and spacing is not None:
            offset = resolve_offset(kernel, spacing, padding, offset)
        neighbor_cache.assert_match(
            input_coords=coords,
            output_coords=output_coords,
            is_transposed=transposed,
            kernel_delta=kernel_delta,
            kernel_size=kernel,
            dilation=spacing,
            stride=tuple(stride or (1,) * axes),
            offset=offset,
        )
    out = _convolve(neighbor_cache, feats, flat, bias, algorithm, allow_tf32)
    return (
        out,
        neighbor_cache.output_coords,
        whole_shape(neighbor_cache.output_sparse_shape, out),
        neighbor_cache,
    )


def sparse_conv_transpose(
    feats: Tensor, coords: Tensor, shape: Ints, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> Result:
    """Transposed convolution: ``out[i * stride - padding + dilation * v] += weight[v] feats[i]``.

    The arguments are those of :func:`sparse_conv`, and the shape that of ``torch.nn.ConvTransposeNd``. A cache is one
    of a convolution from the outputs to the inputs, seen from the other side: its ``.T``.
    """
    return sparse_conv(feats, coords, shape, weight, bias, transposed=True, **options)


def _spread_window(ndim: int, options: dict[str, Any]) -> dict[str, Any]:
    names = ("stride", "dilation", "padding", "offset")
    return {**options, **spread(ndim, **{name: options[name] for name in names if name in options})}


def submanifold_conv2d(
    feats: Tensor, coords: Tensor, shape: Ints, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> tuple[Tensor, NeighborCache]:
    """:func:`submanifold_conv` for two axes."""
    return submanifold_conv(feats, coords, shape, weight, bias, **_spread_window(2, options))


def submanifold_conv3d(
    feats: Tensor, coords: Tensor, shape: Ints, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> tuple[Tensor, NeighborCache]:
    """:func:`submanifold_conv` for three axes."""
    return submanifold_conv(feats, coords, shape, weight, bias, **_spread_window(3, options))


def submanifold_conv4d(
    feats: Tensor, coords: Tensor, shape: Ints, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> tuple[Tensor, NeighborCache]:
    """:func:`submanifold_conv` for four axes."""
    return submanifold_conv(feats, coords, shape, weight, bias, **_spread_window(4, options))


def sparse_conv2d(
    feats: Tensor, coords: Tensor, shape: Ints, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> Result:
    """:func:`sparse_conv` for two axes."""
    return sparse_conv(feats, coords, shape, weight, bias, **_spread_window(2, options))


def sparse_conv3d(
    feats: Tensor, coords: Tensor, shape: Ints, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> Result:
    """:func:`sparse_conv` for three axes."""
    return sparse_conv(feats, coords, shape, weight, bias, **_spread_window(3, options))


def sparse_conv4d(
    feats: Tensor, coords: Tensor, shape: Ints, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> Result:
    """:func:`sparse_conv` for four axes."""
    return sparse_conv(feats, coords, shape, weight, bias, **_spread_window(4, options))


def sparse_conv_transpose2d(
    feats: Tensor, coords: Tensor, shape: Ints, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> Result:
    """:func:`sparse_conv_transpose` for two axes."""
    return sparse_conv_transpose(feats, coords, shape, weight, bias, **_spread_window(2, options))


def sparse_conv_transpose3d(
    feats: Tensor, coords: Tensor, shape: Ints, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> Result:
    """:func:`sparse_conv_transpose` for three axes."""
    return sparse_conv_transpose(feats, coords, shape, weight, bias, **_spread_window(3, options))


def sparse_conv_transpose4d(
    feats: Tensor, coords: Tensor, shape: Ints, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> Result:
    """:func:`sparse_conv_transpose` for four axes."""
    return sparse_conv_transpose(feats, coords, shape, weight, bias, **_spread_window(4, options))
