"""Flatten and rebuild nested arguments and results: lists, tuples, dicts and other containers that torch knows.

``torch.utils._pytree`` is what Dynamo, ``torch.export`` and ``make_fx`` use themselves; torch offers no public way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree

__all__ = ["leaves", "map_leaves"]


def leaves(tree: Any) -> list[Any]:
    """The leaves of ``tree`` in order. An object that is no known container is one leaf."""
    return list(_pytree.tree_leaves(tree))


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """``tree`` with each leaf replaced by ``fn(leaf)``."""
    return _pytree.tree_map(fn, tree)
