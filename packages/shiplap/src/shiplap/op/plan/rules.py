"""The rules of arguments. One class a rule; a new one is written here and made in ``build.py``, nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from shiplap import dtypes
from shiplap.op.expr import Expr
from shiplap.op.plan.rule import TRUE, Rule
from shiplap.op.plan.term import Names, Place, Term, Text, both, equal, quoted, value, values_of
from shiplap.op.plan.values import Constant

__all__ = [
    "AgreesWith",
    "Computed",
    "Contiguous",
    "Dense",
    "DtypeAmong",
    "Fixed",
    "HasValue",
    "IsTensor",
    "Known",
    "OutsideAutograd",
    "OwnMemory",
    "RankAtLeast",
    "RankIs",
    "Requires",
    "SameDevice",
    "SameDtype",
    "SameSize",
    "SameSpread",
    "SameSpreadRank",
    "Unshared",
]


@dataclass(frozen=True)
class OfTensor(Rule):
    """A rule about one tensor."""

    at: Place

    def where(self) -> Text:
        return self.at.where


@dataclass(frozen=True)
class OfCall(Rule):
    """A rule about the call as a whole."""

    op: str

    def where(self) -> Text:
        return (self.op,)


@dataclass(frozen=True)
class IsTensor(OfTensor):
    """The dispatcher takes None for any tensor."""

    declared: str

    id = "SL209"
    cpp_by = "the dispatcher, and tvm-ffi's Arguments, which hand over tensors"

    def holds(self) -> Term:
        return Term(f"isinstance({self.at.tensor.python}, Tensor)", TRUE.cpp)

    def got(self) -> Text:
        t = self.at.tensor.python
        return (Term(f"'None' if {t} is None else type({t}).__name__", ""),)

    def expected(self) -> Text:
        return (self.declared,)


@dataclass(frozen=True)
class Dense(OfTensor):
    """Strides describe the tensor."""

    id = "SL207"
    fix = "call .to_dense() first"
    cpp_by = "the dispatch key under which the code is registered"

    def holds(self) -> Term:
        return Term(f"{self.at.tensor.python}.layout is strided", TRUE.cpp)

    def got(self) -> Text:
        return (Term(f"{self.at.tensor.python}.layout", ""),)

    def expected(self) -> Text:
        return ("a dense tensor",)


@dataclass(frozen=True)
class DtypeAmong(OfTensor):
    """The dtype is one that is declared."""

    dtype_class: str
    names: tuple[str, ...]

    id = "SL204"

    def holds(self) -> Term:
        kind, one = self.at.dtype, len(self.names) == 1
        python = f"{kind.python} {'is' if one else 'in'} ok_{self.at.arg}"
        numbers = dtypes.numbers(self.names)
        return Term(
            python,
            f"{kind.cpp} == {numbers[0]}" if one and numbers else f"among({kind.cpp}, {dtypes.mask(self.names)})",
        )

    def constants(self) -> dict[str, Constant]:
        found = frozenset(getattr(torch, name) for name in self.names)
        return {f"ok_{self.at.arg}": found if len(self.names) > 1 else next(iter(found))}

    def got(self) -> Text:
        return (self.at.dtype,)

    def expected(self) -> Text:
        return (f"{self.dtype_class}: {', '.join(sorted(self.names))}",)


@dataclass(frozen=True)
class SameDtype(OfTensor):
    """One dtype class, one dtype."""

    dtype_class: str
    origin: Text

    id = "SL205"

    @property
    def bound(self) -> Term:
        name = f"dtype_{self.dtype_class}"
        return Term(name, name, "", f"Dtype{{{name}}}")

    def holds(self) -> Term:
        return equal(self.at.dtype, self.bound)

    def got(self) -> Text:
        return (self.at.dtype,)

    def expected(self) -> Text:
        return (self.bound, ", as ", *self.origin, f" ({self.dtype_class})")


@dataclass(frozen=True)
class SameDevice(OfTensor):
    """An op runs on one device."""

    origin: Text

    id = "SL206"

    def holds(self) -> Term:
        return equal(self.at.device, both("device"))

    def got(self) -> Text:
        return (self.at.device,)

    def expected(self) -> Text:
        return (both("device"), ", as ", *self.origin)


@dataclass(frozen=True)
class OfRank(OfTensor):
    """A rule about the number of dims."""

    rank: int
    declared: str

    id = "SL201"

    def got(self) -> Text:
        return (self.at.rank, " dims, shape ", self.at.shape)

    def expected(self) -> Text:
        return (self.declared,)


@dataclass(frozen=True)
class RankIs(OfRank):
    """A type without a variadic dim fixes the rank."""

    def holds(self) -> Term:
        return equal(self.at.rank, both(str(self.rank)))


@dataclass(frozen=True)
class RankAtLeast(OfRank):
    """A variadic dim may be empty, the others are there."""

    def holds(self) -> Term:
        return Term(f"{self.at.rank.python} >= {self.rank}", f"{self.at.rank.cpp} >= {self.rank}")


@dataclass(frozen=True)
class OfAxis(OfTensor):
    """A rule about one size of a tensor; the axis is negative behind a variadic dim."""

    axis: int

    @property
    def size(self) -> Term:
        return self.at.size(self.axis)


@dataclass(frozen=True)
class SameSize(OfAxis):
    """A named dim that was met before has the same size."""

    name: str
    bound: Term
    origin: Text

    id = "SL202"

    def holds(self) -> Term:
        return equal(self.size, self.bound)

    def where(self) -> Text:
        return (*self.at.where, f", dim '{self.name}' (axis ", *self.at.axis(self.axis), ")")

    def got(self) -> Text:
        return (f"{self.name} = ", self.size)

    def expected(self) -> Text:
        return (f"{self.name} = ", self.bound, ", ", *self.origin)


@dataclass(frozen=True)
class Fixed(OfAxis):
    """The declaration has a number there."""

    wanted: int

    id = "SL203"

    def holds(self) -> Term:
        return equal(self.size, both(str(self.wanted)))

    def got(self) -> Text:
        return ("size ", self.size, " in axis ", *self.at.axis(self.axis))

    def expected(self) -> Text:
        return (str(self.wanted),)


@dataclass(frozen=True)
class Computed(OfAxis):
    """The declaration has an expression there; ``wanted`` is its value."""

    source: str
    wanted: Term

    id = "SL202"

    def holds(self) -> Term:
        return equal(self.size, self.wanted)

    def got(self) -> Text:
        return ("size ", self.size, " in axis ", *self.at.axis(self.axis))

    def expected(self) -> Text:
        return (f"{self.source} = ", self.wanted)


@dataclass(frozen=True)
class OfSpread(OfTensor):
    """A rule about a variadic dim, whose sizes here are the variable ``spread_<argument>``."""

    name: str

    @property
    def here(self) -> Term:
        found = f"spread_{self.at.arg}"
        return Term(found, "", f"show({found})")

    @property
    def bound(self) -> Term:
        return Term(f"d_{self.name}", "", f"show(d_{self.name})")

    cpp_by = "nobody: a declaration with variadic dims has no C++ form"

    def got(self) -> Text:
        return (f"{self.name} = ", self.here)


@dataclass(frozen=True)
class SameSpreadRank(OfSpread):
    """A variadic dim that was met before is as many dims."""

    id = "SL201"

    def holds(self) -> Term:
        return Term(f"len({self.here.python}) == len({self.bound.python})", TRUE.cpp)

    def expected(self) -> Text:
        return (f"{self.name} = ", self.bound)


@dataclass(frozen=True)
class SameSpread(OfSpread):
    """A variadic dim that was met before has the same sizes."""

    id = "SL202"

    def holds(self) -> Term:
        return Term(f"same_sizes({self.here.python}, {self.bound.python})", TRUE.cpp)

    def expected(self) -> Text:
        return (self.bound,)


@dataclass(frozen=True)
class Contiguous(OfTensor):
    """``contiguous=`` asks for it."""

    id = "SL207"

    def holds(self) -> Term:
        t = self.at.tensor
        return Term(f"{t.python}.is_contiguous()", f"{t.cpp}.is_contiguous()")

    def got(self) -> Text:
        return ("strides ", self.at.strides)

    def expected(self) -> Text:
        return ("a contiguous tensor",)


@dataclass(frozen=True)
class OwnMemory(OfTensor):
    """No two elements of a tensor that is written to share memory."""

    id = "SL210"

    def holds(self) -> Term:
        t = self.at.tensor
        return Term(f"({t.python}.is_contiguous() or own_memory({t.python}))", f"own_memory({t.cpp})")

    def defers(self, index: int) -> str:
        return f"!peek_contiguous(values[{index}])"  # a copy would have to be written back

    def got(self) -> Text:
        return ("shape ", self.at.shape, ", strides ", self.at.strides)

    def expected(self) -> Text:
        return ("distinct memory",)


@dataclass(frozen=True)
class OutsideAutograd(OfTensor):
    """What is written to has no gradient of its own."""

    id = "SL304"
    fix = "call the op under torch.no_grad(), or pass .detach()"
    cpp_by = "Python, to which such calls are handed over: the stable ABI cannot ask a tensor"

    def holds(self) -> Term:
        return Term(f"not ({self.at.tensor.python}.requires_grad and is_grad_enabled())", TRUE.cpp)

    def defers(self, index: int) -> str:
        return "aoti_torch_grad_mode_is_enabled()"

    def got(self) -> Text:
        return ("a tensor that requires grad",)

    def expected(self) -> Text:
        return ("a mutated tensor outside autograd",)


@dataclass(frozen=True)
class Known(OfCall):
    """A list that gives a size, a dtype or the device has an element."""

    variables: tuple[str, ...]

    id = "SL209"
    cpp_by = "nobody: a declaration with lists of tensors has no C++ form"

    def holds(self) -> Term:
        return Term(" and ".join(f"{v} is not None" for v in self.variables), TRUE.cpp)

    def got(self) -> Text:
        return ("an empty list of tensors",)

    def expected(self) -> Text:
        return ("at least one tensor",)


@dataclass(frozen=True)
class AgreesWith(OfCall):
    """A dim of an argument that ``dims=`` computes too has the computed size."""

    name: str
    bound: Term
    computed: Term
    origin: Text

    id = "SL202"

    def holds(self) -> Term:
        return equal(self.computed, self.bound)

    def got(self) -> Text:
        return (f"{self.name} = ", self.computed)

    def expected(self) -> Text:
        return (f"{self.name} = ", self.bound, ", ", *self.origin)


@dataclass(frozen=True)
class OfExpression(OfCall):
    """A rule about an expression of the declaration."""

    expr: Expr
    names: Names = field(compare=False, repr=False)

    id = "SL208"


@dataclass(frozen=True)
class Requires(OfExpression):
    """``requires=`` asks for it; ``truth`` is the value of the expression."""

    truth: Term

    def holds(self) -> Term:
        return self.truth

    def got(self) -> Text:
        return values_of(self.expr, self.names)

    def expected(self) -> Text:
        return (self.expr.source,)


@dataclass(frozen=True)
class HasValue(OfExpression):
    """An expression has a value; ``why`` is what was caught where it had none."""

    caught: ClassVar[Term] = Term("why", "why.what()", "why_none(why)")

    def holds(self) -> Term:
        return value(self.expr, self.names)

    def got(self) -> Text:
        return (*values_of(self.expr, self.names), ": ", self.caught)

    def expected(self) -> Text:
        return (f"a value of {self.expr}",)


@dataclass(frozen=True)
class Unshared(OfTensor):
    """A tensor that is written to does not start where another argument does: that one's content would be undefined."""

    other: Place

    id = "SL210"
    title = "mutated tensor is another argument too"
    real = True

    def holds(self) -> Term:
        t, o = self.at.tensor, self.other.tensor
        return Term(
            f"({t.python}.data_ptr() != {o.python}.data_ptr() or {o.python}.numel() == 0)",
            f"({t.cpp}.data() != {o.cpp}.data() || numel({o.cpp}) == 0)",
        )

    def got(self) -> Text:
        return ("memory of argument ", *quoted((self.other.arg,)))

    def expected(self) -> Text:
        return ("memory of its own",)
