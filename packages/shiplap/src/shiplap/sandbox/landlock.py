"""Restrict this process for good: files by Landlock, system calls by seccomp, sizes by limits, and no capabilities.

All of these are facilities of the Linux kernel that need no privilege. ``lock_process`` reports each facility that is
missing, and the verdict names it.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import re
import resource
import stat
import struct
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from shiplap.safe_io.files import OwnershipRule, open_folder
from shiplap.sandbox.seccomp import install_filter

CREATE, ADD, RESTRICT = 444, 445, 446  # Landlock's system calls, the same on every machine
VERSION, BENEATH = 1, 1
EXECUTE, WRITE, READ, LIST, TRUNCATE, IOCTL = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
FILE_RIGHTS = EXECUTE | WRITE | READ | TRUNCATE | IOCTL
PROGRAMS = ("/usr", "/lib", "/lib64", "/bin", "/opt", "/nix", "/run/opengl-driver")
# Root owns files of /etc, /proc and /sys that hold secrets, and needs no capability to read what it owns. So what
# libraries and compilers look up there is listed by name.
SETTINGS = """
ld.so.cache ld.so.conf ld.so.conf.d nsswitch.conf passwd group localtime timezone locale.conf locale.alias alternatives
os-release debian_version hosts host.conf mime.types ssl/openssl.cnf pki/tls/openssl.cnf crypto-policies OpenCL vulkan
glvnd nvidia python3 python3.11 python3.12 python3.13 python3.14
"""
MACHINE = """
cpuinfo meminfo stat version filesystems loadavg uptime devices modules sys/kernel/osrelease sys/kernel/ostype
sys/kernel/version sys/kernel/cap_last_cap sys/kernel/ngroups_max sys/kernel/pid_max sys/kernel/threads-max
sys/kernel/numa_balancing sys/vm/overcommit_memory sys/vm/max_map_count sys/vm/nr_hugepages sys/fs/file-max
sys/fs/nr_open
"""
# Of the process itself. The other names show the sockets and the file systems of the whole machine.
OWN = """
auxv cgroup cmdline comm environ exe fdinfo io limits maps numa_maps oom_score schedstat smaps smaps_rollup stat statm
status
"""
# Of processors and their memory. Root may read more, and some files of /sys change something when they are read.
HARDWARE = """
kernel/mm/transparent_hugepage kernel/mm/hugepages devices/system/cpu/[a-z]* devices/system/cpu/cpu*/topology
devices/system/cpu/cpu*/cache devices/system/cpu/cpu*/regs devices/system/cpu/cpu*/cpu_capacity
devices/system/cpu/cpu*/cpufreq devices/system/node/[a-z]* devices/system/node/node*/cpu*
devices/system/node/node*/distance devices/system/node/node*/meminfo devices/system/node/node*/hugepages
"""
NUMBERED = re.compile(r"(cpu|node)\d+")
# Of a folder where Python is installed. Beside them lie settings of pip and of conda, which may hold passwords. If it
# is the folder of a project, everything else of that lies there, too.
PREFIX_PARTS = """
bin include lib lib32 lib64 libexec share sbin src ssl nvvm targets sysroot compiler_compat *-linux-gnu etc/OpenCL
pyvenv.cfg
"""
DEVICE_HARDWARE = "devices class bus module dev"  # what the driver of an accelerator looks up
LISTED_HARDWARE = ("/sys/devices/system", "/sys/kernel/mm")  # of which a process may see the names alone
SYSTEM_PLACES = (
    *(f"/etc/{name}" for name in SETTINGS.split()),
    *(f"/proc/{name}" for name in MACHINE.split()),
    *(f"/proc/self/{name}" for name in OWN.split()),
)
# By which libraries find out how many processors and how much memory they have. The other files of a group say who is
# in it, and what it does.
GROUPS = "/sys/fs/cgroup"
GROUP_FILES = """
cpu.max cpu.weight cpu.cfs_quota_us cpu.cfs_period_us cpu.shares cpuset.cpus cpuset.cpus.effective
cpuset.effective_cpus cpuset.mems cpuset.mems.effective memory.max memory.high memory.low memory.current
memory.limit_in_bytes memory.soft_limit_in_bytes memory.usage_in_bytes pids.max cgroup.controllers
"""
DEVICE_FILES = ("/dev/null", "/dev/zero", "/dev/full")
RANDOM_FILES = ("/dev/random", "/dev/urandom")  # what is written there changes the numbers of the whole machine
SHOWN_DOT_NAMES = {".libs", ".dylibs"}  # where wheels have their libraries
LIBRARIES = ("torch", "triton")
PACKAGE_FOLDERS = {"site-packages", "dist-packages"}
MOST_ENTRIES = 20_000  # names that are looked at for those that begin with a dot
WAY_TO_SCRATCH = OwnershipRule(owned=False, group=True)
MAX_FILES = 1024  # open files of a process: pipes and sockets hold memory of Linux, which counts for no process
MAX_SIGNALS = 1024  # signals that wait; Linux counts those of all processes of a user against one number
NO_CORE = 1  # of the machine's handler of cores, a limit of 0 does not keep Linux from starting it, but 1 does
PR_SET_NO_NEW_PRIVS = 38
CAPSET = {"x86_64": 126, "aarch64": 91}


@dataclass(frozen=True)
class SandboxPolicy:
    """The permissions that ``lock_process`` leaves to a process.

    Attributes:
        scratch: the folder that the process may write.
        readable: further files and folders that it may read and execute, apart from names in them that begin with a
            dot.
        hidden: files and folders that it must not read although ``sys.path`` shows them.
        file_size: the greatest length of a file that it writes, in bytes.
        device: whether it may use the machine's accelerators.
    """

    scratch: str
    readable: tuple[str, ...] = ()
    file_size: int = 1 << 30
    device: bool = False
    hidden: tuple[str, ...] = ()


def readable_places(*, device: bool = False, hidden: Sequence[str] = ()) -> list[str]:
    """Return the existing files and folders that a sandboxed process may read. They are those of Python, its packages
    and the system libraries. If ``device`` is true, those of an accelerator's driver are added. Otherwise they are left
    out. Folders on ``sys.path`` are among the places, apart from those in ``hidden`` and from names in the others that
    begin with a dot.
    """
    places = [*program_places(), *SYSTEM_PLACES, *hardware_places(), *group_places(), *python_places()]
    places += [f"/sys/{name}" for name in DEVICE_HARDWARE.split()] + ["/proc/driver"] if device else []
    places += [place for place in _folders_of_modules(hidden) if _is_installed(place)] + _folders_of_libraries()
    places += [os.path.realpath(place) for place in places if os.path.islink(place)]
    places += [part for place in own_folders(hidden) for part in shown_parts(place, tuple(hidden))]
    return [p for p in dict.fromkeys(places) if os.path.exists(p)]


def own_folders(hidden: Sequence[str] = ()) -> list[str]:
    """Return the folders on ``sys.path``, apart from those in ``hidden``, that may hold files of the user."""
    return [place for place in _folders_of_modules(hidden) if not _is_installed(place)]


def _folders_of_modules(hidden: Sequence[str]) -> list[str]:
    """Return the folders on ``sys.path`` and their real paths, apart from those in ``hidden``."""
    # An editable install may be a link to a folder elsewhere, which must be readable itself.
    listed = [place for place in sys.path if place and not {place, os.path.realpath(place)} & {*hidden}]
    return [*dict.fromkeys(real for place in listed for real in (place, os.path.realpath(place)))]


def _folders_of_libraries() -> list[str]:
    """Return the folders of torch and Triton. If they were built in a folder of the user, they are shown nevertheless,
    however many names that folder has.
    """
    found: list[str] = []
    for name in LIBRARIES:
        with contextlib.suppress(ImportError, ValueError):
            spec = find_spec(name)
            found += (spec.submodule_search_locations or ()) if spec else ()
    return found


def _is_installed(place: str) -> bool:
    """Return whether the folder ``place`` is one of Python or of installed packages, which is shown whole."""
    whole = (*PROGRAMS, *python_places())
    return os.path.basename(place) in PACKAGE_FOLDERS or any(_lies_in(place, folder) for folder in whole)


def python_places() -> list[str]:
    """Return the files and folders of the folders where Python is installed that a sandboxed process may read."""
    return [part for folder in dict.fromkeys((sys.prefix, sys.base_prefix)) for part in _prefix_parts(folder)]


@cache
def _prefix_parts(folder: str) -> tuple[str, ...]:
    """Return the files and folders in ``folder`` that ``PREFIX_PARTS`` names. They are looked up once. The result is
    empty for a folder that this user may not enter.
    """
    return tuple(p for part in PREFIX_PARTS.split() for p in glob.glob(f"{glob.escape(folder)}/{part}"))


def program_places() -> list[str]:
    """Return the folders of programs and libraries that a sandboxed process may read. For root, what root alone may
    read is left out where programs are installed that no distribution has packed, as far as it is looked for.
    """
    if os.geteuid() != 0:
        return [*PROGRAMS]
    packed = [folder for folder in PROGRAMS if folder not in ("/usr", "/opt")]
    with contextlib.suppress(OSError), os.scandir("/usr") as listed:
        packed += [entry.path for entry in listed if entry.name != "local"]
    return [*packed, *(part for folder in ("/usr/local", "/opt") for part in _public_parts(folder))]


@cache
def _public_parts(folder: str) -> tuple[str, ...]:
    """Return the files and folders in ``folder`` that a sandboxed process of root may read. They are looked at once,
    since programs are installed there only now and then.
    """
    return shown_parts(folder, private=True)


def _lies_in(place: str, folder: str) -> bool:
    """Return whether the path ``place`` is that of ``folder`` or of something in it."""
    return f"{place}/".startswith(f"{folder}/")


def group_places() -> list[str]:
    """Return the files of this process's control groups that a sandboxed process may read."""
    groups = {GROUPS}
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            base = Path(GROUPS, *controllers.removeprefix("name=").split()[:1])
            groups |= {str(base), *(str(base / path[1:]) for path in (path, *map(str, Path(path).parents)))}
    return [f"{group}/{name}" for group in sorted(groups) for name in GROUP_FILES.split()]


