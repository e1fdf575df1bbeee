"""The scores of attention, followed from the softmax up to the product of queries and keys."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from shiplap.rewrite.graph import fake_value, name_and_operator
from shiplap.rewrite.normalize_call import canonical_arguments
from shiplap.rewrite.obstacle import RewriteObstacle, obstacle_of_reader
from shiplap.rewrite.passthrough_ops import (
    as_constant,
    is_32_bit_or_wider,
    keeps_values,
    positional_then_named,
    same_shape,
    tensor_and_factor,
    tensor_argument,
    torch_call_name,
)
from shiplap.rewrite.shipped import einsum, sinks

# Einsum and baddbmm are parsed apart, because their operands stand in other places.
BATCHED_PRODUCTS = frozenset({"matmul", "bmm"})
FILLING_CALLS = ("masked_fill", "masked_fill_", "where")
SWALLOWING_NUMBER = 1e8  # a number that is this far from 0 swallows a score that is added to it, in float32
MOST_CALLS_TO_PRODUCT = 40  # calls between a softmax and its product


@dataclass(frozen=True)
class ScoreStep:
    """A call that an attention applies to its scores, between the product of queries and keys and the softmax. ``kind``
    names the call.

    The kinds are:

    - ``scale``: multiply by a number.
    - ``stretch``: multiply by a tensor that is constant along the keys.
    - ``add``: add a tensor times a number.
    - ``fill``: set to a number where a mask is true.
    - ``keep``: set to a number where a mask is false.
    - ``view``: change the leading dims.
    - ``sink``: join ``number`` columns of learned logits.
    - ``rest``: multiply the result of the attention by ``sigmoid(logsumexp(scores) - sink)``.
    - ``cap``: apply ``tanh``.
    - ``causal``: hide the columns after the diagonal (see ``shipped/constant_masks.py``).

    ``given`` is the tensor that the call applies, or None. ``number`` is the number that it applies. ``dtype`` is the
    dtype of the result of ``add``, ``fill`` and ``keep``. ``before`` and ``after`` are the shapes around a ``view``.
    """

    kind: str
    given: Any = None
    number: float = 1.0
    dtype: torch.dtype = torch.float32
    before: tuple[Any, ...] = ()
    after: tuple[Any, ...] = ()


@dataclass(frozen=True)
class ScoresOfAttention:
    """The scores of an attention, from the product of queries and keys up to the softmax.

    Attributes:
        product: the node of the product.
        q: the queries.
        k: the keys.
        natural: whether the product is ``q @ k.transpose(-1, -2)``. Otherwise it is ``q @ k``.
        scale: a number by which the product is multiplied.
        lead: the leading dims of the product.
        steps: the calls behind the product, in the order in which they are computed.
        nodes: all calls up to the softmax, including the product.
        orders: the permutations of ``q`` and ``k`` if the product is an einsum, or None.
    """

    product: Node
    q: Node
    k: Node
    natural: bool
    scale: float
    lead: tuple[Any, ...]
    steps: list[ScoreStep] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    orders: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def sink(self) -> int:
        """The number of columns that an attention sink joins to the scores in the last step. It is 0 if the last step
        is no such sink. A sink is a set of learned logits that take weight and have no values.
        """
        return int(self.steps[-1].number) if self.steps and self.steps[-1].kind == "sink" else 0

    @property
    def sinks(self) -> bool:
        """Whether one of the steps is an attention sink, that is a set of learned logits that take weight and have no
        values. A sink may join columns to the scores, or rescale the result.
        """
        return any(s.kind in ("sink", "rest") for s in self.steps)


def follow_scores(top: Any, reader: Node, depth: int = 0, beside: Collection[Node] = ()) -> ScoresOfAttention | None:
    """Follow attention scores up the graph from ``top``. Return the product of queries and keys, and the calls from it
    to ``top``. Return None if there is no product.

    Only ``reader`` and the calls ``beside`` may read ``top``. Raise ``RewriteObstacle`` if another node reads it, or if
    the scores of a product pass through a call that attention does not have. ``depth`` is the number of calls from the
    softmax, of which at most 40 are followed.
    """
    if not isinstance(top, Node) or not top.op.startswith("call") or depth > MOST_CALLS_TO_PRODUCT:
        return None
    if torch_call_name(top) in (*BATCHED_PRODUCTS, "baddbmm"):
        return _scores_from_product(top)
    if spelled := einsum.as_scores_product(top):
        lead = tuple(fake_value(top).shape[:-2])
        return ScoresOfAttention(top, spelled.first, spelled.second, True, 1.0, lead, [], [top], spelled.orders)
    step = possible_steps(top)
    if step is None:
        _require_no_product(top, depth)
        return None
    below = None
    # Either operand of a sum may be the scores; the first with a product above it is.
    for inner, made in step:
        below = follow_scores(inner, top, depth + 1)
        if below is not None:
            below.steps.extend(s for s in made if s is not None)
            break
    if below is None:
        return None
    _require_single_reader(top, reader, beside)
    below.nodes.append(top)
    if (plain := sinks.base_of_shift(top)) is not None:
        below.nodes.extend(sinks.calls_of_maximum(positional_then_named(top)[1], plain))
    return below


def _require_single_reader(node: Node, reader: Node, beside: Collection[Node]) -> None:
    """Raise ``RewriteObstacle`` if a node other than ``reader`` and the calls ``beside`` reads ``node``, the scores of
    an attention. Nodes that read only the dtype, or compute the maximum that ``reader`` subtracts, are allowed.
    """
    largest = (
        sinks.calls_of_maximum(positional_then_named(reader)[1], node) if sinks.base_of_shift(reader) is node else []
    )
    # The maximum that is subtracted from the scores reads them as well, and goes away with them.
    known = {reader, *largest, *beside}
    other = next((u for u in node.users if u not in known and not _reads_dtype_only(u, node)), None)
    if other is not None:
        raise obstacle_of_reader(node, other, "do not return or read the scores: a fused kernel never has them")


def _reads_dtype_only(reader: Node, node: Node) -> bool:
    """Return whether ``reader`` reads only the dtype of ``node``, as ``weights.type_as(scores)`` reads that of
    ``scores``.
    """
    return keeps_values(reader) and reader.args[0] is not node


def possible_steps(node: Node) -> list[tuple[Any, list[ScoreStep | None]]] | None:
    """Return the meanings that the call ``node`` may have in an attention. Each is a pair of the operand that would be
    the scores, and a list of the steps that the call applies to them. A step is None if the call changes nothing.
    Return None for a call that attention does not have.
    """
    # In-place calls are named ``iadd`` as operators and ``add_`` as methods.
    name = (
        torch_call_name(node).removeprefix("i") if torch_call_name(node) in ("iadd", "imul", "itruediv", "isub") else ""
    )
    name = name or torch_call_name(node).removesuffix("_")
    if keeps_values(node):
        return [(node.args[0], [None])]
    if name == "tanh" and len(given := positional_then_named(node)) == 1:
        return [(given[0], [ScoreStep("cap")])]
    if scaled := tensor_and_factor(node):
        return [(scaled[0], [ScoreStep("scale", None, scaled[1])])]
    given = positional_then_named(node)
    # Before sums: the shift is a difference, too.
    if (plain := sinks.base_of_shift(node)) is not None:
        return [(plain, [None])]
    if (pair := sinks.scores_and_sink(node)) is not None:
        return [(pair[0], [ScoreStep("sink", pair[1], pair[2])])]
    if name in ("add", "sub") and len(given) == 2:
        return list(_steps_of_sum(node, given, 1.0 if name == "add" else -1.0)) or _step_of_zero_sum(given)
    if name in FILLING_CALLS and len(given) == 3:
        return _step_of_fill(node, given)
    if name in ("mul", "div") and len(given) == 2:
        return _step_of_stretch(node, given) if name == "mul" else None
    if keeps_last_two_dims(node, name):
        before, after = (tuple(fake_value(n).shape) for n in (given[0], node))
        if all(isinstance(n, int) for n in (*before, *after)):
            return [(given[0], [ScoreStep("view", None, before=before, after=after)])]
    return None


def _steps_of_sum(node: Node, given: list[Any], sign: float) -> Iterator[tuple[Any, list[ScoreStep | None]]]:
    """Yield a pair for each term of ``node`` that may be attention scores. The pair holds the term and a list with the
    step that adds the other term to it. ``node`` is a sum of the terms ``given`` if ``sign`` is 1, and a difference if
    it is -1.
    """
    pairs = [(given[0], given[1], sign)]
    if sign == 1:
        pairs.append((given[1], given[0], 1.0))
    for scores, bias, number in pairs:
        if isinstance(scores, Node) and isinstance(bias, Node) and _has_shape_of_result(scores, node):
            yield scores, [ScoreStep("add", bias, number, fake_value(node).dtype)]


def _step_of_zero_sum(given: list[Any]) -> list[tuple[Any, list[ScoreStep | None]]] | None:
    """Return ``[(first, [None])]`` if the second of ``given``, the two terms of a sum, is 0. ``first`` is the first
    term, and None stands for no step. Models that leave out a bias write such a sum. Return None otherwise.
    """
    return [(given[0], [None])] if isinstance(given[0], Node) and as_constant(given[1]) == 0 else None


def _has_shape_of_result(scores: Node, node: Node) -> bool:
    """Return whether ``scores`` has at least two dims and the shape of ``node``."""
    held, made = fake_value(scores), fake_value(node)
    return isinstance(held, Tensor) and held.dim() >= 2 and same_shape(held, made)


def _step_of_fill(node: Node, given: list[Any]) -> list[tuple[Any, list[ScoreStep | None]]] | None:
    """Return ``[(scores, [step])]`` if ``node`` fills a number into attention scores by a mask, with ``masked_fill`` or
    ``where``. ``given`` are its arguments. Return None for any other call. Raise ``RewriteObstacle`` if the number is
    not low enough to hide a score.
    """
    where = torch_call_name(node) == "where"
    for at, kind in ((1, "keep"), (2, "fill")) if where else ((0, "fill"),):
        scores = given[at]
        mask, filling = (given[0], given[3 - at]) if where else (given[1], given[2])
        number = as_constant(filling)
        if (
            not isinstance(scores, Node)
            or not isinstance(mask, Node)
            or number is None
            or not _has_shape_of_result(scores, node)
        ):
            continue
        # A small number would leave weight on masked columns.
        if number > max(-SWALLOWING_NUMBER, torch.finfo(fake_value(node).dtype).min):
            if follow_scores(scores, node) is None:
                return None
            raise RewriteObstacle(
                node,
                "constant",
                f"the mask fills in {number:g}, which a row that is masked as a whole would see",
                "fill in torch.finfo(scores.dtype).min",
            )
        return [(scores, [ScoreStep(kind, mask, number, fake_value(node).dtype)])]
    return None


def _step_of_stretch(node: Node, given: list[Any]) -> list[tuple[Any, list[ScoreStep | None]]] | None:
    """Return ``[(scores, [step])]`` if ``node`` multiplies attention scores by a tensor that is constant along the
    keys. The queries may then be multiplied instead. ``given`` are the two factors. Return None for any other call.
    """
    for scores, by in (given, given[::-1]):
        held = fake_value(by) if isinstance(by, Node) else None
        if isinstance(scores, Node) and isinstance(held, Tensor) and _has_shape_of_result(scores, node):
            last = held.shape[-1] if held.dim() else 1
            if isinstance(last, int) and last == 1:
                return [(scores, [ScoreStep("stretch", by)])]
    return None


def keeps_last_two_dims(node: Node, name: str = "") -> bool:
    """Return whether ``node`` is a view that only splits or joins leading dims, so that the last two sizes stay.

    If ``name`` is not empty, it is used as the name of the call. A caller passes a name without its underscore if an
    in-place call such as ``squeeze_`` counts as a view, too.
    """
    if (name or torch_call_name(node)) not in ("view", "flatten", "unflatten", "unsqueeze", "squeeze"):
        return False
    before, after = fake_value(tensor_argument(node)), fake_value(node)
    return before.dim() > 1 < after.dim() and [*map(str, before.shape[-2:])] == [*map(str, after.shape[-2:])]


def _scores_from_product(node: Node) -> ScoresOfAttention | None:
    """Return the scores that ``node``, the matrix product of queries and keys, computes. Constant factors of its
    operands become a part of ``scale``. Return None if its operands are no tensors of at least two dims.
    """
    given = positional_then_named(node)
    steps: list[ScoreStep] = []
    if torch_call_name(node) == "baddbmm":
        names = ("input", "batch1", "batch2")
        by_name = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        alpha, beta = (as_constant(by_name.get(n, 1)) for n in ("alpha", "beta"))
        if alpha is None or beta is None:
            return None
        given = [by_name["batch1"], by_name["batch2"]]
        # With a beta of 0 torch ignores the input, so that there is no bias.
        steps = [ScoreStep("scale", None, alpha), *([ScoreStep("add", by_name["input"], beta)] if beta else [])]
    if len(given) != 2 or not all(isinstance(g, Node) and isinstance(fake_value(g), Tensor) for g in given):
        return None
    if min(fake_value(g).dim() for g in given) < 2:
        return None
    passed: list[Node] = []
    q, by = _strip_scale(given[0], passed)
    k, also = _strip_scale(given[1], passed)
    natural = swaps_last_dims(k)
    if natural:
        passed.append(k)
        k, more = _strip_scale(tensor_argument(k), passed)
        also *= more
    lead = tuple(fake_value(node).shape[:-2])
    return ScoresOfAttention(node, q, k, natural, by * also, lead, steps, [*passed, node])


def _strip_scale(node: Node, passed: list[Node]) -> tuple[Node, float]:
    """Return the value of which ``node`` is a constant multiple, also through casts, and the factor. If there is no
    such value, return ``node`` and 1.0. The calls in between that only one node reads are appended to ``passed``.
    """
    scale, at, dtype = 1.0, node, fake_value(node).dtype
    reached, gone = (node, 1.0), list[Node]()
    while True:
        if scaled := tensor_and_factor(at):
            gone.append(at)
            at, scale = scaled[0], scale * scaled[1]
        elif keeps_values(at) and torch_call_name(at) != "dropout":
            gone.append(at)
            at = tensor_argument(at)
        else:
            break
        held = fake_value(at)
        # A cast to a narrower dtype rounds, so it is not stripped.
        if held.dtype == dtype or (is_32_bit_or_wider(dtype) and held.is_floating_point()):
            reached = at, scale
            # A multiple that others read stays in the graph.
            if len(gone[-1].users) == 1:
                passed.append(gone[-1])
    return reached


def swaps_last_dims(node: Node) -> bool:
    """Return whether ``node`` swaps the last two dims of its argument, by ``transpose``, ``mT`` or a like call."""
    if torch_call_name(node) != "transpose":
        return False
    given, rank = canonical_arguments(node), fake_value(node).dim()
    return [given.get("dim0"), given.get("dim1")] == [rank - 2, rank - 1]


def _require_no_product(top: Node, depth: int) -> None:
    """Raise ``RewriteObstacle`` if the scores above ``top``, a call that attention does not have, come from a product
    of queries and keys. The attention is then reported as a near miss. ``depth`` is the number of calls from the
    softmax.
    """
    for given in top.all_input_nodes:
        held = fake_value(given)
        if not (isinstance(held, Tensor) and held.dim() >= 3 and _has_shape_of_result(given, top)):
            continue
        try:
            above = follow_scores(given, top, depth + 1)
        except RewriteObstacle:
            above = None
        if above is not None:
            what = f"{name_and_operator(top)} lies between the product of queries and keys and the softmax"
            fix = "write it as a mask that is added to the scores, or as a factor of the queries"
            raise RewriteObstacle(top, "operator", what, fix)
