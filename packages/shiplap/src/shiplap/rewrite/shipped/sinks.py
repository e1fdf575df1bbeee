"""Attention sinks: a column of learned scores that takes weight from a row and adds no value (GPT-OSS, DeepSeek V4).

Models join the column to the scores, take the softmax, and drop the column again. A key and a value of zeros, with the
column as the bias of that key, compute the same. Others multiply the result by ``sigmoid(logsumexp(scores) - sink)``
(Granite), which is the part of each row that the column leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from shiplap.rewrite import passthrough_ops
from shiplap.rewrite.graph import value
from shiplap.rewrite.normalize_call import arguments

JOINS = ("cat", "concat", "concatenate")


@dataclass(frozen=True)
class Rescaled:
    """A rescaled product: ``out`` is the product with the values times ``sigmoid(logsumexp(scores, -1) - sink)``, by
    ``nodes``.

    ``kept``: whether the sink has a last dim of 1, as ``logsumexp`` with ``keepdim``.
    """

    out: Node
    sink: Node
    kept: bool
    nodes: list[Node]


def rescaled(product: Node, scores: Any) -> Rescaled | None:
    """Return the rescaling of the product of weights and values by the part that a sink leaves of each row of
    ``scores``, or None.
    """
    out = passthrough_ops.only_reader(product)
    given = (
        passthrough_ops.operands(out) if out is not None and passthrough_ops.named(out) in ("mul", "multiply") else []
    )
    others = [a for a in given if a is not product]
    if out is None or len(given) != 2 or len(others) != 1:
        return None
    nodes, spread = [out], False
    share = passthrough_ops.handed_on(others[0], nodes)
    if passthrough_ops.named(share) == "unsqueeze" and arguments(share).get("dim") == value(share).dim() - 1:
        nodes.append(share)
        spread, share = True, passthrough_ops.handed_on(passthrough_ops.source(share), nodes)
    left = _left_over(share, nodes)
    lse: Any = passthrough_ops.handed_on(left[0], nodes) if left else None
    if left is None or passthrough_ops.named(lse) != "logsumexp":
        return None
    given_lse, rank = arguments(lse), value(product).dim()
    dims, kept = given_lse.get("dim"), bool(given_lse.get("keepdim", False))
    last = [dims] if isinstance(dims, int) else list(dims or ())
    nodes.append(lse)
    # The calls disappear with the rescaling, so no other node may read them.
    alone = all(n is out or len(n.users) == 1 for n in nodes)
    if not alone or [int(d) for d in last] != [rank - 1] or kept is spread or given_lse.get("input") is not scores:
        return None
    return Rescaled(out, left[1], kept, nodes)


def _left_over(share: Any, nodes: list[Node]) -> tuple[Node, Node] | None:
    """Return ``lse`` and ``sink`` where ``share`` is ``sigmoid(lse - sink)``, or None."""
    if passthrough_ops.named(share) != "sigmoid":
        return None
    difference = passthrough_ops.handed_on(passthrough_ops.source(share), [])
    given = passthrough_ops.operands(difference) if passthrough_ops.named(difference) in ("sub", "subtract") else []
    if len(given) != 2 or not all(isinstance(g, Node) for g in given):
        return None
    nodes.append(share)
    passthrough_ops.handed_on(passthrough_ops.source(share), nodes)
    nodes.append(difference)
    return given[0], given[1]


def joined(node: Node) -> tuple[Node, Node, int] | None:
    """Return scores and a sink of ``n`` columns where ``node`` joins the two along the last dim, or None."""
    if passthrough_ops.named(node) not in JOINS:
        return None
    given = arguments(node)
    tensors, dim = given.get("tensors"), given.get("dim", 0)
    if not isinstance(tensors, (list, tuple)) or len(tensors) != 2 or dim != value(node).dim() - 1:
        return None
    scores, sink = tensors
    if not (isinstance(scores, Node) and isinstance(sink, Node)):
        return None
    width = value(sink).shape[-1]
    return (scores, sink, width) if isinstance(width, int) and value(sink).is_floating_point() else None


def shifted(node: Node) -> Node | None:
    """Return ``x`` where ``node`` is ``x - x.max(-1, keepdim=True)``, which changes no softmax over that dim, or
    None.
    """
    given = passthrough_ops.operands(node) if passthrough_ops.named(node) in ("sub", "subtract") else []
    if len(given) == 2 and isinstance(given[0], Node) and maximum(given[1], given[0]):
        return given[0]
    return None


def maximum(node: Any, x: Node) -> list[Node]:
    """Return the calls that compute ``node``, if it is the maximum of ``x`` along the last dim and no other node reads
    it.
    """
    calls: list[Node] = []
    # The maximum is often detached, since its gradient cancels.
    if passthrough_ops.named(node) == "detach":
        calls, node = [node], passthrough_ops.source(node)
    if passthrough_ops.named(node) in ("getitem", "getattr") and node.args[1] in (0, "values"):
        calls, node = [node, *calls], passthrough_ops.source(node)
    if passthrough_ops.named(node) not in ("max", "amax"):
        return []
    given = arguments(node)
    dims = given.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    last = isinstance(dims, (list, tuple)) and [*dims] == [value(x).dim() - 1]
    alone = all(len(n.users) == 1 for n in (node, *calls))
    return [node, *calls] if given.get("input") is x and last and given.get("keepdim") is True and alone else []


def dropped(node: Node) -> int:
    """Return the number of last columns that ``node`` leaves out of its argument, ``weights[..., :-1]``, or 0 for any
    other call.
    """
    if passthrough_ops.named(node) != "getitem":
        return 0
    index, rank = node.args[1], value(passthrough_ops.source(node)).dim()
    if not isinstance(index, tuple) or not index or not isinstance(index[-1], slice):
        return 0
    *rest, _ = index
    last: slice[Any, Any, Any] = index[-1]
    whole = all(i is Ellipsis or (isinstance(i, slice) and i == slice(None)) for i in rest)
    reaches = len(index) == rank or (Ellipsis in rest and len(index) <= rank)
    stop = last.stop
    if not (whole and reaches and last.start in (None, 0) and last.step in (None, 1) and isinstance(stop, int)):
        return 0
    return -stop if stop < 0 else 0


def with_sink(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, values and bias with as many more columns as ``sink`` has."""
    width, rows, columns = sink.shape[-1], q.shape[-2], k.shape[-2]
    lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    bias = sink.new_zeros(()) if bias is None else bias
    parts = (bias.expand(*lead, rows, columns), sink.expand(*lead, rows, width).to(bias.dtype))
    return F.pad(k, (0, 0, 0, width)), F.pad(v, (0, 0, 0, width)), torch.cat(parts, -1)
