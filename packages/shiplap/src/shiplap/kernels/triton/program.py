"""The reader of ``sl.triton(...)``. It finds the source of the value of each parameter of each kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

from shiplap.codegen.launcher import (
    WORD,
    WORKSPACE,
    KernelLaunch,
    KernelParameter,
    Kind,
    LaunchProgram,
    Step,
    WorkspaceFill,
    WorkspaceSort,
    parse_fact,
)
from shiplap.declare.dim_expression import Expr
from shiplap.declare.spec import OpSpec
from shiplap.errors import ShiplapError, error
from shiplap.kernels.triton.async_errors import LateErrors

Grid: TypeAlias = str | int | Sequence[str | int]
OPTIONS = ("num_warps", "num_stages", "maxnreg")  # of a launch: Triton's own
_INTEGERS, _REALS = ("i32", "i64"), ("fp32", "fp64")
_TYPES = {"int32": "i32", "int64": "i64", "float32": "fp32", "float64": "fp64"}  # for an interpreted function


@dataclass(frozen=True)
class DeclaredLaunch:
    """A launch of a Triton kernel as its author declared it. ``TritonLaunches.then`` describes the fields."""

    kernel: Any
    grid: Grid
    arguments: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    constants: Mapping[str, object] = field(default_factory=dict)
    scratch: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    when: str = ""
    word: str = ""
    codes: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the kernel's Python function."""
        return plain_function(self.kernel).__name__


@dataclass(frozen=True)
class DeclaredFill:
    """A step that sets bytes of the workspace. Its fields are expressions, which ``TritonLaunches.fill`` describes."""

    offset: str
    size: str
    byte: int = 0
    when: str = ""


@dataclass(frozen=True)
class DeclaredSort:
    """A step that sorts integers of the workspace. Its fields are expressions, which ``TritonLaunches.sort``
    describes.
    """

    bits: str
    count: str
    keys: str
    values: str
    rows: str
    when: str = ""


DeclaredStep: TypeAlias = DeclaredLaunch | DeclaredFill | DeclaredSort


def plain_function(kernel: Any) -> Callable[..., object]:
    """Return the Python function inside a ``@triton.jit`` function, compiled or interpreted. Raise ``SL619`` for other
    objects.
    """
    # By name, without importing Triton.
    wraps = type(kernel).__name__ in ("JITFunction", "InterpretedFunction")
    function = kernel.fn if wraps else None
    if not inspect.isfunction(function):
        fix = "pass configs=[...] in place of @triton.autotune and constants={...} in place of @triton.heuristics"
        if type(kernel).__module__.partition(".")[0] != "triton":  # no decorator of it was there
            name = kernel.__name__ if inspect.isfunction(kernel) else "of the kernel"
            fix = f"decorate the function {name} with @triton.jit, and pass what the decorator returns"
        raise error(
            "SL619",
            where=f"sl.triton({kernel!r}, ...)",
            got=f"{type(kernel).__module__}.{type(kernel).__name__}",
            expected="a function decorated with @triton.jit alone",
            fix=fix,
        )
    python: Callable[..., object] = function
    return python


def read_program(
    spec: OpSpec,
    declared: Iterable[DeclaredStep],
    configs: Iterable[str],
    values: Mapping[str, str] | None = None,
    errors: LateErrors | None = None,
) -> LaunchProgram:
    """Return the declared steps of an op as a program that can be run. Its expressions are parsed, and every kernel
    parameter has a source of its value. ``configs`` are the names of the config's values. ``values`` are integers by
    name that expressions may use. If ``errors`` is given, the program includes the messages of late errors.

    Raises:
        ShiplapError: ``SL105`` for an invalid expression. ``SL618`` for a parameter without a value, or an unknown
            name. ``SL619`` for a parameter that no launcher can pass.
    """
    named, known, names = tuple(configs), set(_integer_names(spec)), []
    for name, text in (values or {}).items():
        where = f"{spec.name}, values[{name!r}]"
        # An expression could not tell which of two things a name means.
        if name in known or not name.isidentifier() or parse_fact(name) is not None:
            raise error("SL618", where=where, got=f"the name {name!r}", expected="a name that nothing else has")
        names.append((name, _known_expr(where, "it", text, known, _tensor_arguments(spec))))
        known.add(name)
    steps = tuple([_read_step(spec, each, named, frozenset(known), errors) for each in declared])
    codes = {t: None for each in declared if isinstance(each, DeclaredLaunch) for t in each.codes.values()}
    messages = [(errors.code(spec.name, text), spec.name, text) for text in codes] if errors is not None else []
    return LaunchProgram(steps, tuple(names), errors is not None, tuple(messages))


