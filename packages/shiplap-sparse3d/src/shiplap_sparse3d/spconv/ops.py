"""spconv's functions on index tensors: sizes, pairs, and computations over pairs. Layers do not use them.

``Native`` pairs are ``int32 [2, taps, n]`` (input row, output row), padded with -1; tables are ``int32 [taps, rows]``,
the other side's row or -1. The counts of pairs are not read, since the padding marks their end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shiplap.plugin_api import error
from shiplap_sparse3d import ops as kernels
from shiplap_sparse3d import pooling
from shiplap_sparse3d.plan import Plan
from shiplap_sparse3d.spconv import indices as records
from shiplap_sparse3d.spconv.core import ConvAlgo, IndiceData, LayerWindow, SparseConvTensor
from shiplap_sparse3d.spconv.indices import get_conv_output_size, get_deconv_output_size
from shiplap_sparse3d.spconv.maximum import max_pool_from_zero, max_pool_from_zero_grad

__all__ = [
    "ConvAlgo",
    "get_conv_output_size",
    "get_deconv_output_size",
    "get_indice_pairs",
    "get_indice_pairs_implicit_gemm",
    "global_pool_rearrange",
    "implicit_gemm",
    "implicit_gemm_backward",
    "indice_avgpool_implicit_gemm",
    "indice_avgpool_implicit_gemm_backward",
    "indice_conv",
    "indice_conv_backward",
    "indice_maxpool",
    "indice_maxpool_backward",
    "indice_maxpool_implicit_gemm",
    "indice_maxpool_implicit_gemm_backward",
    "maximum_value_int_",
]


# --- pairs ------------------------------------------------------------------------------------------------------------


def _build_pairs_record(
    where: str,
    indices: Tensor,
    batch_size: int,
    spatial_shape: Sequence[int],
    algo: ConvAlgo,
    sizes: tuple[Sequence[int], ...],
    transpose: bool,
    subm: bool,
    bound: int,
) -> IndiceData:
    """Return the record (input voxels, output voxels and neighbours) of a convolution on the voxels ``indices``.
    ``sizes`` are its kernel size, stride, padding, dilation and output padding. If ``subm`` is true, it is submanifold.
    Otherwise it is transposed if ``transpose`` is true, and strided if it is false.

    If ``bound`` is above 0, raise ``SL211`` for more than ``bound`` outputs.
    """
    voxels = SparseConvTensor(
        # No feature is read: the tensor carries the voxels only.
        torch.empty(indices.shape[0], 0, device=indices.device),
        indices,
        spatial_shape,
        batch_size,
    )
    ksize, stride, padding, dilation, extra = map(list, sizes)
    window = LayerWindow(ksize, stride, padding, dilation, extra if transpose else None)
    record = records.build_record(where, voxels, window, algo, subm=subm)
    if 0 < bound < record.out_indices.shape[0]:
        raise error(
            "SL211",
            where=where,
            got=f"{record.out_indices.shape[0]} output voxels",
            expected=f"at most num_out_act_bound = {bound}",
        )
    return record


def get_indice_pairs(
    indices: Tensor,
    batch_size: int,
    spatial_shape: Sequence[int],
    algo: ConvAlgo,
    ksize: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    out_padding: Sequence[int],
    subm: bool = False,
    transpose: bool = False,
    num_out_act_bound: int = -1,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output voxels of a convolution on ``indices``, its pairs of input and output rows, and the number of
    pairs of each tap.

    The shapes are ``int32 [m, 1 + ndim]``, ``int32 [2, taps, n]`` (input and output rows, -1 behind the last pair) and
    ``int32 [taps]``. The convolution is submanifold if ``subm`` is true, else transposed if ``transpose`` is true, else
    strided.

    Raise ``SL208`` if the output grid has no cells. Raise ``SL211`` if no voxel has an output, or if there are more
    than ``num_out_act_bound`` outputs. A bound of 0 or less is no limit.
    """
    sizes = ksize, stride, padding, dilation, out_padding
    record = _build_pairs_record(
        "get_indice_pairs", indices, batch_size, spatial_shape, algo, sizes, transpose, subm, num_out_act_bound
    )
    return record.out_indices, record.indice_pairs, record.indice_pair_num


