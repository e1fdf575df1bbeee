"""Compile one binding into the cache. Standard library only: a detached ``python -I build.py`` does it too.

A finished binding is a directory ``<cache>/native/<digest>`` that appears by one rename, with a seal (sha256 over the
digest and the library) beside it. Builders of one digest queue on an flock, which goes when its holder dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

__all__ = ["LIBRARY", "build", "detached", "distrust", "sealed"]

LIBRARY, SEAL, SOURCE = "binding.so", "seal", "binding.cpp"


def distrust(root: Path) -> str:
    """Make the cache directory, private to the user; why it must not be used, or empty."""
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = root.stat()
    except OSError as e:
        return f"{root}: {e.strerror}"
    if about.st_uid != os.geteuid():
        return f"{root} belongs to another user"
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{root} can be written by others (mode {stat.S_IMODE(about.st_mode):o})"
    return ""


def sealed(folder: Path) -> bool:
    """Whether ``folder`` holds the whole library that was built for it: not cut short, not another one."""
    try:
        library, seal = (folder / LIBRARY).read_bytes(), (folder / SEAL).read_text()
    except (OSError, UnicodeDecodeError):
        return False
    return seal == _seal(folder.name, library)


def build(root: Path, digest: str, source: str, command: list[str]) -> str:
    """Build ``<root>/<digest>`` unless it is there; what went wrong, or empty.

    ``command`` is the compiler call without source and output.
    """
    try:
        with _alone(root, digest):
            if sealed(root / digest):
                return ""
            for left in root.glob(f".{digest}-*"):  # of a builder that was killed: we hold its lock
                shutil.rmtree(left, ignore_errors=True)
            scratch = Path(tempfile.mkdtemp(prefix=f".{digest}-", dir=root))
            try:
                return _compile(scratch, digest, source, command) or _publish(scratch, root / digest)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as e:
        return str(e)


def detached(root: Path, digest: str, source: str, command: list[str]) -> subprocess.Popen[bytes]:
    """``build`` in a process of its own, which outlives this one; its output is what went wrong."""
    child = subprocess.Popen(
        [sys.executable, "-I", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
        pipe.write(json.dumps([str(root), digest, source, command]).encode())
    return child


@contextlib.contextmanager
def _alone(root: Path, digest: str) -> Iterator[None]:
    with (root / f"{digest}.lock").open("w") as lock:
        with contextlib.suppress(OSError):  # no locks on this file system: two may build, one rename wins
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(scratch: Path, digest: str, source: str, command: list[str]) -> str:
    (scratch / SOURCE).write_text(source)
    call = [*command[:1], "-o", str(scratch / LIBRARY), str(scratch / SOURCE), *command[1:]]
    try:
        done = subprocess.run(
            call, capture_output=True, text=True, check=False, errors="replace", env={**os.environ, "LC_ALL": "C"}
        )
    except OSError as e:
        return f"{command[0]}: {e.strerror}"
    if done.returncode:
        return f"{command[0]} failed with status {done.returncode}: {done.stderr.strip()[:2000]}"
    (scratch / SEAL).write_text(_seal(digest, (scratch / LIBRARY).read_bytes()))
    for name in (LIBRARY, SEAL):
        with (scratch / name).open("rb") as file:
            os.fsync(file.fileno())
    return ""


def _publish(scratch: Path, folder: Path) -> str:
    for _ in range(2):
        try:
            scratch.rename(folder)
        except OSError:
            if sealed(folder):  # another builder, on a file system without locks
                return ""
            shutil.rmtree(folder, ignore_errors=True)  # broken: nobody loads it, so it may go
        else:
            return ""
    return f"{folder} cannot be replaced"


def _seal(digest: str, library: bytes) -> str:
    return hashlib.sha256(digest.encode() + library).hexdigest()


def _main(pipe: IO[bytes]) -> None:
    root, digest, source, command = json.load(pipe)
    problem = build(Path(root), digest, source, command)
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(problem)
        sys.stdout.flush()


if __name__ == "__main__":
    _main(sys.stdin.buffer)