def _read_step(
    spec: OpSpec, declared: DeclaredStep, configs: tuple[str, ...], known: frozenset[str], errors: LateErrors | None
) -> Step:
    """Return one declared step, a fill, a sort or a launch, with its expressions parsed. They may use the names
    ``known`` and, in a launch, ``configs``. ``errors`` gives the codes of late errors, if a launch reports any. Raise
    ``SL618`` for any other name.
    """
    if isinstance(declared, DeclaredLaunch):
        return _LaunchReader(spec, declared, configs, known, errors).launch()

    def expr(what: str, text: str) -> Expr:
        """Return the parsed dim expression ``text`` of the declared step. ``what`` names the step's field in errors."""
        return _known_expr(spec.name, what, text, known, _tensor_arguments(spec))

    when = expr("when", declared.when) if declared.when else None
    if isinstance(declared, DeclaredFill):
        return WorkspaceFill(expr("fill", declared.offset), expr("fill", declared.size), declared.byte, when)
    return WorkspaceSort(
        expr("sort", declared.bits),
        expr("sort", declared.count),
        expr("sort", declared.keys),
        expr("sort", declared.values),
        expr("sort", declared.rows),
        when,
    )


def _known_expr(where: str, what: str, text: str, known: Iterable[str], tensors: Iterable[str]) -> Expr:
    """Return the parsed expression ``text``. It may use the names ``known`` and properties of the tensors ``tensors``,
    such as ``stride_x_0``. Raise ``SL105`` if it is no expression, or ``SL618`` for any other name.
    """
    expr, names = Expr.parse(text, f"{where}, {what}"), set(known)
    for name in sorted(expr.names - names):
        fact = parse_fact(name)
        if fact is None or fact[1] not in tensors:
            expected = f"names among {', '.join(sorted(names))}"
            got = f"{name!r} in {what}" + f", {text!r}" * (repr(text) not in what)
            fix = f"write a name under 'expected' in place of {name}, or the number of elements, as in numel_"
            fix += f"{min(tensors)}, or an entry of constants= or of each config" if tensors else ""
            raise error("SL618", where=where, got=got, expected=expected, fix=fix)
    return expr


def _tensor_arguments(spec: OpSpec) -> set[str]:
    """Return the names of the outputs and of the tensor arguments. Arguments that are lists of tensors are left out."""
    return {a.name for a in spec.tensors if not a.many} | {o.name for o in spec.outputs}


def strided_launch_tensors(spec: OpSpec, launches: Iterable[KernelLaunch]) -> frozenset[str]:
    """Return the names of the tensor arguments of which the launches read every stride. Such arguments may have any
    strides. Arguments that are written to are left out.
    """
    names = {name for launch in launches for expr in launch.exprs for name in expr.names}
    asked = {fact[1:] for name in names if (fact := parse_fact(name)) is not None and fact[0] == "stride"}
    whole = frozenset(
        a.name
        for a in spec.tensors
        if a.tensor is not None
        and not a.tensor.variadic
        and a.tensor.dims
        and all((a.name, axis) in asked for axis in range(len(a.tensor.dims)))
    )
    return whole - {a.name for a in spec.args if a.mutated}


