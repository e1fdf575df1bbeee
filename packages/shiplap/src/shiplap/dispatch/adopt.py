"""``@sl.adopt``, a declaration of an op that another library has registered, or of what a new op takes over.

A new op takes over the kernels and the gradient of an existing implementation, which are called unchanged. The source
is an op that is registered in torch (by ``TORCH_LIBRARY``, ``custom_op`` or ``triton_op``), a class derived from
``autograd.Function``, or a function, such as one of pybind11. The declared op calls it below autograd. The gradient is
computed by another run of the source under autograd, since torch does not state what else a registered formula reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeAlias, TypeGuard, Unpack, overload

import torch
from torch import Tensor

from shiplap.declare.choices import convert_call
from shiplap.declare.code_parts import applied_class
from shiplap.declare.gradient import GradientFn
from shiplap.declare.named_parameters import callable_name
from shiplap.declare.signature import DECLARED_TAGS, DeclarationKeywords, check_keywords, check_op_name, read_spec
from shiplap.declare.spec import OpSpec
from shiplap.dispatch.op import ConvertingOp, Op, op
from shiplap.errors import ShiplapError, error
from shiplap.plan.rules import is_choice
from shiplap.torch_private import dispatcher_calls
from shiplap.torch_private.dispatcher_calls import P, R
from shiplap.torch_private.dispatcher_library import dispatch_keys, find_overload, has_gradient
from shiplap.torch_private.dispatcher_transforms import is_transform_active


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
        got, fix = callable_name(source), 'pass into="namespace::name" too'
        if inspect.isfunction(source) and not declaration:
            got = f"no name, but the function {got}"
            fix = (
                f"write the decorator with the name of the op that {source.__name__} describes, as in "
                '@sl.adopt("aten::relu"). To take the function over as a kernel, ' + fix
            )
        raise error("SL142", where="@sl.adopt", got=got, expected="the name of an op that torch knows", fix=fix)
    if devices or differentiable is not None or "tags" in declaration:
        word = "devices=" if devices else "tags=" if "tags" in declaration else "differentiable="
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
        spec = self.spec_of(fn)
        parts = read_source(spec, self.source, self.devices, self.differentiable)
        self.declare.declaration["tags"] = (*spec.tags, *parts.tags)
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


# --- what an implementation that exists gives -------------------------------------------------------------------------


Source: TypeAlias = str | Callable[..., Any] | type[torch.autograd.Function]
ANY_SOURCE = "the name of an op, an autograd.Function or a function"
DEVICES = ("cpu", "cuda")  # for which a source without a dispatch key is called
DEVICE_KEYS = {"CPU": "cpu", "CUDA": "cuda", "XPU": "xpu", "MPS": "mps"}
# Under these keys one implementation serves each device type.
EVERYWHERE = ("CompositeExplicitAutograd", "CompositeImplicitAutograd")
OTHER_RULES = {
    "AutocastCPU": "its autocast rule, in place of which autocast= of the declaration is in force",
    "AutocastCUDA": "its autocast rule, in place of which autocast= of the declaration is in force",
    "FuncTorchBatched": "its rule for torch.vmap: the kernel runs once for each sample",
}


@dataclass(frozen=True)
class Adoption:
    """The parts that a declared op has taken from an existing implementation, and those that it could not take.

    Attributes:
        source: the name of the implementation.
        taken, left: what was taken, and what was left, one line of text for each. The reason is added where it is
            not obvious.
    """

    source: str
    taken: tuple[str, ...]
    left: tuple[str, ...]

    def __str__(self) -> str:
        """Return the parts that the new op has taken from the source, and those that were left, one per line."""
        rows = [*(f"  taken  {text}" for text in self.taken), *(f"  left   {text}" for text in self.left)]
        return "\n".join([f"from {self.source}:", *rows])


@dataclass(frozen=True)
class SourceParts:
    """An existing implementation as a source of kernels and a gradient.

    ``name`` is its name, ``call`` the function to call, and ``devices`` the device types that have kernels.
    ``differentiable`` states whether it has a gradient. ``left`` holds lines of text about what cannot be taken.
    ``tags`` are those of its torch tags that a declaration may give.
    """

    name: str
    call: Callable[..., Any]
    devices: tuple[str, ...]
    differentiable: bool
    left: tuple[str, ...] = ()
    tags: tuple[torch.Tag, ...] = ()


def take_over(op: Op, parts: SourceParts) -> Adoption:
    """Bind the kernels and the gradient of an existing implementation, described by ``parts``, to ``op``. Return an
    ``Adoption``, which states in words what was taken and what was left.
    """
    spec = op.spec
    taken = [f"kernel on {', '.join(parts.devices)}"] if parts.devices else []
    left = list(parts.left) + ([] if parts.devices else ["kernels: torch has none for a device type"])
    for device in parts.devices:
        op.kernel(device, _kernel_by_name(spec, parts.call), name=parts.name.rpartition("::")[2], strided=True)
    if not op.differentiable:
        left += ["gradient: the declared op has none"] if parts.differentiable else []
    # The gradient would belong to other random numbers than the result.
    elif parts.differentiable and spec.draws:
        left.append("gradient: run again, the source would draw other random numbers, declare one with @op.backward")
    elif parts.differentiable:
        saves = [a.name for a in spec.tensors]
        op.backward(_source_gradient(spec, parts.call), saves=saves, strided=True, once_differentiable=True)
        taken.append("gradient, by running the source again; a gradient of the gradient is refused")
    else:
        left.append("gradient: the source has none, declare one with @op.backward")
    taken.append("fake: derived from the declaration, in place of the source's")
    taken += [f"tag {tag.name}" for tag in parts.tags]
    return Adoption(parts.name, tuple(taken), tuple(dict.fromkeys(left)))


def _is_function_class(value: object) -> TypeGuard[type[torch.autograd.Function]]:
    """Return whether ``value`` is a class derived from ``torch.autograd.Function``."""
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)


def read_source(
    spec: OpSpec, source: Source, devices: tuple[str, ...], differentiable: bool | None = None
) -> SourceParts:
    """Return the name, function, device types and differentiability of ``source`` as ``SourceParts``. Raise ``SL142``
    if it does not fit the declaration, or ``SL501`` if torch has no such op.

    ``devices`` are the device types on which it is called. If empty, they are those for which it has kernels.
    ``differentiable`` states whether autograd can differentiate a function. It is None for any other source.
    """
    source = applied_class(source) or source
    if differentiable is not None and (isinstance(source, (str, type)) or not callable(source)):
        got, fix = f"differentiable={differentiable}", "leave differentiable= out"
        raise _unfit_source_error(spec, got, "a function as the source, with differentiable=", fix)
    if isinstance(source, str):
        return _read_registered(spec, source, devices)
    if _is_function_class(source):
        # A forward without setup_context takes the context as its first argument.
        own_context = source.setup_context is not torch.autograd.Function.setup_context
        _check_count(spec, source.__name__, source.forward, 0 if own_context else 1)
        return SourceParts(source.__name__, source.apply, devices or DEVICES, True)
    if not callable(source):
        raise _unfit_source_error(spec, f"a {type(source).__name__}", ANY_SOURCE, "pass one of these")
    name = callable_name(source)
    _check_count(spec, name, source, 0)
    return SourceParts(name, source, devices or DEVICES, bool(differentiable))


def _read_registered(spec: OpSpec, name: str, devices: tuple[str, ...]) -> SourceParts:
    """Return the op that is registered in torch as ``name`` as ``SourceParts``. If ``devices`` is empty, the device
    types are those for which it has kernels. Raise ``SL142`` if its schema does not fit the declaration, or ``SL501``
    if there is no such op.
    """
    namespace, _, rest = name.partition("::")
    overload = find_overload(namespace, rest) if rest else None
    if overload is None:
        fix = "import the library that registers it first"
        raise error("SL501", where=spec.name, got=f"{name} is not registered", expected=f"torch.ops.{name}", fix=fix)
    if name == spec.name:
        raise _unfit_source_error(
            spec, f"into={name!r}, the name that it has", "another name: torch keeps both ops", "change into="
        )
    schema = overload._schema
    keys = dispatch_keys(name)
    found = [device for key, device in DEVICE_KEYS.items() if key in keys]
    everywhere = list(DEVICES) if keys & {*EVERYWHERE} else []
    there = devices or tuple(dict.fromkeys([*found, *everywhere]))
    written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    own = [a.name for a in spec.args]
    names = [a.name for a in schema.arguments]
    # Arguments are matched by name if all names agree, else by position.
    places = dict(zip(names, own, strict=False)) if {*own} - {*names} else {n: n for n in own}
    required = [a.name for a in schema.arguments if not (a.has_default_value() or _is_optional(a))]
    if len(own) > len(names) or {*required} - places.keys():
        raise _unfit_source_error(spec, str(schema), f"as many arguments as the declaration has: {', '.join(own)}")
    # An optional argument without a default that the declaration leaves out is passed as None, to which nothing writes.
    absent = [a.name for a in schema.arguments if a.name not in places and not a.has_default_value()]
    written -= {*absent}
    if {places.get(n, n) for n in written} != {*spec.mutated}:
        got, fix = (
            f"it writes to {', '.join(sorted(written)) or 'no argument'}",
            "declare the same arguments in mutates=",
        )
        raise _unfit_source_error(spec, got, f"writes to {', '.join(spec.mutated) or 'no argument'}", fix)

    def call(*args: Any) -> Any:
        """Return the result of the op registered in torch for the declared arguments ``args``. Each is passed under its
        name in the op's schema.
        """
        values = dict(zip(own, args, strict=True))
        return overload(**dict.fromkeys(absent), **{name: values[mine] for name, mine in places.items()})

    left = [text for key, text in OTHER_RULES.items() if key in keys]
    left += [
        f"argument {name}: it is not declared, so it {'is always None' if name in absent else 'keeps its default'}"
        for name in names
        if name not in places
    ]
    # A declared op that writes to its arguments can have no backward.
    differentiable = has_gradient(name) and not written
    tags = tuple(tag for tag in DECLARED_TAGS if tag in overload.tags)
    return SourceParts(name, call, there, differentiable, tuple(dict.fromkeys(left)), tags)


def _is_optional(argument: torch.Argument) -> bool:
    """Return whether the ``argument`` of a schema may be None."""
    return isinstance(argument.type, torch.OptionalType)


def _check_count(spec: OpSpec, name: str, function: Callable[..., Any], context: int) -> None:
    """Raise ``SL142`` if ``function`` cannot take the declared arguments by position, after ``context`` further
    arguments. If its signature is unknown, nothing is checked. ``name`` is that of the function in the error.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a compiled extension
        return
    try:
        signature.bind(*[None] * (len(spec.args) + context))
    except TypeError as e:
        expected = f"{len(spec.args)} arguments by position: {', '.join(a.name for a in spec.args)}"
        raise _unfit_source_error(spec, f"{name}{signature}: {e}", expected) from None


