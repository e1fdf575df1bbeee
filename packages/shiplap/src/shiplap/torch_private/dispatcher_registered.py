"""The contents of this process's dispatcher: all registered ops, and the modules that registered them."""

from __future__ import annotations

import sys

import torch
from torch.library import Library

from shiplap.torch_private.dispatcher_library import Overload, find_overload


def registered_names() -> frozenset[str]:
    """Return ``namespace::name`` or ``namespace::name.overload`` of every op that is registered now."""
    return frozenset(torch._C._dispatch_get_all_op_names())


def custom_op_module(name: str) -> str:
    """Return the module of the Python function behind an op of ``torch.library.custom_op``; empty for another op."""
    custom = sys.modules.get("torch._library.custom_ops")
    definition = getattr(custom, "OPDEFS", {}).get(name)
    return str(getattr(getattr(definition, "_init_fn", None), "__module__", ""))


def library_namespaces(package: str) -> frozenset[str]:
    """Return the namespaces of the ``torch.library.Library`` objects that modules of ``package`` hold."""
    prefix = package + "."
    modules = [m for n, m in list(sys.modules.items()) if m is not None and (n == package or n.startswith(prefix))]
    held = (v for m in modules for v in list(vars(m).values()) if issubclass(type(v), Library))  # __class__ may warn
    return frozenset(library.ns for library in held)


def is_composite(name: str) -> bool:
    """Return whether the op consists of other ops, so that a dispatch mode sees those in place of it."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


def has_meta_kernel(name: str) -> bool:
    """Return whether a call with meta tensors finds an implementation."""
    namespace, _, rest = name.partition("::")
    op: Overload | None = find_overload(namespace, rest)
    return op is not None and bool(torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "Meta"))
