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
from shiplap_sparse3d.flexgemm.axes import functions_of_axes
from shiplap_sparse3d.flexgemm.ops.neighbor_cache import Ints, NeighborCache, neighbors_of_call

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


def on_outputs(feats: Tensor, cache: NeighborCache) -> Result:
    """Return ``(features, coordinates, shape, cache)`` of a function whose outputs lie on other voxels than its input.
    They are ``feats``, the output coordinates of ``cache``, its output grid with the channels last, and ``cache``
    itself. Raise ``SL208`` if the cache has no output grid.
    """
    grid = cache.output_sparse_shape
    if grid is None:
        raise error("SL208", where="neighbor_cache", got="no output shape", expected="output_shape or input shape")
    return feats, cache.output_coords, torch.Size([*grid, *feats.shape[1:]]), cache


def _flat_weight(where: str, weight: Tensor, kernel_delta: Tensor | None, feats: Tensor) -> Tensor:
    """Return ``weight`` as ``[co, taps, ci]``. It must be ``[co, *kernel, ci]``, or ``[co, taps, ci]`` if
    ``kernel_delta`` is given. Raise ``SL201`` for another number of dimensions, and ``SL202`` unless ``ci`` is the
    number of channels of ``feats``. ``where`` is the function's name in the message.
    """
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
    """Return the submanifold convolution ``[n, co]``, whose outputs lie on the voxels of the input, and the cache of
    the neighbours of these voxels.

    Args:
        feats: ``[n, ci]``.
        coords: ``[n, batch columns + axes]``.
        shape: ``(*batch, *axes, channels)``.
        weight: ``[co, *kernel, ci]``, or ``[co, taps, ci]`` with ``kernel_delta``.
        bias: ``[co]`` or None.
        dilation: the spacing of the taps per axis.
        kernel_delta: the offsets of the taps, ``[taps, axes]``. If it is None, the taps are a box.
        symmetric: whether these offsets are their own mirror image. If it is None, the offsets are compared.
        neighbor_cache: the cache of an earlier call with the same tensor ``coords`` and an equal kernel. If it is None,
            a new one is built.
        algorithm: one of ``Algorithm``, by default ``config.DEFAULT_SPCONV_ALGORITHM``.
        allow_tf32: whether a GPU may round float32 factors, by default ``config.SPCONV_ALLOW_TF32``.

    Raises:
        ArgumentError: ``SL830`` for a cache that was built for other arguments, ``SL211`` for duplicate voxels.
    """
    where = "submanifold_conv"
    flat = _flat_weight(where, weight, kernel_delta, feats)
    check_rows(where, feats, coords.shape[0])
    kernel = tuple(weight.shape[1:-1]) if kernel_delta is None else None
    cache = neighbors_of_call(
        where,
        coords,
        shape,
        neighbor_cache,
        submanifold=True,
        symmetric=symmetric,
        kernel_size=kernel,
        kernel_delta=kernel_delta,
        dilation=dilation,
    )
    return _convolve(cache, feats, flat, bias, algorithm, allow_tf32), cache


def _convolve(
    cache: NeighborCache, feats: Tensor, flat: Tensor, bias: Tensor | None, algorithm: str | None, tf32: bool | None
) -> Tensor:
    """Return the convolution of ``feats [n, ci]`` with ``flat [co, taps, ci]`` over the neighbours of ``cache``. If
    ``algorithm`` or ``tf32`` is None, ``DEFAULT_SPCONV_ALGORITHM`` or ``SPCONV_ALLOW_TF32`` of ``flex_gemm.config``
    applies. If ``bias`` is None, no bias is added.
    """
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
    """Return the features of the strided convolution ``out[o] = sum_v weight[v] feats[o * stride - padding + dilation *
    v]``, their coordinates, their shape and the cache of neighbours.

    Args:
        feats, coords, shape, weight, bias, kernel_delta, algorithm, allow_tf32: as in :func:`submanifold_conv`.
        transposed: whether the convolution is transposed, as in :func:`sparse_conv_transpose`.
        stride, dilation, padding: one number per axis, by default 1, 1 and 0.
        offset: the offset that is added to ``kernel_delta``, one number per axis.
        output_coords: the voxels of the outputs, by default every voxel that an input reaches.
        output_shape: the shape of the outputs, ``(*batch, *axes, channels)``, by default as in ``torch.nn.ConvNd``.
        neighbor_cache: the cache of an earlier call with equal arguments, which has the output voxels and their shape.
            If it is None, a new one is built.

    Returns:
        The features, their coordinates, their shape, and the cache.

    Raises:
        ArgumentError: ``SL830`` for a cache that was built for other arguments, ``SL211`` for duplicate voxels.
    """
    where = "sparse_conv_transpose" if transposed else "sparse_conv"
    flat = _flat_weight(where, weight, kernel_delta, feats)
    check_rows(where, feats, coords.shape[0])
    # As in ``torch.nn.ConvNd``; taps given as offsets have no padding.
    if kernel_delta is None and padding is None:
        padding = (0,) * (weight.dim() - 2)
    cache = neighbors_of_call(
        where,
        coords,
        shape,
        neighbor_cache,
        submanifold=False,
        output_coords=output_coords,
        output_shape=output_shape,
        transpose=transposed,
        kernel_size=tuple(weight.shape[1:-1]) if kernel_delta is None else None,
        kernel_delta=kernel_delta,
        stride=stride,
        dilation=dilation,
        padding=padding,
        offset=offset,
    )
    return on_outputs(_convolve(cache, feats, flat, bias, algorithm, allow_tf32), cache)


def sparse_conv_transpose(
    feats: Tensor, coords: Tensor, shape: Ints, weight: Tensor, bias: Tensor | None = None, **options: Any
) -> Result:
    """Return the features of the transposed convolution ``out[i * stride - padding + dilation * v] += weight[v]
    feats[i]``, their coordinates, their shape and the cache of neighbours.

    The arguments are those of :func:`sparse_conv`, and the shape is that of ``torch.nn.ConvTransposeNd``. As a cache,
    pass the ``.T`` of the cache of a convolution from the outputs to the inputs.
    """
    return sparse_conv(feats, coords, shape, weight, bias, transposed=True, **options)


_WINDOW = ("stride", "dilation", "padding", "offset")
submanifold_conv2d, submanifold_conv3d, submanifold_conv4d = functions_of_axes(submanifold_conv, "dilation")
sparse_conv2d, sparse_conv3d, sparse_conv4d = functions_of_axes(sparse_conv, *_WINDOW)
sparse_conv_transpose2d, sparse_conv_transpose3d, sparse_conv_transpose4d = functions_of_axes(
    sparse_conv_transpose, *_WINDOW
)
