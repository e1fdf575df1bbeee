"""``Backward``: a declared gradient, and the checks of the gradients that it returns.

The inputs of the author's gradient function are passed by name and contiguous. A gradient that comes from ``torch.cat``
or ``sum`` is a view with other strides, and a saved tensor may be one, too. A function that launches a kernel on its
memory would misread it, as a kernel of the op itself would.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import wraps
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from shiplap.declare.choices import gives_result
from shiplap.declare.code_parts import AnyValue, HasCode
from shiplap.declare.generated_code import define_function
from shiplap.declare.named_parameters import bind_names, read_parameters
from shiplap.declare.saved_reads import UnknownReads, attributes_read
from shiplap.declare.spec import Arg, OpSpec
from shiplap.declare.values import Returned, Value
from shiplap.errors import ShiplapError, error
from shiplap.errors.declaration import SAVED_AND_NEEDS

Gradient: TypeAlias = Tensor | Sequence[Tensor | None] | None  # of one argument; a sequence for a list of tensors
Gradients: TypeAlias = Mapping[str, Gradient]  # by argument
GradientFn: TypeAlias = Callable[..., Gradients]  # of grad, saved and needs
Shape: TypeAlias = torch.Size | list[torch.Size | None] | None  # of an argument: of a list, the shape of each
Surrogate: TypeAlias = Callable[..., Returned]  # a function in plain PyTorch


class _DeclaredOp(Protocol):
    """The attributes of a declared op that this module uses, and its call. ``Op`` itself is in a package that this one
    must not import.
    """

    spec: OpSpec

    def __call__(self, *args: Value, **kwargs: Value) -> Returned:
        """Return the result of the op for these arguments."""


@dataclass(frozen=True)
class GradientOp:
    """An op that computes gradients of another op.

    ``op`` is the op that computes them. ``gives`` holds the names of the other op's arguments whose gradients are the
    results of ``op``, in the order of these results.
    """

    op: _DeclaredOp
    gives: tuple[str, ...]

    @classmethod
    def read(cls, spec: OpSpec, op: _DeclaredOp) -> GradientOp:
        """Return ``op``, another declared op that computes gradients of ``spec``, as a ``GradientOp``. Its arguments
        and results are matched by name. Raise ``SL110`` for a name or kind that does not fit.
        """
        own, where = op.spec, f"{spec.name}, gradient {op.spec.name}"
        known = {a.name: a for a in spec.args}
        grads, results = _gradient_argument_names(spec), set(spec.results)
        for arg in own.args:
            same = known.get(arg.name)
            fits = arg.tensor is not None if same is None else (arg.many, arg.scalar) == (same.many, same.scalar)
            if arg.name not in {*known, *grads, *results} or not fits or (arg.name in known and arg.name in grads):
                expected = ", ".join(dict.fromkeys([*grads, *known, *spec.results]))
                fix = "name each argument after a gradient, an argument or a result of the op"
                raise error("SL110", where=where, got=f"an argument {arg.name!r}", expected=expected, fix=fix)
        if own.mutated or own.returns or not own.outputs:
            raise error("SL110", where=where, got="results that are no fresh tensors", expected="fresh tensors")
        asked = [a.name for a in spec.tensors if a.name not in spec.detached]
        # A single gradient can belong to one argument only, whatever its name is.
        if len(own.outputs) == 1 and len(asked) == 1:
            return cls(op, (asked[0],))
        names = {f"grad_{name}": name for name in asked}
        for name in own.results:
            if name not in names:
                fix = f"declare the gradient op with outputs=({', '.join(map(repr, names))})"
                raise error("SL110", where=where, got=f"a result {name!r}", expected=", ".join(names), fix=fix)
        return cls(op, tuple(names[name] for name in own.results))

    def takes(self, spec: OpSpec) -> list[tuple[str, int]]:
        """Return for each argument of this gradient op, in order, the value that it is called with, as ``(name,
        number)``. For the gradient of an output, the number is that of the output. For the saved argument or result
        ``name``, it is -1.
        """
        grads = _gradient_argument_names(spec)
        return [(a.name, grads.get(a.name, -1)) for a in self.op.spec.args]


def _gradient_argument_names(spec: OpSpec) -> dict[str, int]:
    """Return a dict from each argument name that stands for the gradient of an output to the output's number. The names
    are ``grad_<output>``, and also ``grad`` if there is only one output.
    """
    names = {f"grad_{name}": i for i, name in enumerate(spec.results)}
    return {**names, "grad": 0} if len(spec.results) == 1 else names


def _call_gradient_ops(spec: OpSpec, ops: Sequence[GradientOp]) -> GradientFn:
    """Return a gradient function ``(grad, saved, needs)`` that calls the declared ops in ``ops``. Each is called only
    if a gradient that it computes is needed.
    """

    def gradients(grad: Tensor | tuple[Tensor, ...], saved: object, needs: object) -> Gradients:
        """Return the gradients by argument, computed by the ops that return a gradient marked in ``needs``. ``grad``
        holds the gradients of the outputs. ``saved`` has the arguments and results as attributes.
        """
        grads = grad if isinstance(grad, tuple) else (grad,)
        result: dict[str, Gradient] = {}
        for part in ops:
            if not any(vars(needs)[name] for name in part.gives):
                continue
            values = {name: grads[at] if at >= 0 else vars(saved)[name] for name, at in part.takes(spec)}
            made = part.op(**values)
            result.update(zip(part.gives, made if isinstance(made, (tuple, list)) else (made,), strict=True))
        return result

    return gradients


@dataclass(frozen=True)
class Backward(HasCode):
    """A declared gradient, ``fn(grad, saved, needs) -> {argument: gradient}``, and the tensors that it reads.

    Attributes:
        fn: a function that calls ``function`` with its inputs by name, or that calls ``ops``.
        saves: the names of the arguments and results that are kept from the call until the backward.
        function: the function as its author wrote it.
        strided: whether the function takes tensors with any strides.
        surrogate: the function whose derivative the gradient is, if that is not the reference.
        ops: the ops that compute the gradient, if it is not a function.
        once_differentiable: True if a gradient of the gradient is refused, or False if the author has stated that it is
            right. If None, it is checked when it is requested (see dispatch/second_derivative.py).
    """

    fn: GradientFn
    saves: tuple[str, ...]
    function: GradientFn
    strided: bool = False
    surrogate: Surrogate | None = None
    ops: tuple[GradientOp, ...] = ()
    once_differentiable: bool | None = None

    @classmethod
    def by_ops(
        cls,
        spec: OpSpec,
        ops: Sequence[_DeclaredOp],
        surrogate: Surrogate | None = None,
        once_differentiable: bool | None = None,
    ) -> Backward:
        """Return the gradient of ``spec`` that is computed by ``ops``, other declared ops. Each op is called only if
        one of its results is needed.

        ``surrogate`` and ``once_differentiable`` are stored as the attributes of these names. Raise ``SL110`` if an op
        does not fit ``spec``, or if two ops compute one gradient.
        """
        parts = tuple(GradientOp.read(spec, op) for op in ops)
        given = [name for part in parts for name in part.gives]
        if twice := next((name for name in given if given.count(name) > 1), None):
            got = f"{' and '.join(p.op.spec.name for p in parts if twice in p.gives)} for {twice!r}"
            raise error("SL110", where=spec.name, got=got, expected="one op for each gradient")
        tensors = {a.name for a in spec.tensors} | set(spec.results)
        taken = [name for part in parts for name, at in part.takes(spec) if at < 0 and name in tensors]
        # Ops make the tensors that they need contiguous themselves.
        made = cls.declare(spec, _call_gradient_ops(spec, parts), tuple(dict.fromkeys(taken)), surrogate, strided=True)
        return replace(made, ops=parts, once_differentiable=once_differentiable)

    @classmethod
    def declare(
        cls,
        spec: OpSpec,
        fn: GradientFn,
        saves: Iterable[str] | None,
        surrogate: Surrogate | None = None,
        strided: bool = False,
        once_differentiable: bool | None = None,
    ) -> Backward:
        """Return the gradient of ``spec`` that the function ``fn`` computes. Check its parameters and the names that it
        saves.

        ``saves`` names the arguments and results that are kept until the backward. If it is None, they are those that
        ``fn`` reads. If ``strided`` is true, ``fn`` takes tensors with any strides. Otherwise tensors are made
        contiguous before ``fn`` is called. :class:`Backward` describes ``surrogate`` and ``once_differentiable``.

        Raise ``SL110`` for an op that writes to its arguments, for an unknown name, and for a surrogate that takes
        other arguments than the op. Raise ``SL134`` if the reads of ``fn`` cannot be found.
        """
        if spec.mutated:
            raise error(
                "SL110",
                where=spec.name,
                got=f"mutates {', '.join(spec.mutated)}",
                expected="a functional op",
                fix="declare a functional op that returns the new value",
            )
        # The author's own function is kept beside, since digests and audits read its code.
        called = read_gradient_function(spec, fn)
        names = _read_saves(spec, saves) if saves is not None else _find_saved_reads(spec, fn)
        if not strided:
            called = with_contiguous_inputs(called, names)
        formula = surrogate if surrogate is None else gives_result(spec, surrogate)
        made = cls(called, names, fn, strided, formula, once_differentiable=once_differentiable)
        if surrogate is None:
            return made
        takes = list(inspect.signature(surrogate).parameters) if callable(surrogate) else []
        if takes != [a.name for a in spec.args]:
            got = f"surrogate= with arguments {', '.join(takes)}" if takes else f"surrogate={surrogate!r}"
            expected = f"a function of {', '.join(a.name for a in spec.args)}"
            fix = "give a function in plain PyTorch with the parameters of the reference"
            raise error("SL110", where=spec.name, got=got, expected=expected, fix=fix)
        return made

    def code_parts(self) -> Iterator[tuple[str, AnyValue]]:
        """Yield ``(text, value)`` for what the gradient depends on, for digests. This is the function or the ops, the
        names of the saved values, and the surrogate, a function whose derivative the gradient is.
        """
        stated = f"{self.saves} {self.strided} {self.once_differentiable} {[part.gives for part in self.ops]}"
        yield f"gradient {stated}", None
        yield "ops", tuple(part.op for part in self.ops) or self.function
        yield "surrogate", self.surrogate

    def check(
        self,
        spec: OpSpec,
        shapes: Mapping[str, Shape],
        result: Gradients,
        needs: Mapping[str, bool],
        device: torch.device | None = None,
    ) -> Gradients:
        """Return ``result``, the gradients by argument, if they fit the arguments' ``shapes`` and ``device``, which is
        None if it is not known. ``needs`` maps each argument to whether its gradient is used.

        Raise ``SL110`` if ``result`` is no dict, has an unknown name or lacks a gradient that is used. Raise
        ``SL303`` for a gradient of another shape than its argument, or on another device.
        """
        if not isinstance(result, dict):
            raise error("SL110", where=spec.name, got=type(result).__name__, expected="a dict {argument: gradient}")
        for name, value in result.items():
            if name not in shapes:
                rename = f"rename the entry {name!r} to the tensor argument whose gradient it is, or remove it"
                raise error(
                    "SL110",
                    where=spec.name,
                    got=f"gradient of {name!r}",
                    expected=f"a tensor argument: {', '.join(shapes)}",
                    fix=f"{rename}. {SAVED_AND_NEEDS}",
                )
            # A missing argument has no shape, and None as a gradient stands for zero.
            got, expected = shape_of_value(value), shapes[name]
            if value is not None and expected is not None and got != expected:
                several = isinstance(value, (list, tuple)) and not isinstance(expected, list) and len(spec.results) > 1
                raise error(
                    "SL303",
                    where=f"{spec.name}, argument {name!r}",
                    got=f"gradient {_value_shape_text(got) if got is not None else type(value).__name__}",
                    expected=_value_shape_text(expected),
                    fix="combine the gradients of the results, such as grad[0] and grad[1], since grad is a tuple"
                    * several,
                )
            if isinstance(value, Tensor) and value.is_complex() and is_real(spec.arg(name)):
                raise error(
                    "SL303",
                    where=f"{spec.name}, argument {name!r}",
                    got=f"gradient of {value.dtype}",
                    expected=f"real numbers, as {spec.arg(name).tensor} has",
                    fix=f"return the real part that belongs to {name}, such as value.real",
                )
            if isinstance(value, Tensor) and device is not None and value.device != device and value.dim():
                raise error(
                    "SL303",
                    where=f"{spec.name}, argument {name!r}",
                    got=f"gradient on {value.device}",
                    expected=f"a tensor on {device}",
                    fix=f"make the gradient of {name} from tensors on the device under 'expected', without .to(...)",
                )
        for name, needed in needs.items():
            if needed and name not in result:
                raise error(
                    "SL110",
                    where=f"{spec.name}, argument {name!r}",
                    got=f"no gradient of {name!r}, which was needed",
                    expected=f"an entry {name!r}",
                    fix=f"return the gradient of {name}, or None for it where it is zero. {SAVED_AND_NEEDS}",
                )
        return result


def _read_saves(spec: OpSpec, saves: Iterable[str]) -> tuple[str, ...]:
    """Return the names in ``saves=`` as a tuple. Raise ``SL110`` for a name that is no argument or result of the op."""
    names, known = tuple(saves), _op_value_names(spec)
    for name in names:
        if name not in known:
            near = next(iter(get_close_matches(name, known)), "")
            fix = f"write saves=({near!r},)" if near else "name arguments and results of the op in saves="
            expected = f"one of {', '.join(sorted(known))}"
            raise error("SL110", where=spec.name, got=f"saves {name!r}", expected=expected, fix=fix)
    return names


def _find_saved_reads(spec: OpSpec, fn: GradientFn) -> tuple[str, ...]:
    """Return the names of the tensor arguments and results that the gradient function ``fn`` reads from its parameter
    ``saved``. They are found in its bytecode.

    Raise ``SL110`` for a name that the op does not have. Raise ``SL134`` if the reads cannot be found.
    """
    try:
        read = attributes_read(fn, "saved")
    except UnknownReads as e:
        raise error("SL134", where=spec.name, got=str(e), expected="saved.<name>, or saves=(...)") from None
    known = _op_value_names(spec)
    if unknown := sorted(read - known):
        raise error(
            "SL110",
            where=spec.name,
            got=f"the backward reads saved.{unknown[0]}",
            expected=f"one of {', '.join(sorted(known))}",
            fix="read arguments and results of the op by their names",
        )
    return tuple(name for name in dict.fromkeys([*(a.name for a in spec.tensors), *spec.results]) if name in read)


def _op_value_names(spec: OpSpec) -> set[str]:
    """Return the names of all arguments and results of an op."""
    return {a.name for a in spec.args} | {o.name for o in spec.outputs} | {r.name for r in spec.made}


def values_class(spec: OpSpec, name: str, fields: Sequence[str]) -> Callable[..., Any]:
    """Return a constructor of the object that a gradient function receives as ``saved`` or ``needs``, whichever is
    ``name``. The keyword arguments of the constructor are the object's attributes ``fields``.

    Compiled autograd can trace the construction of such an object, but not that of a ``SimpleNamespace``. Reading
    another name raises ``SL135``, which is also an ``AttributeError``.
    """

    def missing(wanted: str) -> ShiplapError:
        """Return the error ``SL135`` for reading the attribute ``wanted``, which the object does not have."""
        tensors = {a.name for a in spec.tensors} | set(spec.results)
        fix = "read a name under 'expected'"
        if name == "saved" and wanted in tensors:
            fix = f"write saves={tuple(f for f in (*fields, wanted) if f in tensors)}"
        what = "" if name == "saved" else "the backward reads a name that needs does not have"
        expected = ", ".join(fields) or "no value"
        return error("SL135", where=spec.name, what=what, got=f"{name}.{wanted}", expected=expected, fix=fix)

    own = "this" + "_" * (1 + max((len(f) for f in fields), default=0))  # an argument may be called self
    members = {f: arg.members for f, arg in spec.enumerated.items() if name == "saved" and f in fields}
    # Defaults: a compiler that traces this looks for the globals of a function in the module that it names.
    given = [f"{own}{f}=members[{f!r}]" for f in members]
    values = {f: f"None if {f} is None else {own}{f}({f})" if f in members else f for f in fields}
    body = [f"        {own}.{field} = {value}" for field, value in values.items()] or ["        pass"]
    lines = [
        f"class {name.capitalize()}:",
        f"    def __init__({', '.join([own, *fields, *given])}):",
        *body,
        "    def __getattr__(self, name): raise missing(name)",
    ]
    scope: dict[str, Any] = {"missing": missing, "members": members, "__name__": __name__}
    return define_function(name.capitalize(), lines, f"{name} of {spec.name}", scope)


def is_real(arg: Arg) -> bool:
    """Return whether a tensor argument can have no complex numbers."""
    # An annotation that names no dtypes admits all of them.
    named = arg.tensor.dtypes if arg.tensor is not None else ()
    return bool(named) and not any(name.startswith("complex") for name in named)


def shape_of_value(value: Value | Gradient) -> Shape:
    """Return the shape of a tensor, or a list of the shapes of a list's members. Return None for any other value."""
    if isinstance(value, Tensor):
        return value.shape
    if isinstance(value, (list, tuple)):
        return [v.shape if isinstance(v, Tensor) else None for v in value]
    return None


