"""Calls in one form: what is called, and its arguments by name, without those that are the default anyway.

``F.softmax(x, dim=1)``, ``torch.softmax(x, 1)`` and ``x.softmax(-1)`` of a matrix are one call here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Node

from shiplap.compat.operators import operator_of, signature_of
from shiplap.rewrite.graph import value

__all__ = ["COMMUTATIVE", "arguments", "called"]

COMMUTATIVE = frozenset({"add", "mul", "maximum", "minimum", "logical_and", "logical_or", "bitwise_and", "bitwise_or"})
DIMS = ("dim", "dims", "dim0", "dim1", "start_dim", "end_dim")
SPREAD = ("view", "expand", "permute", "repeat", "tile", "flip")  # methods that take a list as several arguments
NOISE = ("_stacklevel",)

called = operator_of


def arguments(node: Node) -> dict[str, Any]:
    """Argument name → node or constant; ``arg0``, ``arg1``, ... where nobody knows the names."""
    signature = signature_of(node)
    names = [*signature, *(f"arg{i}" for i in range(len(signature), len(node.args)))]
    passed = node.args
    if called(node) in SPREAD and len(passed) > 2:  # x.view(2, 3)
        passed = (passed[0], passed[1:])
    given = {_same(n): v for n, v in (*zip(names, passed, strict=False), *node.kwargs.items())}
    kept = {k: v for k, v in given.items() if k not in NOISE and not _default(v, signature.get(k, ...))}
    return {k: _canonical(k, v, node) for k, v in kept.items()}


def _same(name: str) -> str:
    return "input" if name == "self" else name


def _default(given: Any, default: Any) -> bool:
    return type(given) is type(default) and not isinstance(given, Node) and given == default


def _canonical(name: str, given: Any, node: Node) -> Any:
    """Dims counted from the front; the sizes of a view without -1."""
    if name in DIMS and node.all_input_nodes:
        held = value(node.all_input_nodes[0])
        rank = held.dim() if isinstance(held, Tensor) else 0
        if isinstance(given, int) and not isinstance(given, bool):
            return given % rank if rank else given
        if isinstance(given, (list, tuple)) and rank and all(isinstance(d, int) for d in given):
            return [d % rank for d in given]
    if called(node) in ("view", "expand") and name != "input" and isinstance(value(node), Tensor):
        return list(value(node).shape)
    return list(given) if isinstance(given, tuple) else given
