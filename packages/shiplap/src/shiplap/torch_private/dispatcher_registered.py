"""What the dispatcher of this process holds: all registered ops, and which module registered them."""

from __future__ import annotations

import sys

import torch
from torch.library import Library

from shiplap.torch_private.dispatcher_library import Overload, find_overload


def names() -> frozenset[str]:
    """``namespace::name`` or ``namespace::name.overload`` of every op that is registered now."""
    return frozenset(torch._C._dispatch_get_all_op_names())


def registrar(name: str) -> str:
    """The module of the Python function that ``torch.library.custom_op`` made the op of; empty if it is another op."""
    custom = sys.modules.get("torch._library.custom_ops")
    definition = getattr(custom, "OPDEFS", {}).get(name)
    return str(getattr(getattr(definition, "_init_fn", None), "__module__", ""))


def registrars(package: str) -> frozenset[str]:
    """Namespaces of the ``torch.library.Library`` objects that modules of ``package`` hold."""
    prefix = package + "."
    modules = [m for n, m in list(sys.modules.items()) if m is not None and (n == package or n.startswith(prefix))]
    held = (v for m in modules for v in list(vars(m).values()) if issubclass(type(v), Library))  # __class__ may warn
    return frozenset(library.ns for library in held)


def composite(name: str) -> bool:
    """Whether the op is made of other ops, so that a dispatch mode sees those in place of it."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


def without_data(name: str) -> bool:
    """Whether a call with meta tensors finds an implementation."""
    namespace, _, rest = name.partition("::")
    op: Overload | None = find_overload(namespace, rest)
    return op is not None and bool(torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "Meta"))
