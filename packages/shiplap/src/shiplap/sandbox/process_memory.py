"""The memory of other processes, and how Linux copies it."""

from __future__ import annotations

import ctypes
import fcntl
import os

_libc = ctypes.CDLL(None, use_errno=True)


class MemorySpan(ctypes.Structure):
    """The C struct ``iovec``, with the address and the number of bytes of some memory."""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def read_process_memory(pid: int, address: int, length: int) -> bytearray:
    """Return ``length`` bytes of the memory of the process ``pid`` at ``address``. Raise ``OSError`` if they cannot be
    read.
    """
    content = bytearray(length)
    start = ctypes.addressof(ctypes.c_char.from_buffer(content)) if length else 0
    done = 0
    while done < length:
        # Linux copies at most about 2 GiB in one call.
        step = min(length - done, 1 << 30)
        into, out = MemorySpan(start + done, step), MemorySpan(address + done, step)
        got = _libc.process_vm_readv(pid, ctypes.byref(into), 1, ctypes.byref(out), 1, 0)
        if got <= 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        done += got
    return content


def make_sealed_file(name: str, size: int) -> int:
    """Return the descriptor of a new file ``name`` in memory, of ``size`` zeros. No process can change its length."""
    handle = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(handle, size)
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(handle)
        raise
    return handle
