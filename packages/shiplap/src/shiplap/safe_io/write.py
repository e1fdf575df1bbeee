"""The one door for writing files: paths that the user names, and files that are replaced whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import IO

from shiplap.safe_io.files import open_for_writing

_numbers = count()


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` as UTF-8 to ``path``, which the user has named or Shiplap has chosen. Raises the errors of
    ``open_for_writing``.
    """
    write_bytes(path, text.encode())


def append_text(path: str | os.PathLike[str], text: str) -> None:
    """Append ``text`` as UTF-8 to ``path`` in one write, and make the file where there is none. Raises the errors of
    ``open_for_writing``.
    """
    with os.fdopen(open_for_writing(path, append=True), "ab") as file:
        # One write to a file opened for appending: lines of several processes do not mix.
        file.write(text.encode())


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write ``content`` to ``path``, which the user has named or Shiplap has chosen. Raises the errors of
    ``open_for_writing``.
    """
    with os.fdopen(open_for_writing(path), "wb") as file:
        file.write(content)


def write_whole(path: Path, content: bytes, *, private: bool = False, lasting: bool = True) -> None:
    """Write ``path`` so that it holds its old content or all of ``content``, whatever happens. Raises OSError.

    Whatever the umask is, others may not write the file, because a reader would refuse it. If it is ``private``, the
    group may neither read nor write it. If it is not ``lasting``, it is not synced: it outlives the process, and after
    a loss of power it may be missing, empty or old.
    """
    with _replace_when_done(path, 0o600 if private else 0o664, lasting) as file:
        file.write(content)


def copy_whole(source: Path, target: Path) -> None:
    """Copy the file ``source`` to ``target``, which has its old or the whole new content at any time. A process that
    has the old file open keeps it.
    """
    with source.open("rb") as read, _replace_when_done(target, 0o664, lasting=False) as file:
        shutil.copyfileobj(read, file)


@contextlib.contextmanager
def _replace_when_done(path: Path, mode: int, lasting: bool) -> Iterator[IO[bytes]]:
    """Open a new file beside ``path`` for writing inside the ``with``. At its end the file replaces ``path`` by a
    rename. After an error it is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name holds machine and process, so that a later clean-up can tell whether the writer still runs.
    temporary = path.parent / f".{path.stem[:16]}@{host_name()}~{os.getpid()}~{next(_numbers)}.tmp"
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, mode), "wb") as file:
            yield file
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
    """Sync a folder to disk, so that a rename in it lasts. Network file systems that cannot do so are passed over."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def host_name() -> str:
    """Return the name of this machine with other characters than letters and digits replaced by ``-``, for file
    names.
    """
    return "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:40]
