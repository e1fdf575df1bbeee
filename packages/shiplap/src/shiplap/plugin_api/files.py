"""Files of a family that one process writes and another reads, and whose writer may be killed at any time.

``write_whole(path, content)`` leaves the old content or all of the new one. ``parse_json(content)`` reads such a file,
with limits on size and depth, and raises a ValueError of one line. The others are for paths that the user names and
that another user may have made: ``read_named(path, limit)`` and ``open_named(path)`` open a regular file,
``work_in(folder)`` makes a folder or checks the existing one, ``open_new(path)`` makes a file in place of any file of
its name. Each raises OSError for files that another user could have written, and none follows a symbolic link of
another user. ``work_folder(tool)`` is a context with a new temporary folder, which ``shiplap cache gc`` removes if the
program is killed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from shiplap import safe_io
from shiplap.safe_io import parse_json, write_whole
from shiplap.safe_io.work_folders import work_folder

__all__ = ["open_named", "open_new", "parse_json", "read_named", "work_folder", "work_in", "write_whole"]


def open_named(path: str | os.PathLike[str]) -> IO[bytes]:
    """Return the regular file ``path``, opened for reading bytes. Raise ``OSError`` for a FIFO, a device, or a file
    that all users can write.
    """
    return os.fdopen(safe_io.open_file(path, safe_io.NAMED), "rb")


def read_named(path: str | os.PathLike[str], limit: int) -> bytes:
    """Return the content of the regular file ``path`` as bytes. Raise ``OSError`` if it has more than ``limit`` bytes,
    and in the cases of :func:`open_named`.
    """
    return safe_io.read_file(path, limit, safe_io.NAMED)


def work_in(folder: str | os.PathLike[str]) -> None:
    """Create ``folder`` so that only this user can enter it. If it exists, check that it and the folders in it hold
    only regular files and folders.

    Raise ``OSError`` if another user could have written there, or if the check fails.
    """
    os.close(safe_io.open_folder(folder, safe_io.NAMED, create=True))
    safe_io.check_content(folder, safe_io.NAMED)


def open_new(path: Path) -> IO[bytes]:
    """Return the new file ``path``, opened for writing bytes. An existing file of this name is removed first. If the
    name is a symbolic link, the link is removed and not followed.
    """
    # "xb" below then fails if another process makes the name again.
    path.unlink(missing_ok=True)
    return path.open("xb")
