"""Cases of the benchmark: an op with one defect, and the same op repaired."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import shiplap as sl

Kind = Literal["broken", "sound"]


@dataclass(frozen=True)
class Case:
    """One defect: the public report that it is modelled on, what is wrong, and the two ops."""

    name: str
    report: str
    defect: str
    broken: sl.Op
    sound: sl.Op

    @property
    def both(self) -> tuple[sl.Op, sl.Op]:
        return self.broken, self.sound

    def op(self, kind: Kind) -> sl.Op:
        """Return the broken op or the sound one, with kernels in C++ compiled."""
        op = self.broken if kind == "broken" else self.sound
        if any(kernel.native for kernels in op.kernels.values() for kernel in kernels):
            op.build()
        return op

    def kernels(self, symbol: str, code: str, **parts: tuple[str, str]) -> None:
        """Bind C++ kernels: ``$NAME`` in the code is replaced by the part of that name, the broken one or the sound
        one."""
        for i, op in enumerate(self.both):
            text = code
            for name, versions in parts.items():
                text = text.replace(f"${name}", versions[i])
            op.kernel("cpu", sl.source(symbol=symbol, code=text, language="c++"))

    def backward(self, function: Callable[..., Any]) -> None:
        """Declare a gradient of both ops."""
        for op in self.both:
            op.backward(function)

    def samples(self, function: Callable[..., Any]) -> None:
        """Declare a builder of samples of both ops."""
        for op in self.both:
            op.samples(function)


CASES: dict[str, Case] = {}


def add_case(name: str, report: str, defect: str, broken: sl.Op, sound: sl.Op) -> Case:
    """Register a case whose ops exist already."""
    CASES[name] = case = Case(name, report, defect, broken, sound)
    return case


def case(report: str, defect: str, **declaration: Any) -> Callable[[Callable[..., Any]], Case]:
    """Return a decorator that declares two ops with one reference, and registers them as a case."""

    def declare(reference: Callable[..., Any]) -> Case:
        name = reference.__name__
        broken, sound = (sl.op(f"{space}::{name}", **declaration)(reference) for space in ("defects", "sound"))
        return add_case(name, report, defect, broken, sound)

    return declare


def address_view(tensor: Tensor, count: int) -> Tensor:
    """Return ``count`` elements from the address of a tensor on, in whatever layout it is: what a kernel sees that is
    given a bare pointer."""
    if not count:
        return tensor.new_empty(0)
    memory = (ctypes.c_char * (count * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype, count=count)
