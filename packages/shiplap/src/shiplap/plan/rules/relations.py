"""The rules of a call as a whole: what its arguments determine together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from shiplap.declare.dim_expression import Expr
from shiplap.plan.expression import Expression, Text, VariableNames, declared_value, equal_expression, values_text
from shiplap.plan.rule import TRUE, ArgumentRule
from shiplap.plan.values import Constant


@dataclass(frozen=True)
class OfCall(ArgumentRule):
    """A rule about the call as a whole."""

    op: str

    def where(self) -> Text:
        return (self.op,)


@dataclass(frozen=True)
class IsObject(ArgumentRule):
    """An argument that is an object belongs to the declared class, which torch does not ask."""

    op: str
    argument: str
    cls: type
    optional: bool

    id = "SL209"
    cpp_by = "nobody: a declaration with objects has no C++ form"

    def holds(self) -> Expression:
        absent = f"a_{self.argument} is None or " * self.optional
        return Expression(f"{absent}isinstance(a_{self.argument}, class_{self.argument})", TRUE.cpp)

    def constants(self) -> dict[str, Constant]:
        return {f"class_{self.argument}": self.cls}

    def where(self) -> Text:
        return (f"{self.op}, argument '{self.argument}'",)

    def got(self) -> Text:
        return (Expression(f"type(a_{self.argument}).__name__", ""),)

    def expected(self) -> Text:
        return (self.cls.__name__ + " or None" * self.optional,)


@dataclass(frozen=True)
class WithoutNul(ArgumentRule):
    """A text has no NUL character, where it would end for a C kernel but not for the reference."""

    op: str
    argument: str

    id = "SL209"
    title = "a text has a NUL character"
    fix = "pass the text without the NUL character"

    def holds(self) -> Expression:
        text = f"a_{self.argument}"
        return Expression(f"'\\0' not in {text}", f"{text}.find('\\0') == std::string::npos")

    def where(self) -> Text:
        return (f"{self.op}, argument '{self.argument}'",)

    def got(self) -> Text:
        return ("a text with a NUL character",)

    def expected(self) -> Text:
        return ("a text that C reads to its end",)


@dataclass(frozen=True)
class DistinctMembers(ArgumentRule):
    """The members of a list that is written to share no memory."""

    op: str
    argument: str

    id = "SL210"
    title = "two members of a mutated list share memory"
    real = True
    cpp_by = "nobody: a declaration with lists of tensors has no C++ form"

    def holds(self) -> Expression:
        members = f"a_{self.argument}"
        return Expression(f"({members} is None or not any_shares_memory({members}))", TRUE.cpp)

    def where(self) -> Text:
        return (f"{self.op}, argument '{self.argument}'",)

    def got(self) -> Text:
        return ("memory of another member",)

    def expected(self) -> Text:
        return ("memory of its own",)


@dataclass(frozen=True)
class MemberKnown(OfCall):
    """A list that gives a size, a dtype or the device has an element."""

    variables: tuple[str, ...]

    id = "SL209"
    cpp_by = "nobody: a declaration with lists of tensors has no C++ form"

    def holds(self) -> Expression:
        return Expression(" and ".join(f"{v} is not None" for v in self.variables), TRUE.cpp)

    def got(self) -> Text:
        return ("an empty list of tensors",)

    def expected(self) -> Text:
        return ("at least one tensor",)


@dataclass(frozen=True)
class AgreesWith(OfCall):
    """A dim of an argument that ``dims=`` computes too has the computed size."""

    name: str
    bound: Expression
    computed: Expression
    origin: Text

    id = "SL202"

    def holds(self) -> Expression:
        return equal_expression(self.computed, self.bound)

    def got(self) -> Text:
        return (f"{self.name} = ", self.computed)

    def expected(self) -> Text:
        return (f"{self.name} = ", self.bound, ", ", *self.origin)


@dataclass(frozen=True)
class OfExpression(OfCall):
    """A rule about an expression of the declaration."""

    expr: Expr
    names: VariableNames = field(compare=False, repr=False)

    id = "SL208"


@dataclass(frozen=True)
class RequiresHolds(OfExpression):
    """``requires=`` asks for it; ``truth`` is the value of the expression."""

    truth: Expression

    def holds(self) -> Expression:
        return self.truth

    def got(self) -> Text:
        return values_text(self.expr, self.names)

    def expected(self) -> Text:
        return (self.expr.source,)


@dataclass(frozen=True)
class HasValue(OfExpression):
    """An expression has a value; ``why`` is what was caught where it had none."""

    caught: ClassVar[Expression] = Expression("why", "why.what()", "why_none(why)")

    def holds(self) -> Expression:
        return declared_value(self.expr, self.names)

    def got(self) -> Text:
        return (*values_text(self.expr, self.names), ": ", self.caught)

    def expected(self) -> Text:
        return (f"a value of {self.expr}",)
