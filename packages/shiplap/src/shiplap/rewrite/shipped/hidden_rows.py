"""Rows of scores that masks may hide as a whole. A fused kernel and the written-out form differ in such rows.

If a finite number hides a row, the row has equal weights in the written-out form, and gradients flow through them. A
fused kernel stores the logarithm of the sum of such a row. The rest of the sum is lost in that number, and the gradient
of the values is wrong by a factor. For 8 keys and -1e9 it was wrong by 82 % (torch 2.13, CPU). If minus infinity hides
a row, the result is NaN in the written-out form, and 0 in a fused kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from shiplap.rewrite.graph import fake_value, flat_nodes
from shiplap.rewrite.passthrough_ops import torch_call_name
from shiplap.rewrite.shipped.constant_masks import hidden_part_of_step
from shiplap.rewrite.shipped.scores import ScoreStep
from shiplap.rewrite.shipped.softmax_region import BOUNDARY_OPERATORS

LEAST_HIDING_NUMBER = 1e3  # no score and no bias of a model is this large; masks are
MOST_BIAS_CALLS = 200  # calls behind a bias that are looked at
UNBOUNDED_OPERATORS = frozenset({"log", "log2", "log10", "log1p", "reciprocal", "logit", "div", "truediv", "pow"})
# The number from which a sum with a score in this dtype is the number itself.
SWALLOWING_NUMBERS = {torch.float16: 3e4, torch.bfloat16: 1e4, torch.float32: 1e9, torch.float64: 1e18}


def masks_that_may_hide_rows(steps: Sequence[ScoreStep]) -> list[ScoreStep]:
    """Return the masks among ``steps`` that may, alone or together, hide all columns of a row of scores. Steps are the
    calls that an attention applies to its scores. The list is empty if each row is known to keep a column.
    """
    masks = [
        s
        for s in steps
        if s.kind in ("fill", "keep") or (s.kind == "add" and not (abs(s.number) <= 1 and _is_bounded(s.given)))
    ]
    return [] if len(masks) == 1 and hidden_part_of_step(masks[0]) else masks


def _is_bounded(bias: Any) -> bool:
    """Return whether ``bias``, a tensor that is added to attention scores, is too small to hide a score as a mask does.

    This holds if ``bias`` is computed from parameters, from inputs with gradients, from booleans, or from results of
    ``BOUNDARY_OPERATORS``, such as matrix products and normalizations. The calls in between must contain no number of
    1000 or more, and no operator such as a division, a power or a logarithm.
    """
    stack, seen = [bias], set[Node]()
    while stack:
        at = stack.pop()
        if at in seen:
            continue
        seen.add(at)
        held, name = fake_value(at), torch_call_name(at)
        if not isinstance(held, Tensor) or held.dtype in (torch.bool, torch.uint8):
            continue
        if name in BOUNDARY_OPERATORS or isinstance(held, torch.nn.Parameter):
            continue
        # What is trained is no mask; what comes in otherwise may be one.
        if at.op in ("placeholder", "get_attr"):
            if held.requires_grad:
                continue
            return False
        numbers = [a for a in (*at.args, *at.kwargs.values()) if isinstance(a, (int, float))]
        if name in UNBOUNDED_OPERATORS or len(seen) > MOST_BIAS_CALLS or not name:
            return False
        if any(not abs(n) < LEAST_HIDING_NUMBER for n in numbers):
            return False
        stack += flat_nodes((at.args, at.kwargs))
    return True


@dataclass(frozen=True)
class HidingNumbers:
    """The numbers by which masks may hide all columns of a row of scores.

    Attributes:
        dtype: the dtype in which the masks are added.
        finite: whether a finite number may hide a row.
        infinite: whether minus infinity may hide a row.
    """

    dtype: torch.dtype
    finite: bool
    infinite: bool


def hiding_numbers(steps: Sequence[ScoreStep], hiding: Sequence[ScoreStep]) -> HidingNumbers:
    """Return the numbers by which the masks ``hiding``, at least one of the ``steps``, may hide a row of scores. Steps
    are the calls that an attention applies to its scores.
    """
    behind = steps[next(i for i, s in enumerate(steps) if s is hiding[0]) :]
    # The numbers of a mask that is added are unknown, and a sum or a product with a finite number may be infinite.
    known = all(s.kind in ("fill", "keep", "view") for s in behind)
    infinite = [s.number == -torch.inf for s in hiding]
    return HidingNumbers(hiding[-1].dtype, not (known and all(infinite)), not known or any(infinite))


def restore_hidden_rows(q: Tensor, bias: Tensor, by: HidingNumbers) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return queries, a bias, and a boolean tensor of the rows that become NaN, or None if there are none. With these
    queries and this bias, a fused attention kernel weighs rows that are fully masked ``by`` these numbers as the
    model's own calls do.

    In 16 bits, adding a mask makes all scores of a fully masked row equal. A fused kernel adds the mask in float32,
    where the scores keep their differences. The queries of such rows are therefore set to 0.
    """
    zeroed = by.finite and q.itemsize == 2 and bias.is_floating_point()
    if not zeroed and not by.infinite:
        return q, bias, None
    top = bias.amax(-1, keepdim=True)
    if zeroed:
        hidden = top <= -SWALLOWING_NUMBERS[by.dtype]
        q = torch.where(hidden, torch.zeros((), dtype=q.dtype, device=q.device), q)
        bias = torch.where(hidden, bias - top.clamp_min(torch.finfo(bias.dtype).min), bias)
    return q, bias, top == -torch.inf if by.infinite else None
