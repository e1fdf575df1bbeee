"""``@sl.adopt``: a declaration of an op that somebody else registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, Unpack

from shiplap.declare.signature import DeclarationKeywords, check_keywords, check_op_name, read_spec
from shiplap.dispatch.op import Op
from shiplap.errors import error
from shiplap.torch_private import dispatcher_calls
from shiplap.torch_private.dispatcher_calls import P, R
from shiplap.torch_private.dispatcher_library import find_overload


class AdoptedOp(Op[P, R]):
    """An op that someone else registered, with a declaration of what it should be: it can be audited, not extended."""

    def _register(self) -> None:
        """Find what is registered; change nothing."""
        overload = find_overload(self.spec.namespace, self.spec.opname)
        if overload is None:
            raise error(
                "SL501",
                where=self.spec.name,
                got="not registered",
                expected=f"torch.ops.{self.spec.name}",
                fix="import the library that registers it first",
            )
        self.overload = self.raw = overload
        self.separable, self.direct = False, dispatcher_calls.builtin_of(overload)

    def _extend(self, what: str) -> NoReturn:
        raise TypeError(f"{self.spec.name} is adopted: its {what} registered elsewhere; declare it with sl.op instead")


def adopt(name: str, **declaration: Unpack[DeclarationKeywords]) -> AdoptDecorator:
    """Declare what an already registered torch op should do, so that it can be audited: ``sl.audit(op)``.

    The decorated function is the reference, as with :func:`op`. Nothing is registered or changed: the schema, the fake
    implementation, the gradient and the kernels remain those of the library that registered the op.

    Args:
        name: ``"namespace::name"`` of an op that torch knows.
        declaration: the keyword arguments of :func:`op`.

    Raises:
        ShiplapError: SL1xx for a declaration that is not valid, SL501 for a name that no library has registered.
    """
    return AdoptDecorator(name, **declaration)


class AdoptDecorator:
    """What ``@sl.adopt(...)`` is: a decorator that keeps the types of the function."""

    def __init__(self, name: str, **declaration: Unpack[DeclarationKeywords]) -> None:
        check_op_name(name)
        check_keywords(name, declaration)
        self.name, self.declaration = name, declaration

    def __call__(self, fn: Callable[P, R]) -> AdoptedOp[P, R]:
        return AdoptedOp(read_spec(self.name, fn, **self.declaration), fn)
