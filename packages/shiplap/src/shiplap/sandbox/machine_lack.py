"""Whether an error in a sandboxed process tells of something that the machine lacks, which is nobody's fault."""

from __future__ import annotations

import errno
import os
import re
import resource
from pathlib import Path

from shiplap.sandbox.landlock import MAX_FILES
from shiplap.sandbox.proc_filesystem import read_process_resources
from shiplap.sandbox.supervisor import MAX_TASKS, SandboxedProcess

FILES_OF_CALLS = 16  # open files that requests may need
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


def available_memory() -> int:
    """Return the bytes of memory that a new process could use: those of the machine, and below its own limits."""
    left = [
        int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    ]
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return min([*left, *(limit for limit in limits if limit != resource.RLIM_INFINITY), 1 << 62])


def is_lack(e: Exception) -> bool:
    """Return whether an error of this process tells of a lack."""
    return isinstance(e, MemoryError) or any(re.search(text, str(e)) for text in LACK_TEXTS.values())


def find_lack(text: str, process: SandboxedProcess) -> str:
    """Return what the machine lacks if that explains an error of the process, or an empty text.

    It explains nothing if the process has used up what it may use, or if the machine has that much left.
    """
    held, disk = read_process_resources(process.pid), os.statvfs(process.launcher.folder)
    lacks = {
        errno.EMFILE: held.files < MAX_FILES - FILES_OF_CALLS,
        errno.ENFILE: True,
        errno.ENOMEM: available_memory() < process.bounds.memory,
        errno.ENOSPC: disk.f_bavail * disk.f_frsize < process.bounds.file_size,
        errno.EDQUOT: True,
        errno.EFBIG: 0 <= resource.getrlimit(resource.RLIMIT_FSIZE)[1] < process.bounds.file_size,
        errno.EAGAIN: held.threads < MAX_TASKS // 2,
    }
    found = (code for code, holds in lacks.items() if holds and re.search(LACK_TEXTS[code], text))
    return next((f"{os.strerror(code)}: {text}" for code in found), "")
