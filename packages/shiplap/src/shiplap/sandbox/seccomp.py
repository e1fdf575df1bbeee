"""A seccomp filter for code that is not trusted. It is assembled here, and needs no library and no privilege.

The filter allows the calls of ``system_calls`` and some others on a condition (``_conditions``). Every other call fails
with EPERM, one that is newer than the table with ENOSYS, so that libc does without it. Calls of another architecture,
and those of the x32 ABI, end the process: their numbers mean other calls.

No call that changes the mode, the owner, the times or the attributes of a file is allowed: Landlock has no right for
them, so they could not be restricted to the scratch folder. GNU's linker tries to make its output executable, and does
without.

Calls with a process id as their first argument are allowed for the caller's own id alone, and so are clocks that
count the time of a process. SIGKILL cannot be sent, nor a limit of processor time be set, at whose end Linux sends it:
only the outside, or Linux when memory runs out, ends a process by it. A process can leave neither its group nor its
session, and no lock of a file reaches others: those calls do nothing and return 0. The supervisor stops and ends the
whole group, so no process can escape by starting another one and ending.

The driver of CUDA binds a local socket when it starts, and does not start without it. If a device is judged, local
sockets of a connected kind may therefore be made, bound and listened on. No socket can be connected, so none reaches
anything.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
from collections.abc import Iterable, Iterator, Sequence

from shiplap.sandbox.system_calls import ALLOWED, NEWEST, WITH_DEVICE

PR_SET_NO_NEW_PRIVS, SECCOMP_SET_MODE_FILTER, FILTER_FLAG_TSYNC = 38, 1, 1
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # REFUSE is SECCOMP_RET_ERRNO | EPERM
NOTHING, UNKNOWN = 0x00050000, 0x00050026  # return 0 without an effect; return ENOSYS
LOAD, EQUAL, AT_LEAST, AND, RETURN = 0x20, 0x15, 0x35, 0x54, 0x06  # ld abs, jeq, jge, and, ret
NUMBER_AT, ARCHITECTURE_AT = 0, 4  # in struct seccomp_data
# Low halves of the arguments, and one high half.
FIRST_AT, SECOND_AT, THIRD_AT, FOURTH_AT, FIFTH_AT, FIFTH_HIGH_AT = 16, 24, 32, 40, 48, 52
LOCAL, KIND, CONNECTED = 1, 0xF, (1, 5)  # AF_UNIX; the bits of a socket's kind; SOCK_STREAM, SOCK_SEQPACKET
X32 = 0x40000000

# The numbers of the system calls: x86-64, arm64.
OWN_PROCESS_CALLS = {  # allowed for the caller's own process, or for 0, which means the same
    "kill": (62, 129),
    "tgkill": (234, 131),
    "rt_tgsigqueueinfo": (297, 240),
    "prlimit64": (302, 261),
}
SIGNAL_AT = {"kill": SECOND_AT, "tgkill": THIRD_AT, "rt_tgsigqueueinfo": THIRD_AT}
PRETENDED_CALLS = {"setsid": (112, 157), "setpgid": (109, 154), "flock": (73, 32)}
CLOCK_CALLS = {"clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115)}
OTHERS_CLOCKS, OWN_CLOCKS = 0x80000000, 0xFFFFFFF8  # the first ids of processes' clocks, and of those of the caller
SETRLIMIT, FUTEX, FADVISE, DROP_PAGES = (160, 164), (202, 98), (221, 223), (4,)
# With KEEP_SIZE, file systems take blocks behind the end of a file, beyond the limit of its size.
FALLOCATE = (285, 47)
# Without those that take pages of a file from others (REMOVE, COLD, PAGEOUT), join them (COLLAPSE), compare them with
# memory of others (MERGEABLE), or say that they are broken.
MADVISE, ADVICE = (28, 233), (0, 1, 2, 3, 4, 8, 10, 11, 14, 15, 16, 17, 18, 19, 22, 23, 102, 103)
# With flags they tell which pages of a file others have read. libc does without them if there are none.
FLAGGED_READS = (327, 286), (328, 287)
CLOSE_RANGE, CLOSE_FLAGS = (436, 436), (0, 4)  # not CLOSE_RANGE_UNSHARE, which gives a thread open files of its own
# WAIT, WAKE, FD, WAKE_OP, WAIT_BITSET and WAKE_BITSET, on memory of the process alone or on shared memory. The others
# lend the caller's priority to the thread whose id the word holds, which may be any thread of the machine. REQUEUE and
# CMP_REQUEUE only on memory of the process alone: in a file that it may read, they would let others wait for ever.
PRIVATE_MEMORY, FUTEX_OPERATION = 0x80, 0xFF
FUTEX_OPERATIONS = (*(own | o for own in (PRIVATE_MEMORY, 0) for o in (0, 1, 9, 10, 5, 2)), 0x83, 0x84)
# With MAP_HUGETLB, pages that the machine has set aside are taken from others, though nothing uses them yet. With
# MAP_LOCKED, pages stay in memory as by ``mlock``.
MMAP, RESERVING = (9, 222), 0x40000 | 0x2000
# A file can be made with the right to run as its owner, which no other call may set: not with O_CREAT or O_TMPFILE.
# ``openat2`` has its mode in memory, so that libc does without it.
MAKES_FILE, AS_OWNER = 0o100 | 0o20000000, 0o6000
OPENING = (((2, None), SECOND_AT, THIRD_AT), ((257, 56), THIRD_AT, FOURTH_AT))  # where the flags and the mode are
# An access for neither reading nor writing, which needs no right of Landlock: any file or device could be opened.
NO_ACCESS = 3
CREAT, OPENAT2 = (85, None), (437, 437)
# A folder that its owner cannot list or enter hides its files from ``du``, which measures them: not by a mode, nor by a
# mask of modes.
OWNER = 0o700
MAKING_FOLDERS = (((83, None), SECOND_AT), ((258, 34), THIRD_AT))  # where the mode is
UMASK = (95, 166)
# SET_GS, SET_FS, GET_FS, GET_GS, GET_CPUID, parts of the processor (XCOMP) that a process may use, and the state of
# control-flow protection and of tags in addresses. Not those that set tags: an argument would have many addresses.
ARCH_PRCTL = (158, None)
ARCH_OPTIONS = (0x1001, 0x1002, 0x1003, 0x1004, 0x1011, 0x1021, 0x1022, 0x1023, 0x3001, 0x4001, 0x5005)
# Those that interrupt the threads of this process alone, and queries: not GLOBAL, which interrupts all processors.
MEMBARRIER, BARRIERS = (324, 283), (0, 8, 16, 32, 64, 128, 256, 512)
GETSOCKOPT, PEER_DESCRIPTOR = (55, 209), (77,)  # SO_PEERPIDFD, a descriptor of the process at the other end
CLONE, CLONE3 = (56, 220), (435, 435)  # the flags of clone3 lie in memory, so it is refused and libc uses clone
# Flags of clone that share or set what is the caller's own: no namespace, no other parent, no tracer, no descriptor.
SHARED, AT_ITS_END = 0x017D4F00, 0xFF  # the other bits are the signal to the parent at the end
THREAD, SAME_FILES = 0x10000, 0x400  # CLONE_THREAD, CLONE_FILES: what a thread alone has open is not seen outside
FCNTL, IOCTL, PRCTL = (72, 25), (16, 29), (157, 167)
# Copies of a descriptor, its flags, and the size and seals of what is open. None sends a signal or a notice.
FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030, 1032, 1034)
LOCK_COMMANDS = (6, 7, 37, 38)  # F_SETLK, F_SETLKW and the same of an open file: pretended
# TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX: none changes a file or its attributes.
IOCTL_REQUESTS = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# Get: PDEATHSIG, DUMPABLE, NAME, SECCOMP, CAPBSET, TIMERSLACK, NO_NEW_PRIVS, THP, SVE and SME lengths, SPECULATION,
# AUXV. Set: NAME, NO_NEW_PRIVS, and names of memory (VMA), which libc gives.
PRCTL_OPTIONS = (2, 3, 15, 16, 21, 23, 30, 38, 39, 42, 51, 52, 64, 0x41555856, 0x53564D41)
# Requests of CUDA's and of the graphics drivers have the kinds F and d. Those of its unified memory are small numbers.
DRIVERS, REQUEST_KIND, UNIFIED_MEMORY, INITIALIZE = (0x4600, 0x6400), 0xFF00, 0x100, (0x30000001, 0x30000002)
SOCKET, SOCKETPAIR, SENDTO = (41, 198), (53, 199), (44, 206)
MACHINES = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}  # column, AUDIT_ARCH, number of seccomp

Line = tuple[int, int, int, int]
"""One instruction: its code, the jump if true, the jump if false, its value. Jumps are relative."""


def assemble(column: int, architecture: int, pid: int, device: bool) -> list[Line]:
    """Return the instructions of the seccomp filter for a machine.

    ``column`` is 0 for x86-64 and 1 for arm64, the machine's column in the tables of system calls. ``architecture`` is
    the kernel's AUDIT_ARCH constant of the machine, and ``pid`` the id of this process. If ``device`` is true, the
    filter also allows the calls that a GPU driver needs. Otherwise it refuses them.
    """
    program = [(LOAD, 0, 0, ARCHITECTURE_AT), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL)]
    program += [(LOAD, 0, 0, NUMBER_AT), (AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL)]
    for number, body in _conditions(column, pid, device):
        program += [(EQUAL, 0, len(body), number), *body]
    for first, last in _ranges(column, device):
        program += [(AT_LEAST, 0, 2, first), (AT_LEAST, 1, 0, last + 1), (RETURN, 0, 0, ALLOW)]
    return [*program, (AT_LEAST, 0, 1, NEWEST + 1), (RETURN, 0, 0, UNKNOWN), (RETURN, 0, 0, REFUSE)]


def _ranges(column: int, device: bool) -> Iterator[tuple[int, int]]:
    """Yield (first, last) of each run of consecutive numbers of system calls that are allowed with any arguments.

    ``column`` is the machine's column in the tables of system calls. If ``device`` is true, the calls that a GPU driver
    needs are included. Otherwise they are left out.
    """
    classes = (*ALLOWED, *(WITH_DEVICE if device else ()))
    numbers = sorted({n for c in classes for pair in c.numbers.values() if (n := pair[column]) is not None})
    first = last = numbers[0]
    for number in numbers[1:]:
        if number != last + 1:
            yield first, last
            first = number
        last = number
    yield first, last


def _conditions(column: int, pid: int, device: bool) -> Iterator[tuple[int, list[Line]]]:
    """Yield (number, instructions) for each system call whose permission depends on its arguments. The filter
    instructions test the arguments.

    ``column`` is the machine's column in the tables of system calls, and ``pid`` the id of this process. If ``device``
    is true, the calls that a GPU driver needs are included. Otherwise they are left out.
    """
    yield FUTEX[column], _one_of(SECOND_AT, FUTEX_OPERATIONS, FUTEX_OPERATION)  # first, since it is called most
    yield MMAP[column], _without(FOURTH_AT, 0 if device else RESERVING)
    for pair, flags_at, mode_at in OPENING:
        if (number := pair[column]) is not None:
            nothing = [(LOAD, 0, 0, flags_at), (AND, 0, 0, NO_ACCESS), (EQUAL, 0, 1, NO_ACCESS), (RETURN, 0, 0, REFUSE)]
            opened = [(LOAD, 0, 0, flags_at), (AND, 0, 0, MAKES_FILE), (EQUAL, 0, 1, 0), (RETURN, 0, 0, ALLOW)]
            yield number, [*nothing, *opened, *_without(mode_at, AS_OWNER)]
    if (number := CREAT[column]) is not None:
        yield number, _without(SECOND_AT, AS_OWNER)
    for pair, mode_at in MAKING_FOLDERS:
        if (number := pair[column]) is not None:
            yield number, _one_of(mode_at, (OWNER,), OWNER)
    yield UMASK[column], _without(FIRST_AT, OWNER)
    if (number := ARCH_PRCTL[column]) is not None:
        yield number, _one_of(FIRST_AT, ARCH_OPTIONS)
    for name, numbers in OWN_PROCESS_CALLS.items():
        killing = _unless(SIGNAL_AT[name], (signal.SIGKILL,), REFUSE) if name in SIGNAL_AT else []
        killing += _unless_limit_is_set() if name == "prlimit64" else []
        yield numbers[column], [*killing, *_one_of(FIRST_AT, (pid, 0))]
    yield SETRLIMIT[column], [*_unless(FIRST_AT, (resource.RLIMIT_CPU,), REFUSE), (RETURN, 0, 0, ALLOW)]
    for numbers in CLOCK_CALLS.values():
        own = [(AT_LEAST, 0, 2, OTHERS_CLOCKS), (AT_LEAST, 1, 0, OWN_CLOCKS), (RETURN, 0, 0, REFUSE)]
        yield numbers[column], [(LOAD, 0, 0, FIRST_AT), *own, (RETURN, 0, 0, ALLOW)]
    for numbers in PRETENDED_CALLS.values():
        yield numbers[column], [(RETURN, 0, 0, NOTHING)]
    for numbers in (CLONE3, OPENAT2, *FLAGGED_READS):
        yield numbers[column], [(RETURN, 0, 0, UNKNOWN)]
    yield FALLOCATE[column], _one_of(SECOND_AT, (0,))
    yield MADVISE[column], _one_of(THIRD_AT, ADVICE)
    yield MEMBARRIER[column], _one_of(FIRST_AT, BARRIERS)
    yield GETSOCKOPT[column], [*_unless(THIRD_AT, PEER_DESCRIPTOR, REFUSE), (RETURN, 0, 0, ALLOW)]
    yield CLOSE_RANGE[column], _one_of(THIRD_AT, CLOSE_FLAGS)
    yield FADVISE[column], [*_unless(FOURTH_AT, DROP_PAGES, REFUSE), (RETURN, 0, 0, ALLOW)]  # pages that others read
    # Another signal at its end, such as SIGCONT, could continue a stopped parent.
    others = [(LOAD, 0, 0, FIRST_AT), (AND, 0, 0, 0xFFFFFFFF & ~(SHARED | AT_ITS_END))]
    apart = [(LOAD, 0, 0, FIRST_AT), (AND, 0, 0, THREAD | SAME_FILES), (EQUAL, 0, 1, THREAD), (RETURN, 0, 0, REFUSE)]
    ending = _one_of(FIRST_AT, (0, signal.SIGCHLD), AT_ITS_END)
    yield CLONE[column], [*others, (EQUAL, 1, 0, 0), (RETURN, 0, 0, REFUSE), *apart, *ending]
    yield FCNTL[column], [*_unless(SECOND_AT, LOCK_COMMANDS, NOTHING), *_one_of(SECOND_AT, FCNTL_COMMANDS)]
    yield IOCTL[column], [*(_driver_requests() if device else ()), *_one_of(SECOND_AT, IOCTL_REQUESTS)]
    yield PRCTL[column], _one_of(FIRST_AT, PRCTL_OPTIONS)
    # A datagram may be sent to any local socket, so both ends of a pair are of a connected kind, and nothing is
    # addressed.
    nowhere = [(LOAD, 0, 0, FIFTH_HIGH_AT), (EQUAL, 1, 0, 0), (RETURN, 0, 0, REFUSE)]
    yield SENDTO[column], [*nowhere, *_one_of(FIFTH_AT, (0,))]
    local = [(LOAD, 0, 0, FIRST_AT), (EQUAL, 1, 0, LOCAL), (RETURN, 0, 0, REFUSE)]
    for numbers in (SOCKETPAIR, *((SOCKET,) if device else ())):
        yield numbers[column], [*local, *_one_of(SECOND_AT, CONNECTED, KIND)]


def _one_of(place: int, values: Iterable[int], mask: int = 0xFFFFFFFF) -> list[Line]:
    """Return filter instructions that allow the system call if its argument at offset ``place`` of the call's data,
    masked by ``mask``, is one of ``values``. They refuse it otherwise.
    """
    wanted = list(values)
    tests = [(EQUAL, len(wanted) - i, 0, value) for i, value in enumerate(wanted)]
    return [(LOAD, 0, 0, place), (AND, 0, 0, mask), *tests, (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]


def _without(place: int, bits: int) -> list[Line]:
    """Return filter instructions that allow the system call if its argument at offset ``place`` of the call's data has
    none of ``bits``. They refuse it otherwise.
    """
    return [(LOAD, 0, 0, place), (AND, 0, 0, bits), (EQUAL, 1, 0, 0), (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]


def _unless(place: int, values: Sequence[int], decision: int) -> list[Line]:
    """Return filter instructions that end with ``decision``, such as ``REFUSE``, if the argument of the system call at
    offset ``place`` of the call's data is one of ``values``. Otherwise the filter continues with the next instruction.
    """
    tests = [(EQUAL, len(values) - i, 0, value) for i, value in enumerate(values[:-1], 1)]
    return [(LOAD, 0, 0, place), *tests, (EQUAL, 0, 1, values[-1]), (RETURN, 0, 0, decision)]


def _unless_limit_is_set() -> list[Line]:
    """Return filter instructions that refuse a ``prlimit64`` call that sets the limit of processor time. For any other
    ``prlimit64`` call, the filter continues with the next instruction.
    """
    is_set = [(LOAD, 0, 0, THIRD_AT), (EQUAL, 0, 2, 0), (LOAD, 0, 0, THIRD_AT + 4), (EQUAL, 1, 0, 0)]
    return [(LOAD, 0, 0, SECOND_AT), (EQUAL, 0, 5, resource.RLIMIT_CPU), *is_set, (RETURN, 0, 0, REFUSE)]


def _driver_requests() -> list[Line]:
    """Return filter instructions that allow the ioctl requests of GPU drivers. For any other request, the filter
    continues with the next instruction. Landlock restricts these requests to the drivers' device files.
    """
    return [
        (LOAD, 0, 0, SECOND_AT),
        (AT_LEAST, 0, 4, UNIFIED_MEMORY),
        (EQUAL, 3, 0, INITIALIZE[0]),
        (EQUAL, 2, 0, INITIALIZE[1]),
        (AND, 0, 0, REQUEST_KIND),
        (EQUAL, 0, 1, DRIVERS[0]),
        (RETURN, 0, 0, ALLOW),
        (EQUAL, 0, 1, DRIVERS[1]),
        (RETURN, 0, 0, ALLOW),
    ]


def install_filter(*, device: bool = False) -> str:
    """Install the seccomp filter of the sandbox for all threads of this process and its children. Return an empty
    string, or the reason why that failed.

    If ``device`` is true, the calls that the driver of an accelerator needs are allowed, too. Otherwise they are
    refused.
    """
    machine = MACHINES.get(platform.machine())
    if machine is None:
        return f"no table of system calls for {platform.machine()}"
    column, architecture, number = machine
    program = assemble(column, architecture, os.getpid(), device)
    code = b"".join(struct.pack("=HBBI", *line) for line in program)
    lines = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(lines)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return f"no_new_privs: {os.strerror(ctypes.get_errno())}"
    failed = libc.syscall(number, SECCOMP_SET_MODE_FILTER, FILTER_FLAG_TSYNC, ctypes.byref(header))
    if failed > 0:
        return f"seccomp: thread {failed} of this process cannot have the filter"
    return f"seccomp: {os.strerror(ctypes.get_errno())}" if failed else ""
