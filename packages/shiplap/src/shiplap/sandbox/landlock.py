"""Lock this process in, for good: files by Landlock, system calls by seccomp, sizes by limits, and no capabilities.

Everything here is a facility of the Linux kernel that needs no privilege. :func:`lock` reports each facility that is
missing, and whoever judges what runs here says so in the verdict.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from shiplap.sandbox.seccomp import install_filter

CREATE, ADD, RESTRICT = 444, 445, 446  # Landlock's system calls, the same on every machine
VERSION, BENEATH = 1, 1
EXECUTE, WRITE, READ, LIST, TRUNCATE, IOCTL = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
OF_FILES = EXECUTE | WRITE | READ | TRUNCATE | IOCTL
SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc", "/opt", "/proc", "/sys", "/nix", "/run/opengl-driver")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CAPSET = {"x86_64": 126, "aarch64": 91}


@dataclass(frozen=True)
class Cell:
    """What a process may still do once it is locked in.

    Attributes:
        scratch: the folder that it may write.
        readable: further places that it may read and execute.
        hidden: places where Python finds modules, and that it may not read all the same.
        file_size: bytes that a file of it may have.
        device: whether it may use the machine's accelerators.
    """

    scratch: str
    readable: tuple[str, ...] = ()
    file_size: int = 1 << 30
    device: bool = False
    hidden: tuple[str, ...] = ()


def readable_places() -> list[str]:
    """What Python and its packages need to be read from."""
    places = [*SYSTEM, sys.prefix, sys.base_prefix, *(p for p in sys.path if p)]
    # An editable install leaves a link to a tree elsewhere: the tree is where its package was found.
    places += [str(Path(spec).resolve()) for spec in places if Path(spec).is_symlink()]
    return [p for p in dict.fromkeys(places) if os.path.exists(p)]


def lock(cell: Cell) -> dict[str, str]:
    """Lock this process in. For each facility an empty text, or why it is not in force."""
    os.umask(0o077)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return {
        "limits": _limits(cell),
        "capabilities": _without_capabilities(),
        "files": _files(cell),
        "system calls": install_filter(device=cell.device),
    }


def _limits(cell: Cell) -> str:
    try:
        for kind, wanted in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, cell.file_size)):
            hard = resource.getrlimit(kind)[1]
            value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(kind, (value, value))
    except (OSError, ValueError) as e:
        return str(e)
    return ""


def _without_capabilities() -> str:
    """Root without capabilities is a user who owns much; anyone else has none to lose."""
    if os.geteuid() != 0:
        return ""
    number = CAPSET.get(os.uname().machine)
    if number is None:
        return f"no number of capset for {os.uname().machine}"
    libc = ctypes.CDLL(None, use_errno=True)
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
    nothing = ctypes.create_string_buffer(bytes(24))
    failed = libc.syscall(number, ctypes.byref(header), ctypes.byref(nothing))
    return f"capset: {os.strerror(ctypes.get_errno())}" if failed else ""


def _files(cell: Cell) -> str:
    """Landlock: read what Python needs, write the scratch folder; no signal and no socket leaves this domain."""
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(CREATE, None, 0, VERSION)
    if version < 1:
        return f"Landlock: {os.strerror(ctypes.get_errno())}"
    every = (1 << (13 if version == 1 else 14 if version == 2 else 15 if version < 5 else 16)) - 1
    attributes = struct.pack("=QQQ", every, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = libc.syscall(CREATE, ctypes.create_string_buffer(attributes, len(attributes)), len(attributes), 0)
    if rules < 0:
        return f"Landlock: {os.strerror(ctypes.get_errno())}"
    try:
        reads = EXECUTE | READ | LIST | (IOCTL & every)
        shown = [p for p in readable_places() if p not in cell.hidden]
        for place in (*shown, *cell.readable, *(("/dev",) if cell.device else ())):
            _allow(libc, rules, place, reads)
        for place in (cell.scratch, *DEVICES, *(_accelerators() if cell.device else ())):
            _allow(libc, rules, place, every)
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if libc.syscall(RESTRICT, rules, 0):
            return f"Landlock: {os.strerror(ctypes.get_errno())}"
    except OSError as e:
        return f"Landlock: {e}"
    finally:
        os.close(rules)
    return "" if version >= 3 else f"Landlock {version} cannot forbid truncation; Linux 6.2 can"


def _accelerators() -> Iterable[str]:
    """The devices, and what /proc has of this process: CUDA's driver does not start if it cannot write there."""
    return [*(str(p) for pattern in ("nvidia*", "dri/*") for p in Path("/dev").glob(pattern)), "/proc/self"]


def _allow(libc: ctypes.CDLL, rules: int, place: str, access: int) -> None:
    """Allow ``access`` at and below ``place``; a place that is not there needs no rule."""
    try:
        handle = os.open(place, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        access &= -1 if os.path.isdir(place) else OF_FILES
        rule = struct.pack("=Qi", access, handle)
        if libc.syscall(ADD, rules, BENEATH, ctypes.create_string_buffer(rule, len(rule)), 0):
            raise OSError(ctypes.get_errno(), f"no rule for {place}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(handle)
