"""The steps of a call in their order: lookups, checks, conversions and allocations."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shiplap.declare.dim_expression import Expr
from shiplap.plan.expression import Expression, TensorPlace, Text
from shiplap.plan.rule import ArgumentRule


class VariableType(Enum):
    """The type of a variable: its C++ type, and the value that stands for an unset variable."""

    SIZE = ("int64_t", "-1", "{} < 0")
    BOOL = ("bool", "false", "!{}")
    DTYPE = ("int32_t", "-1", "{} < 0")
    DEVICE = ("Device", "Device{-1, -1}", "{}.type < 0")
    SHAPE = ("const int64_t*", "nullptr", "{} == nullptr")

    @property
    def cpp(self) -> str:
        """The C++ type, such as ``int64_t``, with which generated code declares a variable of this kind (a size, a
        dtype and so on).
        """
        return self.value[0]

    @property
    def unset(self) -> str:
        """The C++ value, such as ``-1``, that marks a variable of this type as not set."""
        return self.value[1]

    def is_unset(self, variable: str) -> str:
        """Return the C++ condition, as source text, that the variable ``variable`` of this kind has not been set."""
        return self.value[2].format(variable)


@dataclass(frozen=True)
class LetStep:
    """The step that sets a variable. It exists in C++ alone where ``term`` has no Python form."""

    variable: str
    type: VariableType
    term: Expression


@dataclass(frozen=True)
class EvaluateStep:
    """The step that evaluates an expression which may have no value; ``rule`` is broken then."""

    variable: str
    type: VariableType
    expr: Expr
    term: Expression
    rule: ArgumentRule


@dataclass(frozen=True)
class CheckStep:
    """The step that refuses the call unless ``rule`` holds."""

    rule: ArgumentRule


@dataclass(frozen=True)
class UnsetStep:
    """The step that declares a variable which only some calls set, by the first argument that has a value."""

    variable: str
    type: VariableType


@dataclass(frozen=True)
class MeetStep:
    """The step that sets an unset variable, and ``from_<variable>`` to ``origin``, or checks ``rules`` for one that is
    set.
    """

    variable: str
    type: VariableType
    term: Expression
    origin: Text
    rules: tuple[ArgumentRule, ...]


@dataclass(frozen=True)
class PresentStep:
    """The steps for an argument that may be None."""

    at: TensorPlace
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class EachStep:
    """The steps for each tensor of a list, which may be None where it is ``optional``."""

    at: TensorPlace
    steps: tuple[Step, ...]
    optional: bool


@dataclass(frozen=True)
class AllocateStep:
    """The step that allocates a contiguous output. ``sizes`` is a tuple, in C++ a braced list."""

    at: TensorPlace
    sizes: Expression
    dtype: Expression


@dataclass(frozen=True)
class PackStep:
    """The step that replaces an argument by a contiguous copy, where its layout is not one that the kernel takes.

    ``align``: bytes. ``written``: the copy is to be written back.
    """

    at: TensorPlace
    strided: bool
    align: int
    written: bool


Step = LetStep | EvaluateStep | CheckStep | UnsetStep | MeetStep | PresentStep | EachStep | AllocateStep | PackStep
Block = tuple[Step, ...]
