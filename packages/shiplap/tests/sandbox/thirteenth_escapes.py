"""Attempts of a thirteenth attack: numbers whose high halves differ, options and names that no earlier attempt uses,
and ways by which the kernel opens, runs or measures a file for somebody.
"""

from __future__ import annotations

import ctypes
import glob
import mmap
import os
import shutil
import signal
import socket
import stat
import struct
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from tests.sandbox.escapes import AT, Attempt, World, _disk, call, libc, linked, new_file, opened
from tests.sandbox.more_escapes import path_only, ran, reached
from tests.sandbox.reading_escapes import any_opened

ATTEMPTS: dict[str, Attempt] = {}
HIGH = 1 << 32  # of a number that Linux reads as one of 32 bits


def _on_high_halves() -> None:
    """The filter and the kernel have to read the same half of an argument."""

    def of_shown(numbers: tuple[int | None, int | None], *arguments: object) -> Attempt:
        return lambda w: opened(w.shown, lambda fd: reached(lambda: call(numbers, fd, *arguments)))

    def plain(numbers: tuple[int | None, int | None], *arguments: object) -> Attempt:
        return lambda w: reached(lambda: call(numbers, *arguments))

    def mapped(flags: int) -> Attempt:
        def make(w: World) -> object:
            libc.mmap.restype = ctypes.c_void_p
            size = ctypes.c_size_t(1 << 21)
            if libc.mmap(None, size, 3, ctypes.c_long(0x22 | flags | HIGH), -1, ctypes.c_long(0)) is None or (
                ctypes.get_errno() == 1
            ):
                raise OSError(1, "refused")
            return "memory"

        return make

    def made(w: World) -> str:
        os.umask(0)
        call((257, 56), AT, os.fsencode(w.scratch + "/it"), os.O_CREAT | os.O_WRONLY | HIGH, 0o4755 | HIGH)
        if os.stat(w.scratch + "/it").st_mode & 0o6000:
            return "a program of its owner"
        raise OSError(0, "the file was made without these rights")

    ATTEMPTS.update(
        {
            "kill, with a high half": lambda w: call((62, 129), w.outside | HIGH, signal.SIGUSR1),
            "SIGKILL, with a high half": lambda w: reached(lambda: call((62, 129), os.getpid(), 9 | HIGH)),
            "limits of the referee, with a high half": lambda w: call((302, 261), w.outside | HIGH, 7, None, bytes(16)),
            "the owner of a pipe, with a high half": lambda w: reached(
                lambda: call((72, 25), os.pipe()[0], 8 | HIGH, w.outside)
            ),
            "input of a terminal, with a high half": of_shown((16, 29), 0x5412 | HIGH, b"x"),
            "survive the launcher, with a high half": plain((157, 167), 1 | HIGH, 0, 0, 0, 0),
            "pages that are paged out, with a high half": plain((28, 233), 0, 4096, 21 | HIGH),
            "interrupt all processors, with a high half": plain((324, 283), 1 | HIGH, 0, 0),
            "a user namespace, with a high half": plain((56, 220), 0x10000000 | signal.SIGCHLD | HIGH, 0, 0, 0, 0),
            "a priority that is lent, with a high half": plain((202, 98), bytes(16), 6 | HIGH, 0, None, None, 0),
            "files of its own, with a high half": plain((436, 436), 900, 1000, 2 | HIGH),
            "a socket of datagrams, with a high half": plain((53, 199), 1, 2 | HIGH, 0, bytes(8)),
            "the processor time of the referee, with a high half": lambda w: call(
                (228, 113), (~w.outside << 3 | 2) & 0xFFFFFFFF | HIGH, bytes(16)
            ),
            "a process at the other end, with a high half": lambda w: reached(
                lambda: call((55, 209), socket.socketpair()[0].fileno(), 1, 77 | HIGH, bytes(8), bytes(8))
            ),
            "pages that others read, with a high half": of_shown((221, 223), 0, 0, 4 | HIGH),
            "an end by processor time, with a high half": plain((160, 164), HIGH, struct.pack("=QQ", 1, 1)),
            "locked memory, with a high half": mapped(0x2000),
            "huge pages, with a high half": mapped(0x40000),
            "a program of its owner, with high halves": made,
        }
    )


