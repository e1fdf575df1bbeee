"""Attempts to leave the sandbox: each runs in a process of its own that is locked in, and prints its row.

``python -m tests.sandbox.escapes [--device] [--user ID]`` prints the table, as the user who runs it. Root may name
another one. An attempt has got through if it returns, or if anything outside of the scratch folder has changed; it was
refused if it raised OSError or ended its process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import platform
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from shiplap.sandbox.landlock import SandboxPolicy, lock_process

COLUMN = {"x86_64": 0, "aarch64": 1}.get(platform.machine(), 0)
LONGEST_S = 3  # an attempt that has not returned by then waits for something outside
SECRET = b"a secret of the referee"


@dataclass(frozen=True)
class World:
    """What lies around the sandbox.

    Attributes:
        private: a file outside that the process may not read.
        program: a program outside that the process may not run.
        shown: a file outside that the process may read.
        folder: the folder of ``private``.
        scratch: the folder that the process may write.
        outside: the id of the process that started this one.
        socket: the path of a local socket for datagrams, which is read outside.
        stream: the path of a local socket that listens.
        port: the number of a port that listens.
    """

    private: str
    program: str
    shown: str
    folder: str
    scratch: str
    outside: int
    socket: str
    stream: str
    port: int


Attempt = Callable[[World], object]
ATTEMPTS: dict[str, Attempt] = {}
libc = ctypes.CDLL(None, use_errno=True)


def attempt(name: str) -> Callable[[Attempt], Attempt]:
    def add(run: Attempt) -> Attempt:
        ATTEMPTS[name] = run
        return run

    return add


def call(numbers: tuple[int | None, int | None], *args: object) -> int:
    """Make a system call. Raises OSError."""
    number = numbers[COLUMN]
    if number is None:
        raise OSError(errno.ENOSYS, "no such call on this machine")
    libc.syscall.restype = ctypes.c_long
    plain = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    result = libc.syscall(ctypes.c_long(number), *plain)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(result)


AT = -100  # AT_FDCWD


def _on_files() -> None:
    def name(w: World) -> bytes:
        return os.fsencode(w.private)

    of_paths: dict[str, Attempt] = {
        "chmod of a file": lambda w: os.chmod(w.private, 0o4777),
        "chmod of a file that it may read": lambda w: os.chmod(w.shown, 0o777),
        "chmod of a folder": lambda w: os.chmod(w.folder, 0o777),
        "fchmodat": lambda w: call((268, 53), AT, name(w), 0o777),
        "fchmodat2": lambda w: call((452, 452), AT, name(w), 0o777, 0),
        "chown": lambda w: os.chown(w.private, os.getuid(), os.getgid()),
        "lchown": lambda w: os.lchown(w.private, os.getuid(), os.getgid()),
        "utime": lambda w: os.utime(w.private, (1, 1)),
        "utimensat without a name": lambda w: opened(w.shown, lambda fd: os.utime(fd, (1, 1))),
        "utimes": lambda w: call((235, None), name(w), None),
        "utime, the old call": lambda w: call((132, None), name(w), None),
        "setxattr": lambda w: os.setxattr(w.private, "user.mark", b"1"),
        "lsetxattr": lambda w: os.setxattr(w.private, "user.mark", b"1", follow_symlinks=False),
        "fsetxattr": lambda w: opened(w.shown, lambda fd: os.setxattr(fd, "user.mark", b"1")),
        "setxattrat": lambda w: call((463, 463), AT, name(w), 0, b"user.mark", struct.pack("=QII", 0, 0, 0), 16),
        "removexattr": lambda w: os.removexattr(w.private, "user.kept"),
        "getxattr of what it may not read": lambda w: os.getxattr(w.private, "user.kept"),
        "fchmod": lambda w: opened(w.shown, lambda fd: os.fchmod(fd, 0o777)),
        "fchown": lambda w: opened(w.shown, lambda fd: os.fchown(fd, os.getuid(), os.getgid())),
        "flags of a file by ioctl": lambda w: _ioctl(w.shown, 0x40086602, struct.pack("@L", 0x40)),
        "attributes of a file by ioctl": lambda w: _ioctl(w.shown, 0x401C5820, bytes(28)),
        "file_setattr": lambda w: call((469, 469), AT, name(w), bytes(24), 24, 0),
        "truncate": lambda w: os.truncate(w.private, 0),
        "open for writing": lambda w: os.open(w.private, os.O_RDWR),
        "open for writing what it may read": lambda w: os.open(w.shown, os.O_RDWR),
        "openat2 for writing": lambda w: call((437, 437), AT, name(w), struct.pack("=QQQ", 1, 0, 0), 24),
        "a new file": lambda w: os.open(w.folder + "/new", os.O_CREAT | os.O_WRONLY),
        "a file without a name": lambda w: os.open(w.folder, os.O_TMPFILE | os.O_RDWR),
        "a new folder": lambda w: os.mkdir(w.folder + "/new"),
        "a FIFO": lambda w: os.mkfifo(w.folder + "/new"),
        "a FIFO in the scratch folder": lambda w: os.mkfifo(w.scratch + "/new"),
        "a link outside": lambda w: os.symlink("/", w.folder + "/new"),
        "remove a file": lambda w: os.unlink(w.private),
        "remove a folder": lambda w: os.rmdir(w.folder + "/empty"),
        "take a file": lambda w: os.rename(w.private, w.scratch + "/mine"),
        "replace a file": lambda w: os.rename(new_file(w), w.private),
        "exchange files": lambda w: call((316, 276), AT, os.fsencode(new_file(w)), AT, name(w), 2),
        "another name for a file": lambda w: os.link(w.private, w.scratch + "/mine"),
        "another name for an open file": lambda w: opened(
            w.shown, lambda fd: os.link(f"/proc/self/fd/{fd}", w.scratch + "/mine", follow_symlinks=True)
        ),
        "write through a link": lambda w: os.open(linked(w), os.O_RDWR),
        "read through a link": lambda w: Path(linked(w)).read_bytes(),
        "read a private file": lambda w: Path(w.private).read_bytes(),
        "read as another name of the root": lambda w: Path("/proc/self/root" + w.private).read_bytes(),
        "list a private folder": lambda w: os.listdir(w.folder),
        "write again what is open for reading": lambda w: opened(
            w.shown, lambda fd: os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        ),
        "a file by its handle": lambda w: call((304, 265), AT, _handle(w), 0),
        "the passwords": lambda w: Path("/etc/shadow").read_bytes(),
        "shared memory": lambda w: os.close(os.open("/dev/shm/escaped", os.O_CREAT | os.O_RDWR, 0o600)),
        "a disk": lambda w: os.open(_disk(), os.O_RDONLY),
        "a terminal": lambda w: os.open("/dev/tty", os.O_RDWR),
        "the memory of the machine": lambda w: os.open("/proc/kcore", os.O_RDONLY),
        "a setting of the machine": lambda w: os.open("/proc/sys/kernel/core_pattern", os.O_WRONLY),
    }
    ATTEMPTS.update(of_paths)


def _on_processes() -> None:
    def other(what: str) -> Attempt:
        return lambda w: Path(f"/proc/{w.outside}/{what}").read_bytes()

    of_processes: dict[str, Attempt] = {
        **{f"/proc, {what} of the referee": other(what) for what in ("environ", "maps", "cmdline", "mem", "fd/0")},
        "a file by the root of the referee": lambda w: Path(f"/proc/{w.outside}/root{w.private}").read_bytes(),
        "the score of the referee": lambda w: os.open(f"/proc/{w.outside}/oom_score_adj", os.O_WRONLY),
        "kill": lambda w: os.kill(w.outside, signal.SIGUSR1),
        "kill everybody": lambda w: os.kill(-1, signal.SIGUSR1),
        "kill another group": lambda w: os.killpg(os.getpgid(w.outside), signal.SIGUSR1),
        "tgkill": lambda w: call((234, 131), w.outside, w.outside, signal.SIGUSR1),
        "tkill": lambda w: call((200, 130), w.outside, signal.SIGUSR1),
        "rt_sigqueueinfo": lambda w: call((129, 138), w.outside, signal.SIGUSR1, bytes(128)),
        "pidfd_open": lambda w: call((434, 434), w.outside, 0),
        "pidfd_send_signal": lambda w: call((424, 424), 0, signal.SIGUSR1, None, 0),
        "pidfd_getfd": lambda w: call((438, 438), 0, 0, 0),
        "a signal by a pipe": lambda w: _owner(w, fcntl.F_SETOWN),
        "another signal by a pipe": lambda w: fcntl.fcntl(os.pipe()[0], 10, signal.SIGKILL),
        "a signal by ioctl": lambda w: fcntl.ioctl(os.pipe()[0], 0x8901, struct.pack("i", w.outside)),
        "a lease": lambda w: opened(w.shown, lambda fd: fcntl.fcntl(fd, 1024, 0)),
        "a notice of a folder": lambda w: opened(os.path.dirname(w.shown), lambda fd: fcntl.fcntl(fd, 1026, 2)),
        "limits of the referee": lambda w: call((302, 261), w.outside, 7, struct.pack("=QQ", 3, 3), None),
        "process_vm_readv": lambda w: call((310, 270), w.outside, None, 0, None, 0, 0),
        "process_vm_writev": lambda w: call((311, 271), w.outside, None, 0, None, 0, 0),
        "ptrace": lambda w: call((101, 117), 0x4206, w.outside, 0, 0),
        "kcmp": lambda w: call((312, 272), os.getpid(), w.outside, 0, 0, 0),
        "process_madvise": lambda w: call((440, 440), 0, None, 0, 0, 0),
        "move_pages": lambda w: call((279, 239), w.outside, 0, None, None, None, 0),
        "setpriority": lambda w: os.setpriority(os.PRIO_PROCESS, w.outside, 5),
        "priority of its own": lambda w: os.nice(1),
        "processors of the referee": lambda w: os.sched_setaffinity(w.outside, {0}),
        "processors of its own": lambda w: os.sched_setaffinity(0, {0}),
        "scheduler": lambda w: os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0)),
        "a session of its own": lambda w: _moved(os.setsid, os.getsid, w),
        "a group of its own": lambda w: _moved(lambda: os.setpgid(0, 0), os.getpgid, w),
        "a brother": lambda w: call((56, 220), 0x8000 | signal.SIGCHLD, 0, 0, 0, 0),
        "a child with another signal": lambda w: call((56, 220), signal.SIGCONT, 0, 0, 0, 0),
        "a child by a descriptor": lambda w: call((56, 220), 0x1000 | signal.SIGCHLD, 0, bytes(8), 0, 0),
        "a user namespace": lambda w: call((56, 220), 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0),
        "clone3": lambda w: call((435, 435), struct.pack("=8Q", 0x10000000, 0, 0, 0, 17, 0, 0, 0), 64),
        "unshare": lambda w: call((272, 97), 0x10000000),
        "setns": lambda w: call((308, 268), 0, 0),
        "survive the launcher": lambda w: call((157, 167), 1, 0, 0, 0, 0),
        "let others look": lambda w: call((157, 167), 0x59616D61, -1, 0, 0, 0),
        "hide from others": lambda w: call((157, 167), 4, 0, 0, 0, 0),
        "adopt orphans": lambda w: call((157, 167), 36, 1, 0, 0, 0),
        "capabilities": lambda w: call((126, 91), struct.pack("=Ii", 0x20080522, 0), b"\xff" * 24),
        "another user": lambda w: os.setresuid(65534, 65534, 65534),
        "another group of users": lambda w: os.setgroups([0]),
    }
    ATTEMPTS.update(of_processes)


def _on_the_rest() -> None:
    def connect(family: int, kind: int, where: Callable[[World], object]) -> Attempt:
        return lambda w: socket.socket(family, kind).connect(where(w))

    rest: dict[str, Attempt] = {
        "a connection": connect(socket.AF_INET, socket.SOCK_STREAM, lambda w: ("127.0.0.1", w.port)),
        "a local connection": connect(socket.AF_UNIX, socket.SOCK_STREAM, lambda w: w.stream),
        "a local datagram": lambda w: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"x", w.socket),
        "a datagram from a pair": lambda w: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(
            b"x", w.socket
        ),
        "a datagram from a pair of streams": lambda w: socket.socketpair()[0].sendto(b"x", w.socket),
        "netlink": lambda w: socket.socket(16, socket.SOCK_RAW, 0),
        "packets": lambda w: socket.socket(17, socket.SOCK_RAW, 0),
        "crypto": lambda w: socket.socket(38, socket.SOCK_SEQPACKET, 0),
        "a machine's socket": lambda w: socket.socket(40, socket.SOCK_STREAM, 0),
        "options of a socket": lambda w: socket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1),
        "timer with a signal": lambda w: call((222, 107), 1, None, bytes(8)),
        "a killed ABI": lambda w: call((0x40000000 + 39, None)),
        "calls of 32 bits": lambda w: _old_call(),
    }
    ATTEMPTS.update(rest)
    path = b"/\0"
    for name, numbers, args in (
        ("memfd_create", (319, 279), (b"x", 0)),
        ("memfd_secret", (447, 447), (0,)),
        ("shmget", (29, 194), (0, 4096, 0o1600)),
        ("msgget", (68, 186), (0, 0o1600)),
        ("semget", (64, 190), (0, 1, 0o1600)),
        ("mq_open", (240, 180), (b"escaped", 0o102, 0o600, None)),
        ("inotify_init1", (294, 26), (0,)),
        ("inotify_init", (253, None), ()),
        ("fanotify_init", (300, 262), (0x200, 0)),
        ("io_uring_setup", (425, 425), (1, bytes(120))),
        ("io_setup", (206, 0), (1, bytes(8))),
        ("userfaultfd", (323, 282), (1,)),
        ("perf_event_open", (298, 241), (struct.pack("=II", 1, 112) + bytes(104), 0, -1, -1, 0)),
        ("bpf", (321, 280), (5, bytes(48), 48)),
        ("keyctl", (250, 219), (0, -3, 1)),
        ("add_key", (248, 217), (b"user", b"x", b"y", 1, -3)),
        ("request_key", (249, 218), (b"user", b"x", None, 0)),
        ("seccomp", (317, 277), (2, 0, struct.pack("=I", 0x7FC00000))),
        ("landlock", (444, 444), (None, 0, 1)),
        ("mount", (165, 40), (b"none", path, b"tmpfs", 0, None)),
        ("umount2", (166, 39), (path, 2)),
        ("pivot_root", (155, 41), (path, path)),
        ("chroot", (161, 51), (path,)),
        ("open_tree", (428, 428), (AT, path, 0)),
        ("fsopen", (430, 430), (b"tmpfs", 0)),
        ("mount_setattr", (442, 442), (AT, path, 0, bytes(32), 32)),
        ("statmount", (457, 457), (bytes(24), bytes(512), 512, 0)),
        ("name_to_handle_at", (303, 264), (AT, path, struct.pack("=Ii", 128, 0) + bytes(128), bytes(4), 0)),
        ("reboot", (169, 142), (0, 0, 0, None)),
        ("kexec_load", (246, 104), (0, 0, None, 0)),
        ("init_module", (175, 105), (None, 0, b"")),
        ("syslog", (103, 116), (10, None, 0)),
        ("sethostname", (170, 161), (b"x", 1)),
        ("settimeofday", (164, 170), (None, None)),
        ("clock_settime", (227, 112), (0, bytes(16))),
        ("adjtimex", (159, 171), (bytes(208),)),
        ("sync of the machine", (162, 81), ()),
        ("personality", (135, 92), (0x0040000,)),
        ("quotactl", (179, 60), (0, None, 0, None)),
        ("ioprio_set", (251, 30), (1, 0, 0x6000)),
        ("mlockall", (151, 230), (1,)),
        ("mincore", (27, 232), (0, 0, None)),
        ("rseq of the future", (471, 471), ()),
    ):
        ATTEMPTS[name] = lambda w, numbers=numbers, args=args: call(numbers, *args)  # type: ignore[misc]


def opened(path: str, use: Callable[[int], object], flags: int = os.O_RDONLY) -> object:
    """Return what ``use`` makes of a descriptor of the path."""
    handle = os.open(path, flags)
    try:
        return use(handle)
    finally:
        os.close(handle)


def _ioctl(path: str, request: int, content: bytes) -> object:
    return opened(path, lambda handle: fcntl.ioctl(handle, request, content))


def new_file(w: World) -> str:
    Path(w.scratch, "new").write_bytes(b"mine")
    return w.scratch + "/new"


def linked(w: World) -> str:
    os.symlink(w.private, w.scratch + "/link")
    return w.scratch + "/link"


def _handle(w: World) -> bytes:
    """A handle of a file that may be read, as a container's root would name any file."""
    return struct.pack("=Ii", 8, 1) + struct.pack("=Q", os.stat(w.private).st_ino)


