"""A seccomp filter for code that is not trusted. It is assembled here, and needs no library and no privilege.

The filter allows the system calls of compilers and threads. Calls that reach another process, the network or the clock
fail with EPERM. Calls with a process id as their first argument are allowed for the caller's own id alone.

A process can leave neither its group nor its session: those calls do nothing and return 0. The supervisor stops and
ends the whole group, so no process can escape by starting another one and ending.

The driver of CUDA binds a local socket when it starts, and does not start without it. If a device is judged, local
sockets of a connected kind may therefore be made, bound and listened on. No socket can be connected, so none reaches
anything.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import struct

PR_SET_NO_NEW_PRIVS, SECCOMP_SET_MODE_FILTER, FILTER_FLAG_TSYNC = 38, 1, 1
ALLOW, REFUSE = 0x7FFF0000, 0x00050001  # SECCOMP_RET_ERRNO | EPERM
NOTHING, UNKNOWN = 0x00050000, 0x00050026  # return 0 without an effect; return ENOSYS
LOAD, EQUAL, AT_LEAST, AND, RETURN = 0x20, 0x15, 0x35, 0x54, 0x06  # ld abs, jeq, jge, and, ret
NUMBER_AT, ARCHITECTURE_AT, FIRST_AT, SECOND_AT = 0, 4, 16, 24  # in struct seccomp_data
LOCAL, KIND, CONNECTED = 1, 0xF, (1, 5)  # AF_UNIX; the bits of a socket's kind; SOCK_STREAM, SOCK_SEQPACKET
X32 = 0x40000000

# The numbers of the system calls: x86-64, arm64.
REFUSED_CALLS = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "kcmp": (312, 272),
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "setns": (308, 268),
    "unshare": (272, 97),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "syslog": (103, 116),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "memfd_create": (319, 279),  # its memory would count for no process
    "io_submit": (209, 2),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "timer_create": (222, 107),  # its signal may continue a stopped process
}
OWN_PROCESS_CALLS = {  # allowed for the caller's own process, or for 0, which means the same
    "kill": (62, 129),
    "tgkill": (234, 131),
    "rt_tgsigqueueinfo": (297, 240),
    "prlimit64": (302, 261),
}
PRETENDED_CALLS = {"setsid": (112, 157), "setpgid": (109, 154)}
CLONE, CLONE3 = (56, 220), (435, 435)  # the flags of clone3 lie in memory, so it is refused and libc uses clone
NAMESPACES, AT_ITS_END = 0x7E020000, 0xFF  # flags of clone, and the signal to the parent at the end
FILE_CALLS = {  # numbers, and forbidden second arguments: signals to other processes, and locks
    "fcntl": ((72, 25), (8, 10, 15, 1024, 1026)),  # F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY
    "ioctl": ((16, 29), (0x8901, 0x8902)),  # FIOSETOWN, SIOCSPGRP
}
DEVICE_CALLS = frozenset({"bind", "listen", "memfd_create", "timer_create"})
MACHINES = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}  # column, AUDIT_ARCH, number of seccomp


def _filter_program(column: int, architecture: int, pid: int, device: bool) -> list[tuple[int, int, int, int]]:
    """Return the instructions ``(code, if true, if false, value)`` of the filter. Jumps are relative."""
    # System call numbers of another architecture, such as 32-bit ones, mean other calls.
    program = [(LOAD, 0, 0, ARCHITECTURE_AT), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, REFUSE)]
    # x32 has numbers of its own for the same calls.
    program += [(LOAD, 0, 0, NUMBER_AT), (AT_LEAST, 0, 1, X32), (RETURN, 0, 0, REFUSE)]
    program += _local_socket_rules(REFUSED_CALLS["socket"][column]) if device else []
    for name, numbers in REFUSED_CALLS.items():
        if not (device and name in DEVICE_CALLS):
            program += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, REFUSE)]
    for numbers in OWN_PROCESS_CALLS.values():
        program += [
            (EQUAL, 0, 5, numbers[column]),
            (LOAD, 0, 0, FIRST_AT),
            (EQUAL, 2, 0, pid),
            (EQUAL, 1, 0, 0),
            (RETURN, 0, 0, REFUSE),
            (RETURN, 0, 0, ALLOW),
        ]
    return [*program, *_containment_rules(column), (RETURN, 0, 0, ALLOW)]


def _containment_rules(column: int) -> list[tuple[int, int, int, int]]:
    """Return the rules that keep processes in their group and namespaces, and restrict signals by files."""
    program = [(EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, UNKNOWN)]
    for numbers in PRETENDED_CALLS.values():
        program += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, NOTHING)]
    program += [
        (EQUAL, 0, 9, CLONE[column]),
        (LOAD, 0, 0, FIRST_AT),
        (AND, 0, 0, NAMESPACES),
        (EQUAL, 0, 4, 0),
        (LOAD, 0, 0, FIRST_AT),
        (AND, 0, 0, AT_ITS_END),
        (EQUAL, 2, 0, 0),
        # Another signal, such as SIGCONT, could continue a stopped parent.
        (EQUAL, 1, 0, signal.SIGCHLD),
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    ]
    for numbers, values in FILE_CALLS.values():
        program += [
            (EQUAL, 0, 3 + len(values), numbers[column]),
            (LOAD, 0, 0, SECOND_AT),
            *((EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)),
            (RETURN, 0, 0, ALLOW),
            (RETURN, 0, 0, REFUSE),
        ]
    return program


def _local_socket_rules(number: int) -> list[tuple[int, int, int, int]]:
    """Return the rules that allow local sockets of a connected kind, and refuse all others."""
    kinds = [(EQUAL, len(CONNECTED) - i, 0, kind) for i, kind in enumerate(CONNECTED)]
    body = [
        (LOAD, 0, 0, FIRST_AT),
        (EQUAL, 0, 2 + len(kinds), LOCAL),
        (LOAD, 0, 0, SECOND_AT),
        (AND, 0, 0, KIND),
        *kinds,
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    ]
    return [(EQUAL, 0, len(body), number), *body]


def install_filter(*, device: bool = False) -> str:
    """Install the filter for this process and its children. Return an empty text, or why that failed.

    With ``device``, the driver of an accelerator can start.
    """
    machine = MACHINES.get(platform.machine())
    if machine is None:
        return f"no table of system calls for {platform.machine()}"
    column, architecture, number = machine
    program = _filter_program(column, architecture, os.getpid(), device)
    code = b"".join(struct.pack("=HBBI", *line) for line in program)
    lines = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(lines)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return f"no_new_privs: {os.strerror(ctypes.get_errno())}"
    if libc.syscall(number, SECCOMP_SET_MODE_FILTER, FILTER_FLAG_TSYNC, ctypes.byref(header)):
        return f"seccomp: {os.strerror(ctypes.get_errno())}"
    return ""
