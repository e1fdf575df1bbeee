"""The part of an op in the keys of torch's compile caches: a digest of everything that compiled code of the op depends
on.

A graph without ops has the key that it has without Shiplap, and an edit of an op changes the keys of graphs that use
it: by name, through another op that it calls, or as its gradient.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import TypeAlias

from shiplap.declare.code_digest import digest_of
from shiplap.declare.code_parts import AnyValue
from shiplap.declare.code_walk import walk
from shiplap.dispatch import tuned_choices
from shiplap.dispatch.state import OpState
from shiplap.torch_private import graph_keys
from shiplap.torch_private.graph_keys import GraphOperators

PartOfKey: TypeAlias = Callable[[OpState], str]

_listeners: list[Callable[[], None]] = []
_parts: list[PartOfKey] = [lambda op: tuned_choices.digest(op.spec.name)]
_sources: dict[str, tuple[OpState, Callable[[], Iterable[str]]]] = {}  # by name of an op: its operators in torch


def add(op: OpState, operators: Callable[[], Iterable[str]]) -> None:
    """Add an op that is declared, or declared anew. ``operators()`` returns the names under which graphs call it."""
    _sources[op.spec.name] = op, operators
    tuned_choices.declared()
    tuned_choices.forget()


def remove(name: str) -> None:
    """Remove the op ``name``, which is no longer declared."""
    del _sources[name]
    tuned_choices.forget()


def on_trace(listener: Callable[[], None]) -> None:
    """Call ``listener`` at each trace of any op: before compile caches are asked, and before anything is lowered."""
    _listeners.append(listener)


def on_key(part: PartOfKey) -> None:
    """Make ``part(op)`` part of the key of graphs with ``op``: what else compiled code of it is specialised on."""
    _parts.append(part)


def ensure() -> None:
    """Install the part of Shiplap in torch's cache keys. It is called at each trace, before a cache is read."""
    for listener in _listeners:
        listener()
    tuned_choices.ready()
    graph_keys.install(key_of_graph)


def key_of_graph(operators: GraphOperators) -> str:
    """Return the part of a graph's key that its ops decide. Empty for a graph without ops."""
    named = {name: {*names(), *(n.partition(".")[0] for n in names())} for name, (_, names) in _sources.items()}
    ops = [name for name, known in sorted(named.items()) if known & operators.names]
    known = {n for name in ops for n in named[name]}
    if operators.others or (operators.traced_later and graph_keys.foreign(operators.names - known)):
        ops = sorted(named)  # a library may call any of them
    return key_of(*(_sources[name][0] for name in ops)) if ops else ""


def key_of(*roots: AnyValue) -> str:
    """Return the digest of ops, or of functions that call ops, with everything on which compiled code of these is
    specialised.
    """
    parts = walk(*roots)
    ops = {part.value.spec.name: part.value for part in parts if isinstance(part.value, OpState)}
    lines = [digest_of(parts)]
    lines += [f"{name}: {'; '.join(part(op) for part in _parts)}" for name, op in sorted(ops.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
