"""What merging calls gains and costs: launches and passes over memory, by a model with few numbers.

A launch is what compiled code spends between two kernels that do next to nothing; copying is what a generated kernel
reads and writes. The numbers are low for launches and low for bandwidths, so that the model declines in doubt.
``benchmarks/rewrite.py`` measures what it decides (docs/rewrites-shipped.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from shiplap.compat.nodes import hint
from shiplap.rewrite.graph import value

__all__ = ["HORIZONTAL", "MACHINES", "Machine", "Price", "bytes_of", "machine_for", "product_ns"]


@dataclass(frozen=True)
class Machine:
    """What the model knows of a device.

    Attributes:
        launch: ns of a kernel call.
        copy: bytes that a generated kernel reads and writes in a ns. ``read``: bytes of weights that a product reads.
        flops: of a product, in a ns.
        horizontal: whether the code generator puts independent loops of one size into one kernel by itself.
    """

    launch: float
    copy: float
    read: float
    flops: float
    horizontal: bool


# cpu: one core of a shared Xeon server, torch 2.13, 2026-11-21. cuda: H200 without CUDA graphs, assumed.
MACHINES = {
    "cpu": Machine(launch=2500, copy=25, read=20, flops=60, horizontal=True),
    "cuda": Machine(launch=4000, copy=1500, read=2500, flops=100_000, horizontal=False),
}
HORIZONTAL = "the C++ code generator computes independent loops of one size in one kernel by itself"

# A merge has to promise that much of the time that it touches, so that a wrong estimate costs less than it.
MARGIN = 0.10


@dataclass(frozen=True)
class Price:
    """ns of the calls as they are, ns that merging them saves, ns that it adds, and what for."""

    total: float
    saved: float
    added: float
    what: str = ""

    @property
    def pays(self) -> bool:
        return self.saved - self.added > MARGIN * self.total

    def __str__(self) -> str:
        spent = f"{self.what} about {_us(self.added)}" if self.what else f"about {_us(self.added)} more"
        return f"merging saves about {_us(self.saved)} of {_us(self.total)}, {spent}"


def _us(ns: float) -> str:
    return f"{ns / 1000:.1f} us"


def machine_for(node: Node) -> Machine | None:
    """That of the node's device; None for one that nobody measured."""
    held = value(node)
    return MACHINES.get(held.device.type) if isinstance(held, Tensor) else None


def bytes_of(nodes: Iterable[Node]) -> int:
    """Of the tensors that ``nodes`` compute; sizes that vary count as in the call that is compiled for."""
    return sum(_numel(t) * t.itemsize for n in nodes if isinstance(t := value(n), Tensor))


def product_ns(machine: Machine, out: Node, weight: Node) -> float:
    """Of a linear layer, without its launch."""
    flops = 2 * _numel(value(out)) * hint(value(weight).shape[1])
    return flops / machine.flops + bytes_of([weight]) / machine.read


def _numel(t: Tensor) -> int:
    return math.prod(hint(n) for n in t.shape)
