"""A launcher that is a fork of this program, for code that no other process can import.

An op that a function or a notebook declares exists in the memory of the program alone. The fork holds all that the
program held when it began, and nothing of what is drawn later. Its own forks are locked in like any others. Variables
of the environment that may hold a secret are removed; other memory of the program can be read there, and cannot leave.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import signal
import socket
import sys
import threading
import time

from shiplap.sandbox.fork import fork_process
from shiplap.sandbox.launcher_environment import LAUNCHER_VARIABLES, is_secret
from shiplap.sandbox.proc_filesystem import read_memory_map, stat_fields
from shiplap.sandbox.process_memory import MemorySpan
from shiplap.sandbox.protocol import ImportModule
from shiplap.sandbox.request_errors import ProcessEnded
from shiplap.sandbox.supervisor import SandboxLauncher

START_S = 20.0  # seconds in which the fork replies; a lock that another thread held may keep it from that
FIRST_FREE_FILE = 3
FIRST_ENVIRONMENT = slice(47, 49)  # of ``stat_fields``: the ends of the variables with which a program starts
MREMAP_MAYMOVE, MREMAP_FIXED, MREMAP_DONTUNMAP, MAP_FIXED = 1, 2, 4, 0x10
COPIED_BYTES = 1 << 30
MEMORY_FILES = ("/dev/shm/", "/dev/zero")  # below /dev, and no memory of a device


class _ForkedProcess:
    """A fork of this program with the part of the interface of ``subprocess.Popen`` that a launcher uses."""

    def __init__(self, pid: int) -> None:
        """Describe the forked process with the id ``pid``, which has not ended."""
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status of the process, or None if it still runs."""
        return self._wait(os.WNOHANG)

    def wait(self) -> int | None:
        """Wait until the process has ended, and return its exit status. Return None if another part of the program has
        waited for it.
        """
        return self._wait(0)

    def _wait(self, how: int) -> int | None:
        """Call ``waitpid`` with the option ``how`` unless the exit status is known. Return the exit status, or None if
        it is not known.
        """
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, how)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def kill(self) -> None:
        """Send SIGKILL to the process if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class ForkedLauncher(SandboxLauncher):
    """A launcher (the process that forks sandboxed processes) that is itself a fork of this program."""

    def _ready(self) -> socket.socket:
        """Return the socket that is connected to the fork. If the program has to be forked, wait for the fork's first
        reply, and raise ``ProcessEnded`` if there is none.
        """
        started = self._connection is not None
        connection = super()._ready()
        if not started:  # waited for outside of ``_guard``, so that another thread can end the launcher meanwhile
            self.ask(ImportModule(), until=time.monotonic() + START_S)
        return connection

    def _start_process(self, connection: socket.socket) -> None:
        """Fork this program as the launcher, which serves requests on ``connection``. The caller holds ``_guard``.
        Raise ``ProcessEnded`` if no thread can be started.
        """
        # A pool of OpenMP belongs to the thread that has made it, and does not survive a fork of that thread.
        thread = threading.Thread(target=self._fork, args=(connection,))
        try:
            thread.start()
        except RuntimeError as e:
            raise ProcessEnded(str(e), lack=True) from None
        thread.join()

    def _fork(self, connection: socket.socket) -> None:
        """Fork this program in the calling thread. The parent records the new process as the launcher. The child serves
        requests on ``connection`` and never returns.
        """
        try:
            pid = fork_process()
        except OSError:  # the request that follows says that there is no process
            return
        if pid:
            self._process = _ForkedProcess(pid)
            return
        try:
            _serve_alone(connection.detach(), self.folder)
        finally:
            # Not ``sys.exit``: exit handlers and buffers belong to the parent.
            os._exit(0)


def _serve_alone(handle: int, folder: str) -> None:
    """Serve requests on the connection ``handle`` in a fork of this program. The fork's secrets, shared memory and open
    files are removed first. ``folder`` is the temporary folder of the sandboxed processes.
    """
    from shiplap.sandbox.launcher import close_files, serve_forks

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()  # a signal to the group of the program must leave it alive, so that it ends what it has forked
    # A finalizer of the program's garbage may wait for a thread that does not exist here. ``serve_forks`` freezes what
    # exists and lets the collector run again.
    gc.disable()
    _forget_secrets()
    os.environ.update(LAUNCHER_VARIABLES)
    _make_memory_private()
    os.dup2(handle, FIRST_FREE_FILE)
    close_files(FIRST_FREE_FILE + 1)
    sys.setprofile(None)
    sys.settrace(None)
    serve_forks(FIRST_FREE_FILE, folder)


def _forget_secrets() -> None:
    """Remove the environment variables that may hold a secret, and overwrite their values in the initial environment of
    the process.

    ``/proc/self/environ`` shows that memory, even for variables that were removed.
    """
    for name in [name for name, value in os.environ.items() if is_secret(name, value)]:
        del os.environ[name]
    at, end = map(int, stat_fields("self")[FIRST_ENVIRONMENT])
    for entry in ctypes.string_at(at, end - at).split(b"\0"):  # also what the program has changed or removed since
        name, _, value = os.fsdecode(entry).partition("=")
        if is_secret(name, value):
            ctypes.memset(at + len(entry) - len(os.fsencode(value)), ord("x"), len(os.fsencode(value)))
        at += len(entry) + 1


def _make_memory_private() -> None:
    """Replace all memory mappings that the fork shares with the original program by private copies. Raise ``OSError``
    if one stays shared.

    An example is a file that is mapped for writing. The process could write to it whatever the sandbox's rules for
    files are. Memory of devices is unmapped instead.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    whole, private = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | MAP_FIXED
    for line in read_memory_map("/proc/self"):
        spot, rights, offset, _, inode, *named = line.split(maxsplit=5)
        first, last = (int(side, 16) for side in spot.split("-"))
        at, size = ctypes.c_void_p(first), ctypes.c_size_t(last - first)
        if "s" not in rights or libc.mprotect(at, size, whole):  # nobody can write a file that was opened for reading
            continue
        name = named[0] if named else ""
        if name.startswith("/dev/") and not name.startswith(MEMORY_FILES):
            libc.munmap(at, size)
        elif (file := _open_same(name, int(inode))) >= 0:  # pages are copied when they are written
            made = libc.mmap(at, size, whole, private, file, ctypes.c_long(int(offset, 16)))
            os.close(file)
            _check_mapped(made)
        else:
            _copy_memory(libc, first, last - first)


