"""All declared ops of this process."""

from __future__ import annotations

from shiplap.dispatch import compile_cache_key
from shiplap.dispatch.op import Op, declared


def ops() -> tuple[Op, ...]:
    """Return the declared ops, sorted by name."""
    return tuple(declared[name] for name in sorted(declared))


def find(name: str) -> Op | None:
    """Return the op ``namespace::name``, or None."""
    return declared.get(name)


def forget(name: str) -> None:
    """Remove a declared op.

    Tests do so, since their ops must not meet those of other tests. Its registrations in torch stay.
    """
    del declared[name]
    compile_cache_key.remove(name)
