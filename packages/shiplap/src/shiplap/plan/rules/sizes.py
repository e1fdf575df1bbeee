"""The rules of the number of dims of a tensor, and of their sizes."""

from __future__ import annotations

from dataclasses import dataclass

from shiplap.plan.expression import Expression, Text, equal_expression, same_in_both_languages
from shiplap.plan.rule import TRUE
from shiplap.plan.rules.tensors import OfTensor


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

    def holds(self) -> Expression:
        return equal_expression(self.at.rank, same_in_both_languages(str(self.rank)))


@dataclass(frozen=True)
class RankAtLeast(OfRank):
    """A variadic dim may be empty, the others are there."""

    def holds(self) -> Expression:
        return Expression(f"{self.at.rank.python} >= {self.rank}", f"{self.at.rank.cpp} >= {self.rank}")


@dataclass(frozen=True)
class OfAxis(OfTensor):
    """A rule about one size of a tensor. The axis is negative behind a variadic dim."""

    axis: int

    @property
    def size(self) -> Expression:
        return self.at.size(self.axis)


@dataclass(frozen=True)
class SameSize(OfAxis):
    """A named dim that was met before has the same size."""

    name: str
    bound: Expression
    origin: Text

    id = "SL202"

    def holds(self) -> Expression:
        return equal_expression(self.size, self.bound)

    def where(self) -> Text:
        return (*self.at.where, f", dim '{self.name}' (axis ", *self.at.axis(self.axis), ")")

    def got(self) -> Text:
        return (f"{self.name} = ", self.size)

    def expected(self) -> Text:
        return (f"{self.name} = ", self.bound, ", ", *self.origin)


@dataclass(frozen=True)
class SameOrOne(SameSize):
    """A dim that broadcasts has the size of the other, or is 1."""

    def holds(self) -> Expression:
        python = f"({self.size.python} == 1) | ({self.size.python} == {self.bound.python})"
        return Expression(python, f"({self.size.cpp} == 1 || {self.size.cpp} == {self.bound.cpp})")

    def expected(self) -> Text:
        return ("1, or ", *super().expected())


@dataclass(frozen=True)
class FixedSize(OfAxis):
    """The declaration has a number there."""

    wanted: int

    id = "SL203"

    def holds(self) -> Expression:
        return equal_expression(self.size, same_in_both_languages(str(self.wanted)))

    def got(self) -> Text:
        return ("size ", self.size, " in axis ", *self.at.axis(self.axis))

    def expected(self) -> Text:
        return (str(self.wanted),)


@dataclass(frozen=True)
class ComputedSize(OfAxis):
    """The declaration has an expression there; ``wanted`` is its value."""

    source: str
    wanted: Expression

    id = "SL202"

    def holds(self) -> Expression:
        return equal_expression(self.size, self.wanted)

    def got(self) -> Text:
        return ("size ", self.size, " in axis ", *self.at.axis(self.axis))

    def expected(self) -> Text:
        return (f"{self.source} = ", self.wanted)


@dataclass(frozen=True)
class OfSpread(OfTensor):
    """A rule about a variadic dim, whose sizes here are the variable ``spread_<argument>``."""

    name: str

    @property
    def here(self) -> Expression:
        name = f"spread_{self.at.arg}"
        return Expression(name, "", f"show({name})")

    @property
    def bound(self) -> Expression:
        return Expression(f"d_{self.name}", "", f"show(d_{self.name})")

    cpp_by = "nobody: a declaration with variadic dims has no C++ form"

    def got(self) -> Text:
        return (f"{self.name} = ", self.here)


@dataclass(frozen=True)
class SameSpreadRank(OfSpread):
    """A variadic dim that was met before is as many dims."""

    id = "SL201"

    def holds(self) -> Expression:
        return Expression(f"len({self.here.python}) == len({self.bound.python})", TRUE.cpp)

    def expected(self) -> Text:
        return (f"{self.name} = ", self.bound)


@dataclass(frozen=True)
class SameSpread(OfSpread):
    """A variadic dim that was met before has the same sizes."""

    id = "SL202"

    def holds(self) -> Expression:
        return Expression(f"same_sizes({self.here.python}, {self.bound.python})", TRUE.cpp)

    def expected(self) -> Text:
        return (self.bound,)
