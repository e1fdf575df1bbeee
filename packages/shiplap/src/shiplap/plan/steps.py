"""The steps of a call in their order. They are lookups, checks, conversions and allocations."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shiplap.declare.dim_expression import Expr
from shiplap.plan.expression import Expression, TensorPlace, Text
from shiplap.plan.rule import ArgumentRule


class VariableType(Enum):
    """The type of a variable in generated code. Each member has the C++ type, the C++ value of an unset variable, and
    the C++ condition that a variable is unset.
    """

    SIZE = ("int64_t", "-1", "{} < 0")
    BOOL = ("bool", "false", "!{}")
    DTYPE = ("int32_t", "-1", "{} < 0")
    DEVICE = ("Device", "Device{-1, -1}", "{}.type < 0")
    SHAPE = ("const int64_t*", "nullptr", "{} == nullptr")

    @property
    def cpp(self) -> str:
        """The C++ type, such as ``int64_t``, with which generated code declares a variable of this kind (such as a size
        or a dtype).
        """
        return self.value[0]

    @property
    def unset(self) -> str:
        """The C++ value, such as ``-1``, that marks a variable of this type as not set."""
        return self.value[1]

    def is_unset(self, variable: str) -> str:
        """Return the C++ condition, as source text, that the variable ``variable`` of this type has not been set."""
        return self.value[2].format(variable)


@dataclass(frozen=True)
class LetStep:
    """The step that sets ``variable``, of the type ``type``, to ``term``. If ``term`` has no Python source, only
    generated C++ has the step.
    """

    variable: str
    type: VariableType
    term: Expression


@dataclass(frozen=True)
class EvaluateStep:
    """The step that sets ``variable`` to the value of ``expr``, whose source is ``term``. If the evaluation fails, as a
    division by zero does, the call is refused with the error of ``rule``.
    """

    variable: str
    type: VariableType
    expr: Expr
    term: Expression
    rule: ArgumentRule


@dataclass(frozen=True)
class CheckStep:
    """The step that refuses the call with the error of ``rule`` if its condition is false."""

    rule: ArgumentRule


@dataclass(frozen=True)
class UnsetStep:
    """The step that declares ``variable``, of the type ``type``, which only some calls set. The first argument with a
    value sets it.
    """

    variable: str
    type: VariableType


@dataclass(frozen=True)
class MeetStep:
    """The step that sets ``variable`` or checks it. If it is unset, the step sets it to ``term``, and the variable
    ``from_<variable>`` to ``origin``, the text that names the argument. If it is set, the step checks ``rules``.
    """

    variable: str
    type: VariableType
    term: Expression
    origin: Text
    rules: tuple[ArgumentRule, ...]


@dataclass(frozen=True)
class PresentStep:
    """The step that runs ``steps`` if the tensor at ``at`` is not None."""

    at: TensorPlace
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class EachStep:
    """The step that runs ``steps`` for each tensor of the list ``at``. If ``optional`` is true, the list may be None,
    in which case nothing is run.
    """

    at: TensorPlace
    steps: tuple[Step, ...]
    optional: bool


@dataclass(frozen=True)
class AllocateStep:
    """The step that allocates the contiguous output ``at``. ``sizes`` is a tuple in Python and a braced list in C++."""

    at: TensorPlace
    sizes: Expression
    dtype: Expression


@dataclass(frozen=True)
class PackStep:
    """The step that replaces an argument by a contiguous copy, if the kernel does not accept its layout or address.

    ``strided`` states that the kernel accepts any strides. ``align`` is the alignment in bytes that it requires.
    ``written`` states that the copy is to be written back.
    """

    at: TensorPlace
    strided: bool
    align: int
    written: bool


Step = LetStep | EvaluateStep | CheckStep | UnsetStep | MeetStep | PresentStep | EachStep | AllocateStep | PackStep
Block = tuple[Step, ...]
