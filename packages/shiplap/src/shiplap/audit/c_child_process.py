"""A child process that calls C functions which may crash, and reports the memory and files that each call leaves
behind.

Runs as a script without torch or shiplap (``python -I c_child_process.py``): it starts in milliseconds, and its memory
is that of the function. It reads one JSON value from stdin. It writes a line of JSON to stdout when a call begins and
one with the result of the call, so that the parent knows the call in which a process died.
"""

from __future__ import annotations

import base64
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SLACK, ALIGN = 4096, 64  # bytes around every buffer: a kernel that reads a little beside it is not the question here
# The size of the buffer for the message of a kernel.
ERROR_BYTES = 1024
WARM, LEAST, MOST = 32, 64, 20_000  # calls
# The kinds that the parent writes for scalars, each with its type in C.
C_NUMBER_TYPES: dict[str, Any] = {"int64": ctypes.c_int64, "int32": ctypes.c_int32, "double": ctypes.c_double}


class DLTensorStruct(ctypes.Structure):
    """The C struct ``DLTensor``, which describes a tensor in memory."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class CContext(ctypes.Structure):
    """The C struct ``sl_context``, which each C ABI kernel gets as its first argument."""

    _fields_ = (
        ("abi_version", ctypes.c_uint32),
        ("num_threads", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_size", ctypes.c_size_t),
        ("error", ctypes.c_void_p),
        ("error_size", ctypes.c_size_t),
        ("config", ctypes.c_void_p),
        ("config_size", ctypes.c_size_t),
    )


class HeapInfo(ctypes.Structure):
    """The C struct ``mallinfo2`` of glibc 2.33 and later, with the sizes and counts of the heap's blocks."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    )


class CFunctionCall:
    """A call of a C function that can be repeated. The object owns the memory of all arguments."""

    def __init__(self, function: Any, spec: dict[str, Any]) -> None:
        """Prepare a call of the C ``function`` with the arguments, the workspace (scratch memory) and the config
        (values of tuning parameters) that ``spec`` describes.
        """
        self.function = function
        self.kept: list[Any] = []
        self.error = ctypes.create_string_buffer(ERROR_BYTES)
        # A workspace is not initialised, so the kernel must not find zeros in it.
        room = self.buffer(b"\xa5" * spec["workspace"])
        config = spec.get("config", [])
        values = self.buffer(b"".join(v.to_bytes(8, sys.byteorder, signed=True) for v in config)) if config else None
        error = ctypes.addressof(self.error)
        context = CContext(1, 1, None, room, spec["workspace"], error, ERROR_BYTES, values, len(config))
        self.kept.append(context)
        arguments = [self.value(v) for v in spec["arguments"]]
        self.arguments = (ctypes.c_void_p(ctypes.addressof(context)), *arguments)

    def buffer(self, content: bytes) -> int:
        """Return the address of a copy of ``content`` in new, aligned memory, which lives as long as this object.

        Unused bytes on both sides absorb small overruns.
        """
        room = ctypes.create_string_buffer(len(content) + 2 * SLACK + ALIGN)
        self.kept.append(room)
        at = (ctypes.addressof(room) + SLACK + ALIGN - 1) // ALIGN * ALIGN
        ctypes.memmove(at, content, len(content))
        return at

    def value(self, v: dict[str, Any]) -> Any:
        """Return the argument that ``v`` describes, converted for a call by ``ctypes``. ``v["kind"]`` says whether it
        is null, a tensor, a number, a string or a list of numbers.
        """
        kind = v["kind"]
        if kind == "null":
            return ctypes.c_void_p(None)
        if kind == "tensor":
            # Eight entries in any case: a call with a rank too large must not read beyond them.
            sizes = (ctypes.c_int64 * 8)(*v["shape"], *[1] * (8 - len(v["shape"])))
            steps = (ctypes.c_int64 * 8)(*v["strides"], *[0] * (8 - len(v["strides"])))
            tensor = DLTensorStruct(
                self.buffer(base64.b64decode(v["data"])),
                1,
                0,
                v["ndim"],
                v["code"],
                v["bits"],
                v["lanes"],
                ctypes.addressof(sizes),
                ctypes.addressof(steps),
                0,
            )
            self.kept += [sizes, steps, tensor]
            return ctypes.c_void_p(ctypes.addressof(tensor))
        if kind in C_NUMBER_TYPES:
            return C_NUMBER_TYPES[kind](v["value"])
        if kind == "string":
            return ctypes.c_char_p(v["value"].encode())
        # C has no array without elements.
        array = (C_NUMBER_TYPES[kind.removesuffix("s")] * max(1, len(v["value"])))(*v["value"])
        self.kept.append(array)
        return ctypes.c_void_p(ctypes.addressof(array))

    def __call__(self) -> int:
        """Call the C function with the prepared arguments and return its status, which is 0 for success."""
        status: int = self.function(*self.arguments)
        return status


