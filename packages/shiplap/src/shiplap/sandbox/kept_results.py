"""Results of earlier calls of a sandboxed process, by their places in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shiplap.sampling.case import tensors_among
from shiplap.sandbox.device_memory import lies_on_device
from shiplap.sandbox.protocol import Place, TensorLocation, strided_extent

TOGETHER_BYTES = 1 << 20  # bytes of a result up to which it is compared in one step with others


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


def all_are_equal(pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Return whether the two tensors of bytes in each of ``pairs`` are equal.

    Each comparison waits for the GPU. So small tensors, of which a process may keep a hundred, are compared together.
    """
    small = [pair for pair in pairs if pair[0].numel() <= TOGETHER_BYTES]
    sides = [torch.cat(side) for side in zip(*small, strict=True)]
    large = [pair for pair in pairs if pair[0].numel() > TOGETHER_BYTES]
    return (not sides or torch.equal(*sides)) and all(torch.equal(*pair) for pair in large)


def find_shared_result(places: Sequence[Place], like: Sequence[Tensor]) -> int:
    """Return the number of the first result that shares memory with an earlier one of the same call, or -1. ``places``
    are the locations of the results, which have the dtypes of ``like``. A result with gaps between its elements is left
    out, since another one may lie in the gaps.
    """
    taken: list[tuple[tuple[str, bytes], int, int]] = []
    for number, (place, expected) in enumerate(zip(places, like, strict=False)):
        if not isinstance(place, TensorLocation):
            continue
        count = strided_extent(place.shape, place.stride)
        if not count or count != prod(place.shape):
            continue
        memory, end = (place.device, place.block), place.at + count * expected.itemsize
        if any(other == memory and start < end and place.at < stop for other, start, stop in taken):
            return number
        taken.append((memory, place.at, end))
    return -1
