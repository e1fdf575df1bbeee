"""The takeover of the kernels and the gradient of an existing implementation by a declaration. They are called
unchanged.

The source is an op that is registered in torch (by ``TORCH_LIBRARY``, ``custom_op`` or ``triton_op``), a class derived
from ``autograd.Function``, or a function, such as one of pybind11. The declared op calls it below autograd. The
gradient is computed by another run of the source under autograd, since torch does not state what else a registered
formula reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shiplap.declare.gradient import GradientFn
from shiplap.declare.named_parameters import callable_name
from shiplap.declare.spec import OpSpec
from shiplap.dispatch.op import Op
from shiplap.errors import ShiplapError, error
from shiplap.torch_private.dispatcher_library import dispatch_keys, find_overload, has_gradient
from shiplap.torch_private.dispatcher_transforms import is_transform_active

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
    """

    name: str
    call: Callable[..., Any]
    devices: tuple[str, ...]
    differentiable: bool
    left: tuple[str, ...] = ()


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
    return Adoption(parts.name, tuple(taken), tuple(dict.fromkeys(left)))


def read_source(
    spec: OpSpec, source: Source, devices: tuple[str, ...], differentiable: bool | None = None
) -> SourceParts:
    """Return the name, function, device types and differentiability of ``source`` as ``SourceParts``. Raise ``SL142``
    if it does not fit the declaration, or ``SL501`` if torch has no such op.

    ``devices`` are the device types on which it is called. If empty, they are those for which it has kernels.
    ``differentiable`` states whether autograd can differentiate a function. It is None for any other source.
    """
    if differentiable is not None and (isinstance(source, (str, type)) or not callable(source)):
        got, fix = f"differentiable={differentiable}", "leave differentiable= out"
        raise _unfit_source_error(spec, got, "a function as the source, with differentiable=", fix)
    if isinstance(source, str):
        return _read_registered(spec, source, devices)
    if isinstance(source, type) and issubclass(source, torch.autograd.Function):
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
    return SourceParts(name, call, there, differentiable, tuple(dict.fromkeys(left)))


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
