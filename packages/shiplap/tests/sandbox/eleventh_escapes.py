"""Attempts of an eleventh attack: on what is made with more rights than it needs, and read beyond what is needed."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
import struct
from collections.abc import Callable
from pathlib import Path

from tests.sandbox.escapes import AT, Attempt, World, call, libc
from tests.sandbox.reading_escapes import any_opened

ATTEMPTS: dict[str, Attempt] = {}


def _on_rights_of_the_owner() -> None:
    """A file that runs as its owner could be made, though no mode can be changed."""

    def made(open_it: Callable[[str], int]) -> Attempt:
        def work(w: World) -> str:
            os.umask(0)
            mode = os.fstat(open_it(w.scratch + "/program")).st_mode
            if not mode & 0o6000:
                raise OSError(1, "the file was made without these rights")
            return stat.filemode(mode)

        return work

    def without_a_name(path: str) -> int:
        return os.open(os.path.dirname(path), os.O_TMPFILE | os.O_RDWR, 0o4755)

    how = struct.pack("=QQQ", os.O_CREAT | os.O_WRONLY, 0o4755, 0)
    ATTEMPTS.update(
        {
            "a program of its owner": made(lambda path: os.open(path, os.O_CREAT | os.O_WRONLY, 0o4755)),
            "a program of its group": made(lambda path: os.open(path, os.O_CREAT | os.O_WRONLY, 0o2755)),
            "a program of its owner by open": made(
                lambda path: call((2, None), os.fsencode(path), os.O_CREAT | os.O_WRONLY, 0o4755)
            ),
            "a program of its owner by creat": made(lambda path: call((85, None), os.fsencode(path), 0o4755)),
            "a program of its owner by openat2": made(lambda path: call((437, 437), AT, os.fsencode(path), how, 24)),
            "a program of its owner without a name": made(without_a_name),
        }
    )


def _on_the_machine() -> None:
    def locked(w: World) -> object:
        libc.mmap.restype = ctypes.c_void_p
        size, flags = ctypes.c_size_t(4096), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x2000
        if libc.mmap(None, size, 3, flags, -1, ctypes.c_long(0)) == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return "memory that cannot be written to the disk"

    def stirred(path: str) -> Attempt:
        return lambda w: os.write(os.open(path, os.O_WRONLY), b"numbers for everybody")

    groups = tuple(str(p) for n in ("cgroup.procs", "tasks") for p in Path("/sys/fs/cgroup").rglob(n))
    of_others = tuple(str(p) for n in ("*.stat", "devices.list", "*.events") for p in Path("/sys/fs/cgroup").rglob(n))
    ATTEMPTS.update(
        {
            "memory that stays, by its map": locked,
            "numbers of the machine, by /dev/random": stirred("/dev/random"),
            "numbers of the machine, by /dev/urandom": stirred("/dev/urandom"),
            "who is in a group of processes": lambda w: any_opened(groups),
            "what groups of processes do": lambda w: any_opened(of_others),
        }
    )


_on_rights_of_the_owner()
_on_the_machine()
