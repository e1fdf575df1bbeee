"""The rule that each argument is of its annotated kind, and the arrangement of a call's arguments by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from shiplap.declare.spec import Arg, OpSpec
from shiplap.declare.values import Value
from shiplap.errors import ShiplapError, error
from shiplap.plan.expression import Expression, Text
from shiplap.plan.rule import TRUE, ArgumentRule
from shiplap.torch_private.dispatcher_transforms import is_differentiated


@dataclass(frozen=True)
class ArgumentIsKind(ArgumentRule):
    """The rule that an argument is a tensor, a number or a list, as annotated."""

    op: str
    arg: Arg

    id = "SL209"
    cpp_by = "the dispatcher, and tvm-ffi's Arguments, which convert each value or refuse it"

    def holds(self) -> Expression:
        return Expression("not mismatch(arg, value)", TRUE.cpp)

    def where(self) -> Text:
        return (f"{self.op}, argument '{self.arg.name}'",)

    def got(self) -> Text:
        return (Expression("mismatch(arg, value)", ""),)

    def expected(self) -> Text:
        size = f"{self.arg.length} " if self.arg.length else ""
        kind = str(self.arg.tensor or self.arg.kind)
        if self.arg.many:
            kind = f"list of {size}{kind}" + " or None" * self.arg.absent
        kind += f" of length {size}".rstrip() if size and not self.arg.many else ""
        return (kind + (" or None" if self.arg.optional else ""),)

    def broken(self, got: str) -> ShiplapError:
        """Return the error for a value of the kind ``got``."""
        return error(self.id, where=f"{self.op}, argument {self.arg.name!r}", got=got, expected=str(self.expected()[0]))


_NUMBERS = frozenset(("int", "float", "bool", "complex", "Scalar"))


def number_check(
    spec: OpSpec, *, recorded: bool = False
) -> Callable[[Sequence[Value], Mapping[str, Value]], None] | None:
    """Return ``check(args, kwargs)``, which raises SL220 for a number that is a tensor with a gradient.

    Torch would detach such a tensor without a warning. None for an op without numbers. ``recorded`` says that the
    check runs inside the forward of an ``autograd.Function``, where gradients are off.
    """
    numbers = [(i, a) for i, a in enumerate(spec.args) if a.scalar and a.scalar.removeprefix("list[")[:-1] in _NUMBERS]
    numbers += [(i, a) for i, a in enumerate(spec.args) if a.scalar in _NUMBERS]
    if not numbers:
        return None

    def check(args: Sequence[Value], kwargs: Mapping[str, Value]) -> None:
        for i, arg in numbers:
            value = args[i] if i < len(args) else kwargs.get(arg.name)
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(each, Tensor) and (each.requires_grad if recorded else is_differentiated(each)):
                    raise error(
                        "SL220",
                        where=f"{spec.name}, argument {arg.name!r}",
                        got="a tensor that requires a gradient",
                        expected=arg.kind,
                    )

    return check


def arrange_arguments(
    spec: OpSpec, schema: str, args: Sequence[Value], kwargs: Mapping[str, Value]
) -> dict[str, Value]:
    """Return the given arguments by name. Raise SL209, worded as Python's TypeError, where they do not fit."""
    values: dict[str, Value] = {}
    missing = ""
    for index, arg in enumerate(spec.args):
        name, by_name = arg.name, arg.name in kwargs
        if index < len(args) and not arg.keyword_only:
            values[name] = args[index]
            if by_name:
                raise _signature_mismatch(spec, schema, f"multiple values for argument {name!r}")
        elif by_name:
            values[name] = kwargs[name]
        elif arg.default is ... and not missing:
            missing = name
        if (index < len(args) and arg.keyword_only) or index + 1 == len(spec.args) < len(args):
            raise _signature_mismatch(spec, schema, "too many positional arguments")
    if missing:
        raise _signature_mismatch(spec, schema, f"missing a required argument: {missing!r}")
    for name in kwargs:
        if name not in values:
            raise _signature_mismatch(spec, schema, f"an unexpected keyword argument {name!r}")
    return values


def _signature_mismatch(spec: OpSpec, schema: str, got: str) -> ShiplapError:
    what, fix = "the arguments do not fit the signature", "pass the arguments that 'expected' lists, each once"
    return error("SL209", where=spec.name, what=what, got=got, expected=schema, fix=fix)
