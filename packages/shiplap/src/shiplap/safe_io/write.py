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
    """Write ``text`` as UTF-8 to ``path``. An existing file is emptied first. Raise the errors of
    ``open_for_writing``.
    """
    write_bytes(path, text.encode())


def append_text(path: str | os.PathLike[str], text: str) -> None:
    """Append ``text`` as UTF-8 to ``path`` in one write. A missing file is created. Raise the errors of
    ``open_for_writing``.
    """
    with os.fdopen(open_for_writing(path, append=True), "ab") as file:
        # One write to a file opened for appending: lines of several processes do not mix.
        file.write(text.encode())


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write ``content`` to ``path``. An existing file is emptied first. Raise the errors of ``open_for_writing``."""
    with os.fdopen(open_for_writing(path), "wb") as file:
        file.write(content)


def write_whole(path: Path, content: bytes, *, private: bool = False, lasting: bool = True) -> None:
    """Write ``content`` to ``path``. At any time the file holds either all of its old content or all of the new one.

    Raise ``OSError`` if writing fails. Other users cannot write to the file, whatever the umask is, since this package
    refuses to read a file that they can write. If ``private`` is true, no other user can read it either.

    If ``lasting`` is false, the file is not synced to disk. It then outlives the process, but a loss of power may leave
    it missing, empty or old.
    """
    with _replace_when_done(path, 0o600 if private else 0o664, lasting) as file:
        file.write(content)


def copy_whole(source: Path, target: Path) -> None:
    """Copy the file ``source`` to ``target``. At any time ``target`` holds either its old content or all of the new
    one. A process that has the old file open keeps it.
    """
    with source.open("rb") as read, _replace_when_done(target, 0o664, lasting=False) as file:
        shutil.copyfileobj(read, file)


@contextlib.contextmanager
def _replace_when_done(path: Path, mode: int, lasting: bool) -> Iterator[IO[bytes]]:
    """Enter a context that gives a new file of the mode ``mode`` for writing. At the end of the context, the file
    replaces ``path`` by a rename. After an error, the new file is removed. If ``lasting`` is true, the file and the
    rename are synced to disk, so that they survive a loss of power. Otherwise they are not synced.
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
    """Sync a folder to disk, so that a rename in it survives a loss of power. Do nothing on a network file system that
    does not support this.
    """
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def host_name() -> str:
    """Return the name of this machine for use in file names. Each character that is neither a letter nor a digit is
    replaced by ``-``.
    """
    return "".join(c if c.isalnum() else "-" for c in socket.gethostname())[:40]
