"""``OpSpec``, a declaration as frozen data. Schema, checks, fake, header, samples and docs are derived from it."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Literal

import torch

from shiplap.cached_property import cached_property
from shiplap.declare.dim_expression import Expr
from shiplap.declare.values import Args, Value


@dataclass(frozen=True)
class Dim:
    """One dim of a shape. ``kind`` states whether it is named, fixed, anonymous (``_``), variadic (``*batch``, ``...``)
    or computed.

    ``text`` is its name or its source. ``size`` is that of a fixed dim, and ``expr`` the expression of a computed one.
    ``of`` names the size to which this dim broadcasts. ``#n`` of an argument ``x`` is the dim ``x_n``, which is 1 or
    ``n``.
    """

    kind: Literal["name", "fixed", "any", "variadic", "expr"]
    text: str
    size: int = -1
    expr: Expr | None = None
    of: str = field(default="", repr=False)

    def along(self, size: object) -> str:
        """Return the name of the size that this dim has in a call in which it measures ``size``. For a dim ``#n``,
        which broadcasts, it is the common name ``n`` unless ``size`` is 1. Otherwise it is the dim's own name.
        """
        return self.of if self.of and size != 1 else self.text

    def __str__(self) -> str:
        """Return the dim as an annotation writes it, such as ``n``, ``*n`` or ``#n``."""
        if self.of:
            return f"#{self.of}"
        return f"*{self.text}" if self.kind == "variadic" and self.text != "..." else self.text


@dataclass(frozen=True)
class TensorType:
    """The type of a tensor.

    Attributes:
        dtype_class: the name of a set of dtypes, such as ``"Float"``.
        dtypes: the names of the torch dtypes in the set. It is empty if every dtype is admitted.
        dims: the dims of the shape.
    """

    dtype_class: str
    dtypes: tuple[str, ...]
    dims: tuple[Dim, ...]

    @cached_property
    def concrete(self) -> bool:
        """Whether the type admits exactly one dtype."""
        return len(self.dtypes) == 1

    @cached_property
    def axes(self) -> list[tuple[int, Dim]]:
        """All dims but the variadic one (``*batch`` or ``...``, any number of dims), each as ``(position, dim)``. Dims
        behind the variadic dim have negative positions, which count from the end.
        """
        count = len(self.dims)
        spread = next((i for i, d in enumerate(self.dims) if d.kind == "variadic"), count)
        return [(i if i < spread else i - count, d) for i, d in enumerate(self.dims) if i != spread]

    @property
    def variadic(self) -> bool:
        """Whether one of the dims, such as ``*batch`` or ``...``, stands for any number of dims."""
        return any(d.kind == "variadic" for d in self.dims)

    def __str__(self) -> str:
        """Return the type as an annotation, such as ``Float[Tensor, "n c"]``."""
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
    """One argument of an op. It is a tensor if ``tensor`` is set, a list of tensors if ``many`` is true, and otherwise
    a scalar.

    Attributes:
        length: the length of a list that always has as many elements, or 0.
        absent: whether members of a list of tensors may be None.
        specialized: whether torch never makes symbols of the argument's ints.
        cls: the class of an object. An object is a scalar, too.
        choices: the only values that a str or an int may have, or an empty tuple.
        members: the class derived from ``Enum`` whose values are the choices, or None.
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
        """The type of a scalar as errors print it. It is its choices, the class of an object, or its schema type."""
        if self.choices:
            return self.shown_choices
        return self.cls.__name__ if self.cls is not None else str(self.scalar)

    @property
    def shown_choices(self) -> str:
        """The choices of the argument as a caller writes them, such as ``'sum' or 'mean'``. It is empty if the argument
        takes any value.
        """
        names = [f"{self.members.__name__}.{m.name}" for m in self.members] if self.members else map(repr, self.choices)
        *rest, last = [*names] or [""]
        return f"{', '.join(rest)} or {last}" if rest else last

    @property
    def has_default(self) -> bool:
        """Whether the argument has a default, so that a call may leave it out."""
        return self.default is not ...

    @property
    def broadcasts(self) -> dict[str, str]:
        """The dims of the argument annotated ``#n`` (1 or the common size ``n``), as a dict from the dim's own name
        ``x_n`` to ``n``.
        """
        return {d.text: d.of for d in self.tensor.dims if d.of} if self.tensor is not None else {}

    @property
    def form(self) -> str:
        """The text that the argument adds to the declaration's digest beyond its ``repr``, with length, class and
        choices. It is empty for an argument without any of these.
        """
        named = f"/{self.cls.__module__}.{self.cls.__qualname__}" if self.cls is not None else ""
        chosen = f"/{self.choices}/{self.members.__qualname__ if self.members else ''}" if self.choices else ""
        # A plain argument adds nothing, so that digests from before such forms existed stay valid.
        plain = not (self.length or self.absent or self.specialized or self.cls or self.choices)
        return "" if plain else f"{self.name}/{self.length}/{self.absent}/{self.specialized}{named}{chosen}"


@dataclass(frozen=True)
class Output:
    """One output of an op, a tensor that each call allocates anew. ``tensor`` is its type, with dtypes and dims."""

    name: str
    tensor: TensorType


@dataclass(frozen=True)
class Return:
    """One result of an op whose results are not all new tensors of declared sizes.

    If ``alias`` is set, the result is the argument of that name if the op writes to it. Otherwise it may be a view of
    that argument. Any other result is a tensor, a list of tensors (``many``) or a scalar. It may be None if
    ``optional`` is true.
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
        """The result as an argument of the same kind, for code that reads arguments and results."""
        return Arg(self.name, self.tensor, self.scalar, self.many, self.optional, specialized=self.specialized)


