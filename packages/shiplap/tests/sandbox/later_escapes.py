"""Attempts of a tenth attack: on words in files that others wait for, on what is reserved, by programs of the system,
and by requests and options that no earlier attempt makes.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import shutil
import signal
import socket
import struct
from pathlib import Path

from tests.sandbox.escapes import Attempt, World, call, libc, opened
from tests.sandbox.more_escapes import ran, reached

ATTEMPTS: dict[str, Attempt] = {}


def _on_words_in_files() -> None:
    """What a word means to those who wait for it: the kernel finds it by its file, so a map for reading is enough."""

    def requeued(numbers: tuple[int, int], *arguments: object) -> Attempt:
        def move(w: World) -> object:
            libc.mmap.restype = ctypes.c_void_p
            handle = os.open(w.shown, os.O_RDONLY)
            at = ctypes.c_void_p(libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_SHARED, handle, ctypes.c_long(0)))
            return reached(lambda: call(numbers, at, *arguments))

        return move

    ATTEMPTS.update(
        {
            "others wait for another word": requeued((202, 98), 3, 0, 1 << 20, None, 0),
            "others wait for another word, compared": requeued((202, 98), 4, 0, 1 << 20, None, 0),
            "others wait for another word, by futex_requeue": requeued((456, 456), 0, 1, 1),
        }
    )


def _on_what_is_reserved() -> None:
    def huge(flags: int) -> Attempt:
        def reserve(w: World) -> object:
            libc.mmap.restype = ctypes.c_void_p
            at = libc.mmap(None, 1 << 21, 3, 0x22 | 0x40000 | flags, -1, ctypes.c_long(0))
            number = ctypes.get_errno()
            if at == ctypes.c_void_p(-1).value and number == 1:
                raise OSError(number, os.strerror(number))
            return f"reached the kernel: {os.strerror(number)}"

        return reserve

    ATTEMPTS.update(
        {
            "huge pages that are set aside": huge(0),
            "huge pages of 2 MiB that are set aside": huge(21 << 26),
            "huge pages that are set aside and shared": huge(1),
            "interrupt all processors": lambda w: reached(lambda: call((324, 283), 1, 0, 0)),
            "interrupt those who have registered": lambda w: reached(lambda: call((324, 283), 2, 0, 0)),
            "be interrupted by others": lambda w: reached(lambda: call((324, 283), 4, 0, 0)),
            "a descriptor of the process at the other end": lambda w: reached(
                lambda: socket.socketpair()[0].getsockopt(socket.SOL_SOCKET, 77, 4)
            ),
        }
    )


def _on_programs_of_the_system() -> None:
    """The same by a program that is there already, which a filter of this process alone would not reach."""
    for name, command in {
        "chmod": ("chmod", "777", "{private}"),
        "chown": ("chown", "1", "{shown}"),
        "touch": ("touch", "-t", "200101010000", "{shown}"),
        "touch of a new file": ("touch", "{folder}/new"),
        "ln": ("ln", "{private}", "{scratch}/mine"),
        "mv": ("mv", "{private}", "{scratch}/mine"),
        "cp": ("cp", "/bin/true", "{shown}"),
        "cat": ("cat", "{private}"),
        "dd": ("dd", "if=/dev/zero", "of={shown}", "count=1"),
        "truncate": ("truncate", "-s", "0", "{shown}"),
        "kill": ("kill", "-USR1", "{outside}"),
        "renice": ("renice", "5", "{outside}"),
        "chrt": ("chrt", "-b", "-p", "0", "{outside}"),
        "taskset": ("taskset", "-p", "1", "{outside}"),
        "prlimit": ("prlimit", "--nofile=3", "--pid", "{outside}"),
        "unshare": ("unshare", "-r", "true"),
        "nsenter": ("nsenter", "-t", "{outside}", "-m", "true"),
        "mount": ("mount", "-t", "tmpfs", "none", "{scratch}"),
        "su": ("su", "nobody", "-s", "/bin/true"),
        "setpriv": ("setpriv", "--reuid", "65534", "true"),
        "Python": ("python3", "-c", "open('{private}').read()"),
    }.items():
        program = shutil.which(command[0])
        ATTEMPTS[f"by the program {name}"] = lambda w, p=program, c=command: _run_program(w, p, c)  # type: ignore[misc]


def _run_program(w: World, program: str | None, command: tuple[str, ...]) -> object:
    if program is None:
        raise FileNotFoundError(2, "no such program on this machine")
    words = [word.format(**vars(w)) for word in command]

    def become() -> None:
        os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
        os.execv(program, words)

    return ran(become)


def _on_requests() -> None:
    for name, request in (
        ("TCSETS", 0x5402),
        ("TCXONC", 0x540A),
        ("TCFLSH", 0x540B),
        ("TIOCEXCL", 0x540C),
        ("TIOCSWINSZ", 0x5414),
        ("TIOCCONS", 0x541D),
        ("TIOCNOTTY", 0x5422),
        ("TIOCVHANGUP", 0x5437),
        ("KDSETLED", 0x4B32),
        ("BLKDISCARD", 0x1277),
        ("BLKRRPART", 0x125F),
        ("FIBMAP", 0x0001),
        ("FS_IOC_FIEMAP", 0xC020660B),
        ("FS_IOC_SHUTDOWN", 0x8004587D),
        ("FS_IOC_SETFSLABEL", 0x41009432),
        ("FS_IOC_GETFSUUID", 0x80111500),
        ("FS_IOC_SET_ENCRYPTION_POLICY", 0x800C6613),
        ("EXT4_IOC_MOVE_EXT", 0xC028660F),
        ("BTRFS_IOC_SUBVOL_CREATE", 0x5000940E),
        ("PIDFD_GET_INFO", 0xC048FF0B),
        ("PAGEMAP_SCAN", 0xC0606610),
        ("SIOCSIFFLAGS", 0x8914),
        ("FIOGETOWN", 0x8903),
    ):
        ATTEMPTS[f"ioctl {name}"] = lambda w, r=request: opened(  # type: ignore[misc]
            w.shown, lambda fd: reached(lambda: fcntl.ioctl(fd, r, bytes(256)))
        )
    for name, option, value in (
        ("addresses with tags", 55, 1),
        ("memory that is never executed", 65, 1),
        ("vectors by RISC-V", 69, 1),
        ("a shadow stack", 75, 1),
        ("timers by their numbers", 77, 1),
        ("a table of words that are waited for", 78, 1),
        ("an end with its parent", 1, signal.SIGKILL),
    ):
        ATTEMPTS[f"prctl: {name}"] = lambda w, o=option, v=value: reached(  # type: ignore[misc]
            lambda: call((157, 167), o, v, 0, 0, 0)
        )
    for name, command in (("whether two descriptors are one", 1027), ("whether it has made a file", 1028)):
        ATTEMPTS[f"fcntl: {name}"] = lambda w, c=command: opened(  # type: ignore[misc]
            w.shown, lambda fd: reached(lambda: fcntl.fcntl(fd, c, fd))
        )


def _on_ways_to_folders() -> None:
    def dangling(w: World) -> object:
        os.symlink(w.folder + "/new", w.scratch + "/link")
        return os.open(w.scratch + "/link", os.O_CREAT | os.O_WRONLY, 0o600)

    def moved_in(w: World) -> None:
        os.mkdir(w.scratch + "/made")
        try:
            os.rename(w.scratch + "/made", w.folder + "/made")
        finally:
            os.rmdir(w.scratch + "/made")

    def from_within(use: str) -> Attempt:
        def work(w: World) -> object:
            os.chdir(w.folder)
            made = {"mkdir": lambda: os.mkdir("new"), "unlink": lambda: os.unlink("file")}
            return made[use]()

        return work

    ATTEMPTS.update(
        {
            "a new file through a link to nothing": dangling,
            "a folder that is moved out": moved_in,
            "a folder within another working folder": from_within("mkdir"),
            "remove within another working folder": from_within("unlink"),
            "a link beneath what it may read": lambda w: os.symlink("/", os.path.dirname(w.shown) + "/new"),
            "a folder beneath what it may read": lambda w: os.mkdir(os.path.dirname(w.shown) + "/new"),
            "the outside by two dots": lambda w: Path(w.scratch, "..", "private", "file").read_bytes(),
            "a new file by two dots": lambda w: os.open(w.scratch + "/../private/new", os.O_CREAT | os.O_WRONLY),
            "a time of its own": lambda w: call((56, 220), 0x80 | signal.SIGCHLD, 0, 0, 0, 0),
            "a handler of faults for others": lambda w: os.open("/dev/userfaultfd", os.O_RDWR),
            "limits of the referee, read": lambda w: call((302, 261), w.outside, 7, None, struct.pack("=QQ", 0, 0)),
        }
    )


_on_words_in_files()
_on_what_is_reserved()
_on_programs_of_the_system()
_on_requests()
_on_ways_to_folders()
