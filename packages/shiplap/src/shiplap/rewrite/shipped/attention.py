"""Attention written out, ``softmax(q @ k.T * scale + mask) @ v``: torch's ``scaled_dot_product_attention``.

Recognised by what is computed, not by one spelling. From each softmax over the last dim the pass follows the scores up
to the product of queries and keys, and the weights down to the product with the values. On the way it understands
casts, dropout of an evaluated model, scaling by a constant (of queries, keys or scores), additive masks and biases of
any shape that broadcasts, masks that are filled in, views that keep the last two dims, and ``baddbmm``. Dropout that
drops is left alone, since it would draw other numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.nn import functional as F

from shiplap.declare.code_digest import code_digest
from shiplap.rewrite import passthrough_ops
from shiplap.rewrite.base import Rewrite
from shiplap.rewrite.graph import describe, operator_name, place, source_line, value
from shiplap.rewrite.match import Level, NearMiss, Outcome
from shiplap.rewrite.program import Program, proving
from shiplap.rewrite.shipped import einsum, sinks, softcap, speedup_model, zeroed
from shiplap.rewrite.shipped.attention_programs import programs
from shiplap.rewrite.shipped.constant_masks import settled
from shiplap.rewrite.shipped.missed import missed, over_last, written_out
from shiplap.rewrite.shipped.scores import PRODUCTS, Obstructed, Scores, Step, scores_of, steps_of, swaps_last
from shiplap.rewrite.shipped.softmax_region import region_of


class Attention(Rewrite):
    """Puts ``scaled_dot_product_attention`` where a graph computes it step by step."""

    name = "attention"
    level: Level = "pre-grad"
    anchors = frozenset({"softmax", "_softmax"})

    def __init__(self, *, always: bool = False) -> None:
        """``always``: also where torch has no fused kernel that pays."""
        self.always = always

    @property
    def digest(self) -> str:
        of = code_digest(
            Attention.apply, Attention._at, scores_of, _attended, _weighted, speedup_model.required, settled
        )
        return hashlib.sha256(f"{of} {self.always}".encode()).hexdigest()[:16]

    def programs(self) -> Iterator[Program]:
        return programs()

    def may_match(self, graph: Graph) -> bool:
        return super().may_match(graph) or any(map(written_out, graph.nodes))

    def apply(self, graph: Graph) -> Iterator[Outcome]:
        for node in list(graph.nodes):
            if passthrough_ops.named(node) in self.anchors or written_out(node):
                try:
                    outcome = self._at(graph, node)
                except Obstructed as e:
                    outcome = self._near(e)
                if outcome is not None:
                    yield outcome

    def _at(self, graph: Graph, softmax: Node) -> Outcome | None:
        if passthrough_ops.named(softmax) not in self.anchors or not over_last(softmax):
            return _missed(softmax)
        top = softmax.args[0] if softmax.args else softmax.kwargs["input"]
        below = _weighted(softmax)
        tail = below.rescaled(top) if isinstance(below, _Weighted) else None
        above: Scores | Obstructed | None
        try:
            above = scores_of(top, softmax, beside=tail.nodes if tail else ())
        except Obstructed as e:
            above = e
        if above is None or below is None:
            return _missed(softmax)
        for side in (above, below):
            if isinstance(side, Obstructed):
                raise side
        assert isinstance(above, Scores)
        assert isinstance(below, _Weighted)
        if tail is not None:
            above.steps.append(Step("rest", tail.sink, float(tail.kept)))
            below.out, below.nodes = tail.out, [*below.nodes, *tail.nodes]
        return self._placed(graph, softmax, above, below)

    def _placed(self, graph: Graph, softmax: Node, above: Scores, below: _Weighted) -> Outcome:
        held = _held(above, below)
        if reason := _unfit(held):
            raise Obstructed(below.out, *reason)
        _require_same_mask(above, below)
        if below.mask is None and not softcap.is_capped(above):
            above.steps[:] = settled(above.steps)
        in_blocks = {"cap", "scale", "stretch", "add", *speedup_model.MASKS}
        if softcap.is_capped(above) and not {s.kind for s in above.steps} <= in_blocks:
            what = "tanh caps the scores, and a view or a sink follows: that is computed in no blocks of rows"
            raise Obstructed(below.out, "operator", what, softcap.FLEX, 2)
        if above.blocks_gradients or below.mask is not None:
            _require_no_gradients(below.out, held)
        shape = tuple(value(softmax).shape)
        if not (self.always or proving.get()):
            speedup_model.required(below.out, above, held, shape)
        _require_same_sink(above, below)
        plan = _Plan(above, shape, tuple(value(below.out).shape), below.spelled, masked=below.mask is not None)
        nodes = [*above.nodes, softmax, *below.nodes]
        bound = [("q", describe(above.q)), ("k", describe(above.k)), ("v", describe(below.v))]
        tensors = [step.given for step in above.steps]
        args = [above.q, above.k, below.v, *tensors, *([] if below.mask is None else [below.mask])]
        return place(graph, self.level, self.name, plan, args, [below.out], nodes, bound)

    def _near(self, e: Obstructed) -> NearMiss:
        return NearMiss(
            self.name, self.level, e.node.name, source_line(e.node), e.obstacle, e.reason, e.fitting, 3, e.fix
        )


def _missed(softmax: Node) -> NearMiss | None:
    """Raise what keeps a softmax from being an attention that is understood. Nothing where it weighs no activations."""
    region = region_of(softmax)
    if region is not None:
        raise missed(region, lambda n: steps_of(n) is not None, _handed_to_values)
    return None


def _handed_to_values(node: Node) -> bool:
    return passthrough_ops.idle(node) or _keeps_matrix(node) or bool(sinks.dropped(node))


class _Weighted:
    """The product with the values: ``out`` is ``weights @ v``, and ``nodes`` hand the weights on to it.

    The last ``dropped`` columns of the weights are left out. ``spelled`` says how an einsum takes them. ``mask`` says
    where they were set to 0.
    """

    def __init__(
        self,
        out: Node,
        v: Node,
        nodes: list[Node],
        dropped: int = 0,
        spelled: einsum.Spelled | None = None,
        mask: Node | None = None,
    ) -> None:
        self.out, self.v, self.nodes, self.dropped, self.spelled, self.mask = out, v, nodes, dropped, spelled, mask

    def rescaled(self, scores: Any) -> sinks.Rescaled | None:
        """How the result is rescaled by what a sink leaves of the scores, where it is as ``weights @ v`` made it."""
        plain = not self.dropped and self.spelled is None and self.mask is None
        return sinks.rescaled(self.out, scores) if plain else None


def _held(above: Scores, below: _Weighted) -> list[Tensor]:
    """The fake queries, keys and values, as a product reads them."""
    q, k, v = (value(n) for n in (above.q, above.k, below.v))
    if above.orders is not None:
        q, k = q.permute(above.orders[0]), k.permute(above.orders[1])
    return [q, k, v if below.spelled is None else v.permute(below.spelled.orders[1])]


def _require_same_sink(above: Scores, below: _Weighted) -> None:
    """Raise where other columns are dropped than were joined, or scores are changed after that."""
    last = [step.kind for step in above.steps]
    one = last.count("sink") + last.count("rest") < 2 and not (above.sinks and "view" in last)
    if below.dropped == above.sink and last.count("sink") == bool(above.sink) and one:
        return
    what = f"{above.sink} columns are joined to the scores at the end, and {below.dropped} of the weights dropped"
    fix = "join a sink to the scores last, and drop the same columns of the weights"
    raise Obstructed(below.out, "operator", what, fix, 2)


def _require_no_gradients(out: Node, held: Sequence[Tensor]) -> None:
    if torch.is_grad_enabled() and (held[0].requires_grad or held[1].requires_grad):
        what = "the mask is filled in, which lets no gradient through; a row that is masked as a whole would have one"
        fix = "add torch.finfo(scores.dtype).min to the scores instead, or rewrite the model under torch.no_grad()"
        raise Obstructed(out, "gradient", what, fix, 2)


def _require_same_mask(above: Scores, below: _Weighted) -> None:
    """Raise where weights are set to 0 by a mask that the scores were not filled in by."""
    plain = below.spelled is None and below.dropped == 0 and not any(step.kind == "view" for step in above.steps)
    if below.mask is not None and not (plain and zeroed.masks_scores(below.mask, above.steps)):
        what = f"the weights are set to 0 where {below.mask.name} is true; the scores are masked otherwise"
        raise Obstructed(below.nodes[0], "operator", what, "mask the scores alone, before the softmax", 2)


def _weighted(softmax: Node) -> _Weighted | Obstructed | None:
    """Where the weights are multiplied by the values. None where they meet no product at all."""
    node, nodes, dropped, mask, turned = softmax, list[Node](), 0, None, False
    while True:
        reader = passthrough_ops.only_reader(node)
        if reader is None:
            return _several_readers(node)
        given = passthrough_ops.operands(reader)
        if passthrough_ops.named(reader) in PRODUCTS and len(given) == 2:
            if given[0] is node and not turned and isinstance(given[1], Node):
                return _Weighted(reader, given[1], [*nodes, reader], dropped, None, mask)
            if given[1] is node and turned and isinstance(given[0], Node):
                turn = einsum.transposed(reader, given[0])
                return _Weighted(reader, given[0], [*nodes, reader], dropped, turn, mask)
            fix = "sum over the keys, the last dim of the weights: weights @ values, or values @ weights.mT"
            return Obstructed(reader, "operator", f"{_product_of(turned)} sums over the queries", fix, 2)
        if not turned and swaps_last(reader):
            node, turned = reader, True
            nodes.append(reader)
            continue
        if not turned and (spelled := einsum.of_values(reader, node)) is not None:
            return _Weighted(reader, spelled.second, [*nodes, reader], dropped, spelled, mask)
        if not turned and mask is None and (mask := zeroed.zeroing(reader, node)) is not None:
            node = reader
            nodes.append(reader)
            continue
        if not turned and (more := sinks.dropped(reader)):
            node, dropped = reader, dropped + more
            nodes.append(reader)
            continue
        if passthrough_ops.drops(reader):
            fix = "evaluate the model (model.eval()), or train it with attn_implementation='sdpa'"
            return Obstructed(reader, "mode", "dropout drops weights here: a fused kernel would draw others", fix, 2)
        if not (passthrough_ops.idle(reader) or _keeps_matrix(reader)):
            product = next((u for u in reader.users if passthrough_ops.named(u) in PRODUCTS), None)
            what = f"{reader.name} ({operator_name(reader)}) stands between the softmax and the product with the values"
            fix = "move it behind the product, or leave this attention as it is: no fused kernel has a place for it"
            return Obstructed(reader, "operator", what, fix, 2) if product is not None else None
        node = reader
        nodes.append(reader)


def _product_of(turned: bool) -> str:
    return "the product of the weights' transpose and the values" if turned else "the product of values and weights"


def _several_readers(node: Node) -> Obstructed | None:
    """Weights that are read twice: attention whose weights are returned, or no attention."""
    product = next((u for u in node.users if passthrough_ops.named(u) in PRODUCTS), None)
    other = next((u for u in node.users if u is not product), None)
    if product is None or other is None:
        return None
    who = "the graph returns it" if other.op == "output" else f"{other.name} reads it, too"
    fix = "do not ask for attention weights (output_attentions=False): a fused kernel never has them"
    return Obstructed(node, "user", f"{node.name} would no longer be computed, but {who}", fix, 2)


def _keeps_matrix(node: Node) -> bool:
    """Whether ``node`` is a view that splits or joins leading dims only."""
    if passthrough_ops.named(node) not in ("view", "flatten", "unflatten", "unsqueeze", "squeeze"):
        return False
    before, after = value(passthrough_ops.source(node)), value(node)
    return before.dim() > 1 < after.dim() and [*map(str, before.shape[-2:])] == [*map(str, after.shape[-2:])]


def _unfit(held: Sequence[Any]) -> tuple[Any, str, str, int] | None:
    """Why q, k and v of a place are nothing that the fused call takes."""
    q, k, v = held
    if not q.is_floating_point():
        return "dtype", f"queries are {q.dtype}", "", 2
    if not all(isinstance(n, torch.SymInt) or n >= 1 for t in held for n in t.shape):
        return "shape", "a dim is empty", "", 2
    if {q.dtype, k.dtype} != {v.dtype}:
        kinds = ", ".join(str(t.dtype).removeprefix("torch.") for t in held)
        return "dtype", f"queries, keys and values are {kinds}: a fused kernel takes one dtype", "cast them to one", 2
    return None


class _Plan:
    """The function that is traced in place of the steps: of q, k, v and the tensors of the steps.

    If ``masked``, the last tensor is a mask, and rows that it masks as a whole are 0.
    """

    def __init__(
        self,
        scores: Scores,
        shape: tuple[Any, ...],
        out: tuple[Any, ...],
        spelled: einsum.Spelled | None = None,
        *,
        masked: bool = False,
    ) -> None:
        self.scores, self.shape, self.out, self.spelled, self.masked = scores, shape, out, spelled, masked
        self.viewed = any(step.kind == "view" for step in scores.steps)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Tensor:
        if self.scores.orders is not None:
            q, k = q.permute(self.scores.orders[0]), k.permute(self.scores.orders[1])
        if self.spelled is not None:
            v = v.permute(self.spelled.orders[1])
        if softcap.is_capped(self.scores):
            return self._in_blocks(q, k, v, given)
        k = k if self.scores.natural else k.transpose(-1, -2)
        scale, bias, causal = self.scores.scale, None, False
        for step, tensor in zip(self.scores.steps, given[:-1] if self.masked else given, strict=True):
            if step.kind == "scale":
                scale, bias = scale * step.number, None if bias is None else bias * step.number
            elif step.kind == "stretch":
                q, bias = q * tensor, None if bias is None else bias * tensor
            elif step.kind == "causal":
                causal = True
            elif step.kind == "sink":
                k, v, bias = sinks.with_sink(q, k, v, bias, tensor)
            elif step.kind == "rest":
                k, v, bias = sinks.with_sink(q, k, v, bias, tensor if step.number else tensor.unsqueeze(-1))
            else:
                bias = _changed(step, bias, tensor)
        if self.viewed:
            lead = self.shape[:-2]
            q, k = (t.expand(*self.scores.lead, *t.shape[-2:]).reshape(*lead, *t.shape[-2:]) for t in (q, k))
            v = v.reshape(*lead, *v.shape[-2:])
        out = _attended(q, k, v, bias, scale, causal=causal)
        if self.masked:
            out = out.masked_fill(zeroed.rows_of(given[-1]), 0.0)
        if self.spelled is not None:
            out = out.permute(self.spelled.out)
        return out.reshape(self.out) if self.viewed else out

    def _in_blocks(self, q: Tensor, k: Tensor, v: Tensor, given: tuple[Any, ...]) -> Tensor:
        k = k.transpose(-1, -2) if self.scores.natural else k
        out = softcap.attended(q, k, v, self.scores, given[:-1] if self.masked else given)
        if self.masked:
            out = out.masked_fill(zeroed.rows_of(given[-1]), 0.0)
        return out if self.spelled is None else out.permute(self.spelled.out)


def _changed(step: Step, bias: Tensor | None, given: Any) -> Tensor | None:
    """What a step on the way from the product to the softmax makes of the bias so far."""
    if step.kind == "add":
        term: Tensor = given if step.number == 1 else given * step.number
        return term if bias is None else bias + term
    if step.kind in ("fill", "keep"):
        rest = torch.zeros((), dtype=step.dtype, device=given.device) if bias is None else bias
        filled = torch.full((), step.number, dtype=step.dtype, device=given.device)
        mask = given if given.dtype == torch.bool else given != 0
        return torch.where(mask, filled, rest) if step.kind == "fill" else torch.where(mask, rest, filled)
    if step.kind == "view" and bias is not None:
        return bias.expand(step.before).reshape(step.after)
    return bias


def _attended(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, *, causal: bool = False) -> Tensor:
    """The fused call for any number of leading dims, which are those that q, k and v broadcast to."""
    lead, rank = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2]), max(q.dim(), k.dim(), v.dim())
    q, k, v = (t if t.shape[:-2] == lead else t.expand(*lead, *t.shape[-2:]) for t in (q, k, v))
    if bias is not None:
        bias = _in_dtype(bias, q.dtype)
        bias = bias.reshape((1,) * (rank - bias.dim()) + tuple(bias.shape)) if bias.dim() < rank else bias
    if rank > 4:
        q, k, v = (t.flatten(0, rank - 4) for t in (q, k, v))
        bias = None if bias is None else bias.expand(*lead, *bias.shape[-2:]).flatten(0, rank - 4)
    elif rank < 4:
        at = 1 if rank == 3 else 0
        for _ in range(4 - rank):
            q, k, v = (t.unsqueeze(at) for t in (q, k, v))
            bias = None if bias is None else bias.unsqueeze(at)
    if bias is not None and type(dense := bias.stride(-1)) is int and dense > 1 and bias.shape[-1] != 1:
        bias = bias.contiguous()  # no fused kernel reads another: torch would write the scores out
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal, scale=scale)
    return out.reshape(*lead, *out.shape[-2:]) if rank != 4 else out


def _in_dtype(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """``bias`` in the dtype of the queries: the lowest number of a wider dtype stays a number."""
    if bias.dtype == dtype:
        return bias
    if not bias.is_floating_point():
        return bias.to(dtype)
    return torch.where(bias == -torch.inf, bias, bias.clamp_min(torch.finfo(dtype).min)).to(dtype)


attention = (Attention(),)
