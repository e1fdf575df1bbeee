"""``torch.library`` with types: what is registered together is held, and forgotten, together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.library import Library

if TYPE_CHECKING:
    from torch._C import DispatchKeySet
    from torch._ops import OpOverload

__all__ = ["Keys", "Overload", "Registrations", "find_overload"]

Overload: TypeAlias = "OpOverload[..., Any]"  # a registered op: ``torch.ops.<namespace>.<name>.default``
Keys: TypeAlias = "DispatchKeySet"
Implementation: TypeAlias = Callable[..., Any]


class Registrations:
    """Ops of one namespace and their implementations, as long as this object is not told to forget them."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        library: Any = Library  # torch gives it no types
        self._library = library(namespace, "FRAGMENT")

    def define(self, schema: str, tags: Sequence[torch.Tag] = ()) -> None:
        """Define an op by its schema, which begins with its name."""
        self._library.define(schema, tags=tuple(tags))

    def overload(self, name: str) -> Overload:
        """The op ``name``, once it is defined."""
        overload: Overload = getattr(getattr(torch.ops, self.namespace), name).default
        return overload

    def renewed(self, name: str) -> Overload:
        """The op ``name`` as another Python object of the same registration: code compiled for the one before, which
        is guarded by identity, is not used for it. This is what torch does itself when it forgets a library."""
        namespace = getattr(torch.ops, self.namespace)
        if name in vars(namespace):
            delattr(namespace, name)
        return self.overload(name)

    def implement(self, name: str, function: Implementation) -> None:
        """The implementation for every device type, below autograd and autocast."""
        self._library.impl(name, function, "CompositeExplicitAutograd")

    def fake(self, name: str, function: Implementation) -> None:
        """The implementation for tensors without data."""
        torch.library.register_fake(f"{self.namespace}::{name}", function, lib=self._library)

    def record(self, name: str, function: Implementation) -> None:
        """The implementation that autograd calls: ``function(dispatch key set, *args)``."""
        self._library.impl(name, function, "Autograd", with_keyset=True)

    def skip_autograd(self, name: str) -> None:
        """Calls go straight below autograd: the implementation sees to gradients, or there are none."""
        self._library.impl(name, torch.library.fallthrough_kernel, "Autograd")

    def cast(self, name: str, overload: Overload, cast: Callable[[str, tuple[Any, ...]], tuple[Any, ...]]) -> None:
        """Under ``torch.autocast`` call ``overload`` with ``cast(device_type, args)``."""
        for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
            self._library.impl(name, _autocast(overload, device_type, getattr(torch._C.DispatchKey, key), cast), key)

    def forget(self) -> None:
        """Undo everything, so that the ops can be declared again."""
        self._library._destroy()


def find_overload(namespace: str, name: str) -> Overload | None:
    """The op that somebody registered. None if nobody did."""
    packet = getattr(getattr(torch.ops, namespace), name, None)
    return None if packet is None else packet.default


def _autocast(
    overload: Overload, device_type: str, key: Any, cast: Callable[[str, tuple[Any, ...]], tuple[Any, ...]]
) -> Implementation:
    keys = torch._C.DispatchKeySet(key)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return overload(*cast(device_type, args), **kwargs)

    return kernel
