"""How much a sandboxed process takes of the machine: memory, disk, processes and threads."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shiplap.sandbox.proc_filesystem import (
    BLOCK,
    THREADS,
    OversizedMemoryMap,
    has_ended,
    living_folder,
    read_memory_map,
    read_memory_sizes,
    share_memory,
    shared_memory_bytes,
    stat_fields,
    unseen_bytes,
)

MAX_TASKS = 4096  # threads of a process and its descendants, and those of them that nobody has waited for
MAX_NAMES = 100_000  # files and folders: an empty one takes no bytes, but a file system has room for so many alone
MEASURE_S = 5.0  # seconds after which a folder that is not measured yet counts as one without a bound


@dataclass(frozen=True)
class ResourceUse:
    """What a sandboxed process used before it ran code that is not trusted.

    Attributes:
        scratch: the folder that it may write.
        memory: the bytes of its address space and of the memory that it held. Two zeros if they are not known yet.
        shared: the bytes of memory that the processes of the machine shared. Where a device is used, its driver shares
            memory, and no such bytes count.
        free: the bytes, and the files and folders, for which the file system of ``scratch`` had room.
    """

    scratch: str
    memory: tuple[int, int] = (0, 0)
    shared: float = 0
    free: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, pid: int, scratch: str, *, device: bool = False) -> ResourceUse:
        """Return what the process ``pid`` uses now. ``scratch`` is the folder that it may write, and ``device`` says
        whether it may use an accelerator.
        """
        shared = math.inf if device else shared_memory_bytes()
        return cls(scratch, read_memory_sizes(pid), shared, read_free_room(scratch))

    def excess(self, pids: Sequence[int], memory: int, processes: int) -> str:
        """Return a text that names what the processes ``pids`` use beyond a limit, or an empty string.

        ``pids`` are the process and all its descendants. ``memory`` is the limit of the further bytes of memory, and of
        the bytes of all files together. ``processes`` is that of the descendants.
        """
        try:
            return self._find_excess(pids, memory, processes)
        except OversizedMemoryMap as e:
            return str(e)

    def _find_excess(self, pids: Sequence[int], memory: int, processes: int) -> str:
        """Return what ``excess`` returns. Raise ``OversizedMemoryMap``."""
        stats = [stat for pid in pids if (stat := stat_fields(pid))]
        # A forked child shares the pages of its parent until it writes, so the first bytes count for none.
        sizes = [[max(0, a - b) for a, b in zip(read_memory_sizes(pid), self.memory, strict=True)] for pid in pids]
        space, used = map(sum, zip(*sizes, strict=True))
        shared = shared_memory_bytes() - self.shared > memory
        if space > memory or shared:  # else there is no room for more than the limit
            used += unseen_bytes(pids)
        # Of a shared mapping that was cut off, the rest is held as well. Nothing shows it but the sum of the machine.
        if self.memory[1] and (used > memory or (shared and share_memory(pids))):
            return f"more than {memory / 2**30:.3g} GiB of memory"
        # Others may have used up the disk, so the files are measured before anybody is blamed.
        taken, names = (before - now for before, now in zip(self.free, read_free_room(self.scratch), strict=True))
        removed = removed_files(self.scratch, pids) if taken > memory or names > MAX_NAMES else {}
        if taken > memory and measure_folder(self.scratch, "--block-size=1") + sum(removed.values()) > memory:
            return f"more than {memory / 2**30:.3g} GiB of files"
        if names > MAX_NAMES and measure_folder(self.scratch, "--inodes") + len(removed) > MAX_NAMES:
            return f"more than {MAX_NAMES} files"
        if sum(not has_ended(stat) for stat in stats) > 1 + processes:
            return f"more than {processes} processes"
        if sum(int(stat[THREADS]) for stat in stats) > MAX_TASKS:
            return f"more than {MAX_TASKS} threads and processes that have ended"
        return ""


def read_free_room(folder: str) -> tuple[int, int]:
    """Return the bytes, and the files and folders, for which the file system of ``folder`` has room. Return two zeros
    if they cannot be read.
    """
    try:
        disk = os.statvfs(folder)
    except OSError:
        return 0, 0
    return disk.f_bavail * disk.f_frsize, disk.f_favail


def measure_folder(folder: str, unit: str) -> float:
    """Return the size of a folder with everything in it, as the program ``du`` measures it with the option ``unit``.

    Names in the folder may be of any kind and depth. If ``du`` cannot be started, the size is 0. It is infinite if
    ``du`` takes longer than ``MEASURE_S`` seconds, since the sandboxed process has made what it looks at.
    """
    try:
        command = ["du", "-sx", unit, "--", folder]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=MEASURE_S, check=False
        )
        return int(done.stdout.split()[0])
    except subprocess.TimeoutExpired:
        return math.inf
    except (OSError, ValueError, IndexError):
        return 0


def removed_files(folder: str, pids: Iterable[int]) -> dict[tuple[int, int], float]:
    """Return the bytes on disk of each removed file that the processes ``pids`` have mapped below ``folder``, or have
    open on its disk, by device and inode. They are infinite for a file that is only mapped: a map of one page keeps the
    whole file, and Linux does not say how long that is.
    """
    mapped, opened = dict[tuple[int, int], float](), dict[tuple[int, int], float]()
    with contextlib.suppress(OSError):
        disk, within = os.stat(folder).st_dev, f"{os.path.realpath(folder)}/"
        for process in map(living_folder, pids):
            with contextlib.suppress(OSError):  # it has just ended
                mapped |= dict.fromkeys(_mapped_removed_files(process, within), math.inf)
                opened |= _open_removed_files(process, disk)
    return mapped | opened


def _mapped_removed_files(process: str, within: str) -> set[tuple[int, int]]:
    """Return (device, inode) of each removed file with a path that begins with ``within`` that a process has mapped.
    ``process`` is its folder below ``/proc``.
    """
    found = set[tuple[int, int]]()
    for line in read_memory_map(process):
        if line.endswith(" (deleted)"):
            _, _, _, device, inode, path = line.split(maxsplit=5)
            if path.startswith(within):
                found.add((os.makedev(*(int(part, 16) for part in device.split(":"))), int(inode)))
    return found


def _open_removed_files(process: str, disk: int) -> dict[tuple[int, int], int]:
    """Return the bytes of each removed file of the device ``disk`` that a process has open, by device and inode.
    ``process`` is its folder below ``/proc``.
    """
    found = dict[tuple[int, int], int]()
    for name in os.listdir(f"{process}/fd"):
        with contextlib.suppress(OSError):  # it has just been closed
            about = os.stat(f"{process}/fd/{name}")
            if not about.st_nlink and about.st_dev == disk:
                found[about.st_dev, about.st_ino] = about.st_blocks * BLOCK
    return found
