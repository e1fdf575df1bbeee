"""``@sl.adopt``: a declaration of an op that somebody else registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shiplap.compat import calls
from shiplap.errors import error
from shiplap.op.declare import check_name, read_spec
from shiplap.op.op import Op

__all__ = ["AdoptedOp", "adopt"]


class AdoptedOp(Op):
    """An op that someone else registered, with a declaration of what it should be: it can be audited, not extended."""

    def _register(self) -> None:
        packet = getattr(getattr(torch.ops, self.spec.namespace), self.spec.opname, None)
        if packet is None:
            raise error(
                "SL501",
                where=self.spec.name,
                got="not registered",
                expected=f"torch.ops.{self.spec.name}",
                fix="import the library that registers it first",
            )
        self.overload = self.raw = packet.default
        self._split, self._plain = self.raw is not self.overload, calls.builtin(self.raw)

    def kernel(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"{self.spec.name} is adopted: its kernels are registered elsewhere; declare it with sl.op instead"
        )

    def backward(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"{self.spec.name} is adopted: its gradient is registered elsewhere; declare it with sl.op instead"
        )


def adopt(name: str, **declaration: Any) -> Callable[[Callable[..., Any]], AdoptedOp]:
    """Declare what an already registered torch op should do, so that it can be audited: ``sl.audit(op)``.

    Takes the keyword arguments of :func:`op`; the decorated function is the reference, as there. Nothing is registered
    or changed: schema, fake, gradient and kernels stay those of the op's own library.
    """
    check_name(name)

    def declare(fn: Callable[..., Any]) -> AdoptedOp:
        keywords: dict[str, Any] = {
            "dims": {},
            "bounds": {},
            "requires": (),
            "mutates": (),
            "contiguous": (),
            "outputs": (),
            "autocast": "widest",
            **declaration,
        }
        return AdoptedOp(read_spec(name, fn, **keywords), fn)

    return declare
