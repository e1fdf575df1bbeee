"""``torch.library`` with types: what is registered together is held, and forgotten, together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.library import Library

if TYPE_CHECKING:
    from torch._C import DispatchKeySet
    from torch._ops import OpOverload

__all__ = ["Keys", "Overload", "Registrations", "find_overload", "numbered"]

Overload: TypeAlias = "OpOverload[..., Any]"  # a registered op: ``torch.ops.<namespace>.<name>.default``
Keys: TypeAlias = "DispatchKeySet"
Implementation: TypeAlias = Callable[..., Any]


_kept: list[Registrations] = []  # torch would free what is registered while another thread is calling it
_editions: dict[tuple[str, str], int] = {}


def numbered(name: str, edition: int) -> str:
    """What torch calls ``name`` of the ``edition``-th schema that was declared for it in this process."""
    return name if edition == 1 else f"{name}__{edition}"


class Registrations:
    """Ops of one namespace that belong together, and their implementations.

    They stay until the process ends: torch does not know whether a thread is inside a call, and what it removes, it
    frees. So the ops of another schema, the next ``edition``, have other names in torch. ``torch.ops.<namespace>.<name>``
    is always the op that was defined last.
    """

    def __init__(self, namespace: str, edition: int = 1) -> None:
        self.namespace, self.edition = namespace, edition
        library: Any = Library  # torch gives it no types
        self._library = library(namespace, "FRAGMENT")
        _kept.append(self)

    @classmethod
    def of(cls, namespace: str, name: str) -> Registrations:
        """Those of a schema that ``name`` has not had in this process."""
        edition = _editions[namespace, name] = _editions.get((namespace, name), 0) + 1
        return cls(namespace, edition)

    def define(self, schema: str, tags: Sequence[torch.Tag] = ()) -> None:
        """Define an op by its schema, which begins with its name."""
        name, opening, rest = schema.partition("(")
        self._library.define(f"{self._named(name)}{opening}{rest}", tags=tuple(tags))

    def _named(self, name: str) -> str:
        return numbered(name, self.edition)

    def overload(self, name: str) -> Overload:
        """The op ``name``, once it is defined."""
        overload: Overload = getattr(getattr(torch.ops, self.namespace), self._named(name)).default
        return overload

    def publish(self, *names: str) -> None:
        """``torch.ops.<namespace>.<name>`` is an op of this edition from now on."""
        namespace = getattr(torch.ops, self.namespace)
        for name in names if self.edition > 1 else ():
            setattr(namespace, name, getattr(namespace, self._named(name)))

    def renewed(self, name: str) -> Overload:
        """The op ``name`` as another Python object of the same registration: code compiled for the one before, which
        is guarded by identity, is not used for it. This is what torch does itself when it forgets a library."""
        namespace = getattr(torch.ops, self.namespace)
        if self._named(name) in vars(namespace):
            delattr(namespace, self._named(name))
        self.publish(name)
        return self.overload(name)

    def implement(self, name: str, function: Implementation) -> None:
        """The implementation for every device type, below autograd and autocast."""
        self._library.impl(self._named(name), function, "CompositeExplicitAutograd")

    def fake(self, name: str, function: Implementation) -> None:
        """The implementation for tensors without data."""
        torch.library.register_fake(f"{self.namespace}::{self._named(name)}", function, lib=self._library)

    def record(self, name: str, function: Implementation) -> None:
        """The implementation that autograd calls: ``function(dispatch key set, *args)``."""
        self._library.impl(self._named(name), function, "Autograd", with_keyset=True)

    def skip_autograd(self, name: str) -> None:
        """Calls go straight below autograd: the implementation sees to gradients, or there are none."""
        self._library.impl(self._named(name), torch.library.fallthrough_kernel, "Autograd")

    def cast(self, name: str, overload: Overload, cast: Callable[[str, tuple[Any, ...]], tuple[Any, ...]]) -> None:
        """Under ``torch.autocast`` call ``overload`` with ``cast(device_type, args)``."""
        for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
            kernel = _autocast(overload, device_type, getattr(torch._C.DispatchKey, key), cast)
            self._library.impl(self._named(name), kernel, key)


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