def shown_parts(place: str, hidden: tuple[str, ...] = (), *, private: bool = False) -> tuple[str, ...]:
    """Return ``(place,)`` if nothing below ``place`` has to be hidden. Otherwise return the files and folders in it
    that a sandboxed process may read.

    Names that begin with a dot are hidden, such as ``.env`` and ``.ssh``, and so are the real paths ``hidden``. Links
    are left out, since a rule would be about their target. At most ``MOST_ENTRIES`` names are looked at, those next to
    ``place`` first, and folders behind them are hidden.

    If ``private`` is true, what only its owner or group may read is hidden instead, and folders behind these names are
    shown.
    """
    real = os.path.realpath(place)

    def is_hidden(entry: os.DirEntry[str]) -> bool:
        """Return whether the file or folder ``entry`` is hidden, or was removed meanwhile."""
        if not private:
            is_dotted = entry.name[0] == "." and entry.name not in SHOWN_DOT_NAMES
            return is_dotted or real + entry.path[len(place) :] in hidden
        wanted = stat.S_IROTH | (stat.S_IXOTH if entry.is_dir(follow_symlinks=False) else 0)
        try:
            return wanted & ~entry.stat(follow_symlinks=False).st_mode != 0
        except OSError:
            return True

    looked, waiting, left = dict[str, dict[os.DirEntry[str], bool]](), deque([place]), MOST_ENTRIES
    while waiting and left > 0:
        folder = waiting.popleft()
        with contextlib.suppress(OSError), os.scandir(folder) as listed:
            looked[folder] = entries = {entry: is_hidden(entry) for entry in listed if not entry.is_symlink()}
            left -= len(entries)
            waiting += [e.path for e, unseen in entries.items() if not unseen and e.is_dir(follow_symlinks=False)]

    def parts_of(folder: str) -> tuple[str, ...]:
        """Return what is shown of ``folder``: itself if all of it is."""
        if folder not in looked:
            return (folder,) if private else ()
        inside = {
            entry.path: parts_of(entry.path) if entry.is_dir(follow_symlinks=False) else (entry.path,)
            for entry, unseen in looked[folder].items()
            if not unseen
        }
        whole = len(inside) == len(looked[folder]) and all(inside[p] == (p,) for p in inside)
        return (folder,) if whole else tuple(part for shown in inside.values() for part in shown)

    return parts_of(place) if place in looked else (place,)


