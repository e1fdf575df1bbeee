"""Whether an error in a sandboxed process tells of something that the machine lacks, which is nobody's fault."""

from __future__ import annotations

import errno
import os
import re
import resource
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shiplap.sandbox import memory_bound
from shiplap.sandbox.landlock import MAX_FILES

if TYPE_CHECKING:
    from shiplap.sandbox.supervisor import SandboxedProcess

FREE_NAMES = 64  # a disk with fewer is full, unless it does not count them
QUOTA_TRIAL_BYTES = 1 << 16
LACK_TEXTS = {
    errno.EMFILE: "Too many open files(?! in system)",
    errno.ENFILE: "Too many open files in system",
    errno.ENOMEM: r"MemoryError|bad_alloc|[Nn]ot enough memory|[Cc]an(no|')?t allocate memory",
    errno.ENOSPC: "No space left on device",
    errno.EDQUOT: "Disk quota exceeded",
    errno.EFBIG: "File too large",
    errno.EAGAIN: "can't start new thread|Resource temporarily unavailable",
}
"""The texts of errors that tell of a lack."""
DEVICE_LACK_TEXT = "OutOfMemoryError|CUDA out of memory|CUDA error: out of memory"
CONTROL_GROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""The files with the limit and the use of the memory of a control group, of both versions of control groups."""
BOUND_SHARE = 0.9  # of the available memory, the rest of which other processes may need meanwhile
CROWDED_SHARE = 0.5  # of the memory of a device: other programs may hold it if less is free


def available_memory() -> int:
    """Return the bytes of memory that a new process could use. The result is the least of the machine's available
    memory, of what is left of the limit of its control group, and of this process's limits of address space and data.
    """
    left = [
        int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    ]
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    left += [limit for limit in limits if limit != resource.RLIM_INFINITY]
    return min([*left, *_left_in_control_group(), 1 << 62])


def _left_in_control_group() -> list[int]:
    """Return the bytes of memory that the control group of this process may still use, as a list of one number. The
    list is empty if the group has no limit, or if it cannot be read.
    """
    for most, used in CONTROL_GROUP_FILES:
        with suppress(OSError, ValueError):
            left = int(Path(most).read_text()) - int(Path(used).read_text())
            return [max(0, left + _idle_cache(Path(used).with_name("memory.stat")))]
    return []


def _idle_cache(statistics: Path) -> int:
    """Return the bytes of files in memory that Linux gives up first, by the file ``statistics`` of a control group,
    which counts them as used. Return 0 if the file cannot be read.
    """
    with suppress(OSError, ValueError):
        rows = dict(row.split() for row in statistics.read_text().splitlines())
        return int(rows.get("total_inactive_file") or rows.get("inactive_file") or 0)
    return 0


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Return a context in which this process gets no more memory than the machine has available. A request for more
    raises an error for which ``is_lack`` is true. Without the bound, Linux grants the request, and ends a process once
    the memory is used.
    """
    memory_bound.enter(lambda: int(BOUND_SHARE * available_memory()))
    try:
        yield
    finally:
        memory_bound.leave()


def is_lack(e: Exception) -> bool:
    """Return whether an exception of this process says that memory, files, disk space or threads of the machine are
    used up, or the memory of a device.
    """
    return isinstance(e, (MemoryError, torch.OutOfMemoryError)) or any(
        re.search(text, str(e)) for text in LACK_TEXTS.values()
    )


def _is_short_of(kind: int, wanted: int) -> bool:
    """Return whether the hard resource limit ``kind`` of this process is lower than ``wanted``. The children of the
    process inherit the limit.
    """
    most = resource.getrlimit(kind)[1]
    return most != resource.RLIM_INFINITY and most < wanted


def _starts_no_thread() -> bool:
    """Return whether this process cannot start another thread. It tries to start one."""
    try:
        threading.Thread(target=int).start()
    except RuntimeError:
        return True
    return False


def _files_left() -> int:
    """Return how many more files the machine can open, of all processes together."""
    used, _, most = map(int, Path("/proc/sys/fs/file-nr").read_text().split())
    return most - used


def _exceeds_quota(folder: str) -> bool:
    """Return whether the user's disk quota forbids writing more below ``folder``."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(QUOTA_TRIAL_BYTES))
            os.fsync(file.fileno())  # some file systems count a block when they write it
    except OSError as e:
        return e.errno == errno.EDQUOT
    return False


def _is_a_device_crowded() -> bool:
    """Return whether less than half of the memory of this process's current device is free, or none for a context.
    Return False if this process uses no device.
    """
    if not torch.cuda.is_initialized():
        return False
    try:
        free, total = torch.cuda.mem_get_info()
    except RuntimeError:
        return True
    return free < CROWDED_SHARE * total


def find_lack(text: str, process: SandboxedProcess) -> str:
    """Return the error ``text`` of a sandboxed process, preceded by the name of the resource that the machine lacks.
    Return an empty string if no lack explains the error.

    A process that exceeds its own limits fails with the same texts. A resource therefore counts as lacking only if the
    machine has less of it left than the process may use. The memory of a device has no limit for a process. It counts
    as lacking if less than half of it is free, since programs that run beside may hold the rest. What the process
    itself holds is counted in.
    """
    if re.search(DEVICE_LACK_TEXT, text) and _is_a_device_crowded():
        return f"too little free memory on a device: {text}"
    disk, bounds = os.statvfs(process.launcher.folder), process.bounds
    full = disk.f_files > 0 and disk.f_favail < FREE_NAMES
    lacks = {
        errno.EMFILE: lambda: _is_short_of(resource.RLIMIT_NOFILE, MAX_FILES),
        errno.ENFILE: lambda: _files_left() < MAX_FILES * (1 + bounds.processes),
        errno.ENOMEM: lambda: available_memory() < bounds.memory,
        errno.ENOSPC: lambda: full or disk.f_bavail * disk.f_frsize < bounds.file_size,
        errno.EDQUOT: lambda: _exceeds_quota(process.launcher.folder),
        errno.EFBIG: lambda: _is_short_of(resource.RLIMIT_FSIZE, bounds.file_size),
        errno.EAGAIN: _starts_no_thread,
    }
    found = (code for code, holds in lacks.items() if re.search(LACK_TEXTS[code], text) and holds())
    return next((f"{os.strerror(code)}: {text}" for code in found), "")
