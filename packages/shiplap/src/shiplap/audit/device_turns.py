"""Turns on a device that several audits share: a capture or a look at the process runs while no other sample does.

A capture forbids calls of the CUDA runtime to every thread of its process, and a check of open files or of
synchronisation counts what other audits do. Samples of all threads and processes of a user take turns by file locks,
one pair for each device.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path

import torch

from shiplap import safe_io

_opening = threading.RLock()  # held by a sample that is alone, and by a thread that opens a lock file


def lock_folder() -> Path:
    """Create the folder of the lock files in the temporary directory if it does not exist, and return its path. Raise
    ``PermissionError`` if the folder belongs to another user.
    """
    folder = Path(tempfile.gettempdir()) / f"shiplap-turns-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    # The temporary directory is open to all users, and one of them may have made the folder first.
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


@contextmanager
def device_turn(device: str, *, alone: bool) -> Iterator[None]:
    """Return a context manager in whose body one sample of an audit runs on ``device``. If ``alone`` is true, samples
    of all other audits wait meanwhile. If it is false, samples of other audits for which it is false, too, may run at
    the same time.

    On the CPU the context does nothing, since each audit has processes of its own.
    """
    if torch.device(device).type == "cpu":
        yield
        return
    with take_turn(lock_folder(), device, alone=alone):
        yield


@contextmanager
def take_turn(folder: Path, device: str, *, alone: bool) -> Iterator[None]:
    """Return a context manager that holds the file lock of ``device`` in ``folder``. The lock is exclusive if ``alone``
    is true, and otherwise shared.

    A second lock, called the gate, keeps new samples from starting while a sample waits for the exclusive lock. While
    the exclusive lock is held, no other thread of this process opens a lock file, since a check may count open files.
    """
    name = re.sub(r"\W", "-", device)
    operation = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    with ExitStack() as stack:
        gate = stack.enter_context(_lock_file(folder / f"{name}.gate", operation))
        stack.enter_context(_lock_file(folder / f"{name}.use", operation))
        if alone:
            stack.enter_context(_opening)
        else:
            # Only a sample that is alone, or waits to be, keeps the gate.
            gate.close()
        yield


@contextmanager
def _lock_file(file: Path, operation: int) -> Iterator[FileIO]:
    """Return a context manager that holds a lock (flock) on ``file``. Its value is the open file. ``operation`` is
    ``fcntl.LOCK_SH`` for a shared lock and ``fcntl.LOCK_EX`` for an exclusive one.

    At the end the file is closed, which releases the lock.
    """
    with _opening:
        lock = os.fdopen(safe_io.open_for_writing(file, append=True), "ab", buffering=0)
    with lock:
        fcntl.flock(lock, operation)
        yield lock
