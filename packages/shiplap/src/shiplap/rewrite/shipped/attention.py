"""Rewrite attention written out, ``softmax(q @ k.T * scale + mask) @ v``, to torch's ``scaled_dot_product_attention``.

Attention is recognised by its computation, not by one way of writing it. From each softmax over the last dim the pass
follows the scores up to the product of queries and keys. It follows the weights down to the product with the values.
The pass supports these calls in between:

- casts, and dropout of an evaluated model
- scaling of queries, keys or scores by a constant
- additive masks and biases of any shape that broadcasts, and masks that are filled in
- views that keep the last two dims
- ``baddbmm``

Attention with active dropout is not replaced, since the fused kernel would draw other numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional as F

from shiplap.declare.code_digest import code_digest
from shiplap.rewrite.base import Rewrite, short_digest
from shiplap.rewrite.graph import (
    describe_node,
    fake_value,
    name_and_operator,
    place_replacement,
    remove_dead_calls,
)
from shiplap.rewrite.match import Level, Match, NearMiss, Outcome
from shiplap.rewrite.obstacle import RewriteObstacle, obstacle_of_reader
from shiplap.rewrite.passthrough_ops import (
    is_active_dropout,
    keeps_values,
    positional_then_named,
    single_user,
    torch_call_name,
)
from shiplap.rewrite.program import Program, proving
from shiplap.rewrite.shipped import einsum, hidden_rows, sinks, softcap, speedup_model, zeroed
from shiplap.rewrite.shipped.attention_programs import attention_programs
from shiplap.rewrite.shipped.constant_masks import buffers_behind, constant_buffers, simplify_masks
from shiplap.rewrite.shipped.missed import (
    explain_region,
    is_over_last_dim,
    is_softmax_by_hand,
    is_unnormalized_softmax,
)
from shiplap.rewrite.shipped.scores import (
    BATCHED_PRODUCTS,
    ScoresOfAttention,
    ScoreStep,
    follow_scores,
    keeps_last_two_dims,
    possible_steps,
    swaps_last_dims,
)
from shiplap.rewrite.shipped.softmax_region import SOFTMAX_OPERATORS, find_region, log_softmax_below
from shiplap.torch_private.dynamo import guard_values


class AttentionRewrite(Rewrite):
    """A rewrite that puts ``scaled_dot_product_attention`` where a graph computes attention step by step."""

    name = "attention"
    level: Level = "pre-grad"
    anchors = SOFTMAX_OPERATORS | {"log_softmax", "_log_softmax", "exp"}

    def __init__(self, *, always: bool = False, visible_rows: bool = False, constant_buffers: bool = False) -> None:
        """Set the options.

        If ``always`` is true, attention is replaced even if torch has no fused kernel for it that is faster. If
        ``visible_rows`` is true, no mask is assumed to hide all columns of a row of scores. Attention with a mask that
        might do so is then replaced in training, too. If ``constant_buffers`` is true, compiled code relies on the
        values of masks in buffers of modules. A write to such a buffer that torch does not count is then not seen.
        """
        self.always, self.visible_rows, self.constant_buffers = always, visible_rows, constant_buffers

    @property
    def digest(self) -> str:
        """A digest of the code that finds and replaces attention, and of the options of this rewrite."""
        of = code_digest(
            AttentionRewrite.apply,
            AttentionRewrite._replace_attention,
            follow_scores,
            _call_fused_attention,
            _follow_weights,
            speedup_model.require_speedup,
            simplify_masks,
            hidden_rows.masks_that_may_hide_rows,
            hidden_rows.hiding_numbers,
            hidden_rows.restore_hidden_rows,
        )
        return short_digest(of, self.always, self.visible_rows, self.constant_buffers)

    def programs(self) -> Iterator[Program]:
        """Return an iterator over the programs on which the rewrite is proven. A program is a function with arguments.
        Each computes attention in one of the ways in which models write it.
        """
        return attention_programs()

    def may_match(self, graph: Graph) -> bool:
        """Return whether ``graph`` has a softmax, as one call or written out with ``exp``."""
        return super().may_match(graph) or any(map(is_softmax_by_hand, graph.nodes))

    def apply(self, graph: Graph) -> Iterator[Outcome]:
        """Replace the attention around each softmax of ``graph`` by torch's fused call. Yield a ``Match`` for each
        replaced attention, and a ``NearMiss`` with the reason for each that is not replaced.
        """
        remove_dead_calls(graph)
        # A list, since replacements add nodes to the graph and remove others.
        for node in list(graph.nodes):
            if _is_softmax(node) or is_softmax_by_hand(node) or is_unnormalized_softmax(node):
                try:
                    with constant_buffers(self.constant_buffers):
                        outcome = self._replace_attention(graph, node)
                except RewriteObstacle as e:
                    outcome = self.near_miss(e, of=3)
                if outcome is not None:
                    yield outcome

    def _replace_attention(self, graph: Graph, softmax: Node) -> Outcome | None:
        """Replace the attention around the call ``softmax``. Return the ``Match``, or a ``NearMiss`` with the reason if
        the replacement is not possible. Return None if the softmax belongs to no attention. Raise ``RewriteObstacle``
        if the fused call cannot compute the attention.
        """
        if not _is_softmax(softmax) or not is_over_last_dim(softmax):
            return _raise_if_attention(softmax)
        called = log_softmax_below(softmax) or softmax
        top = called.args[0] if called.args else called.kwargs["input"]
        # The weights are followed first: a sink behind the product changes which calls may read the scores.
        below = _follow_weights(softmax)
        tail = below.rescaled(top) if isinstance(below, _WeightedValues) else None
        above: ScoresOfAttention | RewriteObstacle | None
        try:
            above = follow_scores(top, called, beside=tail.nodes if tail else ())
        except RewriteObstacle as e:
            # Kept, since the other side decides whether this place is an attention at all.
            above = e
        if above is None or below is None:
            return _raise_if_attention(softmax)
        for side in (above, below):
            if isinstance(side, RewriteObstacle):
                raise side
        assert isinstance(above, ScoresOfAttention)
        assert isinstance(below, _WeightedValues)
        if tail is not None:
            above.steps.append(ScoreStep("rest", tail.sink, float(tail.kept)))
            below.out, below.nodes = tail.out, [*below.nodes, *tail.nodes]
        return self._place_fused_call(graph, softmax, above, below)

    def _place_fused_call(
        self, graph: Graph, softmax: Node, above: ScoresOfAttention, below: _WeightedValues
    ) -> Outcome:
        """Put torch's fused attention call in place of the attention around ``softmax``, and return the ``Match`` or
        ``NearMiss``. Raise ``RewriteObstacle`` if the fused call would be wrong or slower.

        ``above`` holds the calls from the queries and keys to the softmax, and ``below`` those from the softmax to the
        product with the values.
        """
        held = _fake_qkv(above, below)
        if reason := _why_qkv_unfit(held):
            raise RewriteObstacle(below.out, *reason)
        _require_same_mask(above, below)
        buffers = buffers_behind(above.steps)
        # A mask that also zeroes weights must stay a tensor, and blocks of rows read masks by row.
        if below.mask is None and not softcap.has_tanh_cap(above):
            above.steps[:] = simplify_masks(above.steps)
        in_blocks = {"cap", "scale", "stretch", "add", *speedup_model.MASKING_STEPS}
        if softcap.has_tanh_cap(above) and not {s.kind for s in above.steps} <= in_blocks:
            what = "tanh caps the scores, and a view or a sink follows: that is computed in no blocks of rows"
            raise RewriteObstacle(below.out, "operator", what, softcap.FLEX_ATTENTION_FIX, 2)
        hiding: list[ScoreStep] = []
        if not (self.visible_rows or above.sinks or softcap.has_tanh_cap(above)):
            hiding = hidden_rows.masks_that_may_hide_rows(above.steps)
        if (hiding and not proving.get()) or below.mask is not None:
            _require_no_gradients(below.out, held, hiding)
        shape = tuple(fake_value(softmax).shape)
        if not (self.always or proving.get()):
            speedup_model.require_speedup(below.out, above, held, shape)
        _require_same_sink(above, below)
        plan = _FusedCall(
            above,
            shape,
            tuple(fake_value(below.out).shape),
            below.spelled,
            masked=below.mask is not None,
            lone=len(hiding) < 2,
            hidden=hidden_rows.hiding_numbers(above.steps, hiding)
            if hiding and not _asks_for_gradients(held)
            else None,
        )
        nodes = [*above.nodes, *_calls_of_softmax(softmax), *below.nodes]
        bound = [("q", describe_node(above.q)), ("k", describe_node(above.k)), ("v", describe_node(below.v))]
        tensors = [step.given for step in above.steps]
        args = [above.q, above.k, below.v, *tensors, *([] if below.mask is None else [below.mask])]
        placed = place_replacement(graph, self.level, self.name, plan, args, [below.out], nodes, bound)
        for buffer in buffers if isinstance(placed, Match) else ():
            guard_values(buffer)
        return placed


def _raise_if_attention(softmax: Node) -> NearMiss | None:
    """Raise the ``RewriteObstacle`` that keeps the attention around ``softmax`` from being replaced. Return None if the
    softmax belongs to no attention because its weights multiply no activation.
    """
    region = find_region(softmax)
    if region is not None:
        raise explain_region(region, lambda n: possible_steps(n) is not None, _passes_weights_on)
    return None


def _passes_weights_on(node: Node) -> bool:
    """Return whether ``node`` is a call that an attention may apply to its weights before the product with the values.
    Such calls are casts, views that change only leading dims, and slices that drop columns.
    """
    return keeps_values(node) or keeps_last_two_dims(node) or bool(sinks.count_dropped_columns(node))


class _WeightedValues:
    """The product of the weights and the values in an attention. The weights are the result of the softmax.

    Attributes:
        out: the node of the product ``weights @ v``.
        v: the node of the values.
        nodes: the calls from the softmax, which is excluded, to the product.
        dropped: the number of last columns of the weights that are left out.
        spelled: the product as an einsum, or None.
        mask: the mask where weights were set to 0, or None.
    """

    def __init__(
        self,
        out: Node,
        v: Node,
        nodes: list[Node],
        dropped: int = 0,
        spelled: einsum.EinsumProduct | None = None,
        mask: Node | None = None,
    ) -> None:
        """Store the product ``out`` of the weights and the values ``v``, and the calls ``nodes`` from the softmax to
        it. ``dropped`` is the number of last columns of the weights that are left out. ``spelled`` is the product as an
        einsum, and ``mask`` the mask where weights were set to 0, or None.
        """
        self.out, self.v, self.nodes, self.dropped, self.spelled, self.mask = out, v, nodes, dropped, spelled, mask

    def rescaled(self, scores: Any) -> sinks.RescaledProduct | None:
        """Return this product together with the calls that multiply it by ``sigmoid(logsumexp(scores) - sink)``. Return
        None if no such calls follow.

        That factor has the effect of an attention sink, that is of extra columns of logits in the scores. Return None
        also if columns are dropped, weights are set to 0, or the product is an einsum.
        """
        plain = not self.dropped and self.spelled is None and self.mask is None
        return sinks.find_rescaled_product(self.out, scores) if plain else None


def _fake_qkv(above: ScoresOfAttention, below: _WeightedValues) -> list[Tensor]:
    """Return the fake tensors of the queries, keys and values of an attention as a list. ``above`` holds its scores,
    and ``below`` its product with the values.

    Tensors of an einsum are permuted, so that batch dims come first and the last two dims enter the matrix product.
    """
    q, k, v = (fake_value(n) for n in (above.q, above.k, below.v))
    if above.orders is not None:
        q, k = (einsum.arrange_dims(t, order) for t, order in zip((q, k), above.orders, strict=True))
    return [q, k, v if below.spelled is None else einsum.arrange_dims(v, below.spelled.orders[1])]


def _require_same_sink(above: ScoresOfAttention, below: _WeightedValues) -> None:
    """Raise ``RewriteObstacle`` unless ``below`` drops exactly those columns of the weights that an attention sink in
    ``above`` adds to the scores. A sink is extra columns of logits. Raise it also if there are two sinks.

    The columns must be joined to the scores after all other calls.
    """
    last = [step.kind for step in above.steps]
    one = last.count("sink") + last.count("rest") < 2 and not (above.sinks and "view" in last)
    if below.dropped == above.sink and last.count("sink") == bool(above.sink) and one:
        return
    what = f"{above.sink} columns are joined to the scores at the end, and {below.dropped} of the weights dropped"
    fix = "join a sink to the scores last, and drop the same columns of the weights"
    raise RewriteObstacle(below.out, "operator", what, fix, 2)


def _asks_for_gradients(held: Sequence[Tensor]) -> bool:
    """Return whether autograd computes gradients of the fake queries, keys or values in ``held``."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in held)