class _LaunchReader:
    """The parser of one declared launch of a Triton kernel. It parses the expressions, and finds the source of the
    value of each kernel parameter, from which Python and generated C++ make the launch.
    """

    def __init__(
        self,
        spec: OpSpec,
        declared: DeclaredLaunch,
        configs: tuple[str, ...],
        known: Iterable[str] = (),
        errors: LateErrors | None = None,
    ) -> None:
        """Collect the tensors, numbers and parameters that the launch ``declared`` of the op may use. ``configs`` has
        the names of tuning parameters, and ``known`` those of further integers. ``errors`` holds the messages of errors
        that the kernel reports after its launch.
        """
        self.spec, self.declared, self.configs, self.errors = spec, declared, configs, errors
        self.where = f"{spec.name}, Triton kernel {declared.name}"
        self.tensors = _tensor_arguments(spec)
        self.numbers = {*_integer_names(spec), *known}
        self.scalars = {a.name: str(a.scalar) for a in spec.scalars}
        self.signature = inspect.signature(plain_function(declared.kernel)).parameters
        compiled = type(declared.kernel).__name__ == "JITFunction"
        self.about = {p.name: p for p in (declared.kernel.params if compiled else ())}

    def launch(self) -> KernelLaunch:
        """Return the launch with its grid and the source of the value of each parameter. Raise ``SL618`` or ``SL619``
        if it cannot be launched as declared.
        """
        self._refuse_strangers()
        # A launch has a fixed list of addresses, and outputs must exist before it.
        if self.spec.dynamic or any(a.many for a in self.spec.tensors):
            what = "a list of tensors" if not self.spec.dynamic else "an output whose size depends on data"
            raise self._unfit(what, "tensors and outputs of known sizes")
        parameters = tuple([self._parameter(name) for name in self.signature])
        constants = {p.name for p in parameters if p.kind in ("constant", "config", "computed")}
        given = self.declared.grid
        axes = [given] if isinstance(given, (str, int)) else list(given) if isinstance(given, Iterable) else []
        if not 1 <= len(axes) <= 3:
            fix = 'write one to three sizes in words: grid="cdiv(n, BLOCK)", or grid=("n", "cdiv(m, BLOCK)") for two'
            what, got = "the grid of the Triton kernel is not valid", f"grid={given!r}"
            raise error("SL618", where=self.where, what=what, got=got, expected="one to three sizes", fix=fix)
        grid = tuple([self._expr(f"grid={axis!r}", str(axis), constants | set(self.configs)) for axis in axes])
        when = self.declared.when
        return KernelLaunch(parameters, grid, self._expr("when", when, set()) if when else None)

    def _refuse_strangers(self) -> None:
        """Raise ``SL618`` if a name in ``arguments``, ``constants``, ``scratch`` or ``codes`` is no parameter of the
        kernel. In ``constants``, options such as ``num_warps`` are accepted, too. Raise ``SL618`` also if the launch
        reports late errors and the program has no holder of them.
        """
        options = (*self.signature, *OPTIONS)
        declared = self.declared
        reports = {**({declared.word: ""} if declared.word else {}), **declared.codes}
        if reports and self.errors is None:
            self._refuse(f"errors that {', '.join(reports)} tell late", "launch_program(errors=LateErrors())")
        named: dict[str, Mapping[str, object]] = {
            "arguments": declared.arguments,
            "constants": declared.constants,
            "scratch": declared.scratch,
            "codes": reports,
        }
        for what, given in named.items():
            for name in given:
                if name not in options or (name in OPTIONS and what != "constants"):
                    self._refuse(f"{what}={{{name!r}: ...}}", f"a parameter of the kernel: {', '.join(self.signature)}")

    def _parameter(self, name: str) -> KernelParameter:
        """Return the kernel's parameter ``name`` with the source of its value. The source is a tensor, the workspace, a
        scalar, an expression or a compile-time value. Raise ``SL618`` if there is no value, or ``SL619`` if its type
        cannot be passed.
        """
        annotation, about = self._annotation(name), self.about.get(name)
        specialises = not (about is not None and about.do_not_specialize)
        aligns = not (about is not None and about.do_not_specialize_on_alignment)
        if "constexpr" in annotation:
            return self._constant(name)
        type = str(about.annotation_type) if about is not None else _TYPES.get(annotation.rpartition(".")[2], "")
        if type and type not in (*_INTEGERS, *_REALS):
            raise self._unfit(f"{name}: {annotation}", "no annotation, or tl.int32, tl.int64, tl.float32, tl.float64")
        if name == self.declared.word or name in self.declared.codes:
            return self._report(name, type, specialises, aligns)
        if name in self.declared.scratch:
            dtype, offset = self.declared.scratch[name]
            if type:  # an address as an integer
                place = self._expr(f"scratch[{name!r}]", f"{WORKSPACE} + ({offset})", {*self.configs, WORKSPACE})
                return KernelParameter(name, "integer", "", place, None, type, specialises, aligns)
            at = self._expr(f"scratch[{name!r}]", offset, set(self.configs))
            return KernelParameter(name, "scratch", dtype, at, None, "", specialises, aligns)
        given = self.declared.arguments.get(name, self._namesake(name))
        if given is None:
            examples = [f'arguments={{"{name}": "{min(self.tensors)}"}} for a tensor']
            examples += [f'"{size}" for a size' for size in sorted(self.numbers)[:1]]
            fix = f"write what it stands for, as in {', or '.join(examples)}, or rename it. {self._names_with_values()}"
            self._refuse(f"no value for {name!r}", f"an entry arguments={{{name!r}: ...}}", fix)
        if isinstance(given, float):
            return KernelParameter(name, _is_real_type(type), value=given, type=type)
        # Before the integers, of which bool is one.
        if isinstance(given, bool):
            return KernelParameter(name, "boolean", value=int(given), type=type)
        if given in self.tensors:
            return KernelParameter(name, "tensor", str(given), None, None, "", specialises, aligns)
        if (kind := self.scalars.get(str(given))) in ("float", "bool"):
            what: Kind = _is_real_type(type) if kind == "float" else "boolean"
            return KernelParameter(name, what, str(given), type=type)
        if "list" in self.scalars.get(str(given), ""):
            self._refuse(f"the list {given!r} for {name!r}", f"a number, such as {given}[0] or len({given})")
        expr = self._expr(f"arguments[{name!r}]", str(given), set(self.configs))
        return KernelParameter(name, "integer", "", expr, None, type, specialises, aligns)

    def _report(self, name: str, type: str, specialises: bool, aligns: bool) -> KernelParameter:
        """Return the kernel's parameter ``name``, by which it reports errors that are raised later. The parameter takes
        the address of the error word, or the code of an error message.

        ``type`` is its type in Triton. If ``specialises`` is true, Triton compiles special forms for some of its
        values. If ``aligns`` is true, one of these forms is for multiples of 16.
        """
        if name == self.declared.word:
            if type != "i64":
                raise self._unfit(f"{name}, the address of a word, without its type", f"{name}: tl.int64")
            return KernelParameter(name, "integer", "", Expr(WORD), None, type, specialises, aligns)
        assert self.errors is not None
        code = self.errors.code(self.spec.name, self.declared.codes[name])
        return KernelParameter(name, "integer", "", Expr(str(code)), None, type, specialises, aligns)

    def _constant(self, name: str) -> KernelParameter:
        """Return the ``tl.constexpr`` parameter ``name`` with the source of its value. The value is fixed, comes from
        the config, is computed from sizes, or is the kernel's default. Raise ``SL618`` if there is none.
        """
        if name in self.declared.constants:
            return KernelParameter(name, "constant", value=self.declared.constants[name])
        if name in self.configs:
            return KernelParameter(name, "config")
        given = self.declared.arguments.get(name)
        if isinstance(given, (bool, float)):
            return KernelParameter(name, "constant", value=given)
        if given is None and name in self.numbers:
            given = name
        if given is not None:
            expr = self._expr(f"arguments[{name!r}]", str(given), set(self.configs))
            return KernelParameter(name, "computed", expr=expr)
        default = self.signature[name].default
        if default is inspect.Parameter.empty:
            fix = f'write its value, as in constants={{"{name}": 128}}. {self._names_with_values()}'
            self._refuse(f"no value for {name!r}", f"constants={{{name!r}: ...}}, or {name!r} in each config", fix)
        return KernelParameter(name, "constant", value=default)

    def _namesake(self, name: str) -> str | float | None:
        """Return the value that a parameter gets if the author passes none for it, or None if there is none. It is the
        tensor ``x`` for ``x`` or ``x_ptr``, or the scalar, size or property of that name, such as ``stride_x_0``.
        Otherwise it is the parameter's default, if that is a number.
        """
        short = name.removesuffix("_ptr")
        for tensor in (name, short):
            if tensor in self.tensors:
                return tensor
        if name in self.scalars or name in self.numbers or ((fact := parse_fact(name)) and fact[1] in self.tensors):
            return name
        default = self.signature[name].default
        # Other defaults, such as None, are no values that C++ can pass.
        return default if isinstance(default, (int, float)) else None

    def _expr(self, what: str, text: str, constants: set[str]) -> Expr:
        """Return the parsed expression ``text``. It may use the names of integers, ``constants`` and properties of
        tensors such as ``stride_x_0``. ``what`` names the expression in errors. Raise ``SL105`` if it is no expression,
        or ``SL618`` for any other name.
        """
        known = self.numbers | constants | {n for n, p in self.declared.constants.items() if isinstance(p, int)}
        return _known_expr(self.where, what, text, known, self.tensors)

    def _annotation(self, name: str) -> str:
        """Return the annotation of the kernel's parameter ``name`` as a string."""
        about = self.about.get(name)
        if about is not None:
            return str(about.annotation)
        annotation = self.signature[name].annotation
        return annotation.__name__ if isinstance(annotation, type) else str(annotation)

    def _refuse(self, got: str, expected: str, fix: str = "") -> NoReturn:
        """Raise ``SL618`` for a launch whose declaration has ``got`` in place of ``expected``. If ``fix`` is empty, the
        fix is that of the catalogue.
        """
        raise error("SL618", where=self.where, got=got, expected=expected, fix=fix)

    def _names_with_values(self) -> str:
        """Return a sentence for errors with the names of parameters that need no entry in ``arguments=``."""
        lists = {name for name, kind in self.scalars.items() if "list" in kind}
        names = sorted({*self.tensors, *self.numbers, *self.scalars} - lists)
        counts = [f"numel_{tensor}" for tensor in sorted(self.tensors)]
        return (
            f"These names have values: {', '.join([*names, *counts])}, and strides such as stride_{min(self.tensors)}_0"
        )

    def _unfit(self, got: str, expected: str) -> ShiplapError:
        """Return the error ``SL619`` for a kernel that no generated launcher can launch, since it has ``got`` in place
        of ``expected``. Its fix is an alternative to such a launcher.
        """
        fix = "write a Python function that launches it as kernel[grid](...), and bind that function"
        return error("SL619", where=self.where, got=got, expected=expected, fix=fix)


def _is_real_type(type: str) -> Kind:
    """Return the kind of a floating-point parameter from its annotated Triton type. It is ``real64`` for ``fp64``, and
    otherwise ``real32``.
    """
    return "real64" if type == "fp64" else "real32"


def _integer_names(spec: OpSpec) -> Iterator[str]:
    """Yield the names that stand for integers of a call. They are the sizes of tensors that are always present,
    computed dims, and scalars of type int, bool or list of int. A name may occur more than once.
    """
    kinds = [*(a.tensor for a in spec.tensors if not a.optional), *(o.tensor for o in spec.outputs)]
    for kind in kinds:
        if kind is not None and not kind.variadic:
            yield from (dim.text for dim in kind.dims if dim.kind == "name")
    yield from (name for name, _ in spec.dims)
    yield from (a.name for a in spec.scalars if str(a.scalar) in ("int", "bool", "list[int]"))
