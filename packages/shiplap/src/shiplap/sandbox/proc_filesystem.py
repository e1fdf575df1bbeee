"""Information about processes that Linux gives under ``/proc``."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

CALM_SHARE = 0.9  # share of the wall time without waiting from which a request is undisturbed
CPU_CLOCK = 2  # CPUCLOCK_SCHED, in the clock id of another process: time counted by the scheduler
PPID, GROUP, SESSION, FLAGS, THREADS = 1, 2, 3, 6, 17  # of ``stat_fields``
EXITING = 0x4  # the flag of a thread that is ending (PF_EXITING of Linux)
PAGE = os.sysconf("SC_PAGE_SIZE")
FILE_BYTES = 208 << 10  # the bytes that a socket holds without a reader, by the usual setting; a pipe holds less
STATUS_SIZE = re.compile(r"^(VmPTE|HugetlbPages|RssShmem):\s+(\d+) kB$", re.MULTILINE)
# Memory that processes share without a file, by the name that Linux gives it, or one that they have given it.
NO_FILE = re.compile(r"(/dev/zero \(deleted\)|\[anon_shmem:.*\])$")
MEMORY_FILE = re.compile(r"(^|\s)/memfd:")  # a file in memory
BLOCK = 512  # bytes, as ``stat`` counts them
SHARED_SIZE = re.compile(rb"^Shmem:\s+(\d+) kB$", re.MULTILINE)
MAX_MAP_BYTES = 32 << 20  # of the list of mappings: the most that Linux allows, with some 500 bytes each


class OversizedMemoryMap(Exception):
    """An error for a process whose list of mappings is longer than ``MAX_MAP_BYTES``."""


def _read_proc_file(path: str) -> bytes:
    """Return the first 4,096 bytes of a file under ``/proc``. Raise ``OSError`` if it cannot be read.

    This runs many times for each timed call, so it uses system calls without the layers of ``open``.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 4096)
    finally:
        os.close(file)


def stat_fields(pid: int | str) -> list[str]:
    """Return the fields after the name in ``/proc/PID/stat``, such as state, parent, process group and session. The
    list is empty if the process is gone.

    While a reply is awaited, this function is called for every process of the machine, many times a second.
    """
    try:
        # The name may contain spaces and brackets, so the last bracket ends it.
        return _read_proc_file(f"/proc/{pid}/stat").rpartition(b")")[2].decode().split()
    except (OSError, ValueError):
        return []


def has_ended(stat: Sequence[str]) -> bool:
    """Return whether a process has ended, judged by its ``stat_fields``.

    If only the first thread has ended, Linux shows the state of an ended process, too. The number of threads
    distinguishes the two cases.
    """
    return stat[0] in "ZX" and int(stat[THREADS]) <= 1


def list_descendants(root: int, *, dead: bool = False) -> dict[int, int]:
    """Return the living descendants of the process ``root`` as a mapping from process id to process group. Parents come
    before their children.

    If ``dead`` is true, descendants that have ended and for which nobody has waited are listed, too. Otherwise they are
    left out.
    """
    fields = {int(entry): stat for entry in os.listdir("/proc") if entry.isdigit() and (stat := stat_fields(entry))}
    family = [root]
    for pid in family:
        family += [child for child, stat in fields.items() if int(stat[PPID]) == pid and (dead or not has_ended(stat))]
    return {pid: int(fields[pid][GROUP]) for pid in family[1:]}


def list_session(leader: int) -> list[int]:
    """Return the ids of the living processes in the session that the process ``leader`` has made. Processes whose
    parents have ended are included.
    """
    every = ((int(entry), stat_fields(entry)) for entry in os.listdir("/proc") if entry.isdigit())
    return [pid for pid, stat in every if stat and int(stat[SESSION]) == leader and not has_ended(stat)]


def list_stopped_descendants(root: int) -> dict[int, int]:
    """Return the living descendants of the process ``root`` as ``list_descendants`` does, but faster.

    The result is reliable only while all of them are stopped, since Linux lists the children of a process reliably only
    then. The list of its children is much shorter than that of all processes.
    """
    if not os.path.exists(f"/proc/{root}/task/{root}/children"):  # depends on how the kernel was built
        return list_descendants(root)
    groups: dict[int, int] = {}
    parents = [root]
    for pid in parents:
        for child in _list_children(pid):
            if (stat := stat_fields(child)) and not has_ended(stat) and child not in groups:
                groups[child] = int(stat[GROUP])
                parents.append(child)
    return groups