@dataclass(frozen=True)
class OpSpec:
    """A declared op, with its name, arguments, outputs and the expressions that relate their sizes.

    Attributes:
        outputs: new tensors whose sizes the declaration determines.
        dims, bounds, requires: the expressions in the keywords of these names.
        returns: all results in order, if some are arguments, views, lists or scalars, or if ``traced`` is true.
        traced: whether only a run of the reference determines the results.
        detached: the names of arguments and results through which no gradient flows.
        random: the argument that seeds random results, or ``"global"`` for torch's own generator.
        unordered: the names of results whose rows may be in any order.
        single_tuple: whether the only result is returned in a tuple.
        tags: the torch tags that the declaration gives the op, beside those that follow from its other parts.
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
    tags: tuple[torch.Tag, ...] = field(default=(), repr=False)

    @property
    def namespace(self) -> str:
        """The part of the op's name before ``::``."""
        return self.name.split("::")[0]

    @property
    def opname(self) -> str:
        """The op's name without its namespace. For a named overload it is ``name.overload``."""
        return self.name.split("::")[1]

    @property
    def stem(self) -> str:
        """The prefix of the names of helper ops, such as ``<stem>__out``. It is the op's name with ``_`` in place of
        the dot of an overload.
        """
        return self.opname.replace(".", "_")

    @cached_property
    def tensors(self) -> tuple[Arg, ...]:
        """The arguments that are tensors or lists of tensors, in order."""
        return tuple(a for a in self.args if a.tensor is not None)

    @cached_property
    def dtype_classes(self) -> dict[str, TensorType]:
        """The annotations of the tensor arguments that admit several dtypes, as a dict from the name of the dtypes,
        such as ``Float``, to the type of one such argument. Annotations with one dtype are left out.
        """
        kinds = [a.tensor for a in self.tensors if a.tensor and not a.tensor.concrete]
        return {kind.dtype_class: kind for kind in kinds}

    @cached_property
    def scalars(self) -> tuple[Arg, ...]:
        """The arguments that are no tensors, in order."""
        return tuple(a for a in self.args if a.scalar is not None)

    @cached_property
    def enumerated(self) -> dict[str, Arg]:
        """The arguments that are declared as members of an ``Enum``, by name."""
        return {a.name: a for a in self.args if a.members is not None}

    @property
    def converts(self) -> bool:
        """Whether calls in Python differ from those of the schema. They do if arguments are members of an ``Enum``, or
        if the result is a tuple of one.
        """
        return bool(self.enumerated) or self.single_tuple

    @cached_property
    def broadcasts(self) -> dict[str, str]:
        """The dims annotated ``#n`` (1 or the common size ``n``) of all arguments, as a dict from the dim's own name,
        ``x_n`` for an argument ``x``, to ``n``.
        """
        return {own: of for a in self.args for own, of in a.broadcasts.items()}

    @cached_property
    def mutated(self) -> tuple[str, ...]:
        """The names of the arguments to which the op writes, in order."""
        return tuple(a.name for a in self.args if a.mutated)

    @cached_property
    def returned(self) -> tuple[str, ...]:
        """The names of the arguments that the op writes to and returns, in the order of the results."""
        return tuple(r.alias for r in self.returns if r.alias and self.arg(r.alias).mutated)

    @cached_property
    def view(self) -> bool:
        """Whether a result may be a view of an argument. torch traces such an op through its reference."""
        return any(r.alias and not self.arg(r.alias).mutated for r in self.returns)

    @cached_property
    def made(self) -> tuple[Return, ...]:
        """The declared results that are new, that is neither arguments nor views of them. It is empty if all results
        are new tensors whose sizes the declaration determines.
        """
        return tuple(r for r in self.returns if not r.alias)

    @cached_property
    def draws(self) -> bool:
        """Whether each call draws new random numbers and thereby advances a generator."""
        return self.random == "global" or (bool(self.random) and self.arg(self.random).scalar == "Generator")

    @cached_property
    def results(self) -> tuple[str, ...]:
        """The names of the results that a kernel returns, in order. Results that are arguments are left out."""
        return tuple(r.name for r in self.made) if self.traced else tuple(o.name for o in self.outputs)

    @cached_property
    def dynamic(self) -> dict[str, Expr]:
        """The output dims whose sizes depend on data, as a dict from the name of the dim to the expression that bounds
        it.
        """
        return dict(self.bounds)

    def arg(self, name: str) -> Arg:
        """Return the argument called ``name``, which must exist."""
        return next(a for a in self.args if a.name == name)

    def complete(self, args: Sequence[Value], named: Mapping[str, Value] | None = None) -> Args:
        """Return all arguments of a call in declared order. They are the positional ``args``, then the values in
        ``named``, then the declared defaults.

        No required argument may be missing. torch's dispatcher or the signature of the reference has checked that.
        """
        values = list(args)
        for arg in self.args[len(args) :]:
            value = named[arg.name] if named and arg.name in named else arg.default
            assert not isinstance(value, EllipsisType), f"{self.name}: no argument {arg.name!r}"
            values.append(value)
        return tuple(values)

    def split(self, args: Sequence[Value]) -> tuple[Args, dict[str, Value]]:
        """Return ``(positional, keywords)`` of a call from all arguments in declared order. Keyword-only arguments
        become keywords.
        """
        at = sum(not a.keyword_only for a in self.args)
        return tuple(args[:at]), {a.name: v for a, v in zip(self.args[at:], args[at:], strict=True)}

    @cached_property
    def digest(self) -> str:
        """A digest of the declaration as 16 hexadecimal digits. It covers the name, arguments, results and keywords,
        but not the body of the reference.
        """
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
        stated += f"/tags {[tag.name for tag in self.tags]}" if self.tags else ""
        return hashlib.sha256(f"{self!r}{stated}".encode()).hexdigest()[:16]

    @property
    def tolerated(self) -> float:
        """The relative error beyond rounding that a kernel may have. It is 0.0 unless declared."""
        return self.tolerance[0] if self.tolerance else 0.0
