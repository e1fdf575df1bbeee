"""Files of a family that are written by one process and read by another, and that a kill may meet at any time.

``write_whole(path, content)`` leaves the old content or all of the new one. ``parse_json(content)`` reads what a file
of ours holds, with limits on size and depth; ValueError says in one line what is wrong with it. The others are for
what the user names and somebody else may have made: ``read_named(path, limit)`` and ``open_named(path)`` open a regular
file, ``work_in(folder)`` makes a folder or checks the one that is there, ``open_new(path)`` makes a file in place of
whatever has its name. Each raises OSError for what another user could have written, and none follows a link of his.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

from shiplap import safe_io
from shiplap.safe_io import parse_json, write_whole

__all__ = ["open_named", "open_new", "parse_json", "read_named", "work_in", "write_whole"]


def open_named(path: str | os.PathLike[str]) -> IO[bytes]:
    """A regular file, for reading. OSError for a FIFO, a device, or what everybody can write."""
    return os.fdopen(safe_io.open_file(path, safe_io.NAMED), "rb")


def read_named(path: str | os.PathLike[str], limit: int) -> bytes:
    """The content of a regular file of at most ``limit`` bytes; OSError as :func:`open_named`."""
    return safe_io.read_file(path, limit, safe_io.NAMED)


def work_in(folder: str | os.PathLike[str]) -> None:
    """Make ``folder``, for this user alone, or check that it and the folders in it hold files and nothing else."""
    os.close(safe_io.open_folder(folder, safe_io.NAMED, create=True))
    safe_io.check_content(folder, safe_io.NAMED)


def open_new(path: Path) -> IO[bytes]:
    """A new file for writing, in place of what has its name: a link of that name is removed, not followed."""
    path.unlink(missing_ok=True)
    return path.open("xb")
