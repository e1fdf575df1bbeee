"""Memory of a GPU that two processes share, and words in it at which streams wait.

A *block* is physical memory of its own. Its open file is sent to the other process, which maps this block and nothing
else of the first process. Memory of torch's allocator is not shared in this way: its holder names it by a handle, and
the process that judges maps it to read results. All functions are those of CUDA's driver, called by ``ctypes``.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref, c_char, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

KIND = "cuda"
GRAIN = 2 << 20  # bytes: the granularity of physical memory
FLAG_BYTES, GATE_AT, END_AT = 4096, 0, 256  # the words at the start of a block at which streams wait
FIRST_AT, FIRST_BYTES = 512, 16  # what the first kernel of queued calls writes
HANDLE_BYTES, FLUSHED_BYTES = 64, 256 << 20
BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID


def lies_on_device(value: Any) -> bool:
    """Return whether ``value`` is a tensor in the memory of the GPU."""
    return isinstance(value, Tensor) and value.device.type == KIND


class DeviceError(RuntimeError):
    """Raised for an error of the driver."""


class _Location(ctypes.Structure):
    """A ``CUmemLocation``: the kind 1 is a device."""

    _fields_ = [("kind", c_int), ("number", c_int)]


class _Properties(ctypes.Structure):
    """A ``CUmemAllocationProp``: pinned memory of a device, shared by a file."""

    _fields_ = [
        ("kind", c_int),
        ("shared_by", c_int),
        ("location", _Location),
        ("metadata", c_void_p),
        ("flags", c_char * 8),
    ]


class _Access(ctypes.Structure):
    """A ``CUmemAccessDesc``: the flags 3 are reading and writing."""

    _fields_ = [("location", _Location), ("flags", c_int)]


class _Handle(ctypes.Structure):
    """A ``CUipcMemHandle``."""

    _fields_ = [("data", c_char * HANDLE_BYTES)]


class _Span:
    """Bytes of a block, as torch takes over memory of others. The block lives as long as a tensor on it."""

    def __init__(self, address: int, length: int, block: DeviceBlock) -> None:
        self.block = block
        self.__cuda_array_interface__ = {"shape": (length,), "typestr": "|u1", "data": (address, False), "version": 3}


class DeviceBlock:
    """A block that this process has made or opened."""

    def __init__(self, driver: DeviceDriver, address: int, size: int, handle: int = -1, file: int = -1) -> None:
        """Keep the parts of a block. One without a ``handle`` is memory of another process that was opened by name."""
        self.driver, self.address, self.size, self.handle, self.file = driver, address, size, handle, file

    def bytes_at(self, at: int, length: int) -> Tensor:
        """Return these bytes as a tensor with a storage of its own. Raises DeviceError outside of the block."""
        if at < 0 or at + length > self.size:
            raise DeviceError("memory outside of a block")
        return torch.as_tensor(_Span(self.address + at, length, self)) if length else _no_bytes()

    def close(self) -> None:
        """Unmap the block, once. The physical memory lives until the other process has unmapped it too."""
        address, self.address = self.address, 0
        if not address:
            return
        if self.handle < 0:
            self.driver.call("cuIpcCloseMemHandle", c_uint64(address))
            return
        self.driver.call("cuMemUnmap", c_uint64(address), c_size_t(self.size))
        self.driver.call("cuMemAddressFree", c_uint64(address), c_size_t(self.size))
        self.driver.call("cuMemRelease", c_uint64(self.handle))
        self.close_file()

    def close_file(self) -> None:
        """Close the file with which another process opens the block."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)

    def __del__(self) -> None:
        self.driver.retired.append((self.address, self.size, self.handle, self.file)) if self.address else None


class PrivateBlock(DeviceBlock):
    """Memory of this process alone that is laid out as a block.

    Attributes:
        words: the memory behind the words at which streams wait.
    """

    def __init__(self, block: DeviceBlock) -> None:
        """Take as much memory as ``block`` has, filled with zeros."""
        super().__init__(block.driver, 0, block.size)
        self._room = torch.zeros(block.size, dtype=torch.uint8, device=KIND)
        self.words = self._room[FLAG_BYTES:].view(torch.int32)

    def bytes_at(self, at: int, length: int) -> Tensor:
        """Return these bytes as a tensor."""
        return self._room[at : at + length]


def _no_bytes() -> Tensor:
    """Return an empty tensor of bytes on the device."""
    return torch.empty(0, dtype=torch.uint8, device=KIND)


