"""All declared ops of this process."""

from __future__ import annotations

from shiplap.dispatch import compile_cache_key
from shiplap.dispatch.op import Op, declared


def ops() -> tuple[Op, ...]:
    """Declared ops, sorted by name."""
    return tuple(declared[name] for name in sorted(declared))


def find(name: str) -> Op | None:
    """The op ``namespace::name``, or None."""
    return declared.get(name)


def forget(name: str) -> None:
    """Declare an op no more: for tests, whose ops must not meet those of other tests. What torch has of it stays."""
    del declared[name]
    compile_cache_key.remove(name)