def get_indice_pairs_implicit_gemm(
    indices: Tensor,
    batch_size: int,
    spatial_shape: Sequence[int],
    algo: ConvAlgo,
    ksize: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    out_padding: Sequence[int],
    subm: bool = False,
    transpose: bool = False,
    is_train: bool = True,
    alloc: Any = None,
    timer: Any = None,
    num_out_act_bound: int = -1,
    direct_table: bool = True,
    do_sort: bool = True,
) -> tuple[Any, ...]:
    """Return the output voxels of a convolution on ``indices``, its neighbour tables, and masks of the taps under which
    a row has a neighbour, in spconv's order.

    The tuple is ``(out_inds, num_per_tap, pair_fwd, pair_bwd, mask_fwd, mask_bwd, argsort_fwd, argsort_bwd, masks)``.
    ``pair_fwd [taps, m]`` holds input rows and ``pair_bwd [taps, n]`` output rows, or -1. ``mask_fwd`` and ``mask_bwd``
    are lists of masks, ``int32 [rows, ceil(taps / 32)]``, with a bit for each tap under which the row has a neighbour.
    ``argsort_fwd`` and ``argsort_bwd`` are lists of the row numbers sorted by these masks, or ascending if ``do_sort``
    is false.

    ``MaskSplitImplicitGemm`` has two masks in each list, and other algorithms have one. ``masks`` holds an array for
    each of them, whose bits are the taps that it covers. The backward lists are empty if ``subm`` is true or
    ``is_train`` is false. ``pair_bwd`` is empty if ``is_train`` is false. ``alloc``, ``timer`` and ``direct_table`` are
    not read. Errors are those of :func:`get_indice_pairs`.
    """
    sizes = ksize, stride, padding, dilation, out_padding
    where = "get_indice_pairs_implicit_gemm"
    record = _build_pairs_record(
        where, indices, batch_size, spatial_shape, algo, sizes, transpose, subm, num_out_act_bound
    )
    forward, backward = record.pair_fwd, record.pair_bwd
    taps = forward.shape[0]
    parts = _mask_parts(algo, taps)
    here = _hit_masks(forward, parts, do_sort)
    there = _hit_masks(backward, parts, do_sort) if is_train and not subm else ([], [])
    # spconv has them as unsigned words of 32 bits.
    covered = [np.array([(1 << stop) - (1 << start) & 0xFFFFFFFF], dtype=np.uint32) for start, stop in parts]
    back = backward if is_train else backward.new_empty(0)
    return (
        record.out_indices,
        (forward >= 0).sum(1, dtype=torch.int32),
        forward,
        back,
        here[0],
        there[0],
        here[1],
        there[1],
        covered,
    )


def _mask_parts(algo: ConvAlgo, taps: int) -> list[tuple[int, int]]:
    """Return the ranges ``(first, end)`` of the taps that each mask covers. ``MaskSplitImplicitGemm`` has two masks,
    for the two halves of the taps. Any other algorithm has one mask for all taps.
    """
    half = taps - taps // 2
    return [(0, half), (half, taps)] if algo == ConvAlgo.MaskSplitImplicitGemm else [(0, max(taps, 32))]


