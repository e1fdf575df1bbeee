"""The steps of a call, in the order in which they are made: what is looked up, checked, converted and allocated."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shiplap.declare.dim_expression import Expr
from shiplap.plan.expression import Expression, TensorPlace, Text
from shiplap.plan.rule import ArgumentRule
from shiplap.plan.rules.relations import HasValue


class VariableType(Enum):
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
class LetStep:
    """A variable gets a value. In C++ alone where ``term`` has no Python form."""

    variable: str
    type: VariableType
    term: Expression


@dataclass(frozen=True)
class EvaluateStep:
    """A variable gets the value of an expression that may have none; then ``rule`` is broken."""

    variable: str
    type: VariableType
    expr: Expr
    term: Expression
    rule: HasValue


@dataclass(frozen=True)
class CheckStep:
    """The call is refused unless ``rule`` holds."""

    rule: ArgumentRule


@dataclass(frozen=True)
class UnsetStep:
    """A variable that only some calls give a value, from the first argument that has one."""

    variable: str
    type: VariableType


@dataclass(frozen=True)
class MeetStep:
    """An unset variable gets its value, and ``from_<variable>`` the ``origin``; one that is set is checked."""

    variable: str
    type: VariableType
    term: Expression
    origin: Text
    rules: tuple[ArgumentRule, ...]


@dataclass(frozen=True)
class PresentStep:
    """Steps for an argument that may be None."""

    at: TensorPlace
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class EachStep:
    """Steps for each tensor of a list, which may be None where it is ``optional``."""

    at: TensorPlace
    steps: tuple[Step, ...]
    optional: bool = False


@dataclass(frozen=True)
class AllocateStep:
    """A fresh contiguous output: ``sizes`` is a tuple, in C++ a braced list."""

    at: TensorPlace
    sizes: Expression
    dtype: Expression


@dataclass(frozen=True)
class PackStep:
    """An argument is replaced by a contiguous copy where it lies otherwise than a kernel takes it.

    ``align``: bytes. ``written``: the copy is to be written back.
    """

    at: TensorPlace
    strided: bool
    align: int
    written: bool


Step = LetStep | EvaluateStep | CheckStep | UnsetStep | MeetStep | PresentStep | EachStep | AllocateStep | PackStep
Block = tuple[Step, ...]
