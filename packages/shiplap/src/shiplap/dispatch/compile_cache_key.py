"""The part of an op in the keys of torch's compile caches.

It is a digest of everything on which compiled code of the op depends. A graph without ops has the key that it has
without Shiplap. An edit of an op changes the keys of the graphs that use it by name, through another op that it calls,
or as its gradient.
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
# Compiled code has the chosen configs in it, so that choices are always part of the key.
_key_parts: list[PartOfKey] = [lambda op: tuned_choices.choices_digest(op.spec.name)]
_op_sources: dict[str, tuple[OpState, Callable[[], Iterable[str]]]] = {}  # by name of an op: its operators in torch


def add_op_to_key(op: OpState, operators: Callable[[], Iterable[str]]) -> None:
    """Include a newly declared op in the keys of torch's compile caches. ``operators()`` returns the torch names by
    which graphs call it.
    """
    _op_sources[op.spec.name] = op, operators
    tuned_choices.note_declared_op()
    tuned_choices.forget_derived_choices()


def remove_op_from_key(name: str) -> None:
    """Remove the op ``name``, which is no longer declared, from the keys of torch's compile caches."""
    del _op_sources[name]
    tuned_choices.forget_derived_choices()


def add_trace_listener(listener: Callable[[], None]) -> None:
    """Call ``listener()`` at each later trace of any op. It is called before torch reads its compile caches, and before
    anything is lowered.
    """
    _trace_listeners.append(listener)


def add_key_part(part: PartOfKey) -> None:
    """Add the text ``part(op)`` to the cache key of each graph that calls ``op``. Compiled code is then not used if
    that text differs.
    """
    _key_parts.append(part)


def ensure_cache_keys() -> None:
    """Call the trace listeners, load tuned choices, and install the text by which Shiplap extends the keys of torch's
    compile caches. Each trace calls this function before a cache is read.
    """
    # Listeners come first: they may register lowerings, which the key has to cover.
    for listener in _trace_listeners:
        listener()
    tuned_choices.ensure_choices_loaded()
    graph_keys.install_graph_key(graph_cache_key)


def graph_cache_key(operators: GraphOperators) -> str:
    """Return a digest of all ops that a graph calls, which becomes a part of its compile cache key. If the graph may
    call ops indirectly, through operators of other libraries, the digest covers all declared ops. Return an empty
    string for a graph without ops.
    """
    named = {name: {*names(), *(n.partition(".")[0] for n in names())} for name, (_, names) in _op_sources.items()}
    ops = [name for name, known in sorted(named.items()) if known & operators.names]
    known = {n for name in ops for n in named[name]}
    if operators.others or (operators.traced_later and graph_keys.foreign_operators(operators.names - known)):
        ops = sorted(named)  # a library may call any of them
    return op_cache_key(*(_op_sources[name][0] for name in ops)) if ops else ""


def op_cache_key(*roots: AnyValue) -> str:
    """Return a digest of ops, or of functions that call ops, as 16 hexadecimal digits. It changes with their code, and
    with everything else on which compiled code of these ops depends.
    """
    parts = walk_code(*roots)
    ops = {part.value.spec.name: part.value for part in parts if isinstance(part.value, OpState)}
    # Sorted by name, so that the key does not depend on the order in which ops were found.
    lines = [digest_of_parts(parts)]
    lines += [f"{name}: {'; '.join(part(op) for part in _key_parts)}" for name, op in sorted(ops.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
