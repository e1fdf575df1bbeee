"""Nested arguments and results: lists, tuples, dicts and what else torch looks into, taken apart and put together.

``torch.utils._pytree`` is what Dynamo, ``torch.export`` and ``make_fx`` use themselves; torch offers no public way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree

__all__ = ["leaves", "map_leaves"]


def leaves(tree: Any) -> list[Any]:
    """What ``tree`` holds, in order. What torch does not look into is one leaf."""
    return list(_pytree.tree_leaves(tree))


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """``tree`` with ``fn`` of each leaf in its place."""
    return _pytree.tree_map(fn, tree)
