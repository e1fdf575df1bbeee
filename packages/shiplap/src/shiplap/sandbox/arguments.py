"""Arguments that one process lays out and another reads: those of the host in a file, those of a GPU in a block."""

from __future__ import annotations

import mmap
import os
import random
import secrets
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shiplap.sandbox.device_memory import FLAG_BYTES, KIND, DeviceBlock, device_driver, lies_on_device
from shiplap.sandbox.process_memory import make_sealed_file
from shiplap.sandbox.protocol import (
    Packed,
    PackedDict,
    PackedList,
    PackedText,
    TensorLocation,
    strided_extent,
    tree_leaves,
)

ARENA_GAP, DEVICE_GAP = 64, 512  # bytes, as torch's allocators align
GUARD = b"\xff" * ARENA_GAP  # behind each tensor: NaN for what reads there, and other bytes after a write
MOST_SPARE, SPARE_BYTES = 4, 64 << 20  # a block is used again if it is larger by this factor, or has these bytes
BLOCK_SIZE = struct.Struct("=q")  # at the start of a file of arguments: the bytes of the block that belongs to it


class ArgumentArena:
    """Arguments that are laid out in a file without a name, to be read by another process. Tensors on a GPU are laid
    out in a block of GPU memory instead.
    """

    def __init__(self, seed: int | None = None, block: DeviceBlock | None = None) -> None:
        """Start an empty layout. Two layouts with equal ``seed`` place equal arguments at equal offsets. If ``seed`` is
        None, it is random.

        Arguments on a GPU are written into ``block`` if it has enough room. Otherwise a new block is made.
        """
        self._gaps = random.Random(secrets.randbits(62) if seed is None else seed)
        self._parts: list[tuple[int, Tensor]] = []
        self.block, self._device_parts, self._device_size = block, list[tuple[int, Tensor]](), FLAG_BYTES
        # Gaps of random length: a write beyond an argument hits no known place.
        self._size = ARENA_GAP * (1 + self._gaps.randrange(64))

    def pack(self, value: Any) -> Packed:
        """Reserve room in the shared memory for the tensors in ``value``. Return the description from which
        ``unpack_arguments`` in the other process makes the value.

        ``value`` is a tensor, number, string, bool, dtype, device or None, or a list, tuple or dict of these. Raise
        ``TypeError`` for another type.
        """
        if isinstance(value, Tensor):
            return TensorLocation.of(value, self._place(value))
        if isinstance(value, (list, tuple)):
            return PackedList([self.pack(v) for v in value], isinstance(value, tuple))
        if isinstance(value, dict):
            return PackedDict({str(k): self.pack(v) for k, v in value.items()})
        if isinstance(value, (torch.dtype, torch.device)):
            return PackedText(type(value).__name__, str(value).removeprefix("torch."))
        if isinstance(value, int) and value.bit_length() > 63:
            return PackedText("int", str(value))
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise TypeError(f"an argument of type {type(value).__name__}")

    def _place(self, t: Tensor) -> int:
        """Reserve room for a tensor and return its offset in bytes.

        The offset is that in the file, or in the GPU block if the tensor lies on a GPU. The tensors are separated by
        random gaps.
        """
        length = strided_extent(t.shape, t.stride())
        flat = torch.as_strided(t.detach(), (length,), (1,), t.storage_offset())
        # A view that begins off a boundary of the allocator does so in the other process as well.
        ahead, gaps = int(t.storage_offset()) * t.itemsize % ARENA_GAP, self._gaps.randrange(64)
        if lies_on_device(t):
            at, parts = self._device_size + ahead, self._device_parts
            ends = at + length * t.itemsize + len(GUARD)
            self._device_size = -(-ends // DEVICE_GAP) * DEVICE_GAP + DEVICE_GAP * gaps
        else:
            at, parts = self._size + ahead, self._parts
            ends = at + length * t.itemsize + len(GUARD)
            self._size = -(-ends // ARENA_GAP) * ARENA_GAP + ARENA_GAP * gaps
        parts.append((at, flat if lies_on_device(t) else flat.cpu()))
        return at

    def make(self) -> int:
        """Return the descriptor of a new file, filled with zeros, that has room for all packed tensors. Its length
        cannot be changed. The caller closes it.

        If there are tensors on a GPU and the existing block does not fit, a new block, filled with zeros, is made.
        """
        if self._device_parts and (self.block is None or not self._device_size <= self.block.size <= self._most_room()):
            self.block = device_driver().make_block(self._device_size)
            self.block.bytes_at(0, self.block.size).zero_()
        handle = make_sealed_file("arguments", max(self._size, mmap.PAGESIZE))
        if self.block is not None:
            os.pwrite(handle, BLOCK_SIZE.pack(self.block.size), 0)
        return handle

    def _most_room(self) -> int:
        """Return the largest size in bytes of an existing GPU block that may be used again for these arguments. If the
        existing block is larger, a new one is made.
        """
        return max(MOST_SPARE * self._device_size, SPARE_BYTES)

    def write(self, handle: int = -1) -> int:
        """Write the values of all packed tensors into the file ``handle`` and into the GPU block. A new file is made if
        ``handle`` is negative. Return the descriptor of the file.
        """
        handle = self.make() if handle < 0 else handle
        with mmap.mmap(handle, 0) as memory:
            self.write_into(memory)
        return handle

    def write_into(self, memory: mmap.mmap) -> None:
        """Write the values of all packed tensors into the mapped file ``memory`` and into the GPU block. Wait until the
        GPU has done so.
        """
        for at, flat in self._parts:
            if flat.numel():
                room = torch.frombuffer(memory, dtype=flat.dtype, offset=at, count=flat.numel())
                room.copy_(flat)
                del room
                ends = at + flat.numel() * flat.itemsize
                memory[ends : ends + len(GUARD)] = GUARD
        for at, flat in self._device_parts:
            if self.block is not None and flat.numel():
                size = flat.numel() * flat.itemsize
                self.block.bytes_at(at, size).view(flat.dtype).copy_(flat)
                self.block.bytes_at(at + size, len(GUARD)).fill_(GUARD[0])
        if self.block is not None:  # the other process may read as soon as it runs
            self.block.driver.synchronize()

    def files(self, handle: int) -> list[int]:
        """Return the descriptors to send with a message. They are ``handle``, the file of the arguments, and the file
        of the GPU block if the other process has not opened the block yet.
        """
        return [handle, *([self.block.file] if self.block is not None and self.block.file >= 0 else [])]


@dataclass(frozen=True)
class MappedArguments:
    """Arguments in a file that a process has mapped.

    An instance holds the device and the inode of the file, the locations of the tensors, and the mapped memory.
    """

    file: tuple[int, int]
    places: tuple[TensorLocation, ...]
    memory: mmap.mmap

    @classmethod
    def of(cls, handle: int, packed: Packed, memory: mmap.mmap | None = None) -> MappedArguments:
        """Return the arguments in the file with the descriptor ``handle``, laid out as ``packed`` describes. ``memory``
        is the mapping of the file. If it is None, the file is mapped now.
        """
        stat = os.fstat(handle)
        places = tuple(packed_locations(packed))
        return cls((stat.st_dev, stat.st_ino), places, memory or mmap.mmap(handle, 0))

    def find_overrun(self, block: DeviceBlock | None) -> int:
        """Return the number of the first tensor behind whose end the bytes have changed, or -1. ``block`` is the GPU
        block of the arguments.
        """
        for number, place in enumerate(self.places):
            ends = place.at + strided_extent(place.shape, place.stride) * getattr(torch, place.dtype).itemsize
            if 0 in place.shape:
                continue
            if block is not None and place.device == KIND:
                if not bool((block.bytes_at(ends, len(GUARD)) == GUARD[0]).all()):
                    return number
            elif self.memory[ends : ends + len(GUARD)] != GUARD:
                return number
        return -1


def packed_locations(value: Packed) -> list[TensorLocation]:
    """Return the locations of all tensors in a packed value, in order. Tensors inside lists and dicts are included."""
    if isinstance(value, TensorLocation):
        return [value]
    if isinstance(value, PackedList):
        return [place for v in value.items for place in packed_locations(v)]
    return [p for v in value.items.values() for p in packed_locations(v)] if isinstance(value, PackedDict) else []


def unpack_arguments(
    value: Packed, memory: Any, block: DeviceBlock | None = None, *, as_views: bool | None = None
) -> Any:
    """Return the value that the description ``value`` stands for, in the process that receives the arguments. It is the
    inverse of :meth:`ArgumentArena.pack`.

    The tensors of the result lie in the mapped file ``memory`` or in the GPU ``block``. ``as_views`` says whether all
    of them are views, which is drawn by default. ``torch.compile`` may compile once more for each mixture of both.
    """
    if as_views is None:  # callers pass what an operator has made as well as views of it
        as_views = bool(secrets.randbits(1))
    if isinstance(value, PackedList):
        listed = [unpack_arguments(v, memory, block, as_views=as_views) for v in value.items]
        return tuple(listed) if value.is_tuple else listed
    if isinstance(value, PackedDict):
        return {k: unpack_arguments(v, memory, block, as_views=as_views) for k, v in value.items.items()}
    if isinstance(value, PackedText):
        kinds: dict[str, Callable[[str], Any]] = {"dtype": partial(getattr, torch), "device": torch.device, "int": int}
        return kinds[value.kind](value.text)
    return packed_tensor(value, memory, block, as_view=as_views) if isinstance(value, TensorLocation) else value


def packed_tensor(
    value: TensorLocation, memory: Any, block: DeviceBlock | None = None, *, as_view: bool = False
) -> Tensor:
    """Return the tensor at the location ``value``. It lies in ``memory``, the mapped file of arguments, or in
    ``block``, the GPU block that belongs to that file. It is a view if ``as_view`` is true. By chance, a half of these
    tensors have a version above 0, and the memory of a half goes on behind their end.
    """
    dtype, length = getattr(torch, value.dtype), strided_extent(value.shape, value.stride)
    if not length:
        return torch.empty_strided(value.shape, value.stride, dtype=dtype, device=value.device)
    ahead = value.at % ARENA_GAP // dtype.itemsize  # elements of the storage before those of a view
    behind = secrets.randbits(1) * len(GUARD) // dtype.itemsize
    at, count = value.at - ahead * dtype.itemsize, ahead + length + behind
    if block is not None and value.device == KIND:
        flat = block.bytes_at(at, count * dtype.itemsize).view(dtype)
    else:
        flat = torch.frombuffer(memory, dtype=dtype, offset=at, count=count)
    made = flat.to(value.device).as_strided(value.shape, value.stride, ahead)
    made = made if as_view else made.data
    # Callers pass tensors that were written to before. It counts as a change, and changes nothing.
    if secrets.randbits(1):
        made[(slice(0, 0),) * made.dim()].zero_() if made.dim() else made[None][:0].zero_()
    return made


def argument_facts(args: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the memory, sizes, strides and ``requires_grad`` of each tensor among the arguments of a call."""
    listed = [a for a in tree_leaves(list(args)) if isinstance(a, Tensor)]
    return [
        {"memory": a.data_ptr(), "sizes": tuple(a.shape), "strides": a.stride(), "requires_grad": a.requires_grad}
        for a in listed
    ]


def changed_facts(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> list[str]:
    """Return a text such as ``sizes of tensor argument 0`` for each difference between two results of
    ``argument_facts``. A candidate may make only those changes that its reference makes as well.
    """
    pairs = enumerate(zip(before, after, strict=True))
    return [f"{name} of tensor argument {i}" for i, (a, b) in pairs for name in a if a[name] != b[name]]