def _hit_masks(table: Tensor, parts: list[tuple[int, int]], do_sort: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return two lists, the masks of ``table [taps, rows]`` and orders of its rows, with one tensor for each range of
    taps ``(first, end)`` in ``parts``.

    A mask, ``int32 [rows, words]``, has a bit for each tap of the range under which the row has a neighbour. An order,
    ``int32 [rows]``, holds row numbers. If ``do_sort`` is true, they are sorted by the masks, and otherwise ascending.
    """
    taps, rows = table.shape
    words = -(-taps // 32)
    hit = torch.nn.functional.pad((table >= 0).t(), (0, words * 32 - taps)).view(rows, words, 32)
    masks, orders = [], []
    for start, stop in parts:
        tap = torch.arange(words * 32, device=table.device).view(words, 32)
        # Sums of distinct powers of two are bit masks.
        bits = ((hit & (tap >= start) & (tap < stop)).long() << (tap % 32)).sum(2)
        order = torch.arange(rows, device=table.device)
        if do_sort:
            for word in range(words):
                # Stable sorts from the lowest word on order by all words.
                order = order[bits[order, word].argsort(stable=True)]
        # The highest of 32 bits is the sign of an int32.
        masks.append(torch.where(bits >= 2**31, bits - 2**32, bits).int())
        orders.append(order.int())
    return masks, orders


def _plan_of_pairs(pairs: Tensor, rows: int, out_rows: int, inverse: bool = False) -> Plan:
    """Return the plan (neighbour table) of a convolution from ``rows`` inputs to ``out_rows`` outputs. ``pairs`` holds
    input and output rows, ``int32 [2, taps, n]``. If ``inverse`` is true, the first of a pair is the output and the
    second one the input.
    """
    source, target = (pairs[1], pairs[0]) if inverse else (pairs[0], pairs[1])
    at = torch.where(target >= 0, target, out_rows).long()  # padding goes to a row that is dropped
    table = source.new_full((pairs.shape[1], out_rows + 1), -1).scatter(1, at, source)[:, :out_rows]
    return Plan(table.t(), rows)


# --- convolution ------------------------------------------------------------------------------------------------------


def _weight_by_tap(filters: Tensor) -> Tensor:
    """Return ``filters [co, *k, ci]`` as ``[co, taps, ci]``, the shape that convolutions over neighbour tables take."""
    return filters.flatten(1, -2)


def _no_activation(where: str, act_type: Any) -> None:
    """Raise ``SL208`` if ``act_type`` is not None, since the function named ``where`` applies no activation."""
    if act_type is not None:
        raise error(
            "SL208",
            where=where,
            got=f"act_type={act_type}",
            expected="None",
            fix="apply the activation to the result; torch.compile fuses it",
        )


def _plan_gradients(plan: Plan, features: Tensor, filters: Tensor, out_bp: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of a convolution with respect to ``features [n, ci]`` and ``filters [co, *k, ci]``. ``plan``
    holds the convolution's neighbour tables, and ``out_bp`` is the gradient of its output.
    """
    weight = _weight_by_tap(filters)
    grad = kernels.conv_weight_grad(out_bp, features, plan.table)
    # The gradient of the features is the transposed convolution.
    return plan.t.conv(out_bp, weight.permute(2, 1, 0)), grad.view_as(filters)


def indice_conv(
    features: Tensor,
    filters: Tensor,
    indice_pairs: Tensor,
    indice_pair_num: Tensor,
    num_activate_out: int,
    inverse: bool = False,
    subm: bool = False,
    algo: ConvAlgo = ConvAlgo.Native,
    timer: Any = None,
    bias: Tensor | None = None,
    act_alpha: float = 0.0,
    act_beta: float = 0.0,
    act_type: Any = None,
) -> Tensor:
    """Return the convolution ``[num_activate_out, co]`` of ``features [n, ci]`` with ``filters [co, *k, ci]``, plus
    ``bias`` if it is given. ``indice_pairs`` holds pairs of input and output rows, ``int32 [2, taps, n]``, with -1
    behind the last pair of a tap.

    If ``inverse`` is true, it goes from outputs to inputs, and otherwise from inputs to outputs. Raise ``SL208`` if
    ``act_type`` is given. The arguments ``indice_pair_num``, ``subm``, ``algo``, ``timer``, ``act_alpha`` and
    ``act_beta`` are not read.
    """
    _no_activation("indice_conv", act_type)
    plan = _plan_of_pairs(indice_pairs, features.shape[0], num_activate_out, inverse)
    return plan.conv(features, _weight_by_tap(filters), bias)


def indice_conv_backward(
    features: Tensor,
    filters: Tensor,
    out_bp: Tensor,
    indice_pairs: Tensor,
    indice_pair_num: Tensor,
    inverse: bool = False,
    subm: bool = False,
    algo: ConvAlgo = ConvAlgo.Native,
    timer: Any = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of :func:`indice_conv` with respect to ``features`` and ``filters``. ``out_bp`` is the
    gradient of its output. If ``inverse`` is true, the convolution goes from outputs to inputs, and otherwise from
    inputs to outputs. ``indice_pair_num``, ``subm``, ``algo`` and ``timer`` are not read.
    """
    return _plan_gradients(
        _plan_of_pairs(indice_pairs, features.shape[0], out_bp.shape[0], inverse), features, filters, out_bp
    )


def implicit_gemm(
    features: Tensor,
    filters: Tensor,
    pair_fwd: Tensor,
    pair_mask_fwd_splits: list[Tensor],
    mask_argsort_fwd_splits: list[Tensor],
    num_activate_out: int,
    masks: list[Any],
    is_train: bool,
    is_subm: bool,
    timer: Any = None,
    fp32_accum: bool | None = None,
    bias: Tensor | None = None,
    act_alpha: float = 0.0,
    act_beta: float = 0.0,
    act_type: Any = None,
    output_scale: float = 1.0,
    scale: Tensor | None = None,
    output_add: Tensor | None = None,
    output_add_scale: float = 0.0,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, None, int]:
    """Return ``(out, None, -1)``. ``out [m, co]`` is the convolution of ``features [n, ci]`` with ``filters [co, *k,
    ci]``. ``pair_fwd``, ``int32 [taps, m]``, holds the input row of each output under each tap, or -1.

    Raise ``SL208`` if an activation, a scale or an added output is given. If ``bias`` is given, it is added. If
    ``output_dtype`` is given, the result has that dtype. All other arguments, such as spconv's masks, are not read.
    """
    _no_activation("implicit_gemm", act_type)
    if scale is not None or output_add is not None or output_scale != 1.0:
        raise error(
            "SL208",
            where="implicit_gemm",
            got="scale, output_scale or output_add",
            expected="none of them",
            fix="pass floating-point tensors: int8 is not supported",
        )
    out = Plan(pair_fwd.t(), features.shape[0]).conv(features, _weight_by_tap(filters), bias)
    return (out if output_dtype is None else out.to(output_dtype)), None, -1


def implicit_gemm_backward(
    features: Tensor,
    filters: Tensor,
    out_bp: Tensor,
    pair_fwd: Tensor,
    pair_bwd: Tensor,
    pair_mask_fwd_splits: list[Tensor],
    pair_mask_bwd_splits: list[Tensor],
    mask_argsort_fwd_splits: list[Tensor],
    mask_argsort_bwd_splits: list[Tensor],
    mask_output_fwd: Tensor | None,
    masks: list[Any],
    mask_width: int,
    is_subm: bool,
    timer: Any = None,
    fp32_accum: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of :func:`implicit_gemm` with respect to ``features`` and ``filters``. ``out_bp`` is the
    gradient of its output. Of the arguments after ``out_bp`` only ``pair_fwd`` is read.
    """
    return _plan_gradients(Plan(pair_fwd.t(), features.shape[0]), features, filters, out_bp)


# --- pooling ----------------------------------------------------------------------------------------------------------


def indice_maxpool(features: Tensor, indice_pairs: Tensor, indice_pair_num: Tensor, num_activate_out: int) -> Tensor:
    """Return, for each output and channel, the largest of its inputs, or 0 if that is larger, as ``[num_activate_out,
    c]``. ``indice_pairs`` holds pairs of input and output rows, ``int32 [2, taps, n]``, with -1 behind the last pair of
    a tap. ``indice_pair_num`` is not read.
    """
    return max_pool_from_zero(features, _plan_of_pairs(indice_pairs, features.shape[0], num_activate_out).table)


def indice_maxpool_backward(
    features: Tensor, out_features: Tensor, out_bp: Tensor, indice_pairs: Tensor, indice_pair_num: Tensor
) -> Tensor:
    """Return the gradient of :func:`indice_maxpool` with respect to ``features``, ``[n, c]``. ``out_bp`` is the
    gradient of its output. ``out_features`` and ``indice_pair_num`` are not read.
    """
    plan = _plan_of_pairs(indice_pairs, features.shape[0], out_bp.shape[0])
    return max_pool_from_zero_grad(features, out_bp, plan.table, plan.transposed().table)


def indice_maxpool_implicit_gemm(features: Tensor, indice_pairs: Tensor, num_activate_out: int) -> Tensor:
    """Return, for each output and channel, the largest of its inputs, or 0 if that is larger, as ``[m, c]``.
    ``indice_pairs``, ``int32 [taps, m]``, holds the input row of each output under each tap, or -1.
    ``num_activate_out`` is not read.
    """
    return max_pool_from_zero(features, indice_pairs.t())


def indice_maxpool_implicit_gemm_backward(
    features: Tensor, out_features: Tensor, out_bp: Tensor, indice_pairs: Tensor
) -> Tensor:
    """Return the gradient of :func:`indice_maxpool_implicit_gemm` with respect to ``features``, ``[n, c]``. ``out_bp``
    is the gradient of its output. ``indice_pairs`` is the backward table, ``int32 [taps, n]``, which holds the output
    row that reads each input under each tap, or -1. ``out_features`` is not read.
    """
    table = kernels.transpose_table(indice_pairs.t(), out_bp.shape[0])
    return max_pool_from_zero_grad(features, out_bp, table, indice_pairs.t())


def indice_avgpool_implicit_gemm(
    features: Tensor, indice_pairs: Tensor, num_activate_out: int, calc_count: bool
) -> tuple[Tensor, Tensor]:
    """Return, for each output and channel, the mean of its inputs, ``[m, c]``, and a second tensor. If ``calc_count``
    is true, that is the number of inputs of each output, ``int32 [m]``. Otherwise it is empty.

    The table ``indice_pairs`` holds input rows or -1, ``int32 [taps, m]``.
    """
    count = (indice_pairs >= 0).sum(0, dtype=torch.int32) if calc_count else indice_pairs.new_empty(0)
    return pooling.avg_pool(features, indice_pairs.t()), count


def indice_avgpool_implicit_gemm_backward(out_bp: Tensor, indice_pairs: Tensor, count_out: Tensor) -> Tensor:
    """Return the gradient of :func:`indice_avgpool_implicit_gemm` with respect to the features, ``[n, c]``. ``out_bp``
    is the gradient of its first result, and ``count_out`` is its second one. ``indice_pairs`` is the backward table,
    ``int32 [taps, n]``, which holds the output row that reads each input under each tap, or -1.
    """
    return pooling.sum_pool(out_bp / count_out.clamp_min(1).to(out_bp.dtype)[:, None], indice_pairs.t())


def global_pool_rearrange(coords: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return the row numbers of each scene, ``int32 [batch_size, n]``, and the number of rows of each scene, ``int32
    [batch_size]``. In the first tensor, -1 follows the last row of a scene. Column 0 of ``coords`` is the scene.
    """
    member = coords[:, 0] == torch.arange(batch_size, device=coords.device)[:, None]
    first = (~member).to(torch.int8).argsort(dim=1, stable=True)
    return torch.where(member.gather(1, first), first, -1).int(), member.sum(1, dtype=torch.int32)


def maximum_value_int_(ten: Tensor, value: int) -> None:
    """Set the only element of ``ten`` to ``value``, in place, if ``value`` is larger."""
    records.count_voxels(ten, value)