def _unfit_source_error(spec: OpSpec, got: str, expected: str, fix: str = "") -> ShiplapError:
    """Return the error ``SL142`` for a source that does not fit the declaration. ``got`` and ``expected`` describe the
    difference, and ``fix`` is the remedy, if there is one.
    """
    return error("SL142", where=spec.name, got=got, expected=expected, fix=fix)


def _kernel_by_name(spec: OpSpec, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel function that takes the arguments by name, passes them in declared order to ``call``, and returns
    the result. ``call`` is the existing implementation that the new op takes over.
    """

    def kernel(**values: Any) -> Any:
        """Run the existing implementation without recording gradients. Return its result, which is a tuple for several
        outputs.
        """
        # The op's own gradient is recorded above the kernel, not the operations of the source.
        with torch.no_grad():
            result = call(*[values[a.name] for a in spec.args])
        return tuple(result) if isinstance(result, list) and len(spec.results) > 1 else result

    return kernel


def _source_gradient(spec: OpSpec, call: Callable[..., Any]) -> GradientFn:
    """Return the gradient function ``(grad, saved, needs)`` of the new op. It runs ``call``, the existing
    implementation, again under autograd and differentiates it. It returns a dict from the name of each tensor argument
    to its gradient, which is None if it is not needed.
    """
    tensors = {a.name for a in spec.tensors}

    def gradients(grad: Any, saved: Any, needs: Any) -> Mapping[str, Any]:
        """Return the gradient of each needed argument by name, from a new run of the existing implementation under
        autograd. Raise ``SL304`` inside a transform of torch.func.
        """
        if is_transform_active():  # its tensors cannot be made leaves
            got, fix = "a gradient by torch.func, of a source that autograd differentiates", "declare @op.backward"
            raise error("SL304", where=spec.name, got=got, expected="a gradient by autograd", fix=fix)
        wanted = [name for name, needed in vars(needs).items() if needed]
        given = {a.name: vars(saved)[a.name] for a in spec.args}
        leaves = {n: _as_leaf(v) if n in wanted else v for n, v in given.items()}
        with torch.enable_grad():
            result = call(*leaves.values())
        upper = grad if isinstance(grad, (tuple, list)) else (grad,)
        pairs = [
            (r, g)
            for r, g in zip(_flatten_nested(result), _flatten_nested(upper), strict=True)
            if _requires_gradient(r)
        ]
        # Integer tensors among the needed arguments have no gradient.
        inputs = [t for name in wanted for t in _flatten_nested(leaves[name]) if _requires_gradient(t)]
        found = iter(torch.autograd.grad([r for r, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True))
        return {name: _in_form_of(leaves[name], found) if name in wanted else None for name in given if name in tensors}

    return gradients


def _as_leaf(value: Any) -> Any:
    """Return a value, or the members of a list, with floating-point tensors replaced by detached ones that require
    gradients.
    """
    if isinstance(value, (list, tuple)):
        return [_as_leaf(v) for v in value]
    floats = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return value.detach().requires_grad_() if floats else value


def _flatten_nested(value: Any) -> list[Any]:
    """Return the innermost values of nested lists and tuples as one list."""
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _flatten_nested(v)]
    return [value]


def _requires_gradient(value: Any) -> bool:
    """Return whether the value is a tensor that requires a gradient."""
    return isinstance(value, Tensor) and value.requires_grad


def _in_form_of(value: Any, found: Any) -> Any:
    """Return the next gradient of the iterator ``found`` for ``value``. For a list, return a list with one gradient for
    each member. Return None for a value that requires no gradient.
    """
    if isinstance(value, (list, tuple)):
        return [_in_form_of(v, found) for v in value]
    return next(found) if _requires_gradient(value) else None