def _disk() -> str:
    disks = [str(p) for p in Path("/dev").glob("*") if p.is_block_device()]
    return disks[0] if disks else "/dev/sda"


def _owner(w: World, command: int) -> object:
    handle, other = os.pipe()
    fcntl.fcntl(handle, command, w.outside)
    fcntl.fcntl(handle, fcntl.F_SETFL, os.O_ASYNC)
    return os.write(other, b"x")


def _moved(move: Callable[[], object], where: Callable[[int], int], w: World) -> None:
    """Raise OSError if the process is still where it was, in a child that may leave its group."""
    child = os.fork()
    if child == 0:
        before = where(0)
        move()
        os._exit(1 if where(0) != before else 0)
    if os.waitpid(child, 0)[1] == 0:
        raise OSError(0, "pretended")


def _old_call() -> int:
    """Make the call ``getpid`` of 32-bit programs, whose number means another call here."""
    if COLUMN:
        raise OSError(errno.ENOSYS, "no such call on this machine")
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20; int 0x80; ret
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return ctypes.CFUNCTYPE(ctypes.c_int)(address)()


_on_files()
_on_processes()
_on_the_rest()


@dataclass
class Row:
    """The outcome of one attempt.

    Attributes:
        name: what was tried.
        how: the error, the signal that ended the process, or what came back.
        through: whether the attempt succeeded, or changed anything outside.
    """

    name: str
    how: str
    through: bool

    def __str__(self) -> str:
        return f"{'GOT THROUGH' if self.through else 'refused':12} {self.name:42} {self.how}"


