"""All declared ops of this process."""

from __future__ import annotations

from shiplap.dispatch import compile_cache_key
from shiplap.dispatch.op import Op, declared_ops


def declared_op_list() -> tuple[Op, ...]:
    """Declared ops, sorted by name."""
    return tuple(declared_ops[name] for name in sorted(declared_ops))


def find_declared_op(name: str) -> Op | None:
    """The op ``namespace::name``, or None."""
    return declared_ops.get(name)


def forget_op(name: str) -> None:
    """Declare an op no more: for tests, whose ops must not meet those of other tests. What torch has of it stays."""
    del declared_ops[name]
    compile_cache_key.remove_op_from_key(name)
