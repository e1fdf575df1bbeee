"""Write a file whole or not at all."""

from __future__ import annotations

import contextlib
import os
import socket
from itertools import count
from pathlib import Path

_numbers = count()


def write_whole(path: Path, content: bytes, *, private: bool = False, lasting: bool = True) -> None:
    """Write ``path`` so that it holds its old content or all of ``content``, whatever happens; raises OSError.

    Whatever the umask is, others may not write the file, or it would not be believed when it is read. Of a ``private``
    one, the group may neither read nor write it. What is not ``lasting`` is left to the system to put on the disk: it
    outlives the process, and after a loss of power it may be missing, or empty, or old.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.stem[:16]}@{host()}~{os.getpid()}~{next(_numbers)}.tmp"
    try:
        flags, mode = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600 if private else 0o664
        with os.fdopen(os.open(temporary, flags, mode), "wb") as file:
            file.write(content)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if lasting:
        _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    """Make the rename last; where directories cannot be synced (some network file systems) it lasts as it is."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def host() -> str:
    """The name of this machine, as a file of ours may hold it."""
    return "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:40]
