"""The C++ of a program of launches. It is a function of the C ABI that computes grids and arguments and calls the
driver.

A kernel is compiled for a *key*, a list of integers. The generated code and ``kernels/triton/specialize.py`` compute it
alike. An integer stands for a value of a config or another compile-time parameter, a tensor's dtype and alignment, or
the value on which Triton specialises an integer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, TypeAlias

from shiplap.codegen.ctype import CParameter, c_prototype
from shiplap.codegen.environment import render_source
from shiplap.declare.cpp_expression import quote_cpp, to_cpp
from shiplap.declare.dim_expression import Expr
from shiplap.declare.spec import OpSpec

Kind: TypeAlias = Literal[
    "constant", "config", "computed", "absent", "tensor", "scratch", "integer", "real32", "real64", "boolean"
]
WORD, WORKSPACE = "sl_word", "sl_workspace"  # names of integers: the word of late errors, the workspace's address
FACT = re.compile(r"(?:(numel)_(\w+)|(size|stride)_(\w+)_(\d+))")  # of a tensor: numel_x, size_x_0, stride_x_1


@dataclass(frozen=True)
class KernelParameter:
    """One parameter of a Triton kernel, and the source of its value in a launch.

    Attributes:
        name: the name in the kernel's signature.
        kind: the kind of its value. For ``constant``, it is ``value``, which is known when the code is generated. For
            ``config``, it is the compile-time value called ``name``. For ``computed``, it is the value of ``expr``, for
            which the kernel is compiled. For ``absent``, it is None. For all other kinds, it is an argument at run
            time.
        source: the tensor argument or output, or the float scalar, that is passed.
        expr: the integer that is passed, or the offset into the workspace in bytes.
        value: the value of a constant.
        type: the parameter's type in Triton, if the kernel or the declaration fixes it.
        specialises: whether Triton compiles the kernel separately for some values, such as 1.
        aligns: whether Triton compiles the kernel separately for multiples of 16.
    """

    name: str
    kind: Kind
    source: str = ""
    expr: Expr | None = None
    value: object = None
    type: str = ""
    specialises: bool = True
    aligns: bool = True


@dataclass(frozen=True)
class KernelLaunch:
    """The launch of one kernel. ``parameters`` are those of the kernel in order. ``grid`` has the number of programs
    along up to three axes. ``when`` is the condition under which it is launched, or None to launch always.
    """

    parameters: tuple[KernelParameter, ...]
    grid: tuple[Expr, ...]
    when: Expr | None = None

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """The expressions of sizes and scalars that are evaluated before the launch. Those of the grid come first,
        followed by those of the parameters. ``when`` is not among them.
        """
        return (*self.grid, *(p.expr for p in self.parameters if p.expr is not None))


@dataclass(frozen=True)
class WorkspaceFill:
    """A step that sets ``size`` bytes of the workspace, which is scratch memory, from ``offset`` on to the value
    ``byte``. ``when`` is the condition of the step, or None to run it always.
    """

    offset: Expr
    size: Expr
    byte: int
    when: Expr | None = None

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """The two expressions that are evaluated before the workspace is filled, namely the offset and the size in
        bytes. ``when`` is not among them.
        """
        return self.offset, self.size


@dataclass(frozen=True)
class WorkspaceSort:
    """A step in which torch sorts ``count`` integers of ``bits`` bits in ascending order. The sort is stable. ``when``
    is the condition of the step, or None to run it always.

    ``keys``, ``values`` and ``rows`` are offsets in bytes into the workspace, which is scratch memory. The integers are
    read at ``keys``. They are written in order to ``values``, and their original positions, as int64, to ``rows``.
    """

    bits: Expr
    count: Expr
    keys: Expr
    values: Expr
    rows: Expr
    when: Expr | None = None

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """The expressions that are evaluated before the sort. They are ``bits``, ``count``, ``keys``, ``values`` and
        ``rows``, in this order. ``when`` is not among them.
        """
        return self.bits, self.count, self.keys, self.values, self.rows


Step: TypeAlias = KernelLaunch | WorkspaceFill | WorkspaceSort


@dataclass(frozen=True)
class LaunchProgram:
    """A program of steps that run in order on one CUDA stream. A step launches a kernel, or fills or sorts scratch
    memory.

    Attributes:
        values: integers by name. Each is an expression of earlier ones, of sizes and of scalars.
        late: whether kernels write the code of an error to a word of memory, which a later call reads.
        messages: the errors that the kernels can report, each as code, op and text.
    """

    steps: tuple[Step, ...]
    values: tuple[tuple[str, Expr], ...] = ()
    late: bool = False
    messages: tuple[tuple[int, str, str], ...] = ()

    @property
    def launches(self) -> tuple[KernelLaunch, ...]:
        """The kernel launches of the program in order, without its fills and sorts of scratch memory."""
        return tuple([step for step in self.steps if isinstance(step, KernelLaunch)])


@dataclass(frozen=True)
class Cubin:
    """The compiled code of one launch's kernel for one GPU architecture, which is a number such as 90.

    ``launch`` is the number of the launch in its program. ``key`` holds integers for the properties of the arguments
    for which the code was compiled. ``image`` is the code as a cubin file, and ``name`` is the name of the kernel in
    it. ``threads`` is the number of threads of a block, and ``shared`` its bytes of shared memory.
    """

    launch: int
    architecture: int
    key: tuple[int, ...]
    image: bytes = field(repr=False)
    name: str
    threads: int
    shared: int


def parse_fact(name: str) -> tuple[str, str, int] | None:
    """Return the property of a tensor that the variable name ``name`` stands for, as ``(kind, tensor, axis)``. For
    ``stride_x_1`` it is ``("stride", "x", 1)``, and for ``numel_x`` it is ``("numel", "x", 0)``. Return None for any
    other name.
    """
    # Only numel_x has no axis, so it has groups of its own in the pattern.
    match = FACT.fullmatch(name)
    if match is None:
        return None
    return (match[1], match[2], 0) if match[1] else (match[3], match[4], int(match[5]))


def launcher_source(
    spec: OpSpec, symbol: str, program: LaunchProgram, configs: Sequence[str] = (), cubins: Iterable[Cubin] = ()
) -> str:
    """Return the C++ source code of a file with the function ``symbol``, which runs ``program``. The function has the C
    prototype of ``spec``.

    ``configs`` are the names of the compile-time values that the function gets from a table of tuned choices.
    ``cubins`` are compiled kernels that are embedded in the source code.
    """
    parameters = c_prototype(spec)
    known = _Facts(spec, parameters, dict(program.values))
    # Launches are numbered over the whole program, as compiled forms refer to them by number.
    numbers = count()
    described = [_print_step(step, configs, known, numbers) for step in program.steps]
    tensors = {p.source: p.name for p in parameters if p.role in ("input", "output")}
    # The template reads the device of a call from the first tensor that is always there.
    always = [a.name for a in spec.tensors if not a.optional] + [o.name for o in spec.outputs]
    return render_source(
        "launcher.cpp.jinja",
        spec=spec,
        symbol=symbol,
        where=quote_cpp(f"{spec.name}, kernel {symbol}"),
        prototype=parameters,
        first=tensors[always[0]],
        facts=known.lines,
        steps=described,
        launches=len(program.launches),
        late=program.late,
        messages=[{"code": code, "op": quote_cpp(op), "text": quote_cpp(text)} for code, op, text in program.messages],
        sorts=any(isinstance(step, WorkspaceSort) for step in program.steps),
        cubins=[_print_cubin(cubin) for cubin in cubins],
    )


def _print_cubin(cubin: Cubin) -> dict[str, Any]:
    """Return the values that the Jinja2 template of the launcher prints for the compiled kernel ``cubin``, by the names
    that the template uses.
    """
    return {
        "launch": cubin.launch,
        "architecture": cubin.architecture,
        "key": cubin.key,
        "bytes": ",".join(map(str, cubin.image)),
        "name": quote_cpp(cubin.name),
        "threads": cubin.threads,
        "shared": cubin.shared,
    }


class _Facts:
    """The C++ variables that generated code declares for a call. ``lines`` holds their declarations in the order in
    which they can be computed. ``cpp`` maps the names of arguments and outputs to parameters of the generated function.
    """

    def __init__(self, spec: OpSpec, parameters: Sequence[CParameter], values: Mapping[str, Expr]) -> None:
        """Start without any declared variable. ``parameters`` are those of the generated function. ``values`` are the
        named integers of the launch program, each as an expression.
        """
        self.spec, self.lines, self.values = spec, list[str](), values
        self.cpp = {p.source: p.name for p in parameters if p.role not in ("length", "extent")}
        self.lengths = {p.source: p.name for p in parameters if p.role == "length"}
        self._known: set[str] = {WORD}  # which the template declares

    def __call__(self, name: str) -> str:
        """Return the C++ variable ``n_<name>`` for a dim, a scalar or a property of a tensor. At the first use, append
        its declaration to ``lines``.
        """
        if name not in self._known:
            self._known.add(name)
            # The value is computed first: it may append the statements of other numbers, on which this one depends.
            type, value = self._value(name)
            self.lines.append(f"[[maybe_unused]] const {type} n_{name} = {value};")
        return f"n_{name}"

    def _value(self, name: str) -> tuple[str, str]:
        """Return the C++ type and the C++ expression of the value of ``name``.

        ``name`` may be a dim, a scalar, a list, a computed dim, or a property of a tensor such as ``stride_x_1``. It
        may also be an integer of the launch program, or the name that stands for the address of the workspace.
        """
        if (fact := parse_fact(name)) is not None and fact[1] in self.cpp:
            kind, tensor, axis = fact
            what = f"({self.cpp[tensor]}" + (")" if kind == "numel" else f", {axis})")
            return "int64_t", f"triton::{kind}{'' if kind == 'numel' else '_of'}{what}"
        if name in self.values:
            return "int64_t", to_cpp(self.values[name], self)
        if name == WORKSPACE:
            return "int64_t", "reinterpret_cast<int64_t>(ctx->workspace)"
        computed = dict(self.spec.dims).get(name)
        if computed is not None:
            return "int64_t", to_cpp(computed, self)
        if name in self.lengths:
            return "List", f"List({self.cpp[name]}, {self.cpp[name]} + {self.lengths[name]})"
        if name in self.cpp:
            return "int64_t", self.cpp[name]
        # Any tensor with the dim serves, as the checks of the call have compared all of them.
        tensor, axis = next(axes for dim, axes in _dim_axes(self.spec) if dim == name)
        return "int64_t", f"{self.cpp[tensor]}->shape[{axis}]"


def _dim_axes(spec: OpSpec) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield ``(dim, (tensor, axis))`` for each dim with a name of the required tensor arguments and of the outputs.
    ``tensor`` is the name of a tensor, and ``axis`` the position of the dim. Tensors with a variadic dim are left out.
    """
    tensors = [(a.name, a.tensor) for a in spec.tensors if not a.optional]
    for name, kind in [*tensors, *((o.name, o.tensor) for o in spec.outputs)]:
        if kind is not None and not kind.variadic:
            yield from ((dim.text, (name, axis)) for axis, dim in enumerate(kind.dims) if dim.kind == "name")