def _open_same(name: str, inode: int) -> int:
    """Return a read-only descriptor of the file ``name``. Return -1 if the file has another inode or cannot be
    opened.
    """
    with contextlib.suppress(OSError):
        file = os.open(name, os.O_RDONLY)
        if os.fstat(file).st_ino == inode:
            return file
        os.close(file)
    return -1


def _copy_memory(libc: ctypes.CDLL, first: int, length: int) -> None:
    """Replace ``length`` bytes of shared memory at the address ``first``, which belong to no file, by a private copy.
    Raise ``OSError`` if they stay shared.
    """
    copy = mmap.mmap(-1, length, mmap.MAP_PRIVATE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(copy))
    for at in range(0, length, COPIED_BYTES):
        size = min(COPIED_BYTES, length - at)
        into, out = MemorySpan(start + at, size), MemorySpan(first + at, size)
        libc.process_vm_readv(os.getpid(), ctypes.byref(into), 1, ctypes.byref(out), 1, 0)
    moved = ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_size_t(length)
    libc.mremap.restype = ctypes.c_void_p
    how = MREMAP_MAYMOVE | MREMAP_DONTUNMAP | MREMAP_FIXED  # the second is unknown to a Linux before 5.7
    _check_mapped(libc.mremap(*moved, how, ctypes.c_void_p(first)))


def _check_mapped(address: int | None) -> None:
    """Raise ``OSError`` if ``address``, the result of mmap or mremap, says that the call failed. After a failure the
    memory is still shared with the original program.
    """
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"memory stays shared: {os.strerror(ctypes.get_errno())}")