def _require_no_gradients(out: Node, held: Sequence[Tensor], hiding: Sequence[ScoreStep]) -> None:
    """Raise ``RewriteObstacle`` at the node ``out`` if autograd computes gradients of the fake queries, keys or values
    in ``held``.

    It is called for an attention with masks that may hide all columns of a row. ``hiding`` lists such masks, of which
    the first is named in the error. The gradients of the fused call differ in hidden rows.
    """
    if _asks_for_gradients(held):
        name = next((s.given.name for s in hiding if isinstance(s.given, Node)), "the mask")
        what = f"{name} may mask every key of a query, whose gradients a fused kernel computes otherwise"
        fix = "if each query sees a key, pass AttentionRewrite(visible_rows=True); torch.no_grad() needs no word"
        raise RewriteObstacle(out, "gradient", what, fix, 2)


def _is_softmax(node: Node) -> bool:
    """Return whether ``node`` is a softmax, either as one call or as the exponential of a ``log_softmax``."""
    return torch_call_name(node) in SOFTMAX_OPERATORS or log_softmax_below(node) is not None


def _calls_of_softmax(softmax: Node) -> list[Node]:
    """Return the calls of which a softmax consists, the last call first. For the exponential of a ``log_softmax``,
    raise ``RewriteObstacle`` if another node reads the logarithm.
    """
    logarithm, calls, at = log_softmax_below(softmax), [softmax], softmax
    while logarithm is not None and at is not logarithm:
        at = at.all_input_nodes[0]
        calls.append(at)
        if len(at.users) > 1:
            other = next(u for u in at.users if u not in calls)
            raise obstacle_of_reader(at, other, "compute the softmax apart from its logarithm", 2)
    return calls