def _list_children(pid: int) -> list[int]:
    """Return the process ids of the children of all threads of a process. The list is empty if the process is gone."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                # The thread may have ended since it was listed.
                pids += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split())
    return pids


def thread_states(pid: int) -> set[str]:
    """Return the state letters of all threads of a process, such as ``{"R", "S"}``. The set is empty if the process is
    gone.
    """
    try:
        names = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return set()
    return {stat[0] for name in names if (stat := stat_fields(f"{pid}/task/{name}"))}


def is_ending(pid: int) -> bool:
    """Return whether all threads of a process have ended or are ending, so that its code runs no more. The return of
    much memory to the machine takes a while in this state. Return True if the process is gone.
    """
    try:
        names = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return True
    stats = [stat for name in names if (stat := stat_fields(f"{pid}/task/{name}"))]
    return all(stat[0] in "ZX" or int(stat[FLAGS]) & EXITING for stat in stats)


def living_folder(pid: int) -> str:
    """Return the folder below ``/proc`` that shows the memory and open files of a process. It is that of the process,
    or of a thread that still runs if the first thread has ended.
    """
    if not _memory_sizes_in(f"/proc/{pid}")[0]:
        with contextlib.suppress(OSError):
            threads = (f"/proc/{pid}/task/{name}" for name in os.listdir(f"/proc/{pid}/task"))
            return next((folder for folder in threads if _memory_sizes_in(folder)[0]), f"/proc/{pid}")
    return f"/proc/{pid}"


def _memory_sizes_in(folder: str) -> tuple[int, int]:
    """Return the bytes of address space and of physical memory that ``folder``, the folder of a process or thread in
    ``/proc``, shows. Return two zeros if it shows none.
    """
    try:
        size, resident = _read_proc_file(f"{folder}/statm").split()[:2]
        return int(size) * PAGE, int(resident) * PAGE
    except (OSError, ValueError):
        return 0, 0


def resident_bytes(pid: int) -> int:
    """Return the bytes of physical memory that a process uses, or 0 if it is gone."""
    return _memory_sizes_in(f"/proc/{pid}")[1]


def read_memory_sizes(pid: int) -> tuple[int, int]:
    """Return the bytes of a process's address space and of the memory that it holds, or two zeros if the process is
    gone.

    The memory is its physical memory, and an estimate of what its pipes and sockets can hold, which follows from the
    number of its open files.
    """
    folder = living_folder(pid)
    size, resident = _memory_sizes_in(folder)
    return size, resident + _count_entries(f"{folder}/fd") * FILE_BYTES


def unseen_bytes(pids: Iterable[int]) -> int:
    """Return the bytes of memory that processes hold but that their resident sizes do not show.

    They are page tables, huge pages, open files in memory, and shared memory without a file whose pages were unmapped.
    Unmapping such a page does not free it. Where a mapping was cut off, the rest cannot be seen.
    """
    shared, held, resident = dict[str, int](), 0, 0
    for folder in map(living_folder, pids):
        with contextlib.suppress(OSError):
            status = _read_proc_file(f"{folder}/status").decode(errors="replace")
            sizes = {name: int(size) << 10 for name, size in STATUS_SIZE.findall(status)}
            held += sizes.get("VmPTE", 0) + sizes.get("HugetlbPages", 0)
            resident += sizes.get("RssShmem", 0)
            maps = read_memory_map(folder)
            mine, files = (_mapped_bytes(maps, name) for name in (NO_FILE, MEMORY_FILE))
            shared = {inode: max(mine.get(inode, 0), shared.get(inode, 0)) for inode in mine.keys() | shared.keys()}
            opened = _open_memory_files(folder).items()
            held += sum(max(0, size - files.get(inode, 0)) for inode, size in opened)
    return held + max(0, sum(shared.values()) - resident)


def read_memory_map(folder: str) -> list[str]:
    """Return the lines in which Linux lists the mappings of a process. ``folder`` is the folder in ``/proc`` of the
    process or of a thread. Raise ``OSError`` if they cannot be read, ``ProcessLookupError`` if it has ended, and
    ``OversizedMemoryMap`` if they are too long.

    The paths of mapped files may be of any length. Linux escapes a line feed in them, and no other character that
    ``str.splitlines`` or ``read_text`` takes for the end of a line.
    """
    with open(f"{folder}/maps", "rb") as file:
        text = file.read(MAX_MAP_BYTES + 1)
    if len(text) > MAX_MAP_BYTES:
        raise OversizedMemoryMap(f"the list of its memory mappings has more than {MAX_MAP_BYTES >> 20} MiB")
    if not text:  # Linux shows a process until somebody has waited for it
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return text.decode(errors="replace").split("\n")[:-1]


def _mapped_bytes(maps: Iterable[str], name: re.Pattern[str]) -> dict[str, int]:
    """Return the sum of the bytes of those mappings of a process whose names match ``name``, by the inodes of their
    files. ``maps`` are the lines in which Linux lists the mappings.
    """
    sizes = dict[str, int]()
    for line in filter(name.search, maps):
        spot, _, _, _, inode, *_ = line.split(maxsplit=5)
        first, last = (int(side, 16) for side in spot.split("-"))
        sizes[inode] = sizes.get(inode, 0) + last - first
    return sizes


def _open_memory_files(folder: str) -> dict[str, int]:
    """Return the bytes of the files in memory that a process has open, by their inodes. ``folder`` is the process's
    folder in ``/proc``.
    """
    sizes = dict[str, int]()
    for name in os.listdir(f"{folder}/fd"):
        with contextlib.suppress(OSError):  # it has just been closed
            if MEMORY_FILE.match(os.readlink(f"{folder}/fd/{name}")):
                about = os.stat(f"{folder}/fd/{name}")
                sizes[str(about.st_ino)] = about.st_blocks * BLOCK
    return sizes


def shared_memory_bytes() -> int:
    """Return the bytes of memory that the processes of the machine share without a file on a disk, or 0 if Linux does
    not say.
    """
    with contextlib.suppress(OSError):
        if size := SHARED_SIZE.search(_read_proc_file("/proc/meminfo")):
            return int(size[1]) << 10
    return 0


def share_memory(pids: Iterable[int]) -> bool:
    """Return whether one of the processes maps shared memory without a file."""
    for folder in map(living_folder, pids):
        with contextlib.suppress(OSError):
            if any(map(NO_FILE.search, read_memory_map(folder))):
                return True
    return False


@dataclass(frozen=True)
class ProcessResources:
    """The number of open files and of threads of a process, and the bytes of its memory in use."""

    files: int = 0
    threads: int = 0
    memory: int = 0


def read_process_resources(pid: int) -> ProcessResources:
    """Return the numbers of open files and threads of a process and its memory in bytes. A number that Linux does not
    report is 0.
    """
    files, threads = (_count_entries(f"/proc/{pid}/{what}") for what in ("fd", "task"))
    return ProcessResources(files, threads, resident_bytes(pid))


def _count_entries(folder: str) -> int:
    """Return the number of entries of a folder, or 0 if it cannot be listed."""
    try:
        return len(os.listdir(folder))
    except OSError:
        return 0


@dataclass(frozen=True)
class SchedulerUsage:
    """The seconds of a process on and without a processor, since it started.

    Attributes:
        ran: the seconds that all its threads were on a processor.
        waited: the seconds that one thread was ready to run and had no processor.
    """

    ran: float = 0.0
    waited: float = 0.0


@dataclass(frozen=True)
class RequestTime:
    """The seconds of one request.

    Attributes:
        wall: the time by the clock of this process, from before the other process was continued until it was stopped.
            Only this time counts in favour of a candidate.
        quiet: an estimate of the time on an idle machine. It is the wall time without the time in which this process or
            the other one waited for a processor. It is at least the processor time divided by the number of cores. A
            process can make itself wait, so this time never counts in favour of a candidate.
    """

    wall: float
    quiet: float

    @property
    def undisturbed(self) -> bool:
        """Whether the process hardly waited for a processor during the request. This holds if the quiet time is at
        least ``CALM_SHARE`` of the wall time.
        """
        return self.quiet >= CALM_SHARE * self.wall

    @classmethod
    def of(cls, wall: float, waited: float, ran: float) -> RequestTime:
        """Return the times of a request that took ``wall`` seconds on the clock of this process.

        The quiet time is ``wall`` without the seconds ``waited`` for a processor. It is at least ``ran``, the processor
        time, divided by the number of processors.
        """
        return cls(wall, min(wall, max(wall - waited, ran / len(os.sched_getaffinity(0)))))


def read_scheduler_usage(pid: int, thread: int) -> SchedulerUsage:
    """Return the processor seconds that the process ``pid`` has used with all its threads, and the seconds that the one
    thread ``thread`` has waited for a processor. Each number is 0 if the kernel does not count it.
    """
    ran = waited = 0.0
    with contextlib.suppress(OSError):
        # The clock id of another process, as ``clock_getcpuclockid`` computes it.
        ran = time.clock_gettime((~pid << 3) | CPU_CLOCK)  # of all threads, including ended ones
    with contextlib.suppress(OSError, ValueError):
        waited = int(_read_proc_file(f"/proc/{pid}/task/{thread}/schedstat").split()[1]) * 1e-9
    return SchedulerUsage(ran, waited)


def find_mapped_pieces(pid: int, file: tuple[int, int]) -> list[tuple[int, int, int]]:
    """Return ``(address, size in bytes, offset in the file)`` of each range of a process's memory that is a shared
    mapping of ``file``.

    ``file`` is the device and the inode of the file. Raise the errors of ``read_memory_map``.
    """
    pieces = []
    named = f" {file[1]} "
    for line in read_memory_map(f"/proc/{pid}"):
        if named not in line:  # a quick test for most of a few hundred lines
            continue
        spot, rights, offset, device, inode, *_ = line.split(maxsplit=5)
        # What is written into a private mapping does not show in the file.
        if (
            "s" in rights
            and int(inode) == file[1]
            and [int(n, 16) for n in device.split(":")] == [os.major(file[0]), os.minor(file[0])]
        ):
            first, last = (int(side, 16) for side in spot.split("-"))
            pieces.append((first, last - first, int(offset, 16)))
    return pieces
