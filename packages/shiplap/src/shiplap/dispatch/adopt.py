"""``@sl.adopt``, a declaration of an op that another library has registered, or of what a new op takes over."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import NoReturn, Unpack, overload

from shiplap.declare.choices import convert_call
from shiplap.declare.named_parameters import callable_name
from shiplap.declare.signature import DeclarationKeywords, check_keywords, check_op_name, read_spec
from shiplap.dispatch.op import ConvertingOp, Op, op
from shiplap.dispatch.takeover import Source, read_source, take_over
from shiplap.errors import error
from shiplap.plan.rules import is_choice
from shiplap.torch_private import dispatcher_calls
from shiplap.torch_private.dispatcher_calls import P, R
from shiplap.torch_private.dispatcher_library import find_overload


class AdoptedOp(Op[P, R]):
    """An op of another library, with a declaration of its behaviour. It can be audited, but no kernel or gradient can
    be attached to it.
    """

    def _register(self) -> None:
        """Find the overload that another library has registered under the op's name, and use it. Nothing is registered
        or changed. Raise ``SL501`` if there is none.
        """
        registered = find_overload(self.spec.namespace, self.spec.opname)
        if registered is None:
            raise error(
                "SL501",
                where=self.spec.name,
                got="not registered",
                expected=f"torch.ops.{self.spec.name}",
                fix="import the library that registers it first",
            )
        self.overload = self.below_autograd = registered
        self.can_skip_dispatcher, self.call_kernel = False, dispatcher_calls.builtin_of(registered)

    def _extend(self, what: str) -> NoReturn:
        """Raise ``TypeError``, since kernels and gradients cannot be attached to an op that another library has
        registered. ``what`` begins the sentence of the error, such as ``"kernels are"``.
        """
        raise TypeError(f"{self.spec.name} is adopted: its {what} registered elsewhere; declare it with sl.op instead")


class ConvertingAdoptedOp(AdoptedOp[P, R], ConvertingOp[P, R]):
    """An adopted op that takes members of an ``Enum`` or one of a few literal values, or returns a tuple of one result.
    The library that registered the op does not check such arguments.
    """

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the registered op with arguments converted to its schema. Raise the catalogue error of an argument that
        is none of its declared choices.
        """
        values, named = convert_call(self.spec, args, kwargs)
        given = {**{a.name: v for a, v in zip(self.spec.args, values, strict=False)}, **named}
        # The registered op does not know the choices, so they are checked here.
        for arg in self.spec.args:
            if arg.choices and arg.name in given:
                is_choice(self.spec.name, arg).check_call({f"a_{arg.name}": given[arg.name]})
        return super().__call__(*args, **kwargs)


@overload
def adopt(source: str, *, into: None = None, **declaration: Unpack[DeclarationKeywords]) -> AdoptDecorator: ...


@overload
def adopt(
    source: Source,
    *,
    into: str,
    devices: Iterable[str] = (),
    differentiable: bool | None = None,
    **declaration: Unpack[DeclarationKeywords],
) -> TakeoverDecorator: ...


def adopt(
    source: Source,
    *,
    into: str | None = None,
    devices: Iterable[str] = (),
    differentiable: bool | None = None,
    **declaration: Unpack[DeclarationKeywords],
) -> AdoptDecorator | TakeoverDecorator:
    """Declare what an existing implementation should do, so that ``sl.audit(op)`` can audit it.

    The decorated function is the reference, as with :func:`op`. Without ``into``, the source is a registered torch op.
    Nothing is then registered or changed. The schema, the fake implementation, the gradient and the kernels remain
    those of the library that registered the op.

    With ``into``, declare a new op that takes over the kernels and the gradient of the source. The shapes, the checks
    and everything else follow from the declaration. ``op.adoption`` lists what was taken and what was left.

    Args:
        source: ``"namespace::name"`` of an op registered in torch. With ``into`` it may also be a class derived from
            ``torch.autograd.Function``, or a function that takes the arguments by position, such as one of pybind11.
        into: the name of the new op, ``"namespace::name"``.
        devices: the device types on which the new op calls the source. By default they are those for which torch has a
            kernel, and ``"cpu"`` and ``"cuda"`` for a function.
        differentiable: for a function, whether autograd can differentiate it. Its gradient is then taken over, too. By
            default it is not. For other sources it follows from the source.
        declaration: the keyword arguments of :func:`op`.

    Raises:
        ShiplapError: ``SL1xx`` if the declaration is not valid, ``SL142`` if the source does not fit the declaration,
            ``SL501`` if no library has registered the name.
    """
    if into is not None:
        types = (devices,) if isinstance(devices, str) else tuple(devices)
        return TakeoverDecorator(source, into, types, differentiable, **declaration)
    if not isinstance(source, str):
        if inspect.isfunction(source) and not declaration:  # the decorator without parentheses
            check_op_name(source)
        got, fix = callable_name(source), 'pass into="namespace::name" too'
        raise error("SL142", where="@sl.adopt", got=got, expected="the name of an op that torch knows", fix=fix)
    if devices or differentiable is not None:
        word = "devices=" if devices else "differentiable="
        fix = f"pass into= as well, or leave {word} out"
        raise error("SL142", where=source, got=f"{word} without into=", expected=f"into= with {word}", fix=fix)
    return AdoptDecorator(source, **declaration)


class TakeoverDecorator:
    """The decorator that ``@sl.adopt(source, into=...)`` returns. It makes a new op of the decorated function and keeps
    the function's parameter types for type checkers.
    """

    def __init__(
        self,
        source: Source,
        into: str,
        devices: tuple[str, ...],
        differentiable: bool | None,
        **declaration: Unpack[DeclarationKeywords],
    ) -> None:
        """Set the source, its device types and whether autograd differentiates it. Prepare the declaration of the new
        op ``into``.
        """
        self.source, self.devices, self.differentiable = source, devices, differentiable
        self.declare = op(into, **declaration)
        self.spec_of = partial(read_spec, into, **declaration)

    def __call__(self, fn: Callable[P, R]) -> Op[P, R]:
        """Return the new op declared by the reference ``fn``, with the kernels and the gradient of the source. Raise
        ``SL142`` before anything is declared if the source does not fit.
        """
        # first: a source that does not fit is no op
        parts = read_source(self.spec_of(fn), self.source, self.devices, self.differentiable)
        made = self.declare(fn)
        made.adoption = take_over(made, parts)
        return made


class AdoptDecorator:
    """The decorator that ``@sl.adopt(...)`` returns. It makes an :class:`AdoptedOp` of the decorated function and keeps
    the function's parameter types for type checkers.
    """

    def __init__(self, name: str, **declaration: Unpack[DeclarationKeywords]) -> None:
        """Check the op's name and the keywords of the declaration, and store them."""
        check_op_name(name)
        check_keywords(name, declaration)
        self.name, self.declaration = name, declaration

    def __call__(self, fn: Callable[P, R]) -> AdoptedOp[P, R]:
        """Return the adopted op whose reference is ``fn``. If the declaration needs it, the op converts arguments."""
        spec = read_spec(self.name, fn, **self.declaration)
        converts = spec.converts or any(a.choices for a in spec.args)
        return (ConvertingAdoptedOp if converts else AdoptedOp)(spec, fn)