def hardware_places() -> list[str]:
    """Return the files and folders below ``/sys`` that a sandboxed process may read. Whatever only root may read is
    left out, since root may run the sandbox.
    """
    found = (path for pattern in HARDWARE.split() for path in Path("/sys").glob(pattern))
    return [str(part) for path in found if not NUMBERED.fullmatch(path.name) for part in _open_parts(path)]


def _open_parts(path: Path) -> list[Path]:
    """Return ``[path]`` if everybody may read all files there that their owner may read. Otherwise return those files
    and folders inside ``path`` for which this holds.
    """
    try:
        if not path.is_dir():
            return [path] if path.stat().st_mode & stat.S_IROTH else []
        inside = {part: _open_parts(part) for part in path.iterdir() if not part.is_symlink()}
        hidden = [part for part, shown in inside.items() if shown != [part] and part.stat().st_mode & stat.S_IRUSR]
    except OSError:
        return []
    return [part for shown in inside.values() for part in shown] if hidden else [path]


def lock_process(cell: SandboxPolicy) -> dict[str, str]:
    """Restrict this process irrevocably by resource limits, dropped capabilities, Landlock and seccomp. Return a dict
    from the name of each of these restrictions to an empty string, or to the reason why it is not in force.
    """
    # Files in the scratch folder are for this user alone.
    os.umask(0o077)
    missing = {
        "limits": _set_resource_limits(cell),
        "capabilities": _drop_capabilities(),
        "files": _restrict_files(cell),
        "system calls": install_filter(device=cell.device),
    }
    # GCC looks for its parts beside the first program of its name, which it can see and not run in a hidden folder.
    os.environ["PATH"] = os.pathsep.join(filter(_can_list, os.get_exec_path()))
    return missing