def _value_shape_text(shape: Shape) -> str:
    """Return a shape, or a list of shapes, as text for errors, such as ``(2, 3)``. A missing shape is shown as
    ``None``.
    """
    if isinstance(shape, list):
        return f"[{', '.join(map(_value_shape_text, shape))}]"
    return str(None if shape is None else tuple(shape))


def read_gradient_function(spec: OpSpec, fn: GradientFn) -> GradientFn:
    """Return a function that calls the author's gradient function ``fn`` by name and takes ``(gradient, saved, needs)``
    by position.

    The gradient is the parameter that is called neither ``saved`` nor ``needs``. It must not have the name of an
    argument or result. Raise ``SL110`` for any other parameters.
    """
    first = "grad" if len(spec.results) == 1 else "grads"
    expected = f"def _({first}, saved, needs)"
    three = f"take the three arguments that 'expected' lists. {SAVED_AND_NEEDS}"

    def refuse(got: str, fix: str = "") -> ShiplapError:
        """Return the error ``SL110`` for a gradient function with other parameters than ``grad``, ``saved`` and
        ``needs``. ``got`` describes them, and ``fix`` is the remedy, if there is one.
        """
        return error("SL110", where=spec.name, got=got, expected=expected, fix=fix or three)

    takes = read_parameters(fn, refuse)
    shown = f"def _{takes.shown[takes.shown.index('(') :]}"
    others = [n for n in takes.named if n not in takes.optional and n not in ("saved", "needs")]
    # An argument of the op that is called grad does not forbid the usual name of the gradient.
    taken = ({a.name for a in spec.args} | {*spec.results, "ctx"}) - {"grad", "grads"}
    if unknown := [n for n in others if n in taken] or others[1:]:
        raise refuse(f"{shown}: nothing is called {unknown[0]!r}")
    if missing := next((n for n in ("saved", "needs") if n not in takes.named), "" if others else first):
        raise refuse(f"{shown}: the parameter {missing!r} is missing")
    return bind_names(fn, (others[0], "saved", "needs"), id="SL110", where=spec.name)