def _require_same_mask(above: ScoresOfAttention, below: _WeightedValues) -> None:
    """Raise ``RewriteObstacle`` if ``below`` sets weights to 0 by another mask than the one by which ``above`` fills a
    number into the scores. ``above`` holds the calls before the softmax, and ``below`` those after it. If no weights
    are set to 0, do nothing.
    """
    plain = below.spelled is None and below.dropped == 0 and not any(step.kind == "view" for step in above.steps)
    if below.mask is not None and not (plain and zeroed.fills_scores_by_mask(below.mask, above.steps)):
        what = f"the weights are set to 0 where {below.mask.name} is true; the scores are masked otherwise"
        raise RewriteObstacle(below.nodes[0], "operator", what, "mask the scores alone, before the softmax", 2)


def _follow_weights(softmax: Node) -> _WeightedValues | RewriteObstacle | None:
    """Follow the result of ``softmax`` down the graph to its product with the values. Return that product with the
    calls in between. If one of the calls does not fit, return the obstacle. If there is no product, return None.

    Between the two may stand casts, views of leading dims, a transposition of the last dims (``turned``), a slice that
    drops the last columns (``dropped`` counts them), and one call that sets weights to 0 by a mask.
    """
    node, nodes, dropped, mask, turned = softmax, list[Node](), 0, None, False
    while True:
        reader = single_user(node)
        if reader is None:
            return _obstacle_of_readers(node)
        given = positional_then_named(reader)
        if torch_call_name(reader) in BATCHED_PRODUCTS and len(given) == 2:
            if given[0] is node and not turned and isinstance(given[1], Node):
                return _WeightedValues(reader, given[1], [*nodes, reader], dropped, None, mask)
            # A model may also write the product as values.mT @ weights.mT, whose result is the transposed one.
            if given[1] is node and turned and isinstance(given[0], Node):
                turn = einsum.as_transposed_product(reader, given[0])
                return _WeightedValues(reader, given[0], [*nodes, reader], dropped, turn, mask)
            fix = "sum over the keys, the last dim of the weights: weights @ values, or values @ weights.mT"
            return RewriteObstacle(
                reader, "operator", f"{_describe_product(turned)} sums over the queries", fix, fitting=2
            )
        if not turned and swaps_last_dims(reader):
            node, turned = reader, True
            nodes.append(reader)
            continue
        if not turned and (spelled := einsum.as_values_product(reader, node)) is not None:
            return _WeightedValues(reader, spelled.second, [*nodes, reader], dropped, spelled, mask)
        if not turned and mask is None and (mask := zeroed.zeroing_mask(reader, node)) is not None:
            node = reader
            nodes.append(reader)
            continue
        if not turned and (more := sinks.count_dropped_columns(reader)):
            node, dropped = reader, dropped + more
            nodes.append(reader)
            continue
        if is_active_dropout(reader):
            fix = "evaluate the model (model.eval()), or train it with attn_implementation='sdpa'"
            return RewriteObstacle(
                reader, "mode", "dropout drops weights here: a fused kernel would draw others", fix, fitting=2
            )
        if not (keeps_values(reader) or keeps_last_two_dims(reader)):
            # Without a product behind it, the softmax belongs to no attention, and nothing is reported.
            product = next((u for u in reader.users if torch_call_name(u) in BATCHED_PRODUCTS), None)
            what = f"{name_and_operator(reader)} stands between the softmax and the product with the values"
            fix = "move it behind the product, or leave this attention as it is: no fused kernel has a place for it"
            return RewriteObstacle(reader, "operator", what, fix, fitting=2) if product is not None else None
        node = reader
        nodes.append(reader)


