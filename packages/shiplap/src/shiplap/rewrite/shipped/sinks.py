"""Attention sinks, which are a column of learned scores that takes weight from a row and adds no value.

Models such as GPT-OSS and DeepSeek V4 join the column to the scores, take the softmax, and drop the column again. A key
and a value of zeros, with the column as the bias of that key, compute the same. Granite multiplies the result by
``sigmoid(logsumexp(scores) - sink)`` instead. This is the part of each row that the column leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from shiplap.rewrite.graph import fake_value
from shiplap.rewrite.normalize_call import canonical_arguments, reduced_dims
from shiplap.rewrite.passthrough_ops import (
    positional_then_named,
    single_user,
    skip_idle_calls,
    tensor_argument,
    torch_call_name,
)

CONCATENATIONS = ("cat", "concat", "concatenate")


@dataclass(frozen=True)
class RescaledProduct:
    """A matrix product of weights and values that is multiplied by ``sigmoid(logsumexp(scores, -1) - sink)``.

    Attributes:
        out: the node of the result.
        sink: the node of the sink.
        kept: whether the sink has a last dim of size 1, because ``logsumexp`` has ``keepdim``.
        nodes: the calls that rescale the product.
    """

    out: Node
    sink: Node
    kept: bool
    nodes: list[Node]


def find_rescaled_product(product: Node, scores: Any) -> RescaledProduct | None:
    """Return ``product``, the matrix product of weights and values, with the calls that multiply it by
    ``sigmoid(logsumexp(scores) - sink)``. That factor has the effect of an attention sink, that is of a further column
    of logits in the scores. Return None if no such calls follow.
    """
    out = single_user(product)
    given = positional_then_named(out) if out is not None and torch_call_name(out) in ("mul", "multiply") else []
    others = [a for a in given if a is not product]
    if out is None or len(given) != 2 or len(others) != 1:
        return None
    nodes, spread = [out], False
    share = skip_idle_calls(others[0], nodes)
    if torch_call_name(share) == "unsqueeze" and canonical_arguments(share).get("dim") == fake_value(share).dim() - 1:
        nodes.append(share)
        spread, share = True, skip_idle_calls(tensor_argument(share), nodes)
    left = _lse_and_sink(share, nodes)
    lse: Any = skip_idle_calls(left[0], nodes) if left else None
    if left is None or torch_call_name(lse) != "logsumexp":
        return None
    given_lse, rank = canonical_arguments(lse), fake_value(product).dim()
    kept = bool(given_lse.get("keepdim", False))
    nodes.append(lse)
    # The calls disappear with the rescaling, so no other node may read them.
    alone = all(n is out or len(n.users) == 1 for n in nodes)
    if not alone or reduced_dims(lse) != [rank - 1] or kept is spread or given_lse.get("input") is not scores:
        return None
    return RescaledProduct(out, left[1], kept, nodes)


def _lse_and_sink(share: Any, nodes: list[Node]) -> tuple[Node, Node] | None:
    """Return the nodes ``lse`` and ``sink`` if ``share`` is ``sigmoid(lse - sink)``. Return None for any other value.
    The calls that compute ``share`` from the two nodes are appended to ``nodes``.
    """
    if torch_call_name(share) != "sigmoid":
        return None
    difference = skip_idle_calls(tensor_argument(share), [])
    given = positional_then_named(difference) if torch_call_name(difference) in ("sub", "subtract") else []
    if len(given) != 2 or not all(isinstance(g, Node) for g in given):
        return None
    nodes.append(share)
    skip_idle_calls(tensor_argument(share), nodes)
    nodes.append(difference)
    return given[0], given[1]


def scores_and_sink(node: Node) -> tuple[Node, Node, int] | None:
    """Return the scores, the sink and the number of its columns if ``node`` concatenates two tensors along the last
    dim. The first tensor is taken as the scores, and the second as the sink, that is learned logits. Return None for
    any other call.
    """
    if torch_call_name(node) not in CONCATENATIONS:
        return None
    given = canonical_arguments(node)
    tensors, dim = given.get("tensors"), given.get("dim", 0)
    if not isinstance(tensors, (list, tuple)) or len(tensors) != 2 or dim != fake_value(node).dim() - 1:
        return None
    scores, sink = tensors
    if not (isinstance(scores, Node) and isinstance(sink, Node)):
        return None
    width = fake_value(sink).shape[-1]
    return (scores, sink, width) if isinstance(width, int) and fake_value(sink).is_floating_point() else None


def base_of_shift(node: Node) -> Node | None:
    """Return ``x`` if ``node`` is ``x - x.max(-1, keepdim=True)``. A softmax over the last dim is the same for this
    difference and for ``x``. Return None for any other call.
    """
    given = positional_then_named(node) if torch_call_name(node) in ("sub", "subtract") else []
    if len(given) == 2 and isinstance(given[0], Node) and calls_of_maximum(given[1], given[0]):
        return given[0]
    return None


def calls_of_maximum(node: Any, x: Node) -> list[Node]:
    """Return the calls that compute ``node``, in order, if it is the maximum of ``x`` along the last dim with
    ``keepdim``. Return an empty list otherwise, and if one of the calls has several readers.
    """
    calls: list[Node] = []
    # The maximum is often detached, since its gradient cancels.
    if torch_call_name(node) == "detach":
        calls, node = [node], tensor_argument(node)
    if torch_call_name(node) in ("getitem", "getattr") and node.args[1] in (0, "values"):
        calls, node = [node, *calls], tensor_argument(node)
    if torch_call_name(node) not in ("max", "amax"):
        return []
    given = canonical_arguments(node)
    last = reduced_dims(node) == [fake_value(x).dim() - 1]
    alone = all(len(n.users) == 1 for n in (node, *calls))
    return [node, *calls] if given.get("input") is x and last and given.get("keepdim") is True and alone else []


def count_dropped_columns(node: Node) -> int:
    """Return the number of last columns that the slice ``node`` leaves out of its argument, such as 1 for
    ``weights[..., :-1]``. Return 0 for any other call, and for a slice with a stop that is not negative.
    """
    if torch_call_name(node) != "getitem":
        return 0
    index, rank = node.args[1], fake_value(tensor_argument(node)).dim()
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


def append_sink(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys, values and a bias that include ``sink``, learned logits with one or more columns. The keys and the
    values get a row of zeros for each column of the sink. The sink is joined to ``bias`` as further columns. A ``bias``
    of None counts as 0.
    """
    width, rows, columns = sink.shape[-1], q.shape[-2], k.shape[-2]
    lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    bias = sink.new_zeros(()) if bias is None else bias
    parts = (bias.expand(*lead, rows, columns), sink.expand(*lead, rows, width).to(bias.dtype))
    # Keys of zeros score 0, so that the bias alone is the score of the column.
    return F.pad(k, (0, 0, 0, width)), F.pad(v, (0, 0, 0, width)), torch.cat(parts, -1)
