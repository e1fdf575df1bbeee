"""``spconv.ops`` of spconv 1.x: the functions of ``spconv.pytorch.ops``, and suppression of boxes on tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from shiplap_sparse3d.spconv.ops import (
    ConvAlgo,
    get_conv_output_size,
    get_deconv_output_size,
    get_indice_pairs,
    indice_conv,
    indice_conv_backward,
    indice_maxpool,
    indice_maxpool_backward,
)
from shiplap_sparse3d.spconv_package.boxes import non_max_suppression_cpu

__all__ = [
    "ConvAlgo",
    "get_conv_output_size",
    "get_deconv_output_size",
    "get_indice_pairs",
    "indice_conv",
    "indice_conv_backward",
    "indice_maxpool",
    "indice_maxpool_backward",
    "nms",
]


def nms(boxes: Tensor, scores: Tensor, pre_max_size: int, post_max_size: int, thresh: float, eps: float) -> Tensor:
    """Return the row numbers of the boxes that non-maximum suppression keeps, by descending score, as ``int64 [k]`` on
    the device of ``boxes``. The computation runs on the CPU.

    Args:
        boxes, scores: ``[n, 4]`` and ``[n]``.
        pre_max_size, post_max_size: how many boxes are considered and how many are kept. 0 or less stands for all.
        thresh: a box whose overlap with a kept box is at least this is dropped.
        eps: length of a cell, added to each side.
    """
    order = scores.argsort(descending=True, stable=True)[: pre_max_size if pre_max_size > 0 else None]
    kept = non_max_suppression_cpu(boxes.detach().cpu().numpy(), order.cpu().numpy(), thresh, eps)
    return torch.tensor(kept[: post_max_size if post_max_size > 0 else None], dtype=torch.int64, device=boxes.device)
