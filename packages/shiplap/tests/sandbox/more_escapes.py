"""Attempts of an eighth attack on the sandbox, by calls and ways that ``escapes`` does not list."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import site
import socket
import struct
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from tests.sandbox.escapes import AT, Attempt, World, call, linked, new_file, opened

ATTEMPTS: dict[str, Attempt] = {}
EMPTY_PATH = 0x1000
PATH_ONLY = os.O_PATH
SITE, USER = sysconfig.get_path("purelib"), site.getuserbase()
TORCH = str(getattr(find_spec("torch"), "origin", ""))


def reached(make: Callable[[], object]) -> object:
    """Return what a call that the filter has to refuse came back with, an error of the call itself included."""
    try:
        return make()
    except OSError as e:
        if e.errno in (errno.EPERM, errno.ENOSYS):
            raise
        return f"reached the kernel: {e.strerror}"


def left_behind(make: Callable[[], object]) -> None:
    """Make the attempt in a child that stays for a moment, so that the outside can look for its effect."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.close(7)
        os.close(reading)
        try:
            make()
        except OSError:
            os._exit(1)
        os.write(writing, b"x")
        os.close(writing)
        time.sleep(0.4)
        os._exit(0)
    os.close(writing)
    os.read(reading, 1)
    raise OSError(0, "left a process")


