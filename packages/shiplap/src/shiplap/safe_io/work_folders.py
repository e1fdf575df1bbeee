"""Folders for the work of one run, in the system's temporary folder, and their removal after a run that was killed.

The run holds a lock on its folder as long as it lives, and so does each process that is forked from it. Linux releases
the lock whatever ends them. A folder with the name of such a folder on which nobody holds a lock is therefore left, and
may be removed at once. The cleaners of systemd respect these locks as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

REMOVAL_PATIENCE_S = 2.0  # seconds for which the removal of a folder is waited for
NO_LOCK = -1  # where the file system has no locks
_NAME = re.compile(r"shiplap-run-(?P<tool>[a-z0-9]+)-[a-z0-9_]{8}")
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def work_folder(tool: str) -> Iterator[Path]:
    """Return a context whose value is a new folder for the work of ``tool``, a word of small letters and digits. The
    folder is removed at the end.
    """
    path, lock = make_work_folder(tool)
    try:
        yield Path(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if os.path.lexists(path):  # with folders that cannot be written
            remove_folder(path)
        release_work_folder(lock)


def make_work_folder(tool: str) -> tuple[str, int]:
    """Make a folder of mode 700 for the work of ``tool``, a word of small letters and digits. Return its path and the
    descriptor of its lock, or ``NO_LOCK``. The caller removes the folder, and then calls ``release_work_folder``. Raise
    ``OSError`` if it cannot be made or opened.
    """
    while True:
        path = tempfile.mkdtemp(prefix=f"shiplap-run-{tool}-")
        try:
            lock = os.open(path, _FOLDER)
        except FileNotFoundError:
            continue  # another process has found it without a lock and removed it
        except OSError:
            os.rmdir(path)
            raise
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.lexists(path):
                return path, lock
        except BlockingIOError:
            pass  # another process removes it now
        except OSError:
            os.close(lock)
            return path, NO_LOCK
        os.close(lock)


def release_work_folder(lock: int) -> None:
    """Release the lock of a folder, which was removed. ``lock`` is the second result of ``make_work_folder``."""
    if lock != NO_LOCK:
        os.close(lock)


def remove_left_folders(tool: str = "") -> tuple[int, list[str]]:
    """Remove this user's folders of runs that have ended without removing them. Return how many were removed, and the
    paths of those that could not be removed.

    If ``tool`` is not empty, only its folders are looked at. A folder on a file system without locks is left alone, and
    so are all folders if other users could have given them their names.
    """
    above = tempfile.gettempdir()
    removed, stuck = 0, list[str]()
    mode = os.stat(above).st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        return removed, stuck
    for name in sorted(os.listdir(above)):
        if not (named := _NAME.fullmatch(name)) or tool not in ("", named["tool"]):
            continue
        path = os.path.join(above, name)
        try:
            lock = os.open(path, _FOLDER)
        except OSError:  # it has just been removed, or is another user's, or no folder
            continue
        try:
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # While the lock is held, no run that has just made the folder starts to use it.
                remove_folder(path, math.inf)
                removed += not os.path.lexists(path)
                stuck += [path] if os.path.lexists(path) else []
        except OSError:  # it is in use, or there are no locks
            pass
        finally:
            os.close(lock)
    return removed, stuck


def start_removal(folder: str) -> int:
    """Start a process that removes ``folder``, in which a sandboxed process has written, with everything in it. Return
    the id of the new process. Raise ``OSError`` if it cannot be started.

    The command ``rm`` descends to any depth and follows no links. If it fails, the permissions inside the folder are
    changed, and it is run again.
    """
    script = 'rm -rf -- "$0" || { chmod -R u+rwx -- "$0"; rm -rf -- "$0"; }'
    # Its errors have names that the sandboxed process has chosen. A shell that redirects needs one more descriptor.
    unsaid = [(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]
    return os.posix_spawnp("sh", ["sh", "-c", script, folder], os.environ, file_actions=unsaid)


def remove_folder(folder: str, seconds: float = REMOVAL_PATIENCE_S) -> None:
    """Remove ``folder`` with everything in it. If that takes longer than ``seconds``, return while the removal
    continues in another process.
    """
    ends, ended = time.monotonic() + seconds, (0, 1)
    with contextlib.suppress(OSError):  # no process can be started
        pid = start_removal(folder)
        while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < ends:
            time.sleep(0.005)
    if ended[1]:  # the shell may have started, and the command in it not
        with contextlib.suppress(RecursionError):
            shutil.rmtree(folder, ignore_errors=True)