def _can_list(folder: str) -> bool:
    """Return whether this process can list the entries of a folder."""
    try:
        os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
    except OSError:
        return False
    return True


def _set_resource_limits(cell: SandboxPolicy) -> str:
    """Forbid core dumps, and limit the length of written files and the numbers of open ones and of waiting signals.
    Return an empty string, or the error.

    The process is also marked as the first one that Linux ends when memory runs out.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    wanted = {resource.RLIMIT_CORE: NO_CORE, resource.RLIMIT_FSIZE: cell.file_size}
    wanted |= {resource.RLIMIT_NOFILE: MAX_FILES, resource.RLIMIT_SIGPENDING: MAX_SIGNALS}
    try:
        for kind, most in wanted.items():
            hard = resource.getrlimit(kind)[1]
            value = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (value, value))
    except (OSError, ValueError) as e:
        return str(e)
    return ""


def _drop_capabilities() -> str:
    """Drop all Linux capabilities of this process. Return an empty string, or the error.

    Root has capabilities, and another user in a container may have them. Root without them still owns many files, which
    Landlock protects.
    """
    number = CAPSET.get(os.uname().machine)
    if number is None:
        return f"no number of capset for {os.uname().machine}"
    libc = ctypes.CDLL(None, use_errno=True)
    # The version of the capability structures (_LINUX_CAPABILITY_VERSION_3), and this process.
    header = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
    nothing = ctypes.create_string_buffer(bytes(24))
    failed = libc.syscall(number, ctypes.byref(header), ctypes.byref(nothing))
    return f"capset: {os.strerror(ctypes.get_errno())}" if failed else ""


def _restrict_files(cell: SandboxPolicy) -> str:
    """Restrict this process by Landlock. It may then read only the folders and files that ``cell`` lists and those that
    every sandbox needs, and write only the scratch folder of ``cell`` and files of devices. Return an empty string, or
    a message if the restriction fails.

    If the kernel supports it, signals and abstract sockets stay within the process and its descendants, too.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(CREATE, None, 0, VERSION)
    if version < 1:
        return f"Landlock: {os.strerror(ctypes.get_errno())}"
    # Each version of Landlock knows more rights. A rule with an unknown right is an error.
    every = (1 << (13 if version == 1 else 14 if version == 2 else 15 if version < 5 else 16)) - 1
    attributes = struct.pack("=QQQ", every, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = libc.syscall(CREATE, ctypes.create_string_buffer(attributes, len(attributes)), len(attributes), 0)
    if rules < 0:
        return f"Landlock: {os.strerror(ctypes.get_errno())}"
    try:
        reads = EXECUTE | READ | LIST | (IOCTL & every)
        shown = readable_places(device=cell.device, hidden=cell.hidden)
        for place in (*shown, *(part for folder in cell.readable for part in shown_parts(folder, cell.hidden))):
            _allow_access(libc, rules, place, reads)
        for place in RANDOM_FILES:
            _allow_access(libc, rules, place, READ)
        # Names only. Root owns the disks, and Python takes a folder that it cannot list for one without modules.
        own = (*cell.readable, *own_folders(cell.hidden))
        for folder in ("/proc/self", *LISTED_HARDWARE, *own, *(("/dev",) if cell.device else ())):
            _allow_access(libc, rules, folder, LIST)
        # Somebody could have put another folder in its place. A folder on the way that cannot be listed says nothing.
        with contextlib.suppress(PermissionError):
            os.close(open_folder(cell.scratch, WAY_TO_SCRATCH))
        for place in (cell.scratch, *DEVICE_FILES, *(_accelerator_places() if cell.device else ())):
            _allow_access(libc, rules, place, every)
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if libc.syscall(RESTRICT, rules, 0):
            return f"Landlock: {os.strerror(ctypes.get_errno())}"
    except OSError as e:
        return f"Landlock: {e}"
    finally:
        os.close(rules)
    return "" if version >= 3 else f"Landlock {version} cannot forbid truncation; Linux 6.2 can"


def _accelerator_places() -> Iterable[str]:
    """Return the device files of accelerators, and the process's own folder in ``/proc``, as strings.

    The CUDA driver does not start if it cannot write to that folder.
    """
    return [*(str(p) for pattern in ("nvidia*", "dri/*") for p in Path("/dev").glob(pattern)), "/proc/self"]


def _allow_access(libc: ctypes.CDLL, rules: int, place: str, access: int) -> None:
    """Add a rule to the Landlock ruleset ``rules`` that allows ``access``, a bit mask of rights, at and below
    ``place``. A place that does not exist is skipped. Raise ``OSError`` if the rule is refused.
    """
    try:
        handle = os.open(place, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        access &= -1 if os.path.isdir(place) else FILE_RIGHTS
        rule = struct.pack("=Qi", access, handle)
        if access and libc.syscall(ADD, rules, BENEATH, ctypes.create_string_buffer(rule, len(rule)), 0):
            raise OSError(ctypes.get_errno(), f"no rule for {place}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(handle)