def _on_the_processor() -> None:
    for name, option, value in (
        ("addresses with tags", 0x4002, 6),
        ("tags that are kept", 0x4004, 0),
        ("a processor that says nothing", 0x1012, 0),
        ("another page of the clock", 0x2003, 1 << 40),
        ("a shadow stack", 0x5001, 1),
        ("a shadow stack that can be written", 0x5001, 2),
        ("parts of the processor for guests", 0x1025, 18),
    ):
        ATTEMPTS[f"arch_prctl: {name}"] = lambda w, o=option, v=value: reached(  # type: ignore[misc]
            lambda: call((158, None), o, v)
        )
    for name, option in (
        *(("capabilities that stay", 8), ("seccomp of its own", 22), ("capabilities that are dropped", 24)),
        *(("bits of security", 28), ("an exact timer", 29)),
        *(("counters that stand", 31), ("faults of memory", 33), ("the map of its memory", 35)),
        *(("speculation", 53), ("a disk of its own", 57)),
        *(("a core of its own", 62), ("pages that are merged", 67), ("scoped stacks", 74)),
    ):
        ATTEMPTS[f"prctl: {name}"] = lambda w, o=option: reached(lambda: call((157, 167), o, 1, 0, 0, 0))  # type: ignore[misc]


def _on_folders_that_hide() -> None:
    """What a folder holds that cannot be listed is measured by nobody."""

    def hidden(make: Callable[[str], object], mask: int = 0) -> Attempt:
        def work(w: World) -> str:
            os.umask(mask)
            make(w.scratch + "/made")
            mode = os.stat(w.scratch + "/made").st_mode
            if mode & 0o700 == 0o700:
                raise OSError(0, "its owner can list it")
            return stat.filemode(mode)

        return work

    ATTEMPTS.update(
        {
            "a folder that cannot be listed": hidden(lambda path: os.mkdir(path, 0o300)),
            "a folder that cannot be entered": hidden(lambda path: os.mkdir(path, 0o600)),
            "a folder that cannot be listed, by mkdirat": hidden(
                lambda path: call((258, 34), AT, os.fsencode(path), 0o300)
            ),
            "a folder that cannot be listed, by a mask": hidden(os.mkdir, 0o400),
            "a folder without rights": hidden(os.mkdir, 0o777),
        }
    )


def _on_openings() -> None:
    """Flags of ``open`` that change a file without an access for writing, and other ways to a new name."""

    def flagged(path: Callable[[World], str], flags: int, mode: int = 0o600) -> Attempt:
        return lambda w: os.open(path(w), flags, mode)

    def private(w: World) -> str:
        return w.private

    def shown(w: World) -> str:
        return w.shown

    def new(w: World) -> str:
        return w.folder + "/new"

    def by_a_handle(w: World) -> None:
        handle = os.open(w.scratch, os.O_TMPFILE | os.O_RDWR, 0o600)
        call((265, 37), handle, b"", AT, os.fsencode(new(w)), 0x1000)

    def exchanged_folders(w: World) -> object:
        os.mkdir(w.scratch + "/sub")
        return call((316, 276), AT, os.fsencode(w.scratch + "/sub"), AT, os.fsencode(w.folder + "/empty"), 2)

    def through_a_folder(w: World) -> None:
        os.symlink("..", w.scratch + "/up")
        os.mkdir(w.scratch + "/up/private/new")

    ATTEMPTS.update(
        {
            "an empty file by reading it": flagged(shown, os.O_RDONLY | os.O_TRUNC),
            "an empty file by no access": flagged(shown, os.O_ACCMODE | os.O_TRUNC),
            "open for requests alone": flagged(shown, os.O_ACCMODE),
            "open a private file for requests alone": flagged(private, os.O_ACCMODE),
            "open a private folder for requests alone": lambda w: os.open(w.folder, os.O_ACCMODE | os.O_DIRECTORY),
            "a terminal for requests alone": lambda w: os.open("/dev/ptmx", os.O_ACCMODE | os.O_NOCTTY),
            "a disk for requests alone": lambda w: os.open(_disk(), os.O_ACCMODE),
            "settings of the machine for requests alone": lambda w: os.open("/proc/sys/kernel/core_pattern", 3),
            "open at the end": flagged(private, os.O_WRONLY | os.O_APPEND),
            "open without a wait": flagged(private, os.O_RDONLY | os.O_NONBLOCK | os.O_DIRECT),
            "a new file that is only read": flagged(new, os.O_CREAT | os.O_RDONLY),
            "a new file by creat": lambda w: call((85, None), os.fsencode(new(w)), 0o600),
            "an old file by creat": lambda w: call((85, None), os.fsencode(w.shown), 0o600),
            "a name outside by an empty one": by_a_handle,
            "folders that are exchanged": exchanged_folders,
            "a folder through a link upwards": through_a_folder,
            "replace a file by two dots": lambda w: os.rename(new_file(w), w.scratch + "/../private/file"),
            "a link that is moved outside": lambda w: os.rename(linked(w), w.folder + "/new"),
            "remove by a path descriptor of a link": lambda w: path_only(
                w.scratch + "/..", lambda fd: os.unlink("private/file", dir_fd=fd)
            ),
        }
    )