def _describe_product(turned: bool) -> str:
    """Return words for the product of values and weights, for use in an error. If ``turned`` is true, it is the product
    of the weights' transpose and the values. Otherwise it is the product of the weights and the values.
    """
    return "the product of the weights' transpose and the values" if turned else "the product of values and weights"


def _obstacle_of_readers(node: Node) -> RewriteObstacle | None:
    """Return the obstacle if a matrix product and another node read ``node``, the weights of an attention. This is the
    case where attention returns its weights. Otherwise return None.
    """
    product = next((u for u in node.users if torch_call_name(u) in BATCHED_PRODUCTS), None)
    other = next((u for u in node.users if u is not product), None)
    if product is None or other is None:
        return None
    fix = "do not ask for attention weights (output_attentions=False): a fused kernel never has them"
    return obstacle_of_reader(node, other, fix, 2)


def _why_qkv_unfit(held: Sequence[Any]) -> tuple[Any, str, str, int] | None:
    """Return None if the fused call can take the fake queries, keys and values in ``held``. Otherwise return a tuple of
    the kind of obstacle, the reason, a fix or an empty string, and the number of matched nodes.
    """
    q, k, v = held
    if not q.is_floating_point():
        return "dtype", f"queries are {q.dtype}", "", 2
    if not all(isinstance(n, torch.SymInt) or n >= 1 for t in held for n in t.shape):
        return "shape", "a dim is empty", "", 2
    if {q.dtype, k.dtype} != {v.dtype}:
        kinds = ", ".join(str(t.dtype).removeprefix("torch.") for t in held)
        return "dtype", f"queries, keys and values are {kinds}: a fused kernel takes one dtype", "cast them to one", 2
    return None


