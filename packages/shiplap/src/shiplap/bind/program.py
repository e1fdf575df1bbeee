"""``sl.triton(...)`` read against a declaration: where each parameter of each kernel gets its value."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

from shiplap.codegen.launcher import Kind, Launch, Parameter, fact_of
from shiplap.errors import ShiplapError, error
from shiplap.op.expr import Expr
from shiplap.op.spec import OpSpec

__all__ = ["OPTIONS", "Declared", "Grid", "plain_function", "read_launch", "strided"]

Grid: TypeAlias = str | int | Sequence[str | int]
OPTIONS = ("num_warps", "num_stages", "maxnreg")  # of a launch: Triton's own
_INTEGERS, _REALS = ("i32", "i64"), ("fp32", "fp64")


@dataclass(frozen=True)
class Declared:
    """One launch as its author wrote it; see :func:`shiplap.triton`."""

    kernel: Any
    grid: Grid
    arguments: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    constants: Mapping[str, object] = field(default_factory=dict)
    scratch: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return plain_function(self.kernel).__name__


def plain_function(kernel: Any) -> Callable[..., object]:
    """The Python function of a ``@triton.jit`` function, compiled or interpreted. SL619 for anything else."""
    wraps = type(kernel).__name__ in ("JITFunction", "InterpretedFunction")
    function = kernel.fn if wraps else None
    if not inspect.isfunction(function):
        raise error(
            "SL619",
            where=f"sl.triton({kernel!r}, ...)",
            got=f"{type(kernel).__module__}.{type(kernel).__name__}",
            expected="a function decorated with @triton.jit alone",
            fix="pass configs=[...] in place of @triton.autotune and constants={...} in place of @triton.heuristics",
        )
    python: Callable[..., object] = function
    return python


def read_launch(spec: OpSpec, declared: Declared, configs: Iterable[str]) -> Launch:
    """The launch with every parameter accounted for.

    Raises:
        ShiplapError: SL105 for an expression that is none, SL618 for a parameter without a value and for a name
            that nothing stands for, SL619 for what no launcher passes.
    """
    return _Reader(spec, declared, tuple(configs)).launch()


def strided(spec: OpSpec, launches: Iterable[Launch]) -> frozenset[str]:
    """The tensor arguments of which the launches ask every stride: they may arrive with any."""
    names = {name for launch in launches for expr in launch.exprs for name in expr.names}
    asked = {fact[1:] for name in names if (fact := fact_of(name)) is not None and fact[0] == "stride"}
    whole = frozenset(
        a.name
        for a in spec.tensors
        if a.tensor is not None
        and not a.tensor.variadic
        and a.tensor.dims
        and all((a.name, axis) in asked for axis in range(len(a.tensor.dims)))
    )
    return whole - {a.name for a in spec.args if a.mutated}


class _Reader:
    """Reads one launch."""

    def __init__(self, spec: OpSpec, declared: Declared, configs: tuple[str, ...]) -> None:
        self.spec, self.declared, self.configs = spec, declared, configs
        self.where = f"{spec.name}, Triton kernel {declared.name}"
        self.tensors = {a.name for a in spec.tensors if not a.many} | {o.name for o in spec.outputs}
        self.numbers = set(_numbers(spec))
        self.scalars = {a.name: str(a.scalar) for a in spec.scalars}
        self.signature = inspect.signature(plain_function(declared.kernel)).parameters
        compiled = type(declared.kernel).__name__ == "JITFunction"
        self.about = {p.name: p for p in (declared.kernel.params if compiled else ())}

    def launch(self) -> Launch:
        self._refuse_strangers()
        if self.spec.dynamic or any(a.many for a in self.spec.tensors):
            what = "a list of tensors" if not self.spec.dynamic else "an output whose size depends on data"
            raise self._unfit(what, "tensors and outputs of known sizes")
        parameters = tuple([self._parameter(name) for name in self.signature])
        constants = {p.name for p in parameters if p.kind in ("constant", "config", "computed")}
        given = self.declared.grid
        axes = [given] if isinstance(given, (str, int)) else list(given)
        if not 1 <= len(axes) <= 3:
            raise error("SL618", where=self.where, got=f"grid={given!r}", expected="one to three sizes")
        grid = tuple([self._expr(f"grid={axis!r}", str(axis), constants | set(self.configs)) for axis in axes])
        return Launch(parameters, grid)

    def _refuse_strangers(self) -> None:
        """SL618 for what is given under a name that the kernel does not have."""
        options = (*self.signature, *OPTIONS)
        declared = self.declared
        named = {"arguments": declared.arguments, "constants": declared.constants, "scratch": declared.scratch}
        for what, given in named.items():
            for name in given:
                if name not in options or (name in OPTIONS and what != "constants"):
                    self._refuse(f"{what}={{{name!r}: ...}}", f"a parameter of the kernel: {', '.join(self.signature)}")

    def _parameter(self, name: str) -> Parameter:
        annotation, about = self._annotation(name), self.about.get(name)
        specialises = not (about is not None and about.do_not_specialize)
        aligns = not (about is not None and about.do_not_specialize_on_alignment)
        if "constexpr" in annotation:
            return self._constant(name)
        type = str(about.annotation_type) if about is not None else ""
        if type and type not in (*_INTEGERS, *_REALS):
            raise self._unfit(f"{name}: {annotation}", "no annotation, or tl.int32, tl.int64, tl.float32, tl.float64")
        if name in self.declared.scratch:
            dtype, offset = self.declared.scratch[name]
            at = self._expr(f"scratch[{name!r}]", offset, set(self.configs))
            return Parameter(name, "scratch", dtype, at, None, "", specialises, aligns)
        given = self.declared.arguments.get(name, self._namesake(name))
        if given is None:
            self._refuse(f"no value for {name!r}", f"an entry arguments={{{name!r}: ...}}")
        if isinstance(given, float):
            return Parameter(name, _real(type), value=given, type=type)
        if isinstance(given, bool):
            return Parameter(name, "boolean", value=int(given), type=type)
        if given in self.tensors:
            return Parameter(name, "tensor", str(given), None, None, "", specialises, aligns)
        if (kind := self.scalars.get(str(given))) in ("float", "bool"):
            what: Kind = _real(type) if kind == "float" else "boolean"
            return Parameter(name, what, str(given), type=type)
        if "list" in self.scalars.get(str(given), ""):
            self._refuse(f"the list {given!r} for {name!r}", f"a number, such as {given}[0] or len({given})")
        expr = self._expr(f"arguments[{name!r}]", str(given), set(self.configs))
        return Parameter(name, "integer", "", expr, None, type, specialises, aligns)

    def _constant(self, name: str) -> Parameter:
        """A ``tl.constexpr`` parameter: fixed, of the config, computed from sizes, or the kernel's default."""
        if name in self.declared.constants:
            return Parameter(name, "constant", value=self.declared.constants[name])
        if name in self.configs:
            return Parameter(name, "config")
        given = self.declared.arguments.get(name)
        if isinstance(given, (bool, float)):
            return Parameter(name, "constant", value=given)
        if given is None and name in self.numbers:
            given = name
        if given is not None:
            expr = self._expr(f"arguments[{name!r}]", str(given), set(self.configs))
            return Parameter(name, "computed", expr=expr)
        default = self.signature[name].default
        if default is inspect.Parameter.empty:
            self._refuse(f"no value for {name!r}", f"constants={{{name!r}: ...}}, or {name!r} in each config")
        return Parameter(name, "constant", value=default)

    def _namesake(self, name: str) -> str | float | None:
        """What a parameter stands for by its name: a tensor, with or without ``_ptr``, a scalar, a size, a default."""
        short = name.removesuffix("_ptr")
        for tensor in (name, short):
            if tensor in self.tensors:
                return tensor
        if name in self.scalars or name in self.numbers or ((fact := fact_of(name)) and fact[1] in self.tensors):
            return name
        default = self.signature[name].default
        return default if isinstance(default, (int, float)) else None

    def _expr(self, what: str, text: str, constants: set[str]) -> Expr:
        expr = Expr.parse(text, f"{self.where}, {what}")
        known = self.numbers | constants | {n for n, p in self.declared.constants.items() if isinstance(p, int)}
        for name in sorted(expr.names - known):
            fact = fact_of(name)
            if fact is None or fact[1] not in self.tensors:
                self._refuse(
                    f"{name!r} in {what}, {text!r}", f"sizes, integer arguments or facts: {', '.join(sorted(known))}"
                )
        return expr

    def _annotation(self, name: str) -> str:
        about = self.about.get(name)
        if about is not None:
            return str(about.annotation)
        annotation = self.signature[name].annotation
        return annotation.__name__ if isinstance(annotation, type) else str(annotation)

    def _refuse(self, got: str, expected: str) -> NoReturn:
        raise error("SL618", where=self.where, got=got, expected=expected)

    def _unfit(self, got: str, expected: str) -> ShiplapError:
        fix = "write a Python function that launches the kernel with triton_launcher, and bind that function"
        return error("SL619", where=self.where, got=got, expected=expected, fix=fix)


def _real(type: str) -> Kind:
    return "real64" if type == "fp64" else "real32"


def _numbers(spec: OpSpec) -> Iterator[str]:
    """Names that stand for integers of a call: sizes of tensors that are always there, computed sizes, scalars."""
    kinds = [*(a.tensor for a in spec.tensors if not a.optional), *(o.tensor for o in spec.outputs)]
    for kind in kinds:
        if kind is not None and not kind.variadic:
            yield from (dim.text for dim in kind.dims if dim.kind == "name")
    yield from (name for name, _ in spec.dims)
    yield from (a.name for a in spec.scalars if str(a.scalar) in ("int", "bool", "list[int]"))