def with_contiguous_inputs(fn: GradientFn, saves: Iterable[str]) -> GradientFn:
    """Return a gradient function ``(grad, saved, needs)`` that makes the gradients and the saved tensors named in
    ``saves`` contiguous, and then returns the result of ``fn`` for them.
    """
    names = tuple(dict.fromkeys(saves))

    @wraps(fn)  # digests and audits read the code of the author
    def gradients(grad: Any, saved: Any, needs: Any) -> Gradients:
        """Return the result of the author's gradient function for contiguous gradients and saved tensors. The
        attributes of the object ``saved`` are replaced by contiguous tensors.
        """
        values = saved.__dict__
        for name in names:
            value = values[name]
            if isinstance(value, Tensor):
                values[name] = value.contiguous()
            elif isinstance(value, (list, tuple)):
                values[name] = _contiguous_input(value)
        return fn(grad.contiguous() if isinstance(grad, Tensor) else _contiguous_input(grad), saved, needs)

    return gradients


def _contiguous_input(value: Any) -> Any:
    """Return a tensor, or each of a list of tensors, as a contiguous one. Any other value is returned unchanged."""
    if isinstance(value, (list, tuple)):
        return type(value)([_contiguous_input(v) for v in value])
    return value.contiguous() if isinstance(value, Tensor) else value
