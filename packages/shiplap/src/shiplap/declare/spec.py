"""``OpSpec``: a declaration as frozen data. Schema, checks, fake, header, samples and docs are derived from it."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Literal

from shiplap.cached_property import cached_property
from shiplap.declare.dim_expression import Expr
from shiplap.declare.values import Args, Value


@dataclass(frozen=True)
class Dim:
    """One token of a shape: a named, fixed, anonymous (``_``), variadic (``*batch``, ``...``) or computed dim.

    ``of`` names the size to which this dim broadcasts. ``#n`` of an argument ``x`` is the dim ``x_n``, which is 1 or
    ``n``.
    """

    kind: Literal["name", "fixed", "any", "variadic", "expr"]
    text: str
    size: int = -1
    expr: Expr | None = None
    of: str = field(default="", repr=False)

    def along(self, size: object) -> str:
        """Return the name of the dim that has this ``size``: the broadcast one, unless the size is 1."""
        return self.of if self.of and size != 1 else self.text

    def __str__(self) -> str:
        if self.of:
            return f"#{self.of}"
        return f"*{self.text}" if self.kind == "variadic" and self.text != "..." else self.text


@dataclass(frozen=True)
class TensorType:
    """The type of a tensor: a dtype class (``"Float"``), the dtypes in it (torch names) and the dims."""

    dtype_class: str
    dtypes: tuple[str, ...]
    dims: tuple[Dim, ...]

    @cached_property
    def concrete(self) -> bool:
        return len(self.dtypes) == 1

    @cached_property
    def axes(self) -> list[tuple[int, Dim]]:
        """The dims but the variadic one, each with its axis, which is negative behind the variadic dim."""
        count = len(self.dims)
        spread = next((i for i, d in enumerate(self.dims) if d.kind == "variadic"), count)
        return [(i if i < spread else i - count, d) for i, d in enumerate(self.dims) if i != spread]

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
    "object",
    "list[int]",
    "list[float]",
    "list[bool]",
    "list[str]",
    "list[Scalar]",
]


@dataclass(frozen=True)
class Arg:
    """One argument: a tensor (``tensor`` set), a tensor list (``many``) or a scalar (``scalar`` set).

    ``length``: of a list that always has as many elements. ``absent``: members of a list of tensors may be None.
    ``specialized``: ints that torch never makes symbols. ``cls``: of an object, which is a scalar too. ``choices``: the
    only values that a str or an int may have; ``members``: the class derived from ``Enum`` whose values they are.
    """

    name: str
    tensor: TensorType | None = None
    scalar: ScalarKind | None = None
    many: bool = False
    optional: bool = False
    default: Value | EllipsisType = ...
    keyword_only: bool = False
    mutated: bool = False
    contiguous: bool = False
    length: int = field(default=0, repr=False)
    absent: bool = field(default=False, repr=False)
    specialized: bool = field(default=False, repr=False)
    cls: type | None = field(default=None, repr=False)
    choices: tuple[int | str, ...] = field(default=(), repr=False)
    members: type[enum.Enum] | None = field(default=None, repr=False)

    @property
    def kind(self) -> str:
        """The type of a scalar as errors print it: its schema type, its choices, or the class of an object."""
        if self.choices:
            return self.shown_choices
        return self.cls.__name__ if self.cls is not None else str(self.scalar)

    @property
    def shown_choices(self) -> str:
        """The choices as a caller writes them, such as ``'sum' or 'mean'``. Empty where any value is taken."""
        names = [f"{self.members.__name__}.{m.name}" for m in self.members] if self.members else map(repr, self.choices)
        *rest, last = [*names] or [""]
        return f"{', '.join(rest)} or {last}" if rest else last

    @property
    def has_default(self) -> bool:
        return self.default is not ...

    @property
    def broadcasts(self) -> dict[str, str]:
        """The dims that broadcast, each with the name of the size to which it broadcasts."""
        return {d.text: d.of for d in self.tensor.dims if d.of} if self.tensor is not None else {}

    @property
    def form(self) -> str:
        """The part of the declaration's digest beside ``repr``. Empty for an argument without a special form."""
        named = f"/{self.cls.__module__}.{self.cls.__qualname__}" if self.cls is not None else ""
        chosen = f"/{self.choices}/{self.members.__qualname__ if self.members else ''}" if self.choices else ""
        plain = not (self.length or self.absent or self.specialized or self.cls or self.choices)
        return "" if plain else f"{self.name}/{self.length}/{self.absent}/{self.specialized}{named}{chosen}"