class _FusedCall:
    """The function that is traced in place of an attention's calls. It takes q, k, v and the tensors of the calls in
    between.

    Attributes:
        scores: the calls from the queries and keys to the softmax.
        shape: the shape of the scores.
        out: the shape of the result.
        spelled: the product of weights and values as an einsum, or None.
        masked: whether the last tensor is a mask. Rows that it masks entirely are then 0.
        lone: whether at most one mask may hide an entire row.
        hidden: the numbers by which masks may hide an entire row, or None if there are no such masks.
    """

    def __init__(
        self,
        scores: ScoresOfAttention,
        shape: tuple[Any, ...],
        out: tuple[Any, ...],
        spelled: einsum.EinsumProduct | None = None,
        *,
        masked: bool = False,
        lone: bool = True,
        hidden: hidden_rows.HidingNumbers | None = None,
    ) -> None:
        """Store ``scores``, the calls from queries and keys to the softmax, the ``shape`` of the scores, and ``out``,
        the shape of the result. The class describes the other arguments.
        """
        self.scores, self.shape, self.out, self.spelled, self.masked = scores, shape, out, spelled, masked
        self.lone, self.hidden = lone, hidden
        self.viewed = any(step.kind == "view" for step in scores.steps)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Tensor:
        """Return the attention of the queries ``q``, the keys ``k`` and the values ``v``, computed by torch's fused
        call. ``given`` holds the tensor of each call on the scores, such as a mask, or None. If ``masked`` is true, the
        mask of the weights is the last one.
        """
        if self.scores.orders is not None:
            q, k = (einsum.arrange_dims(t, order) for t, order in zip((q, k), self.scores.orders, strict=True))
        if self.spelled is not None:
            v = einsum.arrange_dims(v, self.spelled.orders[1])
        if softcap.has_tanh_cap(self.scores):
            return self._in_blocks(q, k, v, given)
        # The fused call takes keys with the tokens in front of the width.
        k = k if self.scores.natural else k.transpose(-1, -2)
        scale, bias, causal = self.scores.scale, None, False
        for step, tensor in zip(self.scores.steps, given[:-1] if self.masked else given, strict=True):
            if step.kind == "scale":
                # The bias so far is scaled as well: it was added ahead of this call.
                scale, bias = scale * step.number, None if bias is None else bias * step.number
            elif step.kind == "stretch":
                q, bias = q * tensor, None if bias is None else bias * tensor
            elif step.kind == "causal":
                causal = True
            elif step.kind == "sink":
                k, v, bias = sinks.append_sink(q, k, v, bias, tensor)
            elif step.kind == "rest":
                k, v, bias = sinks.append_sink(q, k, v, bias, tensor if step.number else tensor.unsqueeze(-1))
            else:
                bias = _apply_to_bias(step, bias, tensor, lone=self.lone)
        # A view between product and softmax has other leading dims: q and k take them over, and the result gets its own
        # back.
        if self.viewed:
            lead = self.shape[:-2]
            q, k = (t.expand(*self.scores.lead, *t.shape[-2:]).reshape(*lead, *t.shape[-2:]) for t in (q, k))
            v = v.reshape(*lead, *v.shape[-2:])
        lost = None
        if bias is not None and self.hidden is not None:
            q, bias, lost = hidden_rows.restore_hidden_rows(q, bias, self.hidden)
        out = _call_fused_attention(q, k, v, bias, scale, causal=causal)
        if lost is not None:
            out = out.masked_fill(lost, torch.nan)
        if self.masked:
            out = out.masked_fill(zeroed.fully_masked_rows(given[-1]), 0.0)
        if self.spelled is not None:
            out = out.permute(self.spelled.out)
        return out.reshape(self.out) if self.viewed else out

    def _in_blocks(self, q: Tensor, k: Tensor, v: Tensor, given: tuple[Any, ...]) -> Tensor:
        """Return the attention of ``q``, ``k`` and ``v``, computed in blocks of query rows. It is used for scores that
        ``tanh`` caps, which the fused call does not support. ``given`` holds the tensor of each call on the scores,
        such as a mask, or None.
        """
        k = k.transpose(-1, -2) if self.scores.natural else k
        out = softcap.attend_in_blocks(q, k, v, self.scores, given[:-1] if self.masked else given)
        if self.masked:
            out = out.masked_fill(zeroed.fully_masked_rows(given[-1]), 0.0)
        return out if self.spelled is None else out.permute(self.spelled.out)


