"""Kernels of fused attention by name, where torch's own choice among them is not the fastest one."""

from __future__ import annotations

import torch
from torch import Tensor


def attend_by_efficient_kernel(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Return the attention of the queries ``q``, the keys ``k`` and the values ``v``, with ``bias`` added to the scores
    and without gradients. It is computed by torch's memory-efficient kernel for CUDA.

    All four have four dims and the same first two. Rows of ``bias`` begin at multiples of 16 elements in memory.
    """
    # torch.nn.attention.sdpa_kernel, the public way, is a context, which a graph does not record.
    attend = torch.ops.aten._scaled_dot_product_efficient_attention.default
    out: Tensor = attend(q, k, v, bias, False, 0.0, False, scale=scale)[0]
    return out
