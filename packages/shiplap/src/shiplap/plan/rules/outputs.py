"""The rules of what a caller may own besides arguments: outputs and workspace; and of what a kernel asks of memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from shiplap import dtypes
from shiplap.plan.expression import (
    Expression,
    TensorPlace,
    Text,
    equal_expression,
    python_literal,
    same_in_both_languages,
)
from shiplap.plan.rule import TRUE, ArgumentRule
from shiplap.plan.rules.relations import OfCall
from shiplap.plan.rules.tensors import ContiguousTensor, OfTensor
from shiplap.plan.values import Constant

ALIGNMENT = 64  # bytes: what kernels are promised of a workspace


def dense_condition(tensor: str) -> str:
    """Python condition under which strides describe ``tensor``."""
    return f"{tensor}.layout is strided and not {tensor}.is_nested"


def wanted_dtype(output: str, dtype_class: str, names: tuple[str, ...]) -> Expression:
    """The dtype of an output: its own, or that of its class in this call."""
    if len(names) != 1:
        variable = f"dtype_{dtype_class}"
        return Expression(variable, variable, "", f"Dtype{{{variable}}}")
    number = dtypes.number(names[0])
    return Expression(f"want_{output}", str(number), "", f"Dtype{{{number}}}")


@dataclass(frozen=True)
class FitsKind(OfTensor):
    """A given output is a tensor of the declared dtype, on the device of the call."""

    dtype: Expression
    concrete: str

    id = "SL212"

    def holds(self) -> Expression:
        t, dtype = self.at.tensor, equal_expression(self.at.dtype, self.dtype)
        device = equal_expression(self.at.device, same_in_both_languages("device"))
        return Expression(
            f"isinstance({t.python}, Tensor) and {dense_condition(t.python)}"
            f" and {t.python}.dtype == {self.dtype.python} and {device.python}",
            f"{dtype.cpp} && {device.cpp}",
        )

    def constants(self) -> dict[str, Constant]:
        return {self.dtype.python: getattr(torch, self.concrete)} if self.concrete else {}

    def got(self) -> Text:
        t = self.at.tensor.python
        cpp = f'filled("{{}} on {{}}", {{{self.at.dtype.shown[1]}, {self.at.device.cpp}}})'
        return (Expression(f"kind_of_memory({t})", cpp),)

    def expected(self) -> Text:
        return (self.dtype, " on ", same_in_both_languages("device"))


@dataclass(frozen=True)
class FitsShape(OfTensor):
    """A given output has the declared shape."""

    sizes: Expression

    id = "SL212"

    def holds(self) -> Expression:
        name = f"shape_{self.at.arg}"
        return Expression(
            f"tuple({name}) == {self.sizes.python}", f"has_sizes({name}, rank_{self.at.arg}, {self.sizes.cpp})"
        )

    def got(self) -> Text:
        name = f"shape_{self.at.arg}"
        return ("shape ", Expression(f"tuple({name})", f"Tuple({name}, rank_{self.at.arg})"))

    def expected(self) -> Text:
        return ("shape ", Expression(self.sizes.python, f"Tuple({self.sizes.cpp})"))


@dataclass(frozen=True)
class FitsLayout(ContiguousTensor):
    """A given output is contiguous."""

    id = "SL212"


@dataclass(frozen=True)
class IsSize(OfTensor):
    """A computed size of an output is none below zero."""

    source: str
    size: Expression

    id = "SL208"

    def holds(self) -> Expression:
        return Expression(f"{self.size.python} >= 0", f"{self.size.cpp} >= 0")

    def got(self) -> Text:
        return (f"{self.source} = ", self.size)

    def expected(self) -> Text:
        return ("a size",)


@dataclass(frozen=True)
class DisjointMemory(OfTensor):
    """What the caller owns and the kernel writes shares no memory with another tensor of the call."""

    other: TensorPlace

    id = "SL210"
    title = "an output overlaps another tensor"
    fix = "pass a tensor of its own"
    real = True

    def holds(self) -> Expression:
        t, o = self.at.tensor, self.other.tensor
        return Expression(f"not overlap({t.python}, {o.python})", f"!overlap({t.cpp}, {o.cpp})")

    def got(self) -> Text:
        return ("memory of ", *python_literal((self.other.arg,)))

    def expected(self) -> Text:
        return ("memory of its own",)


@dataclass(frozen=True)
class NoGradient(OfCall):
    """An out-variant has no gradient."""

    tensors: tuple[str, ...]

    id = "SL304"
    title = "an out-variant has no gradient"
    fix = "call it under torch.no_grad(), or call the op without out="
    cpp_by = "Python, to which calls with gradients on are handed over: the stable ABI cannot ask a tensor"

    def holds(self) -> Expression:
        return Expression(f"not (is_grad_enabled() and requires_grad(({', '.join(self.tensors)},)))", TRUE.cpp)

    def where(self) -> Text:
        return (f"{self.op}, out=",)

    undecided = "tensors that may require a gradient, since gradients are enabled"

    def defers(self, index: int) -> str:
        return "aoti_torch_grad_mode_is_enabled()"

    def got(self) -> Text:
        return ("a tensor that requires grad",)

    def expected(self) -> Text:
        return ("tensors outside autograd",)


@dataclass(frozen=True)
class OfScratch(OfCall):
    """A rule about the caller's workspace, the variable ``scratch``."""

    name: str
    id = "SL213"

    def where(self) -> Text:
        return (f"{self.op}, {self.name}",)