@dataclass(frozen=True)
class Output:
    """One freshly allocated output."""

    name: str
    tensor: TensorType


@dataclass(frozen=True)
class Return:
    """One result of an op whose results are not all fresh tensors of declared sizes.

    ``alias``: the argument that the result is, if the op writes to it, or else may be a view of. Any other result is
    a tensor, a list of them (``many``) or a scalar, and may be None where it is ``optional``.
    """

    name: str
    tensor: TensorType | None = None
    scalar: ScalarKind | None = None
    many: bool = False
    optional: bool = False
    alias: str = ""
    specialized: bool = False

    @property
    def arg(self) -> Arg:
        """The argument of the same kind."""
        return Arg(self.name, self.tensor, self.scalar, self.many, self.optional, specialized=self.specialized)


@dataclass(frozen=True)
class OpSpec:
    """A declared op: names, arguments, outputs and the expressions that relate their sizes.

    ``outputs`` are fresh tensors whose sizes the declaration determines. ``returns`` has all results, in order, where
    some are arguments, views, lists or scalars, or where the reference tells the sizes (``traced``). ``detached`` names
    arguments and results through which no gradient flows. ``random``: the argument that seeds random results, "global"
    for torch's own generator. ``unordered``: results whose rows are a set, in any order. ``single_tuple``: the only
    result is returned in a tuple.
    """

    name: str
    args: tuple[Arg, ...]
    outputs: tuple[Output, ...]
    dims: tuple[tuple[str, Expr], ...] = ()
    bounds: tuple[tuple[str, Expr], ...] = ()
    requires: tuple[Expr, ...] = ()
    autocast: str | None = "widest"
    reference_is_fast_on: tuple[str, ...] = field(default=(), repr=False)
    doc: str = field(default="", compare=False, repr=False)
    tolerance: tuple[float, str] | None = field(default=None, repr=False)
    returns: tuple[Return, ...] = field(default=(), repr=False)
    traced: bool = field(default=False, repr=False)
    detached: tuple[str, ...] = field(default=(), repr=False)
    random: str = field(default="", repr=False)
    unordered: tuple[str, ...] = field(default=(), repr=False)
    single_tuple: bool = field(default=False, repr=False)

    @property
    def namespace(self) -> str:
        return self.name.split("::")[0]

    @property
    def opname(self) -> str:
        """The op's name without namespace: ``name``, or ``name.overload`` for a named overload."""
        return self.name.split("::")[1]

    @property
    def stem(self) -> str:
        """The prefix of the names of helper ops, such as ``<stem>__out``. It has no dot, also for an overload."""
        return self.opname.replace(".", "_")

    @cached_property
    def tensors(self) -> tuple[Arg, ...]:
        return tuple(a for a in self.args if a.tensor is not None)

    @cached_property
    def dtype_classes(self) -> dict[str, TensorType]:
        """The dtype classes of tensor arguments with a type of each, in order. A concrete dtype is no class."""
        kinds = [a.tensor for a in self.tensors if a.tensor and not a.tensor.concrete]
        return {kind.dtype_class: kind for kind in kinds}

    @cached_property
    def scalars(self) -> tuple[Arg, ...]:
        return tuple(a for a in self.args if a.scalar is not None)

    @cached_property
    def enumerated(self) -> dict[str, Arg]:
        """The arguments that are members of an ``Enum``, by name."""
        return {a.name: a for a in self.args if a.members is not None}

    @property
    def converts(self) -> bool:
        """Whether calls in Python differ from those of the schema: in members of an ``Enum``, or a tuple of one."""
        return bool(self.enumerated) or self.single_tuple

    @cached_property
    def broadcasts(self) -> dict[str, str]:
        """``x_n`` → ``n`` for each ``#n`` of an argument ``x``."""
        return {own: of for a in self.args for own, of in a.broadcasts.items()}

    @cached_property
    def mutated(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.args if a.mutated)

    @cached_property
    def returned(self) -> tuple[str, ...]:
        """The arguments that the op writes to and returns."""
        return tuple(r.alias for r in self.returns if r.alias and self.arg(r.alias).mutated)

    @cached_property
    def view(self) -> bool:
        """Whether a result may be a view of an argument. Such an op is its reference, through which torch traces."""
        return any(r.alias and not self.arg(r.alias).mutated for r in self.returns)

    @cached_property
    def made(self) -> tuple[Return, ...]:
        """The results of a ``traced`` op that are not arguments."""
        return tuple(r for r in self.returns if not r.alias)

    @cached_property
    def draws(self) -> bool:
        """Whether each call draws new random numbers and so advances the state of a generator."""
        return self.random == "global" or (bool(self.random) and self.arg(self.random).scalar == "Generator")

    @cached_property
    def results(self) -> tuple[str, ...]:
        """The names of the results that a kernel returns, in order."""
        return tuple(r.name for r in self.made) if self.traced else tuple(o.name for o in self.outputs)

    @cached_property
    def dynamic(self) -> dict[str, Expr]:
        """The data-dependent dims, each with its bound."""
        return dict(self.bounds)

    def arg(self, name: str) -> Arg:
        return next(a for a in self.args if a.name == name)

    def complete(self, args: Sequence[Value], named: Mapping[str, Value] | None = None) -> Args:
        """Return all arguments in declared order. Arguments beyond ``args`` come from ``named`` or are defaults.

        No required argument may be missing. Torch's dispatcher or the signature of the reference has checked that.
        """
        values = list(args)
        for arg in self.args[len(args) :]:
            value = named[arg.name] if named and arg.name in named else arg.default
            assert not isinstance(value, EllipsisType), f"{self.name}: no argument {arg.name!r}"
            values.append(value)
        return tuple(values)

    def split(self, args: Sequence[Value]) -> tuple[Args, dict[str, Value]]:
        """Return ``(positional, by name)`` of all arguments in declared order: keyword-only ones go by name."""
        at = sum(not a.keyword_only for a in self.args)
        return tuple(args[:at]), {a.name: v for a, v in zip(self.args[at:], args[at:], strict=True)}

    @cached_property
    def digest(self) -> str:
        """The digest of the declaration, without the body of the reference."""
        # Fields with repr=False are added only where they are set. Otherwise each new field of the class would change
        # the digest of every op, and with it every stored choice and every compiled library.
        stated = f"/{self.tolerance}" if self.tolerance else ""
        stated += "".join(a.form for a in self.args) + (
            f"/{self.returns}/{self.traced}" if self.returns or self.traced else ""
        )
        stated += f"/detached {self.detached}" if self.detached else ""
        stated += f"/random {self.random}" if self.random else ""
        stated += f"/unordered {self.unordered}" if self.unordered else ""
        stated += "/tuple" if self.single_tuple else ""
        stated += f"/broadcasts {self.broadcasts}" if self.broadcasts else ""
        return hashlib.sha256(f"{self!r}{stated}".encode()).hexdigest()[:16]

    @property
    def tolerated(self) -> float:
        """The relative error that a kernel may have beyond rounding."""
        return self.tolerance[0] if self.tolerance else 0.0
