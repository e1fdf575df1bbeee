"""Memory of a GPU that two processes share, and words in it at which streams wait.

A *block* is physical memory of its own. Its open file is sent to the other process, which maps this block and nothing
else of the first process. Memory of torch's allocator is not shared in this way: its holder names it by a handle, and
the process that judges maps it to read results. All functions are those of CUDA's driver, called by ``ctypes``.
"""

from __future__ import annotations

import contextlib
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
NEEDED, WORTHWHILE = 0.5, 1 / 16  # shares of the memory of a GPU: free for all processes, and in the cache of one


def lies_on_device(value: Any) -> bool:
    """Return whether ``value`` is a tensor in the memory of the GPU."""
    return isinstance(value, Tensor) and value.device.type == KIND


class DeviceError(RuntimeError):
    """An error that the CUDA driver has reported, or an access outside a block of GPU memory."""


class _Location(ctypes.Structure):
    """The C struct ``CUmemLocation``. The kind 1 stands for a device."""

    _fields_ = [("kind", c_int), ("number", c_int)]


class _Properties(ctypes.Structure):
    """The C struct ``CUmemAllocationProp``, for pinned memory of a device that is shared by a file."""

    _fields_ = [
        ("kind", c_int),
        ("shared_by", c_int),
        ("location", _Location),
        ("metadata", c_void_p),
        ("flags", c_char * 8),
    ]


class _Access(ctypes.Structure):
    """The C struct ``CUmemAccessDesc``. The flags 3 stand for reading and writing."""

    _fields_ = [("location", _Location), ("flags", c_int)]


class _Handle(ctypes.Structure):
    """The C struct ``CUipcMemHandle``."""

    _fields_ = [("data", c_char * HANDLE_BYTES)]


class _Span:
    """Bytes of a GPU block as an object from which torch can make a tensor without a copy (by
    ``__cuda_array_interface__``). The block lives as long as that tensor.
    """

    def __init__(self, address: int, length: int, block: DeviceBlock) -> None:
        """Describe ``length`` bytes at ``address`` for torch, and keep alive the block to which they belong."""
        self.block = block
        self.__cuda_array_interface__ = {"shape": (length,), "typestr": "|u1", "data": (address, False), "version": 3}


class DeviceBlock:
    """A range of GPU memory that this process has allocated or opened, and that two processes can share. It has an
    address and a size in bytes.
    """

    def __init__(self, driver: DeviceDriver, address: int, size: int, handle: int = -1, file: int = -1) -> None:
        """Store the parts of a block of ``size`` bytes at ``address``. ``handle`` is that of its physical memory, or -1
        for memory of another process. ``file`` is the descriptor by which the block can be shared, or -1.
        """
        self.driver, self.address, self.size, self.handle, self.file = driver, address, size, handle, file

    def bytes_at(self, at: int, length: int) -> Tensor:
        """Return ``length`` bytes of the block from offset ``at`` as a uint8 tensor that shares its memory. Raise
        ``DeviceError`` if they are not within the block.
        """
        if at < 0 or at + length > self.size:
            raise DeviceError("memory outside of a block")
        return torch.as_tensor(_Span(self.address + at, length, self)) if length else _no_bytes()

    def close(self) -> None:
        """Unmap the block. A second call does nothing. If another process has mapped the block as well, the physical
        memory lives until that process has unmapped it.
        """
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
        """Close the descriptor that is sent to another process to open the block. Do nothing if it is closed
        already.
        """
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)

    def __del__(self) -> None:
        """Add the block to the driver's list of blocks to unmap later, unless it is closed. The GPU may still use
        it.
        """
        self.driver.retired.append((self.address, self.size, self.handle, self.file)) if self.address else None


