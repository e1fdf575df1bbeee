"""Masks that a graph computes only from sizes and from buffers of modules, classified by computing them.

Models build the mask of a decoder by ``arange``, comparisons and a table of positions, in ways that change with each
release, or keep it in a buffer. If no input of the graph is part of a mask, its numbers are known while the graph is
compiled. With the option ``constant_buffers`` of a rewrite, those in buffers are known as well, and a write to the
buffer makes Dynamo compile again. A mask that hides nothing is left out. A mask that hides later columns is replaced by
``is_causal``. Fused kernels then read no mask and leave out half of the products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Node

from shiplap.rewrite.graph import fake_value, is_written
from shiplap.rewrite.passthrough_ops import CAST_OPERATORS, torch_call_name
from shiplap.rewrite.shipped.scores import SWALLOWING_NUMBER, ScoreStep
from shiplap.rewrite.walk import inputs_of, run_call, walk_from
from shiplap.torch_private.dispatcher_calls import without_modes
from shiplap.torch_private.dynamo import buffer_with_values

MOST_MASK_ELEMENTS = 1 << 27  # elements of a mask that is computed
MOST_MASK_CALLS = 60  # calls behind a mask; transformers 5.23 has 26
VERDICT_KEY = "shiplap_hides"  # in the meta of a node: what its mask was found to hide
# Only these may start a mask: they read neither inputs nor random numbers.
FACTORY_OPERATORS = frozenset({"arange", "zeros", "ones", "full", "scalar_tensor"})
COMPARISON_OPERATORS = frozenset({"eq", "ne", "le", "lt", "ge", "gt"})
LOGIC_OPERATORS = frozenset(
    {"and", "and_", "or", "or_", "invert", "logical_and", "logical_or", "logical_not", "bitwise_and"}
)
LOGIC_OPERATORS |= {
    "bitwise_or",
    "bitwise_not",
    "__and__",
    "__or__",
    "__invert__",
    "where",
    "masked_fill",
    "tril",
    "triu",
}
ARITHMETIC_ON_MASKS = frozenset({"add", "sub", "mul", "neg", "negative", "abs", "diff", "cumsum", "rsub"})
VIEWS_OF_MASKS = frozenset(
    {"getitem", "unsqueeze", "squeeze", "expand", "view", "transpose", "contiguous", "clone", "flatten"}
    | {"cat", "concat", "stack", "repeat", "repeat_interleave"}
)
# These read a tensor for its shape, dtype and device only, but that tensor must be constant as well.
LIKE_FACTORIES = frozenset({"new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like"})
PURE_OPERATORS = (
    FACTORY_OPERATORS
    | COMPARISON_OPERATORS
    | LOGIC_OPERATORS
    | ARITHMETIC_ON_MASKS
    | VIEWS_OF_MASKS
    | LIKE_FACTORIES
    | CAST_OPERATORS
)

HiddenPart = Literal["", "nothing", "later", "some"]
# Whether buffers of modules count as constants: an option of the rewrite that is being applied.
_CONSTANT_BUFFERS: ContextVar[bool] = ContextVar("shiplap_constant_buffers", default=False)


@contextmanager
def constant_buffers(wanted: bool) -> Iterator[None]:
    """While the context is open, buffers of modules count as constants if ``wanted`` is true."""
    token = _CONSTANT_BUFFERS.set(wanted)
    try:
        yield
    finally:
        _CONSTANT_BUFFERS.reset(token)


def simplify_masks(steps: Sequence[ScoreStep]) -> list[ScoreStep]:
    """Return a new list of ``steps``, the calls that an attention applies to its scores. Masks that hide nothing are
    left out, and a causal mask is replaced by a ``causal`` step. A causal mask hides the columns after the diagonal.

    It is not replaced if there is another mask or a bias, or if a call other than a view changes the scores after it.
    """
    left = [s for s in steps if s.kind not in ("add", "fill", "keep") or hidden_part_of_step(s) != "nothing"]
    biases = [i for i, s in enumerate(left) if s.kind in ("add", "fill", "keep", "sink", "rest", "cap")]
    # is_causal replaces the whole bias of the fused call, so it must be the only one.
    if (
        len(biases) != 1
        or any(s.kind != "view" for s in left[biases[0] + 1 :])
        or hidden_part_of_step(left[biases[0]]) != "later"
    ):
        return left
    return [ScoreStep("causal") if i == biases[0] else s for i, s in enumerate(left)]


def hidden_part_of_step(step: ScoreStep) -> HiddenPart:
    """Return which scores the mask of ``step`` hides, as a string. ``step`` is a call that an attention applies to its
    scores.

    The string is ``"nothing"`` for a mask that changes no score, and ``"later"`` if exactly the columns after the
    diagonal are hidden. It is ``"some"`` if some scores are hidden, but not all of a row. It is empty for any other
    mask, and for one whose values depend on inputs.
    """
    node = step.given
    if not isinstance(node, Node) or (step.kind == "add" and step.number != 1):
        return ""
    key = f"{VERDICT_KEY} {step.kind} {_CONSTANT_BUFFERS.get()}"
    if key not in node.meta:
        # Kept with the node: the mask of a decoder is shared by all of its layers.
        node.meta[key] = _classify_mask(step.kind, node)
    known: HiddenPart = node.meta[key]
    return known


def _classify_mask(kind: str, node: Node) -> HiddenPart:
    """Return which scores the mask computed by ``node`` hides, as a string like that of :func:`hidden_part_of_step`.
    Return an empty string if the mask is not constant. ``kind`` is how the mask is applied, by ``"add"``, ``"fill"`` or
    ``"keep"``.
    """
    mask = constant_value(node, buffers=_CONSTANT_BUFFERS.get())
    return "" if mask is None else _classify_hidden(_hidden_positions(kind, mask))


def buffers_behind(steps: Sequence[ScoreStep]) -> list[Node]:
    """Return the buffers of modules from which masks are computed whose hidden part is known, as inputs of the graph.
    ``steps`` are calls that an attention applies to its scores.

    A replacement that relies on :func:`hidden_part_of_step` calls ``guard_values`` for each of them.
    """
    known = [s.given for s in steps if s.kind in ("add", "fill", "keep") and hidden_part_of_step(s)]
    behind = (at for mask in known for at in _calls_behind_mask(mask, _CONSTANT_BUFFERS.get()) or ())
    return list(dict.fromkeys(at for at in behind if at.op == "placeholder"))


def constant_value(node: Node, *, buffers: bool = False) -> Tensor | None:
    """Return the values of the tensor that the graph computes at ``node`` from constants alone. If ``buffers`` is true,
    buffers of modules count as constants. Return None if the tensor depends on other inputs, is too large or cannot be
    computed in this process.
    """
    calls = _calls_behind_mask(node, buffers)
    if calls is None:
        return None
    # The numbers are real ones in the middle of a trace, whose modes would make fakes of them.
    with without_modes(), torch.no_grad():
        try:
            return _compute_mask(calls)
        except (RuntimeError, TypeError, ValueError):  # a device that is not here, too little memory
            return None


def _calls_behind_mask(node: Node, buffers: bool) -> list[Node] | None:
    """Return the calls that compute ``node`` from constants alone, in the order of the graph, with ``node`` as the
    last. If ``buffers`` is true, buffers of modules count as constants, and the list holds these inputs, too.

    Return None if ``node`` depends on an input, a symbolic size, or a call that is not known to be pure. Return None
    also if a result is written to or is on the meta device, if there are more than 60 calls, or if a result has more
    than 2**27 elements.
    """
    calls: list[Node] = []
    for at in walk_from([node], inputs_of):
        calls.append(at)
        if len(calls) > MOST_MASK_CALLS or not (_is_pure(at) or (buffers and buffer_with_values(at) is not None)):
            return None
        held = fake_value(at)
        if (
            not isinstance(held, Tensor)
            or not all(type(n) is int for n in held.shape)
            or held.numel() > MOST_MASK_ELEMENTS
            or held.is_meta  # it has no values
        ):
            return None
        if is_written(at):
            return None
    return sorted(calls)


def _is_pure(node: Node) -> bool:
    """Return whether ``node`` is a call whose result depends on its arguments alone."""
    name = torch_call_name(node)
    # A call that reads nothing must be a factory; any other may read state.
    return name in PURE_OPERATORS and (bool(node.all_input_nodes) or name in FACTORY_OPERATORS)


def _compute_mask(calls: Sequence[Node]) -> Tensor:
    """Run ``calls`` in order on tensors with data and return the result of the last one. Inputs among them are buffers
    of modules.
    """
    held: dict[Node, Any] = {}
    for node in calls:
        held[node] = buffer_with_values(node) if node.op == "placeholder" else run_call(node, held.__getitem__)
    made = held[calls[-1]]
    assert isinstance(made, Tensor)
    return made


def _hidden_positions(kind: str, mask: Tensor) -> Tensor | None:
    """Return a boolean tensor that is True where ``mask`` hides a score. ``kind`` is how the mask is applied to scores,
    by ``"add"``, ``"fill"`` or ``"keep"``. Return None if an added mask changes a score that it does not hide.
    """
    if kind != "add":
        hidden = mask if mask.dtype == torch.bool else mask != 0
        return hidden if kind == "fill" else ~hidden
    if not mask.is_floating_point():
        return None
    # A number this low leaves weight 0 in float32, like minus infinity.
    hidden = mask <= -SWALLOWING_NUMBER
    return hidden if bool((hidden | (mask == 0)).all()) else None


def _classify_hidden(hidden: Tensor | None) -> HiddenPart:
    """Return which scores are hidden, as a string. ``hidden`` is a boolean tensor that is True for hidden scores, or
    None.

    The string is ``"nothing"`` if none is hidden, and ``"later"`` if exactly the columns after the diagonal are hidden.
    It is ``"some"`` if some scores are hidden, but not all of a row. It is empty for any other tensor and for None.
    """
    if hidden is None:
        return ""
    if not bool(hidden.any()):
        return "nothing"
    if hidden.dim() > 1 and hidden.shape[-1] == hidden.shape[-2]:
        later = torch.ones(hidden.shape[-2:], dtype=torch.bool, device=hidden.device).triu(1)
        if bool((hidden == later).all()):
            return "later"
    return "some" if hidden.dim() and not bool(hidden.all(-1).any()) else ""
