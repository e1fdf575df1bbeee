"""``OpSpec``: a declaration as frozen data. All else - schema, checks, fake, header, samples, docs - reads it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Literal

from shiplap.cached import cached_property
from shiplap.op.expr import Expr
from shiplap.op.values import Args, Value

__all__ = ["Arg", "Dim", "OpSpec", "Output", "TensorType"]


@dataclass(frozen=True)
class Dim:
    """One token of a shape: a named, fixed, anonymous (``_``), variadic (``*batch``, ``...``) or computed dim."""

    kind: Literal["name", "fixed", "any", "variadic", "expr"]
    text: str
    size: int = -1
    expr: Expr | None = None

    def __str__(self) -> str:
        return f"*{self.text}" if self.kind == "variadic" and self.text != "..." else self.text


@dataclass(frozen=True)
class TensorType:
    """Dtype class (``"Float"``), the dtypes it admits (torch names) and the dims."""

    dtype_class: str
    dtypes: tuple[str, ...]
    dims: tuple[Dim, ...]

    @cached_property
    def concrete(self) -> bool:
        return len(self.dtypes) == 1

    @property
    def variadic(self) -> bool:
        return any(d.kind == "variadic" for d in self.dims)

    def __str__(self) -> str:
        return f'{self.dtype_class}[Tensor, "{" ".join(map(str, self.dims))}"]'


ScalarKind = Literal[
    "int",
    "float",
    "bool",
    "str",
    "complex",
    "Scalar",
    "dtype",
    "device",
    "layout",
    "memory_format",
    "Generator",
    "list[int]",
    "list[float]",
    "list[bool]",
    "list[str]",
    "list[Scalar]",
]


@dataclass(frozen=True)
class Arg:
    """One argument: a tensor (``tensor`` set), a tensor list (``many``) or a scalar (``scalar`` set)."""

    name: str
    tensor: TensorType | None = None
    scalar: ScalarKind | None = None
    many: bool = False
    optional: bool = False
    default: Value | EllipsisType = ...
    keyword_only: bool = False
    mutated: bool = False
    contiguous: bool = False

    @property
    def has_default(self) -> bool:
        return self.default is not ...


@dataclass(frozen=True)
class Output:
    """One freshly allocated output."""

    name: str
    tensor: TensorType


@dataclass(frozen=True)
class OpSpec:
    """A declared op: names, arguments, outputs and the expressions that relate their sizes."""

    name: str
    args: tuple[Arg, ...]
    outputs: tuple[Output, ...]
    dims: tuple[tuple[str, Expr], ...] = ()
    bounds: tuple[tuple[str, Expr], ...] = ()
    requires: tuple[Expr, ...] = ()
    autocast: str | None = "widest"
    library: tuple[str, ...] = field(default=(), repr=False)
    doc: str = field(default="", compare=False, repr=False)
    tolerance: tuple[float, str] | None = field(default=None, repr=False)

    @property
    def namespace(self) -> str:
        return self.name.split("::")[0]

    @property
    def opname(self) -> str:
        """Its name without namespace, ``name.overload`` for a named overload."""
        return self.name.split("::")[1]

    @property
    def stem(self) -> str:
        """What the names of the ops begin with that belong to this one, also where it is an overload."""
        return self.opname.replace(".", "_")

    @cached_property
    def tensors(self) -> tuple[Arg, ...]:
        return tuple(a for a in self.args if a.tensor is not None)

    @cached_property
    def scalars(self) -> tuple[Arg, ...]:
        return tuple(a for a in self.args if a.scalar is not None)

    @cached_property
    def mutated(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.args if a.mutated)

    @cached_property
    def dynamic(self) -> dict[str, Expr]:
        """Data-dependent dims and their bounds."""
        return dict(self.bounds)

    def arg(self, name: str) -> Arg:
        return next(a for a in self.args if a.name == name)

    def complete(self, args: Sequence[Value], named: Mapping[str, Value] | None = None) -> Args:
        """All arguments in declared order: those ``args`` leave out come by name, or are their defaults.

        The caller has seen to it that none is missing: torch's dispatcher, or the signature of the reference.
        """
        values = list(args)
        for arg in self.args[len(args) :]:
            value = named[arg.name] if named and arg.name in named else arg.default
            assert not isinstance(value, EllipsisType), f"{self.name}: no argument {arg.name!r}"
            values.append(value)
        return tuple(values)

    def split(self, args: Sequence[Value]) -> tuple[Args, dict[str, Value]]:
        """All arguments in declared order → as a function takes them: keyword-only ones by name."""
        at = sum(not a.keyword_only for a in self.args)
        return tuple(args[:at]), {a.name: v for a, v in zip(self.args[at:], args[at:], strict=True)}

    @cached_property
    def digest(self) -> str:
        """Identity of the declaration (not of its body)."""
        stated = f"/{self.tolerance}" if self.tolerance else ""
        return hashlib.sha256(f"{self!r}{stated}".encode()).hexdigest()[:16]

    @property
    def tolerated(self) -> float:
        """What a kernel may be off by besides rounding, relative to a value and its row."""
        return self.tolerance[0] if self.tolerance else 0.0
