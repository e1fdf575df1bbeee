"""Calls in one form: what is called, and its arguments by name, without those that are the default anyway.

``F.softmax(x, dim=1)``, ``torch.softmax(x, 1)`` and ``x.softmax(-1)`` of a matrix are one call here.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from shiplap.compat.operators import operator_of, signature_of
from shiplap.rewrite.graph import value

__all__ = ["COMMUTATIVE", "arguments", "called"]

COMMUTATIVE = frozenset({"add", "mul", "maximum", "minimum", "logical_and", "logical_or", "bitwise_and", "bitwise_or"})
DIMS = ("dim", "dims", "dim0", "dim1", "start_dim", "end_dim")
SPREAD = ("view", "expand", "permute", "repeat", "tile", "flip")  # methods that take a list as several arguments
NOISE = ("_stacklevel",)
EMPTY = inspect.Parameter.empty

called = operator_of


def arguments(node: Node, spelled: Collection[str] = ()) -> dict[str, Any]:
    """Argument name → node or constant; ``arg0``, ``arg1``, ... where nobody knows the names.

    Those that have their default are left out, except for those in ``spelled``, which are there even if the call does
    not give them.
    """
    signature = {_same(k): p for k, p in signature_of(node).items()}
    names = [*signature, *(f"arg{i}" for i in range(len(signature), len(node.args)))]
    passed = node.args
    if called(node) in SPREAD and len(passed) > 2:  # x.view(2, 3)
        passed = (passed[0], passed[1:])
    given = {_same(k): v for k, v in (*zip(names, passed, strict=False), *node.kwargs.items()) if k not in NOISE}
    defaults = {k: _canonical(k, p.default, p.numbers, node) for k, p in signature.items() if p.default is not EMPTY}
    named = {k: _canonical(k, v, signature[k].numbers if k in signature else 0, node) for k, v in given.items()}
    kept = {k: v for k, v in named.items() if not (k in defaults and _equal(v, defaults[k]))}
    return {k: v for k, v in {**defaults, **named}.items() if k in kept or (k in spelled and v is not None)}


def _same(name: str) -> str:
    return "input" if name == "self" else name


def _equal(given: Any, default: Any) -> bool:
    """Constants: 1 and 1.0 are one, and neither is True."""
    if isinstance(given, Node) or isinstance(given, bool) != isinstance(default, bool):
        return False
    numbers = isinstance(given, (int, float)) and isinstance(default, (int, float))
    return (numbers or type(given) is type(default)) and bool(given == default)


def _canonical(name: str, given: Any, count: int, node: Node) -> Any:
    """Dims counted from the front; the sizes of a view without -1; ``count`` numbers where one stands for all."""
    if count and isinstance(given, int) and not isinstance(given, bool):
        given = [given] * count
    if name in DIMS and node.all_input_nodes:
        held = value(node.all_input_nodes[0])
        rank = held.dim() if isinstance(held, Tensor) else 0
        if isinstance(given, int) and not isinstance(given, bool):
            return given % rank if rank else given
        if isinstance(given, (list, tuple)) and rank and all(isinstance(d, int) for d in given):
            return [d % rank for d in given]
    sizes = called(node) in ("view", "expand") and name not in ("input", "implicit")
    if sizes and isinstance(value(node), Tensor) and not isinstance(given, torch.dtype):
        return list(value(node).shape)
    return list(given) if isinstance(given, (list, tuple)) else given
