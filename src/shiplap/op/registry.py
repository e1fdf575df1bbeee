"""All declared ops of this process, and the digest of everything a compiled graph may have been specialised on."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from shiplap import compat

if TYPE_CHECKING:
    from shiplap.op.op import Op

__all__ = ["add", "digest", "find", "ops"]

_ops: dict[str, Op] = {}
_salt = ""


def ops() -> tuple[Op, ...]:
    """Declared ops, sorted by name."""
    return tuple(_ops[name] for name in sorted(_ops))


def find(name: str) -> Op | None:
    return _ops.get(name)


def add(op: Op) -> None:
    """Register or replace ``op``; from now on compiled artefacts of another set of declarations do not match."""
    _ops[op.spec.name] = op
    refresh()


def refresh() -> None:
    """Recompute the salt in torch's compile cache keys: called whenever a declaration, kernel or gradient changes."""
    global _salt
    new = f"+shiplap:{digest()}"
    compat.salt_compile_caches(_salt, new)
    _salt = new


def ensure() -> None:
    """Put the salt back if somebody set the tag: called at each trace, which comes before the cache is asked."""
    compat.salt_compile_caches(_salt, _salt)


def digest() -> str:
    """sha256 over every op's declaration, reference, gradient and kernels."""
    state = hashlib.sha256()
    for name in sorted(_ops):
        state.update(f"{name}={_ops[name].identity};".encode())
    return state.hexdigest()[:16]
