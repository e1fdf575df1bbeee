"""Attempts to read, as root, what root alone may read, and files of which a mere look changes something."""

from __future__ import annotations

import os
import stat
from functools import cache
from pathlib import Path

from tests.sandbox.escapes import Attempt, World, call, opened

ATTEMPTS: dict[str, Attempt] = {}
TREES = ("/sys/class", "/sys/module", "/sys/kernel", "/sys/devices", "/sys/bus", "/sys/fs", "/proc/sys", "/proc/driver")
FADVISE, DONTNEED = (221, 223), 4


@cache
def hidden_files(tree: str) -> tuple[str, ...]:
    """The files below a folder that their owner may read, and others may not."""
    found = []
    for folder, _, files in os.walk(tree):
        for path in (os.path.join(folder, name) for name in files):
            try:
                mode = os.lstat(path).st_mode
            except OSError:
                continue
            if stat.S_ISREG(mode) and mode & stat.S_IRUSR and not mode & stat.S_IROTH:
                found.append(path)
    return tuple(found)


def any_opened(paths: tuple[str, ...]) -> str:
    """The first of the paths that can be opened. Raises the last error."""
    last = OSError(0, "there is none")
    for path in paths:
        try:
            os.close(os.open(path, os.O_RDONLY))
        except OSError as e:
            last = e
        else:
            return path
    raise last


def _on_what_root_reads() -> None:
    for tree in TREES:
        hidden = hidden_files(tree)  # before the process is locked in, when it can be listed
        ATTEMPTS[f"what root alone may read below {tree}"] = lambda w, paths=hidden: any_opened(paths)  # type: ignore[misc]
    registers = tuple(
        str(p) for n in ("resource*", "rom", "config") for p in Path("/sys/bus/pci/devices").glob(f"*/{n}")
    )
    named = {
        "a device that is made by reading": ("/sys/class/zram-control/hot_add",),
        "counters that are renewed by reading": ("/proc/sys/vm/stat_refresh",),
        "the key of TCP": ("/proc/sys/net/ipv4/tcp_fastopen_key",),
        "the secrets of addresses": tuple(str(p) for p in Path("/proc/sys/net/ipv6/conf").glob("*/stable_secret")),
        "registers of devices": registers,
        "numbers of the machine": tuple(str(p) for p in Path("/sys/devices/virtual/dmi/id").glob("*serial")),
        "names in the network": ("/proc/sys/kernel/hostname", "/sys/class/net/lo/address"),
        "who writes to disks": ("/sys/class/block", "/sys/class/bdi", "/proc/diskstats"),
    }
    for name, paths in named.items():
        ATTEMPTS[name] = lambda w, paths=paths: any_opened(paths)  # type: ignore[misc]


def _on_pages_of_others() -> None:
    def dropped(path: str) -> object:
        return opened(path, lambda fd: call(FADVISE, fd, 0, 0, DONTNEED))

    def dropped_program(w: World) -> object:
        return dropped("/bin/sh")

    ATTEMPTS["pages of a file that others read"] = lambda w: dropped(w.shown)
    ATTEMPTS["pages of a program that others run"] = dropped_program


_on_what_root_reads()
_on_pages_of_others()