def make_heap_counter() -> Callable[[], int]:
    """Return a function that returns the number of bytes that malloc has handed out. The returned function always
    returns 0 if the C library does not report this number.
    """
    try:
        info = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return lambda: 0
    # mallinfo2 counts in size_t. The older mallinfo overflows at 2 GiB, so it is not used.
    info.restype = HeapInfo

    def used() -> int:
        """Return the number of bytes that malloc has handed out, from its heap and from separate memory mappings."""
        allocator = info()
        return int(allocator.uordblks + allocator.hblkhd)

    return used


def count_resident_bytes() -> int:
    """Return the number of bytes of physical memory that this process occupies, or 0 if the system does not report
    it.
    """
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def count_open_files() -> int:
    """Return the number of open files of this process, or 0 if the operating system does not report it."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return 0


def measure_leaks(call: CFunctionCall, seconds: float, used: Callable[[], int]) -> dict[str, Any]:
    """Return what one call leaves behind, as a dict.

    ``status`` and ``message`` are the results of the first call, and ``calls`` is the number of calls in a round.
    ``heap``, ``resident`` and ``files`` are the bytes and open files that one call leaves behind on average. They come
    from two rounds of about ``seconds`` seconds. The smaller growth is taken, since a cache fills only once. ``used``
    returns the heap bytes. If the call is too slow to be repeated, the three numbers are 0.
    """
    status = call()
    message = call.error.value.decode(errors="replace")
    began = time.perf_counter()
    # The first calls fill caches and load code, which is no leak.
    for _ in range(WARM):
        call()
    each = (time.perf_counter() - began) / WARM
    repeat = int(min(MOST, max(LEAST, seconds / max(each, 1e-7))))
    usage = {"status": status, "message": message, "calls": repeat, "heap": 0.0, "resident": 0.0, "files": 0.0}
    if LEAST * each > 2 * seconds:  # too slow to be repeated: what it leaves behind is not known
        return usage
    rounds = []
    for _ in range(2):
        before = used(), count_resident_bytes(), count_open_files()
        for _ in range(repeat):
            call()
        rounds.append(
            [
                (b - a) / repeat
                for a, b in zip(before, (used(), count_resident_bytes(), count_open_files()), strict=True)
            ]
        )
    # A leak shows in both rounds, a cache that fills or a thread that starts in one.
    usage["heap"], usage["resident"], usage["files"] = map(min, *rounds)
    return usage


def run_task() -> None:
    """Read a task as JSON from stdin, and make its calls of one C function. Write a line of JSON to stdout before and
    after each call, so that the parent process knows which call a crash belongs to.
    """
    task = json.load(sys.stdin)
    # RTLD_NOW: a symbol that is missing fails here, and not in the middle of a call.
    function = getattr(ctypes.CDLL(task["library"], mode=os.RTLD_LOCAL | os.RTLD_NOW), task["symbol"])
    function.restype, used = ctypes.c_int, make_heap_counter()

    def say(**what: Any) -> None:
        """Write the keyword arguments as one JSON object in one line to stdout, and flush it."""
        sys.stdout.write(json.dumps(what) + "\n")
        sys.stdout.flush()

    for index, spec in task["calls"]:
        # Written before the call: if it ends the process, the parent knows which one it was.
        say(call=index)
        call = CFunctionCall(function, spec)
        say(call=index, **measure_leaks(call, task["seconds"], used))


if __name__ == "__main__":
    run_task()