def _apply_to_bias(step: ScoreStep, bias: Tensor | None, given: Any, *, lone: bool) -> Tensor | None:
    """Return ``bias``, the tensor that the fused call adds to the scores, changed by ``step``. A step is one call that
    a model applies to its scores, and ``given`` is its mask or bias. ``bias`` is None if nothing is added so far, and
    None is returned if nothing is added afterwards.

    If ``lone`` is true, at most one mask may hide an entire row. A mask then fills in the lowest number of its dtype in
    place of its own finite number. If ``lone`` is false, each mask fills in its own number.
    """
    if step.kind == "add":
        term: Tensor = given if step.number == 1 else given * step.number
        return term if bias is None else bias + term
    if step.kind in ("fill", "keep"):
        # A scalar broadcasts, so no mask of full size is allocated where nothing was added before.
        rest = torch.zeros((), dtype=step.dtype, device=given.device) if bias is None else bias
        # The lowest number swallows every score that is added to it, as if it was filled in. Beside another mask the
        # number stays: which of both is lower decides the weights of a hidden row, and a sum of both may be infinite.
        keep = step.number == -torch.inf or not lone
        number = step.number if keep else torch.finfo(step.dtype).min
        filled = torch.full((), number, dtype=step.dtype, device=given.device)
        mask = given if given.dtype == torch.bool else given != 0
        return torch.where(mask, filled, rest) if step.kind == "fill" else torch.where(mask, rest, filled)
    if step.kind == "view" and bias is not None:
        return bias.expand(step.before).reshape(step.after)
    return bias


