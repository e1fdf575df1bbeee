"""The compilation of one binding into the cache.

The module uses only the standard library, since a detached ``python -I build.py`` runs it too. It does not decide
whether a result may be loaded. ``kernels/native/cache.py`` decides that.

A finished binding is a directory ``<cache>/native/<digest>`` that appears by one rename, with two seals beside it. The
first is a sha256 of the digest and the library. It detects damage, and is part of packages. The second is keyed with a
secret in the user's home, so that a cache folder that somebody else has filled is not loaded. Builders of one digest
wait for each other by an flock, which ends when its holder ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from io import FileIO
from itertools import takewhile
from pathlib import Path
from typing import IO

LIBRARY, SEAL, KEYED_SEAL, SOURCE = "binding.so", "seal", "seal.keyed", "binding.cpp"
KEY_BYTES = 32
LACKING = "the machine lacks"  # how a problem begins that is not the source's
LACKS = (errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EAGAIN)
# What compilers print whose parts were killed, or had no room.
ENDED = ("Killed signal terminated", "virtual memory exhausted", "out of memory", "No space left on device")
SOURCE_FOLDER = "@SOURCES@"  # in a command: the folder of the sources, which does not exist when the command is made
MOST_LIBRARY_BYTES = 1 << 28  # bytes of a library
MOST_OUTPUT_BYTES = 1 << 20  # bytes of the messages of a compiler
LOCK_WAIT_S = 300.0  # seconds that a builder waits for another one of the same digest


def is_sealed_folder(folder: Path) -> bool:
    """Return whether ``folder`` holds a complete library with two valid seals. One seal is a checksum, which proves
    that the library is undamaged. The other seal is an HMAC, which proves that this user built the library.
    """
    try:
        with os.fdopen(_open_regular_file(folder / LIBRARY, os.O_RDONLY), "rb") as library:
            text = seal_text(folder.name, library)
        keyed = _read_seal(folder / KEYED_SEAL)
        # compare_digest takes the same time wherever two seals differ.
        return _read_seal(folder / SEAL) == text.encode() and hmac.compare_digest(keyed, keyed_seal(text).encode())
    except OSError:
        return False


def seal_text(digest: str, library: IO[bytes]) -> str:
    """Return the seal of ``library``, a sha256 as hexadecimal digits. It covers the library's name ``digest`` and its
    content. Raise ``OSError`` if the library is larger than 256 MiB.
    """
    hashed, length = hashlib.sha256(digest.encode()), 0
    while piece := library.read(1 << 20):
        length += len(piece)
        if length > MOST_LIBRARY_BYTES:
            raise OSError(errno.EFBIG, f"it is longer than {MOST_LIBRARY_BYTES} bytes")
        hashed.update(piece)
    return hashed.hexdigest()


def keyed_seal(seal: str) -> str:
    """Return a seal that only this user can make for ``seal``, the checksum of a library. It is an HMAC of ``seal``
    with the user's secret, as hexadecimal digits.
    """
    return hmac.new(user_key()[0], seal.encode(), "sha256").hexdigest()


def user_key() -> tuple[bytes, str]:
    """Return the secret with which this user's seals of compiled libraries are made, and an empty string. The secret is
    created if it is missing. If it cannot be stored on disk, return a secret that only this process has, and the
    reason.
    """
    home = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    if home not in _keys:
        try:
            # A relative path would be another folder in each working folder.
            if not os.path.isabs(home):
                raise OSError(errno.ENOENT, "no home folder", home)
            _keys[home] = _kept_key(Path(home, "shiplap")), ""
        except OSError as e:
            _keys[home] = os.urandom(KEY_BYTES), f"{e.filename or home}: {e.strerror}"
    return _keys[home]


_keys: dict[str, tuple[bytes, str]] = {}  # the folder of the user's data -> the secret


def _kept_key(folder: Path) -> bytes:
    """Return the secret in the file ``seal.key`` of ``folder``. The file is created if it is missing. Raise ``OSError``
    if it belongs to another user, if others can access it, or if it has a wrong length.
    """
    path = folder / "seal.key"
    if not os.path.lexists(path):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=folder)  # of mode 600
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(os.urandom(KEY_BYTES))
            with contextlib.suppress(FileExistsError):  # another process was quicker: its secret counts
                os.link(draft, path)
        finally:
            os.unlink(draft)
    handle = _open_regular_file(path, os.O_RDONLY)
    with os.fdopen(handle, "rb") as file:
        about, key = os.fstat(handle), file.read(KEY_BYTES + 1)
    # A secret that others can read would let them seal a library.
    if about.st_uid != os.geteuid() or about.st_mode & 0o077 or len(key) != KEY_BYTES:
        raise OSError(errno.EPERM, "it is no secret of this user: remove it", str(path))
    return key


def _read_seal(path: Path) -> bytes:
    """Return the first 4096 bytes of the regular file ``path``. Raise ``OSError`` for any other file, such as a FIFO,
    whose reading would block.
    """
    with os.fdopen(_open_regular_file(path, os.O_RDONLY), "rb") as file:
        return file.read(4096)


def _open_regular_file(path: Path, flags: int) -> int:
    """Return a descriptor of ``path``, opened with ``flags``. Raise ``OSError`` if it is no regular file, or is
    a link.
    """
    # O_NONBLOCK: opening a FIFO would otherwise wait for a writer.
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return handle


def build_once(
    root: Path,
    digest: str,
    source: str,
    command: list[str],
    files: Mapping[str, str] | None = None,
    wait: float = LOCK_WAIT_S,
) -> str:
    """Compile the C++ code ``source`` to a library in the folder ``<root>/<digest>``, unless the folder exists with
    valid seals. Return the problem, or an empty string if there is none.

    ``command`` is the compiler call without source and output. ``files`` maps names of further files to their contents,
    which are written beside the source. ``SOURCE_FOLDER`` in the command stands for the folder of these files. If
    another process is building the digest, wait at most ``wait`` seconds for its lock.
    """
    try:
        with _hold_build_lock(root, digest, wait):
            # Another builder may have finished while this one waited for the lock.
            if is_sealed_folder(root / digest):
                return ""
            for left in root.glob(f".{digest}-*"):  # of a builder that was killed: we hold its lock
                shutil.rmtree(left, ignore_errors=True)
            scratch = Path(tempfile.mkdtemp(prefix=f".{digest}-", dir=root))
            try:
                for name, text in (files or {}).items():
                    (scratch / name).write_text(text)
                return _compile_source(scratch, digest, source, command) or _publish_folder(scratch, root / digest)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as e:
        return f"{LACKING} {e}" if e.errno in LACKS else str(e)


def build_detached(root: Path, digest: str, source: str, command: list[str]) -> subprocess.Popen[bytes]:
    """Start ``build_once`` with these arguments in a separate process, and return the process. The build may outlive
    this process. If there is a problem, the builder prints it to its standard output.
    """
    with tempfile.TemporaryFile() as order:
        order.write(json.dumps([str(root), digest, source, command, user_key()[0].hex()]).encode())
        order.seek(0)
        with _fork_lock:
            return subprocess.Popen(
                # -I: neither the working folder nor PYTHONPATH can replace a module of the builder.
                [sys.executable, "-I", __file__],
                stdin=order,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # An interrupt at the terminal of this process must not end the build.
                start_new_session=True,
            )


@contextlib.contextmanager
def _hold_build_lock(root: Path, digest: str, wait: float) -> Iterator[None]:
    """Hold the lock file of ``digest`` in ``root`` inside the ``with`` block, and write this process's id into the
    file. Raise ``OSError`` if another process still holds the lock after ``wait`` seconds.
    """
    path = root / f"{digest}.lock"
    with _fork_lock:  # no fork between the two
        lock = os.fdopen(_open_regular_file(path, os.O_RDWR | os.O_CREAT), "r+b", buffering=0)
        _open_locks.add(lock)
    try:
        _acquire_build_lock(lock, path, wait)
        # The number of an earlier holder may be longer than that of this process.
        lock.truncate()
        lock.write(f"{os.getpid()}\n".encode())
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)
        with _fork_lock:
            _open_locks.discard(lock)
            lock.close()


def _close_locks_after_fork() -> None:
    """Close the inherited lock files of builds in a forked child, since the child holds none of the locks.

    A lock of ``flock`` ends with the last process that has the file open. The child would otherwise hold the lock after
    its parent has ended.
    """
    for lock in _open_locks:
        lock.close()
    _open_locks.clear()
    _fork_lock.release()


_open_locks: set[FileIO] = set()  # every lock file that is open: none is missing while a process is forked
_fork_lock = threading.RLock()  # no thread forks while it is held
os.register_at_fork(
    before=_fork_lock.acquire, after_in_parent=_fork_lock.release, after_in_child=_close_locks_after_fork
)


def _acquire_build_lock(lock: FileIO, path: Path, wait: float) -> None:
    """Take the lock of an opened lock file with ``flock``. Raise ``OSError``, with the holding process, after ``wait``
    seconds. If the file system has no locks, return immediately.
    """
    until = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                lock.seek(0)
                holder = os.read(lock.fileno(), 32).decode(errors="replace").strip() or "unknown"
                why = f"process {holder} has been building it for more than {wait:g} s"
                raise OSError(errno.ETIMEDOUT, why, str(path)) from None
            # flock has no timeout of its own.
            time.sleep(0.02)
        except OSError:  # no locks on this file system: two may build, one rename wins
            return
        else:
            return


def _compile_source(scratch: Path, digest: str, source: str, command: list[str]) -> str:
    """Compile the C++ code ``source`` by ``command`` to a library in the folder ``scratch``, and write its two seals
    beside it. The first seal is a checksum of the library and its name ``digest``. The second is an HMAC of that
    checksum. Return the problem, or an empty string if there is none.
    """
    (scratch / SOURCE).write_text(source)
    tools = list(takewhile(lambda word: not word.startswith("-"), command))  # two for "ccache g++"
    rest = [word.replace(SOURCE_FOLDER, str(scratch)) for word in command[len(tools) :]]
    # The source comes before the flags, so that libraries to link follow what needs them.
    call = [*tools, "-o", str(scratch / LIBRARY), str(scratch / SOURCE), *rest]
    try:
        status, output = _run_compiler(call)
    except OSError as e:
        if e.errno in LACKS:
            raise
        return f"{command[0]}: {e.strerror}"
    if status < 0 or any(sign in output for sign in ENDED):
        how = signal.Signals(-status).name if status < 0 else output.strip()[-500:]
        return f"{LACKING} what {command[0]} needs: it was ended ({how})"
    if status:
        return f"{command[0]} failed with status {status}: {output.strip()[:2000]}"
    with (scratch / LIBRARY).open("rb") as library:
        # Sealed before the rename: a folder under its final name is always complete.
        seal = seal_text(digest, library)
    (scratch / SEAL).write_text(seal)
    (scratch / KEYED_SEAL).write_text(keyed_seal(seal))
    for name in (SOURCE, LIBRARY, SEAL, KEYED_SEAL):
        with (scratch / name).open("rb") as file:
            # Whatever the umask is: what others can write is not loaded. In a sandbox no mode can be changed.
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                os.fchmod(file.fileno(), 0o600)
            os.fsync(file.fileno())
    return ""


def _run_compiler(call: list[str]) -> tuple[int, str]:
    """Run the compiler command ``call``. Return its exit status and its messages.

    The messages go to a file and not to a pipe. A child that another thread forks meanwhile would inherit the writing
    end of the pipe. This process would then wait for the end of the child, while the child may wait for the lock that
    is held here.
    """
    with tempfile.TemporaryFile() as output:
        with _fork_lock:  # subprocess has a pipe of its own, until the program runs
            child = subprocess.Popen(
                # LC_ALL=C: the signs of a killed compiler are searched for in English.
                call,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, "LC_ALL": "C"},
            )
        try:
            status = child.wait()
        except BaseException:
            child.kill()
            child.wait()
            raise
        output.seek(0)
        return status, output.read(MOST_OUTPUT_BYTES).decode(errors="replace")


def _publish_folder(scratch: Path, folder: Path) -> str:
    """Rename the folder ``scratch`` to ``folder``. If ``folder`` exists and its seals are not valid, remove it first.
    Return the problem, or an empty string if ``folder`` is now a sealed folder, of this builder or of another one.
    """
    # A broken folder in the place is removed once, then the rename is tried again.
    for _ in range(2):
        try:
            scratch.rename(folder)
        except OSError:
            if is_sealed_folder(folder):  # another builder, on a file system without locks
                return ""
            _remove_path(folder)  # broken: nobody loads it, so it may go
        else:
            return ""
    return f"{folder} cannot be replaced"


def _remove_path(path: Path) -> None:
    """Remove a folder with its content, or a file. Errors are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _builder_main(pipe: IO[bytes]) -> None:
    """Read the JSON arguments from ``pipe`` that :func:`build_detached` has sent, and build the library that they
    describe. Write the problem, if there is one, to standard output. This is the main function of a builder process.
    """
    root, digest, source, command, key = json.load(pipe)
    # The key comes with the order, since under a process of this one it may not be kept on disk.
    _keys[os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")] = bytes.fromhex(key), ""
    problem = build_once(Path(root), digest, source, command)
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(problem)
        sys.stdout.flush()


if __name__ == "__main__":
    _builder_main(sys.stdin.buffer)
