"""Weights that are set to 0 behind the softmax where the scores were masked, as in Conformers and CPM-Ant.

A masked weight is 0 already, except in a row that is masked as a whole. The weights of such a row are equal, or NaN. So
only the results of such rows change, and they become 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import Node

from shiplap.rewrite.graph import fake_value
from shiplap.rewrite.normalize_call import canonical_arguments, canonical_name
from shiplap.rewrite.passthrough_ops import as_constant, positional_then_named, same_shape, torch_call_name
from shiplap.rewrite.shipped.scores import ScoreStep

# Calls by which models derive one mask from another.
PURE_MASK_OPERATORS = frozenset(
    {"eq", "ne", "view", "unsqueeze", "logical_not", "invert", "to", "expand", "tensor", "bool"}
)


def zeroing_mask(node: Node, weights: Node) -> Node | None:
    """Return the mask if ``node`` sets ``weights`` to 0 by ``masked_fill`` where the mask is true. Return None for any
    other call.
    """
    given = positional_then_named(node)
    if torch_call_name(node) != "masked_fill" or len(given) != 3 or given[0] is not weights:
        return None
    mask, held = given[1], fake_value(weights)
    kept = isinstance(mask, Node) and fake_value(mask).dim() <= held.dim() and same_shape(fake_value(node), held)
    return mask if kept and as_constant(given[2]) == 0 else None


def fills_scores_by_mask(mask: Node, steps: Sequence[ScoreStep]) -> bool:
    """Return whether one of ``steps``, the calls that an attention applies to its scores, fills in a number where
    ``mask`` is true.

    A mask that a second series of equal calls computes counts as ``mask``, too.
    """
    return any(step.kind == "fill" and _is_same_computation(step.given, mask) for step in steps)


def _is_same_computation(a: Any, b: Any, depth: int = 8) -> bool:
    """Return whether ``a`` and ``b`` are one node, equal constants, or calls of one pure function with equal arguments.

    The comparison follows the arguments of a call, their arguments, and so on, over ``depth`` calls in a row. Behind
    them, two different nodes count as unequal.
    """
    if a is b or not (isinstance(a, Node) and isinstance(b, Node)):
        return a is b or (type(a) is type(b) and bool(a == b))
    # Calls outside of the list may draw random numbers or read state, so equal arguments do not make them equal.
    if not depth or torch_call_name(a) not in PURE_MASK_OPERATORS or canonical_name(a) != canonical_name(b):
        return False
    left, right = canonical_arguments(a), canonical_arguments(b)
    return left.keys() == right.keys() and all(_is_same_computation(left[n], right[n], depth - 1) for n in left)


def fully_masked_rows(mask: Tensor) -> Tensor:
    """Return a boolean tensor that is true for the rows in which ``mask`` masks all columns. It has the shape of
    ``mask`` with 1 as the last size.
    """
    return mask.bool().all(-1, keepdim=True)