def _on_what_runs() -> None:
    """Files that the kernel opens by itself when it starts a program."""

    def script(w: World) -> object:
        # No file can be made executable here, but a program may be copied with the rights that it is made with.
        handle = os.open(w.scratch + "/it", os.O_CREAT | os.O_WRONLY, 0o700)
        os.write(handle, f"#!{w.program}\n".encode())
        os.close(handle)
        return ran(lambda: os.execv(w.scratch + "/it", ["it"]))

    def loaded(w: World) -> object:
        code, old = Path("/bin/true").read_bytes(), None
        for name in (b"/lib64/ld-linux-x86-64.so.2\0", b"/lib/ld-linux-aarch64.so.1\0"):
            old = name if name in code else old
        if old is None:
            raise OSError(0, "a program without a loader")
        os.symlink(w.program, w.scratch + "/l")
        handle = os.open(w.scratch + "/it", os.O_CREAT | os.O_WRONLY, 0o700)
        os.write(handle, code.replace(old, b"l".ljust(len(old), b"\0")))
        os.close(handle)
        os.chdir(w.scratch)
        return ran(lambda: os.execv("./it", ["it"]))

    ATTEMPTS.update(
        {
            "a private program as an interpreter": script,
            "a private program as a loader": loaded,
            "a private program by a link": lambda w: (
                os.symlink(w.program, w.scratch + "/p"),
                ran(lambda: os.execv(w.scratch + "/p", ["true"])),
            ),
        }
    )
    for name, command in (
        *(("at", "at -f {shown} now"), ("crontab", "crontab {shown}")),
        *(
            ("sudo", "sudo -n true"),
            ("pkexec", "pkexec true"),
            ("newgrp", "newgrp root"),
            ("ping", "ping -c1 127.0.0.1"),
        ),
        *(("systemd-run", "systemd-run true"), ("busctl", "busctl list"), ("loginctl", "loginctl list-sessions")),
        *(("docker", "docker ps"), ("ssh-add", "ssh-add -l"), ("gpg-connect-agent", "gpg-connect-agent /bye")),
        *(("git", "git config --global user.name escaped"), ("fallocate", "fallocate -l1 {shown}")),
        *(
            ("install", "install /bin/true {folder}/new"),
            ("mkfifo", "mkfifo {scratch}/new"),
            ("ionice", "ionice -p {outside}"),
        ),
        *(("gcc", "gcc -x c -o {folder}/new /dev/null -shared"), ("perl", "perl -e open(F,'>>','{shown}')||exit(1)")),
    ):
        program = shutil.which(name)
        ATTEMPTS[f"by the program {name}"] = lambda w, p=program, c=command: _run(w, p, c)  # type: ignore[misc]


def _run(w: World, program: str | None, command: str) -> object:
    if program is None:
        raise FileNotFoundError(2, "no such program on this machine")

    def become() -> None:
        os.dup2(os.open("/dev/null", os.O_WRONLY), 1)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.chdir(w.scratch)
        os.environ["HOME"] = w.folder
        os.execv(program, command.format(**vars(w)).split())

    return ran(become)