class DeviceDriver:
    """The functions of the driver that share memory and wait in streams, on the current device.

    Attributes:
        retired: blocks without a user, which are unmapped when no work is queued.
    """

    def __init__(self) -> None:
        torch.empty(1, device=KIND)  # makes the context of this process
        self._library = ctypes.CDLL("libcuda.so.1")
        self._number = torch.cuda.current_device()
        self._exported: dict[int, bytes] = {}
        self.retired: list[tuple[int, int, int, int]] = []
        self._room: Tensor | None = None

    def call(self, name: str, *args: Any) -> None:
        """Call a function of the driver. Raises DeviceError."""
        if code := getattr(self._library, name)(*args):
            raise DeviceError(f"{name}: error {code} of the driver")

    def make_block(self, size: int) -> DeviceBlock:
        """Return a new block of at least ``size`` bytes, with an open file for another process.

        Raises torch.OutOfMemoryError.
        """
        size = -(-size // GRAIN) * GRAIN
        wanted, handle, file = _Properties(1, 1, _Location(1, self._number)), c_uint64(), c_int()
        create = partial(self.call, "cuMemCreate", byref(handle), c_size_t(size), byref(wanted), c_uint64(0))
        try:
            create()
        except DeviceError:  # torch may keep what it has freed
            self.synchronize()
            torch.cuda.empty_cache()
            try:
                create()
            except DeviceError as e:
                raise torch.OutOfMemoryError(f"a block of {size} bytes: {e}") from None
        self.call("cuMemExportToShareableHandle", byref(file), handle, c_int(1), c_uint64(0))
        return self._map(handle, size, file.value)

    def receive_block(self, file: int, size: int) -> DeviceBlock:
        """Return the block of ``size`` bytes that another process has sent as an open file."""
        handle = c_uint64()
        self.call("cuMemImportFromShareableHandle", byref(handle), c_void_p(file), c_int(1))
        return self._map(handle, size, -1)

    def _map(self, handle: c_uint64, size: int, file: int) -> DeviceBlock:
        """Map physical memory."""
        address, access = c_uint64(), _Access(_Location(1, self._number), 3)
        self.call("cuMemAddressReserve", byref(address), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0))
        self.call("cuMemMap", address, c_size_t(size), c_size_t(0), handle, c_uint64(0))
        self.call("cuMemSetAccess", address, c_size_t(size), byref(access), c_size_t(1))
        return DeviceBlock(self, address.value, size, handle.value, file)

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Return the start and the size of the allocation that holds an address."""
        base, size = c_uint64(), c_size_t()
        self.call("cuMemGetAddressRange_v2", byref(base), byref(size), c_uint64(address))
        return base.value, size.value

    def export_allocation(self, address: int) -> tuple[bytes, int]:
        """Return the handle of the allocation of torch that holds an address, and the offset of the address in it."""
        base, number = self.allocation_of(address)[0], c_uint64()
        self.call("cuPointerGetAttribute", byref(number), c_int(BUFFER_ID), c_uint64(base))
        if number.value not in self._exported:
            handle = _Handle()
            self.call("cuIpcGetMemHandle", byref(handle), c_uint64(base))
            self._exported[number.value] = ctypes.string_at(byref(handle), HANDLE_BYTES)
        return self._exported[number.value], address - base

    def open_allocation(self, handle: bytes) -> DeviceBlock:
        """Map an allocation of another process. Raises DeviceError for a handle that names no allocation."""
        address = c_uint64()
        named = _Handle.from_buffer_copy(handle.ljust(HANDLE_BYTES, b"\0"))
        self.call("cuIpcOpenMemHandle_v2", byref(address), named, c_uint(1))
        return DeviceBlock(self, address.value, self.allocation_of(address.value)[1])

    def wait_for_word(self, block: DeviceBlock, at: int) -> None:
        """Let the current stream wait until the word at this offset is not zero."""
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        self.call("cuStreamWaitValue32_v2", stream, c_uint64(block.address + at), c_uint(1), c_uint(0))

    def write_word(self, block: DeviceBlock, at: int) -> None:
        """Write 1 to the word at this offset when the current stream gets there."""
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        self.call("cuStreamWriteValue32_v2", stream, c_uint64(block.address + at), c_uint(1), c_uint(0))

    def synchronize(self) -> None:
        """Wait until all queued work of this process is done."""
        torch.cuda.synchronize()

    def empty_caches(self) -> None:
        """Queue a write of memory that is larger than the caches."""
        if self._room is None:
            self._room = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=KIND)
        self._room.fill_(secrets.randbelow(251))

    def record_event(self) -> torch.cuda.Event:
        """Return an event with a time that the current stream has just recorded."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def other_stream(self) -> Iterator[None]:
        """A context in which another stream is current, which waits for none."""
        with torch.cuda.stream(torch.cuda.Stream()):
            yield

    def free_bytes(self) -> int:
        """Return the bytes of the device that are free for all processes, once torch keeps none for this one."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def release_retired(self) -> None:
        """Unmap the blocks that nobody uses any more. No work may be queued."""
        if self.retired:
            self.synchronize()
        while self.retired:
            DeviceBlock(self, *self.retired.pop()).close()


@cache
def device_driver() -> DeviceDriver:
    """Return the driver of this process."""
    return DeviceDriver()


class OpenedAllocations:
    """The allocations of another process that this process has mapped, each with the number of its users."""

    def __init__(self) -> None:
        self._opened: dict[bytes, tuple[DeviceBlock, int]] = {}

    def take(self, handle: bytes) -> DeviceBlock:
        """Return the mapped allocation of this handle for one more user. Raises DeviceError."""
        block, users = self._opened.get(handle, (None, 0))
        block = block or device_driver().open_allocation(handle)
        self._opened[handle] = block, users + 1
        return block

    def find(self, handle: bytes) -> DeviceBlock:
        """Return the mapped allocation of this handle, which has a user."""
        return self._opened[handle][0]

    def drop(self, handle: bytes) -> None:
        """Unmap the allocation of this handle if it has no further user."""
        block, users = self._opened.pop(handle)
        if users > 1:
            self._opened[handle] = block, users - 1
        else:
            block.driver.synchronize()
            block.close()
