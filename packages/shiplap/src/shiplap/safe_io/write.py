"""Write a file whole or not at all."""

from __future__ import annotations

import contextlib
import os
import socket
from itertools import count
from pathlib import Path

_numbers = count()


def write_whole(path: Path, content: bytes, *, private: bool = False, lasting: bool = True) -> None:
    """Write ``path`` so that it holds its old content or all of ``content``, whatever happens. Raises OSError.

    Whatever the umask is, others may not write the file, because a reader would refuse it. If it is ``private``, the
    group may neither read nor write it. If it is not ``lasting``, it is not synced: it outlives the process, and after
    a loss of power it may be missing, empty or old.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name holds machine and process, so that a later clean-up can tell whether the writer still runs.
    temporary = path.parent / f".{path.stem[:16]}@{host_name()}~{os.getpid()}~{next(_numbers)}.tmp"
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
    """Sync the rename to disk. Some network file systems cannot sync directories, and the rename stays unsynced
    there.
    """
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def host_name() -> str:
    """Return the name of this machine, in characters that a file name may hold."""
    return "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:40]