def _print_step(step: Step, configs: Sequence[str], facts: _Facts, numbers: Iterator[int]) -> dict[str, Any]:
    """Return the values that the Jinja2 template of the launcher prints for ``step``, by the names that the template
    uses.

    ``configs`` are the names of the compile-time values. ``facts`` returns the C++ variable of a name. ``numbers``
    yields the numbers of the launches of the program.
    """
    made: dict[str, Any] = {"when": to_cpp(step.when, facts) if step.when is not None else "", "fill": "", "sort": ""}
    match step:
        case KernelLaunch():
            return {**made, "launch": {**_print_launch(step, configs, facts), "number": next(numbers)}}
        case WorkspaceFill():
            return {**made, "fill": ", ".join(to_cpp(e, facts) for e in step.exprs), "byte": step.byte}
        case WorkspaceSort():
            return {**made, "sort": ", ".join(to_cpp(e, facts) for e in step.exprs)}


def _print_launch(launch: KernelLaunch, configs: Sequence[str], facts: _Facts) -> dict[str, Any]:
    """Return the values that the Jinja2 template of the launcher prints for a launch, by the names that the template
    uses. They are its constants, the statements that add parameters, the numbers of both, and the grid.

    ``configs`` are the names of the compile-time values. ``facts`` returns the C++ variable of a name.
    """
    # A config of a choice table reaches the kernel through the call frame, in the order of its names.
    constants: dict[str, str] = {name: f"ctx->config[{i}]" for i, name in enumerate(configs)}
    constants |= {
        p.name: f"int64_t{{{int(p.value)}}}"
        for p in launch.parameters
        if p.kind == "constant" and isinstance(p.value, int)
    }

    def variable(name: str) -> str:
        """Return the C++ variable of ``name``. It is ``c_<name>`` if ``constants`` has the name, that is for a constant
        or a compile-time value of this launch. Otherwise it is the variable of a dim, a scalar or a tensor property.
        """
        return f"c_{name}" if name in constants else facts(name)

    for p in launch.parameters:
        if p.kind == "computed" and p.expr is not None:
            constants[p.name] = to_cpp(p.expr, variable)
    lines = [f"sl_launch.constant(c_{name});" for name in configs]
    lines += [line for p in launch.parameters if (line := _parameter_statement(p, facts.cpp, variable))]
    # The grid comes last, as its expressions may use the constants above.
    grid = [to_cpp(expr, variable) for expr in launch.grid]
    return {
        "constants": [f"[[maybe_unused]] const int64_t c_{name} = {value};" for name, value in constants.items()],
        "lines": lines,
        "entries": len(lines),
        "parameters": len(launch.parameters),
        "grid": [*grid, *["1"] * (3 - len(grid))],
    }


def _parameter_statement(p: KernelParameter, tensors: Mapping[str, str], variable: Any) -> str:
    """Return the C++ statement that adds the kernel parameter ``p`` to the launch and to the key of its compiled code.
    Return an empty string for constants, config values and absent tensors.

    ``tensors`` maps the names of tensors to C++ names. ``variable`` returns the C++ variable of any other name.
    """
    aligns = "true" if p.specialises and p.aligns else "false"
    value = to_cpp(p.expr, variable) if p.expr is not None else tensors.get(p.source, "")
    # Constants are the same in every call, and the values of a config have been added before.
    match p.kind:
        case "constant" | "config" | "absent":
            return ""
        case "computed":
            return f"sl_launch.constant(c_{p.name});"
        case "tensor":
            return f"sl_launch.tensor({value}, {aligns});"
        case "scratch":
            return f"sl_launch.scratch(ctx->workspace, {value}, {aligns});"
        case "integer":
            flags = [bool(p.type), p.specialises, p.aligns]
            return f"sl_launch.integer({value}, {', '.join('true' if flag else 'false' for flag in flags)});"
    return f"sl_launch.{p.kind}({value if p.value is None else repr(p.value)});"
