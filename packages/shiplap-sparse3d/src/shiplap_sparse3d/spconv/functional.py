"""spconv's differentiable functions over those of :mod:`ops`. ``torch.autocast`` narrows all of them, pooling too."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shiplap_sparse3d.spconv import ops
from shiplap_sparse3d.spconv.core import ConvAlgo, autocast_features
from shiplap_sparse3d.spconv.tables import sparse_add

__all__ = [
    "implicit_gemm",
    "indice_avgpool_implicit_gemm",
    "indice_conv",
    "indice_inverse_conv",
    "indice_maxpool",
    "indice_maxpool_implicit_gemm",
    "indice_subm_conv",
    "sparse_add",
    "sparse_add_hash_based",
]

sparse_add_hash_based = sparse_add


def indice_conv(
    features: Tensor,
    filters: Tensor,
    indice_pairs: Tensor,
    indice_pair_num: Tensor,
    num_activate_out: int,
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

    The result is differentiable. Raise ``SL208`` if ``act_type`` is given. The arguments ``indice_pair_num``, ``algo``,
    ``timer``, ``act_alpha`` and ``act_beta`` are not read.
    """
    return _over_pairs(features, filters, indice_pairs, indice_pair_num, num_activate_out, False, bias, act_type)


def indice_inverse_conv(
    features: Tensor,
    filters: Tensor,
    indice_pairs: Tensor,
    indice_pair_num: Tensor,
    num_activate_out: int,
    algo: ConvAlgo = ConvAlgo.Native,
    timer: Any = None,
    bias: Tensor | None = None,
    act_alpha: float = 0.0,
    act_beta: float = 0.0,
    act_type: Any = None,
) -> Tensor:
    """Return the convolution ``[num_activate_out, co]`` of ``features`` with ``filters [co, *k, ci]`` from the output
    rows of ``indice_pairs`` to its input rows, as an inverse layer computes it. ``indice_pairs`` is ``int32 [2, taps,
    n]``, with -1 behind the last pair of a tap. If ``bias`` is given, it is added.

    Raise ``SL208`` if ``act_type`` is given. The arguments ``indice_pair_num``, ``algo``, ``timer``, ``act_alpha`` and
    ``act_beta`` are not read.
    """
    return _over_pairs(features, filters, indice_pairs, indice_pair_num, num_activate_out, True, bias, act_type)


indice_subm_conv = indice_conv


def _over_pairs(
    features: Tensor,
    filters: Tensor,
    pairs: Tensor,
    counts: Tensor,
    rows: int,
    inverse: bool,
    bias: Tensor | None,
    act_type: Any,
) -> Tensor:
    """Return the convolution ``[rows, co]`` of ``features`` with ``filters [co, *k, ci]`` over ``pairs`` of input and
    output rows, plus ``bias`` if it is given. If ``inverse`` is true, it goes from outputs to inputs, and otherwise
    from inputs to outputs.

    Raise ``SL208`` if ``act_type`` is given.
    """
    return ops.indice_conv(features, filters, pairs, counts, rows, inverse, bias=bias, act_type=act_type)


def implicit_gemm(
    features: Tensor,
    filters: Tensor,
    pair_fwd: Tensor,
    pair_bwd: Tensor,
    pair_mask_fwd_splits: list[Tensor],
    pair_mask_bwd_splits: list[Tensor],
    mask_argsort_fwd_splits: list[Tensor],
    mask_argsort_bwd_splits: list[Tensor],
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
) -> Tensor:
    """Return the convolution ``[m, co]`` of ``features [n, ci]`` with ``filters [co, *k, ci]``, plus ``bias`` if it is
    given. ``pair_fwd``, ``int32 [taps, m]``, holds the input row of each output under each tap, or -1.

    The result is differentiable. Raise ``SL208`` if ``act_type`` is given. All other arguments, such as masks and
    sorting orders, are not read.
    """
    return ops.implicit_gemm(
        features,
        filters,
        pair_fwd,
        pair_mask_fwd_splits,
        mask_argsort_fwd_splits,
        num_activate_out,
        masks,
        is_train,
        is_subm,
        timer,
        fp32_accum,
        bias,
        act_type=act_type,
    )[0]


def indice_maxpool(features: Tensor, indice_pairs: Tensor, indice_pair_num: Tensor, num_activate_out: int) -> Tensor:
    """Return, for each output and channel, the largest of its inputs, or 0 if that is larger, as ``[num_activate_out,
    c]``. ``indice_pairs`` holds pairs of input and output rows, ``int32 [2, taps, n]``, with -1 behind the last pair of
    a tap. The result is differentiable. ``indice_pair_num`` is not read.
    """
    return ops.indice_maxpool(autocast_features(features), indice_pairs, indice_pair_num, num_activate_out)


def indice_maxpool_implicit_gemm(
    features: Tensor, indice_pairs_fwd: Tensor, indice_pairs_bwd: Tensor, num_activate_out: int
) -> Tensor:
    """Return, for each output and channel, the largest of its inputs, or 0 if that is larger, as ``[m, c]``.
    ``indice_pairs_fwd``, ``int32 [taps, m]``, holds the input row of each output under each tap, or -1. The result is
    differentiable. ``indice_pairs_bwd`` is not read.
    """
    return ops.indice_maxpool_implicit_gemm(autocast_features(features), indice_pairs_fwd, num_activate_out)


def indice_avgpool_implicit_gemm(
    features: Tensor, indice_pairs_fwd: Tensor, indice_pairs_bwd: Tensor, num_activate_out: int, calc_count: bool
) -> Tensor:
    """Return, for each output and channel, the mean of its inputs, as ``[m, c]``. ``indice_pairs_fwd``, ``int32 [taps,
    m]``, holds the input row of each output under each tap, or -1, which is not counted. The result is differentiable.
    ``indice_pairs_bwd`` and ``calc_count`` are not read.
    """
    return ops.indice_avgpool_implicit_gemm(autocast_features(features), indice_pairs_fwd, num_activate_out, False)[0]
