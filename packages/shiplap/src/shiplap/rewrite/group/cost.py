"""An estimate of the gain and the cost of merging calls, in launches and passes over memory.

A launch is the time that compiled code spends between two kernels that do next to nothing. A copy is the memory that a
generated kernel reads and writes. The numbers for launches and for bandwidths are low, so that a doubtful merge is not
made. ``benchmarks/rewrite.py`` measures the cases that the estimate decides (docs/rewrites-shipped.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from shiplap.rewrite.graph import fake_value
from shiplap.rewrite.normalize_call import canonical_name
from shiplap.torch_private.graph_nodes import aten_packet, size_hint_of


@dataclass(frozen=True)
class Machine:
    """The measured costs of one type of device.

    Attributes:
        launch: nanoseconds that the launch of a kernel takes.
        copy: bytes that a generated kernel reads and writes in a nanosecond.
        read: bytes of weights that a matrix product reads in a nanosecond.
        flops: floating-point operations of a matrix product in a nanosecond.
        horizontal: whether the code generator puts independent loops of one size into one kernel.
        ahead: whether kernels are launched while others run. A long kernel then hides the launches behind it.
    """

    launch: float
    copy: float
    read: float
    flops: float
    horizontal: bool
    ahead: bool


# cpu: one core of a shared Xeon server, torch 2.13, 2026-11-21. cuda: H200, torch 2.11, 2026-11-21; a layer of 64x64 on
# 4 rows that is not launched saves 14 us of the host, and 4 us of the device where CUDA graphs launch it.
MACHINES = {
    "cpu": Machine(launch=2500, copy=25, read=20, flops=60, horizontal=True, ahead=False),
    "cuda": Machine(launch=4000, copy=1500, read=2500, flops=100_000, horizontal=False, ahead=True),
}
HORIZONTAL_REASON = "the C++ code generator computes independent loops of one size in one kernel by itself"

# As many as Inductor computes in one kernel if it concatenates.
MOST_FOREACH_INPUTS = 8
ENTRY_OPERATORS = frozenset({"getitem", "select", "unbind"})

# A merge has to promise that much of the time that it touches, so that a wrong estimate costs less than it.
MINIMAL_GAIN = 0.10


@dataclass(frozen=True)
class MergePrice:
    """The estimated times of a merge in nanoseconds.

    Attributes:
        total: time of the separate calls.
        saved: time that the merge saves.
        added: time that the merge adds.
        what: the work that causes the added time, in words.
    """

    total: float
    saved: float
    added: float
    what: str = ""

    @property
    def pays(self) -> bool:
        """Whether the merge saves more time than it adds, by at least ``MINIMAL_GAIN`` of the time of the separate
        calls.
        """
        return self.saved - self.added > MINIMAL_GAIN * self.total

    def __str__(self) -> str:
        """Return the price as text, with the time that merging saves, the total time and the time that merging adds."""
        spent = (
            f"{self.what} about {_format_microseconds(self.added)}"
            if self.what
            else f"about {_format_microseconds(self.added)} more"
        )
        return f"merging saves about {_format_microseconds(self.saved)} of {_format_microseconds(self.total)}, {spent}"


def _format_microseconds(ns: float) -> str:
    """Return a time in nanoseconds as text in microseconds, such as ``2.5 us``."""
    return f"{ns / 1000:.1f} us"


def machine_of_node(node: Node) -> Machine | None:
    """Return the measured costs of the type of device on which ``node`` is computed, such as the time of a launch.
    Return None if that type was never measured.
    """
    held = fake_value(node)
    return MACHINES.get(held.device.type) if isinstance(held, Tensor) else None


def tensor_bytes(nodes: Iterable[Node]) -> int:
    """Return the size in bytes of all tensors that ``nodes`` compute. A symbolic size has the value that it has in the
    call being compiled.
    """
    return sum(_count_elements(t) * t.itemsize for n in nodes if isinstance(t := fake_value(n), Tensor))


def linear_ns(machine: Machine, out: Node, weight: Node) -> float:
    """Return the estimated nanoseconds that ``machine`` takes for a linear layer with the result ``out``. They cover
    the arithmetic and the reading of ``weight``, but not the launch of the kernel.
    """
    return linear_arithmetic_ns(machine, out, weight) + tensor_bytes([weight]) / machine.read


def linear_arithmetic_ns(machine: Machine, out: Node, weight: Node) -> float:
    """Return the estimated nanoseconds of the arithmetic of a linear layer with the result ``out``. The time to read
    ``weight`` is not included.
    """
    # Two operations, a product and a sum, for each element of the result and each input width.
    return 2 * _count_elements(fake_value(out)) * size_hint_of(fake_value(weight).shape[1]) / machine.flops


def visible_launch_ns(machine: Machine, hidden: float) -> float:
    """Return the nanoseconds by which launching one more kernel extends the computation. ``hidden`` is the time in
    nanoseconds for which the previous kernel computes. If ``machine.ahead`` is true, the launch overlaps with that
    time.
    """
    # Where kernels are launched ahead, a launch is hidden by the kernel that runs meanwhile.
    return max(0.0, machine.launch - hidden) if machine.ahead else machine.launch


def kernels_to_stack(machine: Machine, *stacks: Sequence[Node]) -> int:
    """Return how many kernels are needed to copy each list of tensors in ``stacks`` into one stacked tensor. The number
    is at least one.

    If ``machine.horizontal`` is true, one kernel copies everything. Otherwise a list needs one kernel if it has at most
    8 tensors, or only inputs of the graph with fixed sizes. In any other list, each tensor needs a kernel, unless the
    kernel that computes the tensor writes it into the stack.
    """
    # One generated loop stacks everything.
    if machine.horizontal:
        return 1
    # A generated kernel that concatenates computes pointwise operands in place, so that only the others are copied.
    return max(
        1,
        sum(
            1 if len(s) <= MOST_FOREACH_INPUTS or all(map(_is_fixed_input, s)) else sum(map(_needs_copy, s))
            for s in stacks
            if s
        ),
    )


def _is_fixed_input(node: Node) -> bool:
    """Return whether ``node`` has fixed sizes and is an input of the graph, or a part of an input such as ``x[0]``."""
    fixed = isinstance(held := fake_value(node), Tensor) and all(isinstance(n, int) for n in held.shape)
    # An entry of an input is as fixed in memory as the input.
    while canonical_name(node) in ENTRY_OPERATORS and isinstance(source := node.args[0], Node):
        node = source
    return fixed and node.op in ("placeholder", "get_attr")


def _needs_copy(node: Node) -> bool:
    """Return whether stacking ``node`` with other tensors needs a kernel that copies it. A pointwise result with a
    single reader needs none, because its kernel writes it into the stack.
    """
    packet = aten_packet(str(canonical_name(node))) if node.op.startswith("call") else None
    tags = getattr(packet, packet.overloads()[0]).tags if packet is not None else ()
    return len(node.users) != 1 or torch.Tag.pointwise not in tags


def _count_elements(t: Tensor) -> int:
    """Return the number of elements of ``t``. A symbolic size has the value that it has in the call being compiled."""
    return math.prod(size_hint_of(n) for n in t.shape)
