"""Attention sinks: a column of learned scores that takes weight from a row and adds no value (GPT-OSS, DeepSeek V4).

Models join the column to the scores, take the softmax, and drop it again. The same is a key and a value of zeros, with
the column as what is added to the score of that key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from shiplap.rewrite import trail
from shiplap.rewrite.graph import value
from shiplap.rewrite.normal import arguments

__all__ = ["dropped", "joined", "maximum", "shifted", "with_sink"]

JOINS = ("cat", "concat", "concatenate")


def joined(node: Node) -> tuple[Node, Node, int] | None:
    """Scores and a sink of ``n`` columns where ``node`` joins the two along the last dim."""
    if trail.named(node) not in JOINS:
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
    """``x`` where ``node`` is ``x - x.max(-1, keepdim=True)``, which no softmax over that dim sees."""
    given = trail.operands(node) if trail.named(node) in ("sub", "subtract") else []
    if len(given) == 2 and isinstance(given[0], Node) and maximum(given[1], given[0]):
        return given[0]
    return None


def maximum(node: Any, x: Node) -> list[Node]:
    """The calls that compute ``node``, if that is the maximum of ``x`` along the last dim and nothing else reads it."""
    calls: list[Node] = []
    if trail.named(node) == "detach":
        calls, node = [node], trail.source(node)
    if trail.named(node) in ("getitem", "getattr") and node.args[1] in (0, "values"):
        calls, node = [node, *calls], trail.source(node)
    if trail.named(node) not in ("max", "amax"):
        return []
    given = arguments(node)
    dims = given.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    last = isinstance(dims, (list, tuple)) and [*dims] == [value(x).dim() - 1]
    alone = all(len(n.users) == 1 for n in (node, *calls))
    return [node, *calls] if given.get("input") is x and last and given.get("keepdim") is True and alone else []


def dropped(node: Node) -> int:
    """How many of the last columns of its argument ``node`` leaves out: ``weights[..., :-1]``. 0 for anything else."""
    if trail.named(node) != "getitem":
        return 0
    index, rank = node.args[1], value(trail.source(node)).dim()
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
    """Keys, values and bias with as many more columns as ``sink`` has."""
    width, rows, columns = sink.shape[-1], q.shape[-2], k.shape[-2]
    lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    bias = sink.new_zeros(()) if bias is None else bias
    parts = (bias.expand(*lead, rows, columns), sink.expand(*lead, rows, width).to(bias.dtype))
    return F.pad(k, (0, 0, 0, width)), F.pad(v, (0, 0, 0, width)), torch.cat(parts, -1)
