"""Flatten and rebuild nested arguments and results: lists, tuples, dicts and other containers that torch supports.

``torch.utils._pytree`` is the module that Dynamo, ``torch.export`` and ``make_fx`` use; torch offers no public way.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils import _pytree


def leaves(tree: Any, whole: tuple[type, ...] = ()) -> list[Any]:
    """Return the leaves of ``tree`` in order. An unknown object is one leaf, and so is an instance of ``whole``."""
    return list(_pytree.tree_leaves(tree, is_leaf=lambda value: isinstance(value, whole)))


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return ``tree`` with each leaf replaced by ``fn(leaf)``."""
    return _pytree.tree_map(fn, tree)


def register_node(
    cls: type,
    take: Callable[[Any], tuple[Sequence[Any], Any]],
    make: Callable[[Sequence[Any], Any], Any],
    *,
    dump: Callable[[Any], Any],
    load: Callable[[Any], Any],
) -> None:
    """Register ``cls`` as a container of tensors. A class that is registered already stays as it is.

    Args:
        take: an object → its children in order, and the rest of it, which torch compares with ``==``.
        make: the inverse of ``take``. The children may be anything, since ``tree_map`` replaces them.
        dump, load: the rest of an object → a value for JSON, and back: ``torch.export.save`` writes it.
    """
    if cls in _pytree.SUPPORTED_NODES:
        return
    _pytree.register_pytree_node(
        cls,
        lambda value: (list(take(value)[0]), take(value)[1]),
        lambda children, rest: make(list(children), rest),
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        to_dumpable_context=lambda rest: json.dumps(dump(rest)),
        from_dumpable_context=lambda text: load(json.loads(text)),
        flatten_with_keys_fn=lambda value: (
            [(_pytree.SequenceKey(i), child) for i, child in enumerate(take(value)[0])],
            take(value)[1],
        ),
    )


def register_constant(cls: type) -> Callable[[], None]:
    """Register objects of ``cls`` as constants of graphs and pytrees, which compare them with ``==`` in each call.

    Returns a function that undoes it. A class that is registered already stays as it is.
    """
    if cls in _pytree.SUPPORTED_NODES:
        # The class was registered by other code, which must not be undone here.
        return lambda: None
    _pytree.register_constant(cls)

    def undo() -> None:
        if cls in _pytree.SUPPORTED_NODES:
            _pytree._deregister_pytree_node(cls)
        _pytree.CONSTANT_NODES.discard(cls)

    return undo


def show_fields(cls: type, names: Sequence[str]) -> None:
    """Make ``cls`` look like a dataclass: ``names`` are attributes, and keywords of its constructor.

    ``DistributedDataParallel`` and ``fully_shard`` look for tensors in tuples, lists, dicts and dataclasses only. They
    make another object by ``cls(**{name: value})``.
    """
    made = dataclasses.make_dataclass("fields", [(name, Any) for name in names])
    cls.__dataclass_fields__ = made.__dataclass_fields__  # type: ignore[attr-defined]
