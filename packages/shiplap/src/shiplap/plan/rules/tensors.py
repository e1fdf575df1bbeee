"""The rules of one tensor argument; one that follows from an argument alone is written here, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from shiplap import dtypes
from shiplap.declare.spec import Arg
from shiplap.plan.expression import (
    Expression,
    TensorPlace,
    Text,
    equal_expression,
    python_literal,
    same_in_both_languages,
)
from shiplap.plan.rule import TRUE, ArgumentRule
from shiplap.plan.values import Constant


def undefined_tensor_condition(index: int) -> str:
    """C++ condition under which None was passed for a tensor that nobody has taken: nothing else can be asked of it."""
    return f"!peek_defined(values[{index}])"


@dataclass(frozen=True)
class OfTensor(ArgumentRule):
    """A rule about one tensor."""

    at: TensorPlace

    def where(self) -> Text:
        return self.at.where


@dataclass(frozen=True)
class IsTensor(OfTensor):
    """The dispatcher takes None for any tensor."""

    declared: str

    id = "SL209"
    cpp_by = "Python, to which a call with None is handed over, and tvm-ffi's Arguments, which hand over tensors"

    def holds(self) -> Expression:
        return Expression(f"isinstance({self.at.tensor.python}, Tensor)", TRUE.cpp)

    undecided = "None for a tensor"

    def defers(self, index: int) -> str:
        return undefined_tensor_condition(index)

    def got(self) -> Text:
        t = self.at.tensor.python
        return (Expression(f"'None' if {t} is None else type({t}).__name__", ""),)

    def expected(self) -> Text:
        return (self.declared,)


@dataclass(frozen=True)
class DenseTensor(OfTensor):
    """Strides describe the tensor."""

    id = "SL207"
    fix = "call .to_dense() first"
    cpp_by = "the dispatch key under which the code is registered"

    def holds(self) -> Expression:
        return Expression(f"{self.at.tensor.python}.layout is strided", TRUE.cpp)

    def got(self) -> Text:
        t = self.at.tensor.python
        return (Expression(f"'a nested tensor' if {t}.is_nested else {t}.layout", ""),)

    def expected(self) -> Text:
        return ("a dense tensor",)


@dataclass(frozen=True)
class DtypeAmong(OfTensor):
    """The dtype is one that is declared."""

    dtype_class: str
    names: tuple[str, ...]

    id = "SL204"

    def holds(self) -> Expression:
        kind, one = self.at.dtype, len(self.names) == 1
        python = f"{kind.python} {'is' if one else 'in'} ok_{self.at.arg}"
        numbers = dtypes.numbers(self.names)
        return Expression(
            python,
            f"{kind.cpp} == {numbers[0]}" if one and numbers else f"among({kind.cpp}, {dtypes.mask(self.names)})",
        )

    def constants(self) -> dict[str, Constant]:
        dtypes = frozenset(getattr(torch, name) for name in self.names)
        return {f"ok_{self.at.arg}": dtypes if len(self.names) > 1 else next(iter(dtypes))}

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
    def bound(self) -> Expression:
        name = f"dtype_{self.dtype_class}"
        return Expression(name, name, "", f"Dtype{{{name}}}")

    def holds(self) -> Expression:
        return equal_expression(self.at.dtype, self.bound)

    def got(self) -> Text:
        return (self.at.dtype,)

    def expected(self) -> Text:
        return (self.bound, ", as ", *self.origin, f" ({self.dtype_class})")


@dataclass(frozen=True)
class SameDevice(OfTensor):
    """An op runs on one device."""

    origin: Text

    id = "SL206"

    def holds(self) -> Expression:
        return equal_expression(self.at.device, same_in_both_languages("device"))

    def got(self) -> Text:
        return (self.at.device,)

    def expected(self) -> Text:
        return (same_in_both_languages("device"), ", as ", *self.origin)


@dataclass(frozen=True)
class ContiguousTensor(OfTensor):
    """``contiguous=`` asks for it."""

    id = "SL207"

    def holds(self) -> Expression:
        t = self.at.tensor
        return Expression(f"{t.python}.is_contiguous()", f"{t.cpp}.is_contiguous()")

    def got(self) -> Text:
        return ("strides ", self.at.strides)

    def expected(self) -> Text:
        return ("a contiguous tensor",)


@dataclass(frozen=True)
class OwnMemory(OfTensor):
    """No two elements of a tensor that is written to share memory."""

    id = "SL210"

    def holds(self) -> Expression:
        t = self.at.tensor
        return Expression(f"({t.python}.is_contiguous() or own_memory({t.python}))", f"own_memory({t.cpp})")

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

    def holds(self) -> Expression:
        return Expression(f"not ({self.at.tensor.python}.requires_grad and is_grad_enabled())", TRUE.cpp)

    undecided = "a tensor that may require a gradient, since gradients are enabled"

    def defers(self, index: int) -> str:
        return "aoti_torch_grad_mode_is_enabled()"

    def got(self) -> Text:
        return ("a tensor that requires grad",)

    def expected(self) -> Text:
        return ("a mutated tensor outside autograd",)


@dataclass(frozen=True)
class UnsharedMemory(OfTensor):
    """A tensor that is written to shares no memory with another argument, whose content would be undefined."""

    other: TensorPlace

    id = "SL210"
    title = "a mutated tensor is another argument too"
    fix = "pass memory of its own: a .clone(), or torch.empty_like where a compiled graph shares that of the copy"
    real = True

    def holds(self) -> Expression:
        t, o = self.at.tensor, self.other.tensor
        return Expression(
            f"not shares_memory({t.python}, {o.python})",
            f"!shares_memory({t.cpp}, {o.cpp})",
        )

    def got(self) -> Text:
        return ("memory of argument ", *python_literal((self.other.arg,)))

    def expected(self) -> Text:
        return ("memory of its own",)


def argument_rules(at: TensorPlace, arg: Arg) -> Iterator[ArgumentRule]:
    """The rules that follow from the declaration of an argument, after those that bind its dtype, device and sizes."""
    if arg.contiguous:
        yield ContiguousTensor(at)
    if arg.mutated:
        yield OwnMemory(at)
        if arg.tensor is not None and dtypes.differentiable(arg.tensor.dtypes):
            yield OutsideAutograd(at)
