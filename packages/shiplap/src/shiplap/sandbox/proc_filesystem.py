"""What Linux says about processes, under ``/proc``."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

CALM = 0.9  # share of its time in which a request had a processor, or none to do
CPU_CLOCK = 2  # of a process of another, in the number of its clock: what the scheduler counted


def _read(path: str) -> bytes:
    """What a short file says. Asked many times for each call of a kernel, so it takes no detour. Raises OSError."""
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)


def stat_fields(pid: int | str) -> list[str]:
    """What follows the name in ``/proc/PID/stat``: state, ppid, pgrp, session, ...

    While an answer is waited for, this is asked of every process of the machine, many times a second.
    """
    try:
        return _read(f"/proc/{pid}/stat").rpartition(b")")[2].decode().split()
    except (OSError, ValueError):
        return []


def below(root: int) -> dict[int, int]:
    """Every living process that ``root`` started, directly or not, and its group; parents before their children."""
    fields = {int(entry): stat for entry in os.listdir("/proc") if entry.isdigit() and (stat := stat_fields(entry))}
    family = [root]
    for pid in family:
        family += [child for child, stat in fields.items() if int(stat[1]) == pid and stat[0] not in "ZX"]
    return {pid: int(fields[pid][2]) for pid in family[1:]}


def below_still(root: int) -> dict[int, int]:
    """What :func:`below` finds, while all of the family stand still: Linux lists the children of such processes."""
    if not os.path.exists(f"/proc/{root}/task/{root}/children"):  # not every kernel is built with it
        return below(root)
    groups: dict[int, int] = {}
    parents = [root]
    for pid in parents:
        for child in _children(pid):
            if (stat := stat_fields(child)) and stat[0] not in "ZX" and child not in groups:
                groups[child] = int(stat[2])
                parents.append(child)
    return groups


def _children(pid: int) -> list[int]:
    """Those of all of its threads."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                pids += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split())
    return pids


def threads(pid: int) -> set[str]:
    """The states of all threads of a process, as letters; empty when it is gone."""
    try:
        names = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return set()
    return {stat[0] for name in names if (stat := stat_fields(f"{pid}/task/{name}"))}


def resident(pid: int) -> int:
    """Bytes of memory that are in use."""
    try:
        return int(_read(f"/proc/{pid}/statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


@dataclass(frozen=True)
class Holds:
    """What a process has open, how many threads it has, and its bytes of memory that are in use."""

    files: int = 0
    threads: int = 0
    memory: int = 0


def holds(pid: int) -> Holds:
    """Zeros where Linux does not tell."""
    files, threads = (_entries(f"/proc/{pid}/{what}") for what in ("fd", "task"))
    return Holds(files, threads, resident(pid))


def _entries(folder: str) -> int:
    try:
        return len(os.listdir(folder))
    except OSError:
        return 0


@dataclass(frozen=True)
class Usage:
    """Seconds of a process since it started.

    Attributes:
        ran: on a processor, of all its threads.
        waited: of one thread, ready to run and without a processor, since others had them all.
    """

    ran: float = 0.0
    waited: float = 0.0


@dataclass(frozen=True)
class Took:
    """Seconds of one request.

    Attributes:
        wall: by the referee's clock, from before the process was continued until it was stopped. This alone counts in
            its favour.
        quiet: what it may have taken with the machine to itself: without the time in which either side was ready and
            had no processor, but never less than its processor time shared out over all cores. A process can make
            itself wait, so nothing is credited because of this figure.
    """

    wall: float
    quiet: float

    @property
    def undisturbed(self) -> bool:
        """Whether it hardly waited for a processor."""
        return self.quiet >= CALM * self.wall

    @classmethod
    def of(cls, wall: float, waited: float, ran: float) -> Took:
        return cls(wall, min(wall, max(wall - waited, ran / len(os.sched_getaffinity(0)))))


def usage(pid: int, thread: int) -> Usage:
    """What the scheduler counted for a process and for one thread of it; zeros where the kernel does not count."""
    ran = waited = 0.0
    with contextlib.suppress(OSError):
        ran = time.clock_gettime((~pid << 3) | CPU_CLOCK)  # of all its threads, also of those that ended
    with contextlib.suppress(OSError, ValueError):
        waited = int(_read(f"/proc/{pid}/task/{thread}/schedstat").split()[1]) * 1e-9
    return Usage(ran, waited)


def mapped(pid: int, file: tuple[int, int]) -> list[tuple[int, int, int]]:
    """``(address, bytes, offset)`` of every piece of memory of a process that shows a file. Raises OSError.

    ``file``: the numbers of its device and of its inode.
    """
    pieces = []
    named = f" {file[1]} "
    for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
        if named not in line:  # most of a few hundred lines
            continue
        spot, _, offset, device, inode, *_ = line.split(maxsplit=5)
        if int(inode) == file[1] and [int(n, 16) for n in device.split(":")] == [os.major(file[0]), os.minor(file[0])]:
            first, last = (int(side, 16) for side in spot.split("-"))
            pieces.append((first, last - first, int(offset, 16)))
    return pieces
