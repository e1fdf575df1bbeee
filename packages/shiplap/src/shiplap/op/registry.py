"""All declared ops of this process, and the digest of everything a compiled graph may have been specialised on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from shiplap import compat
from shiplap.op import choices

if TYPE_CHECKING:
    from shiplap.op.op import Op

__all__ = ["add", "digest", "find", "on_digest", "on_trace", "ops"]

_ops: dict[str, Op] = {}
_identities: dict[str, str] = {}  # of `_ops`, as far as they have been asked for since they changed
_salt = ""
_listeners: list[Callable[[], None]] = []
_parts: list[Callable[[], str]] = []


def ops() -> tuple[Op, ...]:
    """Declared ops, sorted by name."""
    return tuple(_ops[name] for name in sorted(_ops))


def find(name: str) -> Op | None:
    return _ops.get(name)


def add(op: Op) -> None:
    """Register or replace ``op``; from now on compiled artefacts of another set of declarations do not match."""
    _ops[op.spec.name] = op
    refresh(op)


def refresh(op: Op | None = None) -> None:
    """Recompute the salt in torch's compile cache keys: called when anything in ``digest`` has changed.

    ``op``: the only declaration that has; programs declare hundreds of them, one after the other.
    """
    global _salt
    if op is None:
        _identities.clear()
    else:
        _identities.pop(op.spec.name, None)
    choices.forget()
    _salt = f"+shiplap:{digest()}"
    compat.salt_compile_caches(_salt)


def on_trace(listener: Callable[[], None]) -> None:
    """Call ``listener`` at each trace of any op: before compile caches are asked, and before anything is lowered."""
    _listeners.append(listener)


def on_digest(part: Callable[[], str]) -> None:
    """Make ``part()`` part of the digest: what else compiled graphs are specialised on."""
    _parts.append(part)


def ensure() -> None:
    """Put the salt back if somebody set the tag: called at each trace, which comes before the cache is asked."""
    for listener in _listeners:
        listener()
    choices.ready()
    compat.salt_compile_caches(_salt)


def digest() -> str:
    """sha256 over every op's declaration, reference, gradient and kernels, and over the choices among them."""
    state = hashlib.sha256()
    for name in sorted(_ops):
        if name not in _identities:
            _identities[name] = _ops[name].identity
        state.update(f"{name}={_identities[name]};".encode())
    for part in (choices.digest, *_parts):
        state.update(f"{part()};".encode())
    return state.hexdigest()[:16]
