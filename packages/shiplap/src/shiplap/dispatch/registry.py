"""All declared ops of this process."""

from __future__ import annotations

from pathlib import Path

from shiplap.dispatch import compile_cache_key
from shiplap.dispatch.op import Op, declared_ops
from shiplap.errors import error


def declared_op_list() -> tuple[Op, ...]:
    """Return all ops declared in this process, sorted by name."""
    return tuple(declared_ops[name] for name in sorted(declared_ops))


def find_declared_op(name: str) -> Op | None:
    """Return the op declared as ``namespace::name``, or None if there is none."""
    return declared_ops.get(name)


def require_op(value: object, where: str) -> None:
    """Raise ``SL501`` unless ``value`` is a declared op. ``where`` is the call that takes it, in the error."""
    if not isinstance(value, Op):
        raise error(
            "SL501",
            where=where,
            what="the object is not a declared op",
            got=f"{type(value).__name__} {value}",
            expected="what @sl.op or @sl.adopt returned",
            fix='declare what it should do: @sl.op(...), or @sl.adopt("namespace::name")',
        )


def command_target(name: str) -> str:
    """Return the argument with which commands such as ``shiplap build`` find the op ``namespace::name``. It is the
    module that declares the op if that module is part of a package, and otherwise the file. It is ``"TARGET"`` if no
    such op is declared.
    """
    op = declared_ops.get(name)
    if op is None:
        return "TARGET"
    module = op.reference.__module__
    # A module without a package may lie in any folder, which another process does not search.
    return module if "." in module or not Path(op.file).is_file() else str(op.file)


def forget_op(name: str) -> None:
    """Remove a declared op from the registry and from the keys of compile caches.

    Tests call this function, so that their ops do not affect other tests. The op's registrations in torch stay.
    """
    del declared_ops[name]
    compile_cache_key.remove_op_from_key(name)
