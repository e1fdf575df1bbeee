"""Results of earlier calls of a sandboxed process, by their places in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from shiplap.sampling.case import tensors_among
from shiplap.sandbox.device_memory import lies_on_device


@dataclass(frozen=True)
class ResultSpan:
    """A result in memory, of which ``length`` bytes begin at ``at``. That is an address in the sandboxed process if
    ``memory`` is ``"host"``, and otherwise an offset in the GPU allocation with the handle ``memory``. The GPU block of
    the arguments has an empty handle. ``content`` has the bytes as they were read, or is None if they were deleted.
    """

    memory: bytes | str
    at: int
    length: int
    content: bytearray | Tensor | None


ResultSpans: TypeAlias = list[ResultSpan]


@dataclass(frozen=True)
class KeptResults:
    """The results of one call, kept so that later changes of them are detected. ``spans`` are their locations and
    bytes. ``size`` is the number of bytes of the call's arguments and results, and ``host`` the number of those in host
    memory.
    """

    spans: ResultSpans
    size: int
    host: int


def argument_bytes(args: Sequence[Any], *, host: bool = False) -> int:
    """Return the number of bytes of all tensors in ``args``. If ``host`` is true, leave out tensors on a GPU."""
    return sum(t.numel() * t.itemsize for t in tensors_among(args) if not (host and lies_on_device(t)))