@dataclass
class Outside:
    """The files, the sockets and the signals that an attempt aims at, in a folder of their own."""

    folder: Path
    signals: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("private", "shown", "scratch", "private/empty"):
            (self.folder / name).mkdir()
        shutil.copy("/bin/true", self.folder / "private/program")
        for path in (self.folder / "private/file", self.folder / "shown/file"):
            path.write_bytes(SECRET)
            path.chmod(0o600)
            os.utime(path, (1_600_000_000, 1_600_000_000))
            if path.parent.name == "private":
                self.attributes = _mark(path)
        self.datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.datagrams.bind(str(self.folder / "datagrams"))
        self.datagrams.setblocking(False)
        self.streams, self.port = socket.socket(socket.AF_UNIX), socket.socket()
        self.streams.bind(str(self.folder / "streams"))
        self.port.bind(("127.0.0.1", 0))
        for listening in (self.streams, self.port):
            listening.listen()
            listening.setblocking(False)
        self.handler = signal.signal(signal.SIGUSR1, lambda number, frame: self.signals.append(number))

    def close(self) -> None:
        """Close the sockets, and handle the signal as before."""
        for listening in (self.datagrams, self.streams, self.port):
            listening.close()
        signal.signal(signal.SIGUSR1, self.handler)

    def release_locks(self, group: int) -> None:
        """End the processes that an attempt has left, and wait until they hold no lock."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        ends = time.monotonic() + 2
        while any(_is_locked(self.folder / name / "file") for name in ("private", "shown")):
            assert time.monotonic() < ends
            time.sleep(0.005)

    @property
    def world(self) -> World:
        at = {name: str(self.folder / name) for name in ("private", "scratch")}
        file, shown = (str(self.folder / name / "file") for name in ("private", "shown"))
        sockets = str(self.folder / "datagrams"), str(self.folder / "streams")
        program = str(self.folder / "private/program")
        return World(
            file, program, shown, at["private"], at["scratch"], os.getpid(), *sockets, self.port.getsockname()[1]
        )

    def state(self) -> dict[str, object]:
        """Return what the attempts must not change."""
        state: dict[str, object] = {"signals": len(self.signals), "scheduling": os.sched_getaffinity(0)}
        for path in (self.folder / "private", self.folder / "shown"):
            state[str(path)] = sorted(os.listdir(path)), os.stat(path).st_mode, os.stat(path).st_mtime_ns
            about = os.stat(path / "file")
            marks = {n: os.getxattr(path / "file", n) for n in os.listxattr(path / "file")}
            fields = about.st_mode, about.st_uid, about.st_gid, about.st_mtime_ns, about.st_ino, about.st_nlink
            state[str(path / "file")] = fields, marks, (path / "file").read_bytes(), _is_locked(path / "file")
        for name, listening in (("streams", self.streams), ("port", self.port), ("datagrams", self.datagrams)):
            state[name] = _heard(listening)
        return state


def _is_locked(path: Path) -> bool:
    """Return whether another process holds a lock of any kind on a file."""
    with path.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _mark(path: Path) -> bool:
    try:
        os.setxattr(path, "user.kept", SECRET)
    except OSError:  # some file systems have no attributes
        return False
    return True


def _heard(listening: socket.socket) -> bool:
    try:
        listening.recv(100) if listening.type == socket.SOCK_DGRAM else listening.accept()
    except BlockingIOError:
        return False
    return True


def run_attempt(name: str, outside: Outside, **how: Any) -> Row:
    """Return the outcome of one attempt in a process of its own."""
    before, world = outside.state(), outside.world
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _become(name, world, writing, **how)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read(400).decode(errors="replace")
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        told = f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
        told = f"returned: {told}" if os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGALRM) else told
    after = outside.state()
    outside.release_locks(child)
    changed = [k for k in before if before[k] != after[k]]
    return Row(name, told + (f"; changed {changed}" if changed else ""), told.startswith("returned") or bool(changed))


def _become(name: str, world: World, writing: int, device: bool = False, user: int | None = None) -> None:
    """Lock this process in, try, write the outcome, and end."""
    try:
        if user is not None:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        os.setpgid(0, 0)
        signal.alarm(LONGEST_S)
        os.dup2(writing, 7)
        os.closerange(3, 7)
        os.closerange(8, 1 << 12)
        missing = lock_process(SandboxPolicy(world.scratch, (os.path.dirname(world.shown),), device=device))
        if any(missing.values()):
            told = f"returned: not locked in, {missing}"
        else:
            try:
                told = f"returned {every_attempt()[name](world)!r}"
            except OSError as e:
                told = f"{errno.errorcode.get(e.errno or 0, 'nothing')}: {e.strerror}"
    except BaseException:
        told = "returned an error of the test: " + traceback.format_exc(limit=3)[-300:]
    os.write(7, told.encode(errors="replace")[:400])
    os._exit(0)


@cache
def every_attempt() -> dict[str, Attempt]:
    """Return the attempts of this module and those of later attacks."""
    from tests.sandbox import eleventh_escapes, later_escapes, more_escapes, reading_escapes, thirteenth_escapes

    every: dict[str, Attempt] = {}
    later = later_escapes.ATTEMPTS, eleventh_escapes.ATTEMPTS, thirteenth_escapes.ATTEMPTS
    for attempts in (ATTEMPTS, more_escapes.ATTEMPTS, reading_escapes.ATTEMPTS, *later):
        assert not every.keys() & attempts.keys()
        every |= attempts
    return every


def run_all(names: Iterable[str] = (), *, user: int | None = None, **how: bool) -> list[Row]:
    """Return the rows of the attempts ``names``, by default of all, each with an empty scratch folder. ``user`` is
    another one that tries them.
    """
    rows, every = [], every_attempt()  # before a process is locked in, which cannot read this file
    with tempfile.TemporaryDirectory(prefix="escapes-") as folder:
        outside = Outside(Path(folder))
        for path in (Path(folder), *Path(folder).rglob("*")) if user is not None else ():
            os.chown(path, user, user)
        for name in names or every:
            rows.append(run_attempt(name, outside, user=user, **how))
            for left in Path(outside.world.scratch).iterdir():
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        outside.close()
    return rows


if __name__ == "__main__":
    assert threading.active_count() == 1
    USER = int(sys.argv[sys.argv.index("--user") + 1]) if "--user" in sys.argv else os.geteuid()
    ROWS = run_all(device="--device" in sys.argv, user=USER if os.geteuid() != USER else None)
    print("\n".join(map(str, ROWS)))
    print(f"{len(ROWS)} attempts as user {USER}, {sum(r.through for r in ROWS)} got through")
    sys.exit(any(r.through for r in ROWS))