def ran(program: Callable[[], object]) -> str:
    """Return a text if a program of the outside runs in a child. Raises OSError if not."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
        try:
            program()
        except OSError as e:
            os._exit(e.errno or 1)
    if status := os.waitpid(child, 0)[1]:
        raise OSError(os.waitstatus_to_exitcode(status), "no program")
    return "it ran"


def path_only(path: str, use: Callable[[int], object]) -> object:
    """Return what ``use`` makes of a descriptor that stands for the path alone."""
    return opened(path, use, PATH_ONLY)


def relative(w: World) -> bytes:
    return os.fsencode(w.private).lstrip(b"/")


def how(flags: int, resolve: int) -> bytes:
    """Return a ``struct open_how``."""
    return struct.pack("=QQQ", flags, 0, resolve)


def _on_paths() -> None:
    def from_root(flags: int, resolve: int, path: Callable[[World], bytes] = relative) -> Attempt:
        return lambda w: path_only("/", lambda fd: call((437, 437), fd, path(w), how(flags, resolve), 24))

    def again(path: Callable[[World], str], flags: int) -> Attempt:
        return lambda w: path_only(path(w), lambda fd: os.open(f"/proc/self/fd/{fd}", flags))

    def at_folder(use: Callable[[int], object]) -> Attempt:
        return lambda w: path_only(w.folder, use)

    def cloned(w: World) -> object:
        into = os.open(new_file(w), os.O_RDWR)
        return path_only(w.private, lambda fd: fcntl.ioctl(into, 0x40049409, fd))

    def named_outside(w: World) -> None:
        handle = os.open(w.scratch, os.O_TMPFILE | os.O_RDWR, 0o600)
        os.link(f"/proc/self/fd/{handle}", w.folder + "/new", follow_symlinks=True)

    def poisoned(folder: Callable[[World], str], name: str) -> Attempt:
        return lambda w: os.open(os.path.join(folder(w), name), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)

    def cache_of_inductor(w: World) -> str:
        return tempfile.mkdtemp(dir=os.path.dirname(os.path.dirname(w.folder)), prefix="torchinductor_")

    ATTEMPTS.update(
        {
            "openat2 in a root of its own": from_root(os.O_RDONLY, 0x10),
            "openat2 beneath a path descriptor": from_root(os.O_RDONLY, 0x08),
            "openat2 without links": from_root(os.O_RDONLY, 0x04),
            "openat2 from the cache alone": from_root(os.O_RDONLY, 0x20),
            "openat2 for writing beneath": from_root(os.O_RDWR, 0x08, lambda w: os.fsencode(w.shown)[1:]),
            "a path descriptor opened again": again(lambda w: w.private, os.O_RDONLY),
            "a path descriptor opened again for writing": again(lambda w: w.shown, os.O_RDWR),
            "a path descriptor read": lambda w: path_only(w.private, lambda fd: os.read(fd, 1)),
            "a path descriptor mapped": lambda w: path_only(w.private, lambda fd: mmap.mmap(fd, 4, mmap.MAP_PRIVATE)),
            "a path descriptor sent on": lambda w: path_only(w.private, lambda fd: os.sendfile(1, fd, 0, 4)),
            "a path descriptor listed": at_folder(lambda fd: call((217, 61), fd, bytes(4096), 4096)),
            "a file below a path descriptor": at_folder(lambda fd: os.open("file", os.O_RDONLY, dir_fd=fd)),
            "a new file below a path descriptor": at_folder(
                lambda fd: os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=fd)
            ),
            "remove below a path descriptor": at_folder(lambda fd: os.unlink("file", dir_fd=fd)),
            "from another working folder": at_folder(lambda fd: (os.fchdir(fd), os.open("file", os.O_RDONLY))),
            "by the name of the working folder": at_folder(
                lambda fd: (os.fchdir(fd), os.open("/proc/self/cwd/file", os.O_RDONLY))
            ),
            "a link to a link": lambda w: (os.symlink(linked(w), w.scratch + "/2"), Path(w.scratch, "2").read_bytes()),
            "another name by a path descriptor": lambda w: path_only(
                w.private, lambda fd: call((265, 37), fd, b"", AT, os.fsencode(w.scratch + "/mine"), EMPTY_PATH)
            ),
            "a name outside for a file without one": named_outside,
            "exchange files that it may read": lambda w: call(
                (316, 276), AT, os.fsencode(new_file(w)), AT, os.fsencode(w.shown), 2
            ),
            "a whiteout": lambda w: call((316, 276), AT, os.fsencode(w.shown), AT, os.fsencode(w.scratch + "/mine"), 4),
            "rename the scratch folder": lambda w: os.rename(w.scratch, w.scratch + "2"),
            "remove the scratch folder": lambda w: os.rmdir(w.scratch),
            "a device in the scratch folder": lambda w: call(
                (259, 33), AT, os.fsencode(w.scratch + "/new"), 0o020600, os.makedev(1, 1)
            ),
            "run a private program": lambda w: ran(lambda: os.execv(w.program, ["true"])),
            "run a private program by execveat": lambda w: path_only(
                w.program, lambda fd: ran(lambda: call((322, 281), fd, b"", None, None, EMPTY_PATH))
            ),
            "run a private program by its descriptor": lambda w: path_only(
                w.program, lambda fd: ran(lambda: os.execv(f"/proc/self/fd/{fd}", ["true"]))
            ),
            "run a private program by the loader": lambda w: ran(lambda: os.execv(_loader(), ["ld.so", w.program])),
            "a copy on write of a private file": cloned,
            "a module for later processes": poisoned(lambda w: SITE, "escaped.pth"),
            "a module of the user for later processes": poisoned(lambda w: USER, "usercustomize.py"),
            "compiled code for later processes": poisoned(
                lambda w: os.path.join(os.path.dirname(TORCH), "__pycache__"), "escaped.pyc"
            ),
            "compiled code beside a source": poisoned(lambda w: os.path.dirname(w.shown), "shown.pyc"),
            "a cache of Inductor for later processes": cache_of_inductor,
            "torch itself": lambda w: os.open(TORCH, os.O_WRONLY | os.O_APPEND),
            "libraries for all programs": lambda w: os.open("/etc/ld.so.preload", os.O_CREAT | os.O_WRONLY),
            "a profile of the shell": lambda w: os.open(os.path.expanduser("~/.profile"), os.O_CREAT | os.O_WRONLY),
        }
    )


def _loader() -> str:
    return next(str(p) for p in (*Path("/lib64").glob("ld-*"), *Path("/lib").glob("ld-*")))


def _on_open_files() -> None:
    def of_shown(use: Callable[[int], object]) -> Attempt:
        return lambda w: opened(w.shown, use)

    def protected(handle: int, *, moved: bool = False) -> object:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
        at = libc.mmap(None, 4096, 1, 1, handle, 0)  # PROT_READ, MAP_SHARED
        at = libc.mremap(ctypes.c_void_p(at), 4096, 8192, 1) if moved else at
        if libc.mprotect(ctypes.c_void_p(at), 4096, 3):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return at

    def copied(handle: int) -> object:
        source = os.open("/dev/zero", os.O_RDONLY)
        return os.sendfile(handle, source, 0, 1)

    def locked(handle: int, command: int) -> object:
        form = struct.pack("@hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0)
        return fcntl.fcntl(handle, command, form)

    def held(command: int) -> Attempt:
        return lambda w: left_behind(lambda: locked(os.open(w.shown, os.O_RDONLY), command))

    ATTEMPTS.update(
        {
            "write to a map that it may read": of_shown(lambda fd: mmap.mmap(fd, 0, mmap.MAP_SHARED)),
            "make a map writable": of_shown(protected),
            "make a longer map writable": of_shown(lambda fd: protected(fd, moved=True)),
            "sendfile into what it may read": of_shown(copied),
            "copy_file_range into what it may read": of_shown(lambda fd: os.copy_file_range(fd, fd, 1, 0, 1)),
            "splice into what it may read": of_shown(lambda fd: call((275, 76), os.pipe()[0], None, fd, None, 1, 2)),
            "vmsplice": lambda w: reached(lambda: call((278, 75), os.pipe()[1], bytes(16), 1, 0)),
            "tee": lambda w: reached(lambda: call((276, 77), 0, 1, 1, 0)),
            "shorten what it may read": of_shown(lambda fd: os.ftruncate(fd, 0)),
            "shorten what it may read by name": lambda w: os.truncate(w.shown, 0),
            "a hole in what it may read": of_shown(lambda fd: call((285, 47), fd, 3, 0, 4)),
            "remap_file_pages": lambda w: reached(lambda: call((216, 234), 0, 4096, 0, 0, 0)),
            "a lock that others wait for": lambda w: left_behind(
                lambda: fcntl.flock(os.open(w.shown, os.O_RDONLY), fcntl.LOCK_EX)
            ),
            "a shared lock": lambda w: left_behind(lambda: fcntl.flock(os.open(w.shown, os.O_RDONLY), fcntl.LOCK_SH)),
            "a lock of a record": held(fcntl.F_SETLK),
            "a lock of an open file": held(37),
            "who has locked a file": of_shown(lambda fd: locked(fd, fcntl.F_GETLK)),
            "a delegation": of_shown(lambda fd: reached(lambda: fcntl.fcntl(fd, 1040, bytes(8)))),
            "a hint for the disk": of_shown(lambda fd: reached(lambda: fcntl.fcntl(fd, 1036, struct.pack("Q", 5)))),
            "an owner by F_SETOWN_EX": lambda w: fcntl.fcntl(os.pipe()[0], 15, struct.pack("@ii", 1, w.outside)),
            "a larger pipe": lambda w: reached(lambda: fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)),
            "seals": lambda w: reached(lambda: fcntl.fcntl(0, 1033, 1)),
            "thousands of descriptors": lambda w: [os.open("/dev/null", os.O_RDONLY) for _ in range(5000)][-1],
            "more descriptors by another limit": lambda w: call((302, 261), 0, 7, struct.pack("=QQ", 1 << 19, 1 << 19)),
            "larger files by another limit": lambda w: call((302, 261), 0, 1, b"\xff" * 16),
            "cores by another limit": lambda w: call((302, 261), 0, 4, b"\xff" * 16),
            "a core for the machine's handler": lambda w: _core(),
        }
    )
    for name, request in (
        ("TIOCSTI", 0x5412),
        ("TIOCLINUX", 0x541C),
        ("TIOCSCTTY", 0x540E),
        ("TIOCSPGRP", 0x5410),
        ("TIOCSETD", 0x5423),
        ("FIOASYNC", 0x5452),
        ("FIFREEZE", 0xC0045877),
        ("FITRIM", 0xC0185879),
        ("FICLONERANGE", 0x4020940D),
        ("FIDEDUPERANGE", 0xC0189436),
        ("FS_IOC_SETVERSION", 0x40087602),
        ("FS_IOC_ENABLE_VERITY", 0x40806685),
        ("SIOCGIFCONF", 0x8912),
        ("NS_GET_PARENT", 0xB702),
    ):
        ATTEMPTS[f"ioctl {name}"] = of_shown(lambda fd, r=request: reached(lambda: fcntl.ioctl(fd, r, bytes(256))))  # type: ignore[misc]


def _core() -> object:
    """Return the limit of cores unless it is 1, which alone keeps Linux from starting a handler of cores."""
    import resource

    if (limit := resource.getrlimit(resource.RLIMIT_CORE)) != (1, 1):
        return limit
    raise OSError(0, "no handler starts")


def _on_the_machine() -> None:
    for name in (
        *("net/tcp", "net/unix", "net/route", "mountinfo", "mountstats", "task/{tid}/net/tcp"),
        *("task/{tid}/mountinfo", "root/etc/shadow", "task/{tid}/root/etc/shadow"),
    ):
        ATTEMPTS[f"/proc/self/{name}"] = lambda w, n=name: os.open(  # type: ignore[misc]
            f"/proc/self/{n.format(tid=os.getpid())}", os.O_RDONLY
        )
    for name in (
        *("mem", "oom_score_adj", "comm", "coredump_filter", "timerslack_ns", "autogroup", "attr/current", "uid_map"),
        *("clear_refs", "loginuid", "sched", "projid_map"),
    ):
        ATTEMPTS[f"/proc/self/{name} for writing"] = lambda w, n=name: os.open(f"/proc/self/{n}", os.O_WRONLY)  # type: ignore[misc]
    for name in (
        *("net/tcp", "locks", "timer_list", "interrupts", "keys", "iomem", "kallsyms", "cmdline", "1/status"),
        *("sysrq-trigger", "swaps", "partitions", "slabinfo", "vmallocinfo", "buddyinfo", "consoles", "fs"),
    ):
        ATTEMPTS[f"/proc/{name}"] = lambda w, n=name: os.open(f"/proc/{n}", os.O_RDONLY)  # type: ignore[misc]
    for name in ("status", "stat", "io", "smaps_rollup", "fdinfo/0", "ns/net", "task", "auxv", "limits", "cgroup"):
        ATTEMPTS[f"/proc, {name} of the referee, opened"] = lambda w, n=name: os.open(  # type: ignore[misc]
            f"/proc/{w.outside}/{n}", os.O_RDONLY
        )
    for name in ("cwd", "exe", "root", "fd/1"):
        ATTEMPTS[f"where {name} of the referee leads"] = lambda w, n=name: os.readlink(f"/proc/{w.outside}/{n}")  # type: ignore[misc]
    for path in (
        *("mem", "port", "kmsg", "ptmx", "pts/0", "console", "fuse", "kvm", "net/tun", "vhost-vsock", "userfaultfd"),
        *("loop-control", "mapper/control", "uinput", "snapshot", "vsock", "nvram", "hpet", "rtc0", "shm", "mqueue"),
    ):
        ATTEMPTS[f"/dev/{path}"] = lambda w, p=path: os.open(f"/dev/{p}", os.O_RDONLY)  # type: ignore[misc]
    for path in ("/sys/fs/cgroup/cgroup.procs", "/sys/kernel/mm/transparent_hugepage/enabled", "/sys/power/state"):
        ATTEMPTS[f"{path} for writing"] = lambda w, p=path: os.open(p, os.O_WRONLY)  # type: ignore[misc]
    ATTEMPTS["a group of resources"] = lambda w: os.mkdir("/sys/fs/cgroup/escaped")


def _on_clocks_and_tasks() -> None:
    def referee_clock(w: World) -> int:
        return ~w.outside << 3 | 2

    word = (ctypes.c_uint32 * 4)()

    def lent(operation: int) -> Attempt:
        def lend(w: World) -> object:
            word[0] = w.outside  # the owner of the lock, to whom a waiter lends its priority
            return reached(lambda: call((202, 98), ctypes.byref(word), operation, 0, None, None, 0))

        return lend

    def of_clone(flags: int) -> Attempt:
        return lambda w: call((56, 220), flags | signal.SIGCHLD, 0, 0, 0, 0)

    def of_prctl(option: int, *arguments: int) -> Attempt:
        given = (*arguments, *(0,) * (4 - len(arguments)))
        return lambda w: reached(lambda: call((157, 167), option, *given))

    ATTEMPTS.update(
        {
            "the processor time of the referee": lambda w: time.clock_gettime(referee_clock(w)),
            "the resolution of the referee's clock": lambda w: time.clock_getres(referee_clock(w)),
            "wait for the referee to compute": lambda w: reached(
                lambda: call((230, 115), referee_clock(w), 0, struct.pack("@qq", 0, 1), None)
            ),
            "the locks of the referee's threads": lambda w: call((274, 100), w.outside, bytes(8), bytes(8)),
            "a lock that lends its priority": lent(8),
            "a lock that lends its priority, by another clock": lent(8 | 256),
            "give up a lock of the referee": lent(7),
            "wake the machine": lambda w: call((283, 85), 9, 0),
            "clock_adjtime": lambda w: reached(lambda: call((305, 266), 0, bytes(208))),
            "be traced": lambda w: call((101, 117), 0, 0, 0, 0),
            "rt_tgsigqueueinfo": lambda w: call((297, 240), w.outside, w.outside, signal.SIGUSR1, bytes(128)),
            "its own threads with the id of the referee": lambda w: call((234, 131), os.getpid(), w.outside, 10),
            "sched_setattr": lambda w: reached(lambda: call((314, 274), w.outside, bytes(48), 0)),
            "sched_setparam": lambda w: reached(lambda: call((142, 118), w.outside, bytes(4))),
            "a failure of memory": lambda w: _advised(100),
            "take memory out of use": lambda w: _advised(101),
            "pinned memory": lambda w: reached(lambda: call((149, 228), bytes(4096), 4096)),
            "kill one by SIGKILL": lambda w: os.kill(os.getpid(), signal.SIGKILL) or time.sleep(1),
            "filter with a listener": lambda w: reached(lambda: call((317, 277), 1, 8, bytes(16))),
            "filter by prctl": of_prctl(22, 2),
            "a mount namespace": of_clone(0x20000),
            "a host name of its own": of_clone(0x4000000),
            "queues of its own": of_clone(0x8000000),
            "processes of its own": of_clone(0x20000000),
            "a network of its own": of_clone(0x40000000),
            "groups of its own": of_clone(0x2000000),
            "a child that is traced": of_clone(0x2000),
            "a child that nobody traces": of_clone(0x800000),
            "a child that shares its disk queue": of_clone(0x80000000),
        }
    )
    for name, option, arguments in (
        ("keep capabilities", 8, (1,)),
        ("drop from the bounding set", 24, (0,)),
        ("secure bits", 28, (1,)),
        ("slack of timers", 29, (1,)),
        ("no clock of the processor", 26, (2,)),
        ("another program's name", 35, (10, 0)),
        ("no huge pages", 41, (1,)),
        ("ambient capabilities", 47, (2, 0)),
        ("no speculation control", 53, (0, 2)),
        ("a dispatcher of its calls", 59, (1,)),
        ("pair with the referee's core", 62, (1, 1)),
        ("memory merged with others", 67, (1,)),
        ("failures of memory early", 33, (1, 1)),
        ("counters off", 31, ()),
        ("files written first", 57, (1,)),
    ):
        ATTEMPTS[f"prctl: {name}"] = of_prctl(option, *arguments)


def _on_second_ways() -> None:
    """Calls that are needed, in the forms in which they do what other calls may not."""

    def mapped(w: World, advice: int) -> object:
        with open(w.shown, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as pages:
            return pages[0], reached(lambda: pages.madvise(advice))

    def vectors(numbers: tuple[int, int], name: str, flags: int, how: int) -> object:
        room = ctypes.create_string_buffer(1)
        vector = struct.pack("=QQ", ctypes.addressof(room), 1)
        return reached(lambda: call(numbers, os.open(name, how), vector, 1, 0, 0, flags))

    def waiting(w: World) -> object:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
        information = ctypes.create_string_buffer(struct.pack("=iii", signal.SIGRTMIN, 0, -1), 128)  # SI_QUEUE
        for _ in range(5000):
            call((297, 240), os.getpid(), threading.get_native_id(), signal.SIGRTMIN, information)
        return "5,000 signals wait"

    for advice, name in (
        (9, "removed"),
        (12, "compared with others"),
        (20, "called cold"),
        (21, "paged out"),
        (24, "dropped though locked"),
        (25, "joined"),
    ):
        ATTEMPTS[f"pages of a file that others read, {name}"] = lambda w, a=advice: mapped(w, a)  # type: ignore[misc]
    ATTEMPTS.update(
        {
            "which pages of a file others have read": lambda w: vectors((327, 286), w.shown, 8, os.O_RDONLY),
            "pages of a file that nobody keeps": lambda w: vectors((327, 286), w.shown, 128, os.O_RDONLY),
            "a disk that is waited for": lambda w: vectors((328, 287), f"{w.scratch}/f", 4, os.O_WRONLY | os.O_CREAT),
            "open files of a thread's own": lambda w: reached(lambda: call((436, 436), 1 << 20, 1 << 21, 2)),
            "most signals that may wait for its user": waiting,
        }
    )


def _advised(advice: int) -> object:
    memory = mmap.mmap(-1, 4096)
    memory.madvise(advice)
    return advice


def _on_sockets() -> None:
    def pair(kind: int = socket.SOCK_STREAM) -> tuple[socket.socket, socket.socket]:
        return socket.socketpair(socket.AF_UNIX, kind)

    address = struct.pack("=H", 1) + b"\0escaped"
    for name, family, kind in (
        ("IPv6", 10, 1),
        ("UDP", 2, 2),
        ("an abstract name", 1, 5),
        ("CAN", 29, 3),
        ("Bluetooth", 31, 3),
        ("keys of IPsec", 15, 3),
        ("XDP", 44, 3),
        ("TIPC", 30, 5),
        ("a modem", 42, 2),
        ("SMC", 43, 1),
    ):
        ATTEMPTS[f"a socket of {name}"] = lambda w, f=family, k=kind: _sent(w, f, k)  # type: ignore[misc]
    ATTEMPTS.update(
        {
            "connect an end of a pair": lambda w: reached(lambda: call((42, 203), pair()[0].fileno(), address, 10)),
            "bind an end of a pair": lambda w: reached(lambda: call((49, 200), pair()[0].detach(), address, 10)),
            "a message with an address": lambda w: reached(lambda: pair(5)[0].sendmsg([b"x"], [], 0, w.socket)),
            "descriptors in flight": lambda w: [socket.send_fds(ends[0], [b"x"], [0]) for ends in [pair()]],
            "many messages at once": lambda w: reached(lambda: call((307, 269), pair()[0].fileno(), bytes(64), 1, 0)),
            "receive many messages": lambda w: reached(
                lambda: call((299, 243), pair()[0].fileno(), bytes(64), 1, 0x40, None)
            ),
            "enter a namespace by its file": lambda w: reached(
                lambda: call((308, 268), os.open("/proc/self/ns/net", os.O_RDONLY), 0)
            ),
            "a pair of TIPC": lambda w: socket.socketpair(30, 1),
        }
    )


def _sent(w: World, family: int, kind: int) -> object:
    made = socket.socket(family, kind)
    if family == socket.AF_UNIX:  # the driver of a device needs such a socket, which then can reach nothing
        made.connect("\0escaped" if kind != 2 else w.socket)
    return made


def _on_calls() -> None:
    for name, numbers, arguments in (
        ("sync_file_range", (277, 84), (0, 0, 0, 0)),
        ("syncfs", (306, 267), (0,)),
        ("acct", (163, 89), (None,)),
        ("swapon", (167, 224), (b"/escaped\0", 0)),
        ("swapoff", (168, 225), (b"/escaped\0",)),
        ("modify_ldt", (154, None), (0, None, 0)),
        ("iopl", (172, None), (3,)),
        ("ioperm", (173, None), (0, 1, 1)),
        ("vhangup", (153, 58), ()),
        ("setdomainname", (171, 162), (b"", 0)),
        ("delete_module", (176, 106), (b"escaped\0", 0)),
        ("finit_module", (313, 273), (-1, b"\0", 0)),
        ("kexec_file_load", (320, 294), (-1, -1, 0, None, 0)),
        ("pkey_alloc", (330, 289), (0, 0)),
        ("pkey_mprotect", (329, 288), (0, 0, 0, -1)),
        ("migrate_pages", (256, 238), (0, 0, None, None)),
        ("set_mempolicy_home_node", (450, 450), (0, 0, 0, 0)),
        ("mbind", (237, 235), (0, 4096, 0, None, 0, 0)),
        ("mseal", (462, 462), (0, 0, 0)),
        ("map_shadow_stack", (453, 453), (0, 4096, 0)),
        ("lsm_set_self_attr", (460, 460), (100, bytes(32), 32, 0)),
        ("lsm_get_self_attr", (459, 459), (100, bytes(64), bytes(4), 0)),
        ("listmount", (458, 458), (bytes(24), bytes(64), 8, 0)),
        ("cachestat", (451, 451), (0, bytes(16), bytes(40), 0)),
        ("process_mrelease", (448, 448), (0, 0)),
        ("quotactl_fd", (443, 443), (0, 0, 0, None)),
        ("move_mount", (429, 429), (AT, b"/\0", AT, b"/\0", 0)),
        ("fsmount", (432, 432), (0, 0, 0)),
        ("fspick", (433, 433), (AT, b"/\0", 0)),
        ("open_tree_attr", (467, 467), (AT, b"/\0", 0, bytes(32), 32)),
        ("landlock_add_rule", (445, 445), (0, 1, bytes(16), 0)),
        ("landlock_restrict_self", (446, 446), (-1, 0)),
        ("io_uring_enter", (426, 426), (0, 0, 0, 0, None, 0)),
        ("io_uring_register", (427, 427), (0, 0, None, 0)),
        ("io_submit", (209, 2), (0, 0, None)),
        ("io_pgetevents", (333, 292), (0, 0, 0, None, None, None)),
        ("mq_notify", (244, 184), (-1, bytes(64))),
        ("mq_timedsend", (242, 182), (-1, b"x", 1, 0, None)),
        ("msgsnd", (69, 189), (0, bytes(16), 1, 0)),
        ("msgrcv", (70, 188), (0, bytes(16), 1, 0, 0)),
        ("shmat", (30, 196), (0, None, 0)),
        ("shmctl", (31, 195), (0, 2, bytes(256))),
        ("semop", (65, 193), (0, bytes(6), 1)),
        ("setsockopt", (54, 208), (0, 1, 1, bytes(4), 4)),
        ("readahead", (187, 213), (0, 0, 0)),
        ("fanotify_mark", (301, 263), (-1, 1, 0, AT, b"/\0")),
        ("inotify_add_watch", (254, 27), (-1, b"/\0", 2)),
        ("lookup_dcookie", (212, 18), (0, None, 0)),
        ("nfsservctl", (180, 42), (0, None, None)),
        ("sysfs", (139, None), (3,)),
        ("ustat", (136, None), (0, bytes(32))),
        ("uselib", (134, None), (b"/\0",)),
        ("setfsuid", (122, 151), (65534,)),
        ("setregid", (114, 143), (-1, -1)),
        ("setgid", (106, 144), (os.getgid(),)),
        ("ioprio_get", (252, 31), (1, 0)),
        ("mknod", (133, None), (b"/tmp/escaped\0", 0o010600, 0)),
        ("file_getattr", (468, 468), (AT, b"/\0", bytes(24), 24, 0)),
        ("listxattr", (194, 11), (b"/\0", None, 0)),
        ("timer_settime", (223, 110), (0, 0, bytes(32), None)),
        ("set_thread_area", (205, None), (bytes(16),)),
        ("uretprobe", (335, None), ()),
    ):
        ATTEMPTS[name] = lambda w, n=numbers, a=arguments: reached(lambda: call(n, *a))  # type: ignore[misc]


_on_paths()
_on_open_files()
_on_the_machine()
_on_clocks_and_tasks()
_on_second_ways()
_on_sockets()
_on_calls()