class PrivateBlock(DeviceBlock):
    """Memory of this process alone that has the size and the layout of a shared GPU block.

    Attributes:
        words: the memory without the first bytes, which in the block hold the words for which streams wait.
    """

    def __init__(self, block: DeviceBlock) -> None:
        """Allocate as much memory as ``block`` has, filled with zeros."""
        super().__init__(block.driver, 0, block.size)
        self._room = torch.zeros(block.size, dtype=torch.uint8, device=KIND)
        self.words = self._room[FLAG_BYTES:].view(torch.int32)

    def bytes_at(self, at: int, length: int) -> Tensor:
        """Return ``length`` bytes from offset ``at`` as a uint8 tensor that shares the memory."""
        return self._room[at : at + length]


def _no_bytes() -> Tensor:
    """Return an empty tensor of bytes on the device."""
    return torch.empty(0, dtype=torch.uint8, device=KIND)


class DeviceDriver:
    """The functions of the CUDA driver that share memory and wait in streams, on the current device.

    Attributes:
        retired: blocks that were garbage collected without being closed, which are unmapped when no work is queued.
    """

    def __init__(self) -> None:
        """Open the CUDA driver library and make the CUDA context of this process."""
        torch.empty(1, device=KIND)  # makes the context of this process
        self._library = ctypes.CDLL("libcuda.so.1")
        self._number = torch.cuda.current_device()
        self._exported: dict[int, bytes] = {}
        self.retired: list[tuple[int, int, int, int]] = []
        self._room: Tensor | None = None

    def call(self, name: str, *args: Any) -> None:
        """Call the function ``name`` of the CUDA driver library with ``args``. Raise ``DeviceError`` with the error
        code if it fails.
        """
        if code := getattr(self._library, name)(*args):
            raise DeviceError(f"{name}: error {code} of the driver")

    def make_block(self, size: int) -> DeviceBlock:
        """Return a new block of at least ``size`` bytes of GPU memory. It has an open file by which another process can
        map it.

        Raise ``torch.OutOfMemoryError`` if there is too little memory.
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
        """Return the GPU block of ``size`` bytes that another process has sent as the open file ``file``. It is mapped
        in this process.
        """
        handle = c_uint64()
        self.call("cuMemImportFromShareableHandle", byref(handle), c_void_p(file), c_int(1))
        return self._map(handle, size, -1)

    def _map(self, handle: c_uint64, size: int, file: int) -> DeviceBlock:
        """Map ``size`` bytes of the physical GPU memory ``handle`` for reading and writing, and return them as a block.
        ``file`` is the descriptor by which the memory can be shared, or -1.
        """
        address, access = c_uint64(), _Access(_Location(1, self._number), 3)
        self.call("cuMemAddressReserve", byref(address), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0))
        self.call("cuMemMap", address, c_size_t(size), c_size_t(0), handle, c_uint64(0))
        self.call("cuMemSetAccess", address, c_size_t(size), byref(access), c_size_t(1))
        return DeviceBlock(self, address.value, size, handle.value, file)

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Return the start address and the size in bytes of the GPU allocation that holds ``address``."""
        base, size = c_uint64(), c_size_t()
        self.call("cuMemGetAddressRange_v2", byref(base), byref(size), c_uint64(address))
        return base.value, size.value

    def export_allocation(self, address: int) -> tuple[bytes, int]:
        """Return (handle, offset) of the GPU memory that torch has allocated around ``address``.

        Another process can open the memory by the handle. The offset is that of ``address`` in it. Handles are cached.
        """
        base, number = self.allocation_of(address)[0], c_uint64()
        self.call("cuPointerGetAttribute", byref(number), c_int(BUFFER_ID), c_uint64(base))
        if number.value not in self._exported:
            handle = _Handle()
            self.call("cuIpcGetMemHandle", byref(handle), c_uint64(base))
            self._exported[number.value] = ctypes.string_at(byref(handle), HANDLE_BYTES)
        return self._exported[number.value], address - base

    def open_allocation(self, handle: bytes) -> DeviceBlock:
        """Return the GPU allocation of another process that ``handle`` names, mapped in this process. Raise
        ``DeviceError`` if the handle names no allocation.
        """
        address = c_uint64()
        named = _Handle.from_buffer_copy(handle.ljust(HANDLE_BYTES, b"\0"))
        self.call("cuIpcOpenMemHandle_v2", byref(address), named, c_uint(1))
        return DeviceBlock(self, address.value, self.allocation_of(address.value)[1])

    def wait_for_word(self, block: DeviceBlock, at: int) -> None:
        """Make the current CUDA stream wait until the 32-bit word at offset ``at`` of the block is at least 1."""
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        self.call("cuStreamWaitValue32_v2", stream, c_uint64(block.address + at), c_uint(1), c_uint(0))

    def write_word(self, block: DeviceBlock, at: int) -> None:
        """Queue a write of 1 to the 32-bit word at offset ``at`` of the block on the current CUDA stream."""
        stream = c_void_p(torch.cuda.current_stream().cuda_stream)
        self.call("cuStreamWriteValue32_v2", stream, c_uint64(block.address + at), c_uint(1), c_uint(0))

    def synchronize(self) -> None:
        """Wait until all GPU work that this process has queued is done."""
        torch.cuda.synchronize()

    def empty_caches(self) -> None:
        """Queue a write of a random value to more memory than the GPU's caches hold. Later kernels then find cold
        caches.
        """
        if self._room is None:
            self._room = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=KIND)
        self._room.fill_(secrets.randbelow(251))

    def record_event(self) -> torch.cuda.Event:
        """Return a CUDA event with timing that was just recorded on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def other_stream(self) -> Iterator[None]:
        """Return a context in which a new CUDA stream is current. It waits for no other stream."""
        with torch.cuda.stream(torch.cuda.Stream()):
            yield

    def free_bytes(self) -> int:
        """Return the free bytes of the GPU. Torch's cache of freed memory in this process is emptied first."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def leave_room(self) -> None:
        """Empty torch's cache of freed memory in this process, which no other process can use, if less than half of the
        GPU is free, and the cache holds a sixteenth of it or more than is free.
        """
        free, total = torch.cuda.mem_get_info()
        if free > NEEDED * total:  # as a rule; to ask torch takes longer
            return
        if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > min(free, WORTHWHILE * total):
            torch.cuda.empty_cache()

    def release_retired(self) -> None:
        """Wait for all queued GPU work, then unmap the blocks that were garbage collected without being closed."""
        if self.retired:
            self.synchronize()
        with contextlib.suppress(IndexError):  # the list is empty: another thread may take the last one
            while True:
                DeviceBlock(self, *self.retired.pop()).close()


