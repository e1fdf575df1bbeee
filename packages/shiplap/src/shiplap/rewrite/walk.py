"""Walks over the nodes of a graph, and the computation of single nodes on given values."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from torch.fx import Node
from torch.fx.node import map_arg

T = TypeVar("T", bound=Hashable)


def walk_from(starts: Iterable[T], step: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yield ``starts`` and all values that are reached from them by repeated calls of ``step``, without duplicates.
    ``step`` returns the neighbours of a value. The last neighbour found is followed first.
    """
    stack = list(dict.fromkeys(starts))
    seen = set(stack)
    while stack:
        at = stack.pop()
        yield at
        for near in step(at):
            if near not in seen:
                # Marked when it is pushed, so that nothing is pushed twice.
                seen.add(near)
                stack.append(near)


def inputs_of(node: Node) -> list[Node]:
    """Return the nodes that ``node`` reads, as the ``step`` of :func:`walk_from` up the graph."""
    return node.all_input_nodes


def users_of(node: Node) -> Iterable[Node]:
    """Return the nodes that read ``node``, as the ``step`` of :func:`walk_from` down the graph."""
    return node.users


def without_other_readers(nodes: Sequence[Node], out: Node) -> list[Node]:
    """Return those of ``nodes`` that only nodes in the result or ``out`` read, in order. If ``out`` is in ``nodes``, it
    is in the result in any case.

    For example, a cast whose result a residual connection also reads is left out.
    """
    inside = {*nodes, out}
    # Removing one node may give another an outside reader, so the set shrinks until it is stable.
    changed = True
    while changed:
        kept = {n for n in inside if n is out or all(u in inside for u in n.users)}
        changed, inside = kept != inside, kept
    return [n for n in nodes if n in inside]


def run_call(node: Node, value_of: Callable[[Node], Any]) -> Any:
    """Return the result of the call of ``node``. ``value_of`` returns the value of each node that the call reads."""
    args, kwargs = map_arg((node.args, dict(node.kwargs)), value_of)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    target: Any = node.target
    return target(*args, **kwargs)


def as_list(results: Any) -> list[Any]:
    """Return ``results`` as a new list. A value that is no list or tuple becomes the only element."""
    return list(results) if isinstance(results, (list, tuple)) else [results]