def _on_names_of_the_machine() -> None:
    homes = {os.path.expanduser("~"), "/root"}
    kept = ("id_rsa", "id_ed25519", "known_hosts", "credentials", "netrc", "git-credentials", "pypirc", "bashrc")
    places = tuple(f"{home}/{way}{name}" for home in homes for way in (".", ".ssh/", ".aws/") for name in kept)
    ATTEMPTS["what a home holds"] = lambda w: any_opened(places)
    for tree in ("/run", "/var", "/srv", "/mnt", "/media", "/boot", "/etc"):
        listed = islice((p for n in ("*", "*/*", "*/*/*") for p in glob.iglob(f"{tree}/{n}")), 400)
        found = filter(os.path.isfile, listed)
        shown = ("/etc/ld.so", "/etc/nsswitch", "/etc/passwd", "/etc/group", "/etc/localtime", "/etc/timezone")
        shown += ("/etc/loc", "/etc/alternatives", "/etc/os-release", "/etc/debian_version", "/etc/host", "/etc/mime")
        shown += ("/etc/ssl/openssl", "/etc/OpenCL", "/etc/vulkan", "/etc/glvnd", "/etc/nvidia", "/etc/python3")
        paths = tuple(
            p for p in found if not (p.startswith(shown) or os.path.realpath(p).startswith(("/usr", "/opt", "/proc")))
        )
        ATTEMPTS[f"any file below {tree}"] = lambda w, paths=paths: any_opened(paths)  # type: ignore[misc]
    for folder in ("/", "/etc", "/home", "/root", "/tmp", "/proc", "/run", "/var/tmp"):
        ATTEMPTS[f"the names in {folder}"] = lambda w, f=folder: os.listdir(f)  # type: ignore[misc]
    installer = (
        "pip.conf",
        ".condarc",
        "condarc",
        "uv.toml",
        ".netrc",
        "etc/pip.conf",
        "etc/jupyter",
        "conda-meta/history",
    )
    paths = tuple(f"{prefix}/{name}" for prefix in (sys.prefix, sys.base_prefix) for name in installer)
    ATTEMPTS["settings of the installer of Python"] = lambda w, paths=paths: any_opened(paths)
    for name in (
        "stack",
        "syscall",
        "wchan",
        "personality",
        "mounts",
        "setgroups",
        "sessionid",
        "timens_offsets",
        "arch_status",
    ):
        ATTEMPTS[f"/proc/self/{name}"] = lambda w, n=name: os.open(f"/proc/self/{n}", os.O_RDONLY)  # type: ignore[misc]
    for name in ("mem", "environ", "children", "maps", "pagemap"):
        ATTEMPTS[f"/proc/thread-self/{name}"] = lambda w, n=name: os.open(f"/proc/thread-self/{n}", os.O_RDONLY)  # type: ignore[misc]
    for name in ("timens_offsets", "setgroups", "make-it-fail", "attr/exec", "attr/sockcreate", "gid_map", "fail-nth"):
        ATTEMPTS[f"/proc/self/{name} for writing"] = lambda w, n=name: os.open(f"/proc/self/{n}", os.O_WRONLY)  # type: ignore[misc]
    for name in (
        "pressure/cpu",
        "crypto",
        "misc",
        "schedstat",
        "softirqs",
        "vmstat",
        "zoneinfo",
        "config.gz",
    ):
        ATTEMPTS[f"/proc/{name}"] = lambda w, n=name: os.open(f"/proc/{n}", os.O_RDONLY)  # type: ignore[misc]


def _on_others() -> None:
    def mapped_file(w: World) -> object:
        handle = os.open(w.shown, os.O_RDONLY)
        made = mmap.mmap(handle, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        line = next(line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(w.shown))
        return os.open(f"/proc/self/map_files/{line.split()[0]}", os.O_RDWR), made

    def clock_page(name: str) -> Attempt:
        def write(w: World) -> object:
            line = next(line for line in Path("/proc/self/maps").read_text().splitlines() if name in line)
            first, last = (int(side, 16) for side in line.split()[0].split("-"))
            if libc.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(last - first), 3):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            ctypes.memset(first, 1, 1)
            return "written"

        return write

    ATTEMPTS.update(
        {
            "a file by the map of its memory": mapped_file,
            "the page of the clock, written": clock_page("[vvar"),
            "the page of old calls, written": clock_page("[vsyscall"),
            "wait for the referee": lambda w: os.waitid(os.P_PID, w.outside, os.WEXITED | os.WNOWAIT),
            "locks of the referee's threads": lambda w: call((274, 100), w.outside, bytes(8), bytes(8)),
            "a thread of the referee": lambda w: call((234, 131), os.getpid(), w.outside, signal.SIGUSR1),
            "a thread of the referee, queued": lambda w: call(
                (297, 240), os.getpid(), w.outside, signal.SIGUSR1, struct.pack("=iii", 10, 0, -1) + bytes(116)
            ),
            "a clock that wakes the machine": lambda w: call((283, 85), 9, 0),
        }
    )


_on_high_halves()
_on_the_processor()
_on_folders_that_hide()
_on_openings()
_on_what_runs()
_on_names_of_the_machine()
_on_others()