@cache
def device_driver() -> DeviceDriver:
    """Return the CUDA driver of this process. It is made at the first call."""
    return DeviceDriver()


class OpenedAllocations:
    """The GPU allocations of another process that this process has mapped, by handle. Each is stored with the number of
    its users.
    """

    def __init__(self) -> None:
        """Start with no allocation mapped."""
        self._opened: dict[bytes, tuple[DeviceBlock, int]] = {}

    def take(self, handle: bytes) -> DeviceBlock:
        """Return the GPU allocation of another process with the handle ``handle``, and count one more user. It is
        mapped at its first use. Raise ``DeviceError`` if it cannot be mapped.
        """
        block, users = self._opened.get(handle, (None, 0))
        block = block or device_driver().open_allocation(handle)
        self._opened[handle] = block, users + 1
        return block

    def find(self, handle: bytes) -> DeviceBlock:
        """Return the mapped GPU allocation with the handle ``handle``. Raise ``KeyError`` if it has no user."""
        return self._opened[handle][0]

    def drop(self, handle: bytes) -> None:
        """Count one user less of the GPU allocation with the handle ``handle``. Without a user, the allocation is
        unmapped.
        """
        block, users = self._opened.pop(handle)
        if users > 1:
            self._opened[handle] = block, users - 1
        else:
            # Queued kernels may still use the memory.
            block.driver.synchronize()
            block.close()
