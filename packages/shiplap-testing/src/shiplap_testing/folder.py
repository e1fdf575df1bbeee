"""Folders that go with the process that made them, and not with one that was forked from it."""

from __future__ import annotations

import atexit
import fcntl
import itertools
import os
import shutil
from pathlib import Path
from typing import IO

from shiplap.safe_io.work_folders import make_work_folder, remove_left_folders

_locks: list[IO[bytes]] = []  # open as long as this process, or one that was forked from it, uses a numbered folder


def temporary(name: str) -> Path:
    """Create a temporary folder whose name contains ``name``, and return its path. Remove those that killed runs have
    left.

    The new folder is removed when this process ends, but not when a process forked from it ends.
    """
    remove_left_folders(name)
    path, _ = make_work_folder(name)  # its lock is held as long as this process, or one forked from it, runs
    atexit.register(_remove, Path(path), os.getpid())
    return Path(path)


def numbered(parent: Path) -> Path:
    """Create an empty folder in ``parent`` whose name is the least number that no other process uses, and return its
    path.

    Runs one after the other get the same path. The folder is removed when this process ends, as one of
    :func:`temporary` is.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count():
        lock = (parent / f"{number}.lock").open("wb")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        break
    _locks.append(lock)
    folder = parent / str(number)
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    folder.mkdir(mode=0o700)
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: Path, owner: int) -> None:
    """Remove ``folder`` if ``owner``, the id of the process that created it, is that of this process."""
    # A forked process runs the same exit functions.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