@dataclass(frozen=True)
class ScratchKind(OfScratch):
    """It is bytes in one contiguous dim, on the device of the call. Asked before anything else of a workspace."""

    at: ClassVar[TensorPlace] = TensorPlace("", "", variable="scratch")

    def holds(self) -> Expression:
        t = self.at.tensor.python
        return Expression(
            f"isinstance({t}, Tensor) and {dense_condition(t)}"
            f" and {t}.dtype == uint8 and {t}.device == device and {t}.dim() == 1 and {t}.stride(0) == 1",
            f"{t}.dtype() == {dtypes.number('uint8')} && device_of({t}) == device && is_vector({t})",
        )

    def constants(self) -> dict[str, Constant]:
        return {"uint8": torch.uint8}

    def got(self) -> Text:
        t = self.at.tensor.python
        shape, strides = f"Tuple({t}.sizes(), {t}.dim())", f"Tuple({t}.strides(), {t}.dim())"
        values = f"Dtype{{{t}.dtype()}}, {self.at.device.cpp}, {shape}, {strides}"
        cpp = f'filled("{{}} on {{}}, {{}} by {{}}", {{{values}}})'
        return (Expression(f"kind_of_memory({t}, extents=True)", cpp),)

    def expected(self) -> Text:
        return ("torch.uint8 on ", same_in_both_languages("device"), ", one contiguous dim")


@dataclass(frozen=True)
class ScratchRoom(OfScratch):
    """It has the bytes that the kernel asks for, the variable ``needed``."""

    def holds(self) -> Expression:
        return Expression("scratch.numel() >= needed", "scratch.sizes()[0] >= needed")

    def got(self) -> Text:
        return (Expression("scratch.numel()", "scratch.sizes()[0]"), " bytes")

    def expected(self) -> Text:
        return ("at least ", same_in_both_languages("needed"), " bytes")


@dataclass(frozen=True)
class ScratchAligned(OfScratch):
    """It begins where a kernel expects a workspace to begin."""

    def holds(self) -> Expression:
        return Expression(f"{self.beyond.python} == 0", f"{self.beyond.cpp} == 0")

    @property
    def beyond(self) -> Expression:
        return Expression(f"scratch.data_ptr() % {ALIGNMENT}", f"address(scratch) % {ALIGNMENT}")

    def got(self) -> Text:
        return ("an address that is ", self.beyond, f" modulo {ALIGNMENT}")

    def expected(self) -> Text:
        return (f"memory aligned to {ALIGNMENT} bytes",)


@dataclass(frozen=True)
class Aligned(OfTensor):
    """A kernel asks for an address that is a multiple of so many bytes."""

    bytes: int

    id = "SL207"
    fix = "pass .clone()"

    def holds(self) -> Expression:
        return Expression(f"{self.beyond.python} == 0", f"{self.beyond.cpp} == 0")

    @property
    def beyond(self) -> Expression:
        t = self.at.tensor
        return Expression(f"{t.python}.data_ptr() % {self.bytes}", f"address({t.cpp}) % {self.bytes}")

    def got(self) -> Text:
        return ("an address that is ", self.beyond, f" modulo {self.bytes}")

    def expected(self) -> Text:
        return (f"memory aligned to {self.bytes} bytes",)


@dataclass(frozen=True)
class AlignedOutput(Aligned):
    """The same of an output that the caller owns: no copy can stand in for it."""

    id = "SL212"
    fix = "pass torch.empty of the expected shape and dtype"

    def got(self) -> Text:
        return (f"an address that is no multiple of {self.bytes} bytes",)

    def expected(self) -> Text:
        return ("memory as an allocator gives it",)


@dataclass(frozen=True)
class OnCpu(OfCall):
    """tvm-ffi hands over tensors of any device, and this kernel is one for CPUs."""

    id = "SL206"

    def holds(self) -> Expression:
        return Expression("device.type == 'cpu'", "device.type == kDLCPU")

    def got(self) -> Text:
        return (same_in_both_languages("device"),)

    def expected(self) -> Text:
        return ("cpu",)


@dataclass(frozen=True)
class WithinBound(ArgumentRule):
    """A data-dependent size respects its declared bound."""

    place: str
    dim: str
    source: str

    id = "SL302"

    @property
    def size(self) -> Expression:
        return same_in_both_languages(f"extent_{self.dim}")

    @property
    def bound(self) -> Expression:
        return same_in_both_languages(f"d_{self.dim}")

    def holds(self) -> Expression:
        size, bound = self.size.python, self.bound.python
        return Expression(f"0 <= {size} <= {bound}", f"0 <= {size} && {size} <= {bound}")

    def where(self) -> Text:
        return (self.place,)

    def got(self) -> Text:
        return (f"{self.dim} = ", self.size)

    def expected(self) -> Text:
        return (f"{self.dim} <= {self.source} = ", self.bound)
