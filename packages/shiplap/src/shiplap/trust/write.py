"""Write a file whole or not at all."""

from __future__ import annotations

import contextlib
import os
import socket
from itertools import count
from pathlib import Path

__all__ = ["host", "write_whole"]

_numbers = count()


def write_whole(path: Path, content: bytes) -> None:
    """Write ``path`` so that it holds its old content or all of ``content``, whatever happens; raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.stem[:16]}@{host()}~{os.getpid()}~{next(_numbers)}.tmp"
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
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