def _call_fused_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, *, causal: bool = False
) -> Tensor:
    """Return the result of torch's ``scaled_dot_product_attention``. The leading dims of ``q``, ``k`` and ``v`` may be
    of any number, and are broadcast.

    ``bias`` is added to the scores unless it is None. If ``causal`` is true, the columns after the diagonal are hidden
    in each row of scores.
    """
    lead, rank = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2]), max(q.dim(), k.dim(), v.dim())
    q, k, v = (t if t.shape[:-2] == lead else t.expand(*lead, *t.shape[-2:]) for t in (q, k, v))
    if bias is not None:
        bias = _bias_in_dtype(bias, q.dtype)
        bias = bias.reshape((1,) * (rank - bias.dim()) + tuple(bias.shape)) if bias.dim() < rank else bias
    # Fused kernels take four dims: more are folded into the batch, fewer are added with size 1.
    if rank > 4:
        q, k, v = (t.flatten(0, rank - 4) for t in (q, k, v))
        bias = None if bias is None else bias.expand(*lead, *bias.shape[-2:]).flatten(0, rank - 4)
    elif rank < 4:
        # With three dims the first is the batch, and heads are inserted behind it.
        at = 1 if rank == 3 else 0
        for _ in range(4 - rank):
            q, k, v = (t.unsqueeze(at) for t in (q, k, v))
            bias = None if bias is None else bias.unsqueeze(at)
    if bias is not None and type(dense := bias.stride(-1)) is int and dense > 1 and bias.shape[-1] != 1:
        bias = bias.contiguous()  # no fused kernel reads another: torch would write the scores out
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, scale=scale)
    return out.reshape(*lead, *out.shape[-2:]) if rank != 4 else out


def _bias_in_dtype(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``bias`` in ``dtype``, the dtype of the queries. The lowest number of a wider dtype becomes the lowest
    number of ``dtype``, not minus infinity.
    """
    if bias.dtype == dtype:
        return bias
    if not bias.is_floating_point():
        return bias.to(dtype)
    # Minus infinity stays infinite; a cast of the lowest float32 to float16 would become infinite, too.
    return torch.where(bias == -torch.inf, bias, bias.clamp_min(torch.finfo(dtype).min)).to(dtype)


attention = (AttentionRewrite(),)
