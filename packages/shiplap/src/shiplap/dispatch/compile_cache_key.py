"""What compiled code of an op depends on, as a part of the keys of torch's compile caches: by graph, of the ops in it.

A graph without ops has the key that it has without Shiplap, and an edit of an op changes the keys of graphs that use
it: by name, through another op that it calls, or as its gradient.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import TypeAlias

from shiplap.declare.code_digest import digest_of_parts
from shiplap.declare.code_parts import AnyValue
from shiplap.declare.code_walk import walk_code
from shiplap.dispatch import tuned_choices
from shiplap.dispatch.state import OpState
from shiplap.torch_private import graph_keys
from shiplap.torch_private.graph_keys import GraphOperators

PartOfKey: TypeAlias = Callable[[OpState], str]

_trace_listeners: list[Callable[[], None]] = []
_key_parts: list[PartOfKey] = [lambda op: tuned_choices.choices_digest(op.spec.name)]
_op_sources: dict[str, tuple[OpState, Callable[[], Iterable[str]]]] = {}  # by name of an op: its operators in torch


def add_op_to_key(op: OpState, operators: Callable[[], Iterable[str]]) -> None:
    """An op is declared, or declared anew. ``operators()`` are the names under which graphs call it."""
    _op_sources[op.spec.name] = op, operators
    tuned_choices.note_declared_op()
    tuned_choices.forget_derived_choices()


def remove_op_from_key(name: str) -> None:
    """The op ``name`` is no longer declared."""
    del _op_sources[name]
    tuned_choices.forget_derived_choices()


def add_trace_listener(listener: Callable[[], None]) -> None:
    """Call ``listener`` at each trace of any op: before compile caches are asked, and before anything is lowered."""
    _trace_listeners.append(listener)


def add_key_part(part: PartOfKey) -> None:
    """Make ``part(op)`` part of the key of graphs with ``op``: what else compiled code of it is specialised on."""
    _key_parts.append(part)


def ensure_cache_keys() -> None:
    """See that keys name the ops of a graph: called at each trace, which comes before a cache is asked."""
    for listener in _trace_listeners:
        listener()
    tuned_choices.ensure_choices_loaded()
    graph_keys.install_graph_key(graph_cache_key)


def graph_cache_key(operators: GraphOperators) -> str:
    """The part of the key of a graph that its ops decide. Empty for a graph without ops."""
    named = {name: {*names(), *(n.partition(".")[0] for n in names())} for name, (_, names) in _op_sources.items()}
    ops = [name for name, known in sorted(named.items()) if known & operators.names]
    known = {n for name in ops for n in named[name]}
    if operators.others or (operators.traced_later and graph_keys.foreign_operators(operators.names - known)):
        ops = sorted(named)  # a library may call any of them
    return op_cache_key(*(_op_sources[name][0] for name in ops)) if ops else ""


def op_cache_key(*roots: AnyValue) -> str:
    """The digest of ops, or of functions that call ops, with all that compiled code of these is specialised on."""
    parts = walk_code(*roots)
    ops = {part.value.spec.name: part.value for part in parts if isinstance(part.value, OpState)}
    lines = [digest_of_parts(parts)]
    lines += [f"{name}: {'; '.join(part(op) for part in _key_parts)}" for name, op in sorted(ops.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
