"""The digest of everything that a compiled graph may have been specialised on, in the keys of torch's compile caches.

Whoever compiled code depends on puts its part in. Whoever changes something says so (:func:`refresh`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from shiplap import torch_private
from shiplap.dispatch import tuned_choices

_sources: dict[str, Callable[[], str]] = {}  # by name of an op: what identifies it as it is now
_identities: dict[str, str] = {}  # of `_sources`, as far as they have been asked for since they changed
_salt = ""
_listeners: list[Callable[[], None]] = []
_parts: list[Callable[[], str]] = []


def add(name: str, identity: Callable[[], str]) -> None:
    """An op is declared, or declared anew: artefacts of another set of declarations do not match from now on."""
    _sources[name] = identity
    tuned_choices.declared()
    refresh(name)


def remove(name: str) -> None:
    """The op ``name`` is no longer declared."""
    del _sources[name]
    refresh(name)


def refresh(name: str | None = None) -> None:
    """Recompute the salt in torch's compile cache keys: called when anything in ``digest`` has changed.

    ``name``: of the only declaration that has; programs declare hundreds of them, one after the other.
    """
    if name is None:
        _identities.clear()
    else:
        _identities.pop(name, None)
    tuned_choices.forget()
    salt()


def salt() -> None:
    """Recompute the salt where no declaration has changed, but a part has been added or says something else."""
    global _salt
    _salt = f"+shiplap:{digest()}"
    torch_private.salt_compile_caches(_salt)


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
    tuned_choices.ready()
    torch_private.salt_compile_caches(_salt)
    torch_private.salt_workers()


def digest() -> str:
    """sha256 over every op's declaration, reference, gradient and kernels, and over the choices among them."""
    state = hashlib.sha256()
    for name in sorted(_sources):
        if name not in _identities:
            _identities[name] = _sources[name]()
        state.update(f"{name}={_identities[name]};".encode())
    for part in (tuned_choices.digest, *_parts):
        state.update(f"{part()};".encode())
    return state.hexdigest()[:16]
