"""``@sl.adopt``: a declaration of an op that another library has registered."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, Unpack

from shiplap.declare.choices import convert_call
from shiplap.declare.signature import DeclarationKeywords, check_keywords, check_op_name, read_spec
from shiplap.dispatch.op import ConvertingOp, Op
from shiplap.errors import error
from shiplap.plan.rules import is_choice
from shiplap.torch_private import dispatcher_calls
from shiplap.torch_private.dispatcher_calls import P, R
from shiplap.torch_private.dispatcher_library import find_overload


class AdoptedOp(Op[P, R]):
    """An op of another library, with a declaration of its behaviour. It can be audited, but not extended."""

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
        self.overload = self.below_autograd = overload
        self.can_skip_dispatcher, self.call_kernel = False, dispatcher_calls.builtin_of(overload)

    def _extend(self, what: str) -> NoReturn:
        raise TypeError(f"{self.spec.name} is adopted: its {what} registered elsewhere; declare it with sl.op instead")


class ConvertingAdoptedOp(AdoptedOp[P, R], ConvertingOp[P, R]):
    """An adopted op with choices, which its own library does not check, or with a tuple of one as result."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        values, named = convert_call(self.spec, args, kwargs)
        given = {**{a.name: v for a, v in zip(self.spec.args, values, strict=False)}, **named}
        for arg in self.spec.args:
            if arg.choices and arg.name in given:
                is_choice(self.spec.name, arg).check_call({f"a_{arg.name}": given[arg.name]})
        return super().__call__(*args, **kwargs)


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
    """The type of ``@sl.adopt(...)``: a decorator that keeps the types of the function."""

    def __init__(self, name: str, **declaration: Unpack[DeclarationKeywords]) -> None:
        check_op_name(name)
        check_keywords(name, declaration)
        self.name, self.declaration = name, declaration

    def __call__(self, fn: Callable[P, R]) -> AdoptedOp[P, R]:
        spec = read_spec(self.name, fn, **self.declaration)
        converts = spec.converts or any(a.choices for a in spec.args)
        return (ConvertingAdoptedOp if converts else AdoptedOp)(spec, fn)
