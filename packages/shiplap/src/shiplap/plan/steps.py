"""The steps of a call, in the order in which they are made: what is looked up, checked, converted and allocated."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shiplap.declare.dim_expression import Expr
from shiplap.plan.expression import Place, Term, Text
from shiplap.plan.rule import Rule


class Type(Enum):
    """What a variable holds: its C++ type, and the value that stands for none of it."""

    SIZE = ("int64_t", "-1", "{} < 0")
    BOOL = ("bool", "false", "!{}")
    DTYPE = ("int32_t", "-1", "{} < 0")
    DEVICE = ("Device", "Device{-1, -1}", "{}.type < 0")
    SHAPE = ("const int64_t*", "nullptr", "{} == nullptr")

    @property
    def cpp(self) -> str:
        return self.value[0]

    @property
    def unset(self) -> str:
        return self.value[1]

    def is_unset(self, variable: str) -> str:
        return self.value[2].format(variable)


@dataclass(frozen=True)
class Let:
    """A variable gets a value. In C++ alone where ``term`` has no Python form."""

    variable: str
    type: Type
    term: Term


@dataclass(frozen=True)
class Evaluate:
    """A variable gets the value of an expression that may have none; then ``rule`` is broken."""

    variable: str
    type: Type
    expr: Expr
    term: Term
    rule: Rule


@dataclass(frozen=True)
class Check:
    """The call is refused unless ``rule`` holds."""

    rule: Rule


@dataclass(frozen=True)
class Unset:
    """A variable that only some calls give a value, from the first argument that has one."""

    variable: str
    type: Type


@dataclass(frozen=True)
class Meet:
    """An unset variable gets its value, and ``from_<variable>`` the ``origin``; one that is set is checked."""

    variable: str
    type: Type
    term: Term
    origin: Text
    rules: tuple[Rule, ...]


@dataclass(frozen=True)
class Present:
    """Steps for an argument that may be None."""

    at: Place
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Each:
    """Steps for each tensor of a list, which may be None where it is ``optional``."""

    at: Place
    steps: tuple[Step, ...]
    optional: bool = False


@dataclass(frozen=True)
class Allocate:
    """A fresh contiguous output: ``sizes`` is a tuple, in C++ a braced list."""

    at: Place
    sizes: Term
    dtype: Term


@dataclass(frozen=True)
class Pack:
    """An argument is replaced by a contiguous copy where it lies otherwise than a kernel takes it.

    ``align``: bytes. ``written``: the copy is to be written back.
    """

    at: Place
    strided: bool
    align: int
    written: bool


Step = Let | Evaluate | Check | Unset | Meet | Present | Each | Allocate | Pack
Block = tuple[Step, ...]
