"""The system calls that a sandboxed process may make, in classes, each with its reason. All others are refused.

The list was measured on the CPU: it holds what Python, torch, ``torch.compile``, the C and C++ compilers and numpy
called in a sandboxed process (x86-64, glibc 2.36, torch 2.13, 2026-11-28), and the calls by which other releases of
libc do the same. What CUDA's driver needs beyond that is a class of its own. It follows from its documentation and from
earlier runs; this list has not run on a GPU.

Calls with a condition on their arguments are not here but in ``seccomp``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallClass:
    """One class of system calls that a sandboxed process may make.

    Attributes:
        name: the subject of the class, such as ``files``.
        reason: the purpose of the calls, and why they reach nothing outside the sandbox.
        numbers: for each call by name, its numbers on x86-64 and on arm64. A number is None if the machine lacks the
            call.
    """

    name: str
    reason: str
    numbers: dict[str, tuple[int | None, int | None]]


def _call_class(name: str, reason: str, table: str) -> CallClass:
    """Return the class of the system calls in ``table``. Each entry has the name of a call, then its numbers on x86-64
    and on arm64, with ``-`` for a machine that lacks the call.
    """
    words = table.split()
    numbers = [None if word == "-" else int(word) for at, word in enumerate(words) if at % 3]
    return CallClass(name, reason, dict(zip(words[::3], zip(numbers[::2], numbers[1::2], strict=True), strict=True)))


ALLOWED = (
    _call_class(
        "files",
        "read and write what Landlock allows by path, and what is open already",
        """
        read              0  63   write             1  64   readv            19  65   writev           20  66
        pread64          17  67   pwrite64         18  68   preadv          295  69   pwritev         296  70
        lseek             8  62   sendfile         40  71   copy_file_range 326 285   close             3  57
        dup              32  23   dup2             33   -   dup3            292  24   pipe             22   -
        pipe2           293  59   fsync            74  82   fdatasync        75  83   ftruncate        77  46
        truncate         76  45   getdents         78   -   getdents64      217  61   getcwd           79  17
        chdir            80  49   fchdir           81  50   rmdir            84   -   unlink           87   -
        unlinkat        263  35   rename           82   -   renameat        264  38   renameat2       316 276
        link             86   -   linkat          265  37   symlink          88   -   symlinkat       266  36
        """,
    ),
    _call_class(
        "metadata",
        "look at files; nothing here changes a mode, an owner, a time or an attribute, and no attribute is read",
        """
        stat         4   -   lstat        6   -   fstat        5  80   newfstatat 262  79   statx      332 291
        statfs     137  43   fstatfs    138  44   access      21   -   faccessat  269  48   faccessat2 439 439
        readlink    89   -   readlinkat 267  78
        """,
    ),
    _call_class(
        "memory",
        "allocate, protect and return memory of the caller's own",
        """
        brk            12 214   munmap         11 215   mremap         25 216   mprotect       10 226
        msync          26 227   get_mempolicy 239 236
        """,
    ),
    _call_class(
        "processes",
        "start threads and programs, wait for them, and end",
        """
        fork                   57   -   vfork                   58   -   execve                  59 221
        exit                   60  93   exit_group             231  94   wait4                   61 260
        waitid                247  95   set_tid_address        218  96   set_robust_list        273  99
        get_robust_list       274 100   rseq                   334 293   futex_waitv            449 449
        futex_wake            454 454   futex_wait             455 455   restart_syscall        219 128
        sched_yield            24 124   sched_getaffinity      204 123   sched_getparam         143 121
        sched_getscheduler    145 120   sched_get_priority_max 146 125   sched_get_priority_min 147 126
        sched_rr_get_interval 148 127   sched_getattr          315 275   getpriority            140 141
        getpid                 39 172   getppid                110 173   gettid                 186 178
        getpgid               121 155   getpgrp                111   -   getsid                 124 156
        getuid                102 174   geteuid                107 175   getgid                 104 176
        getegid               108 177   getresuid              118 148   getresgid              120 150
        getgroups             115 158   getrlimit               97 163   getrusage               98 165
        times                 100 153   sysinfo                 99 179   uname                   63 160
        getrandom             318 278   getcpu                 309 168   capget                 125  90
        """,
    ),
    _call_class(
        "signals",
        "handle and wait for signals of the caller's own",
        """
        rt_sigaction     13 134   rt_sigprocmask   14 135   rt_sigreturn     15 139   rt_sigpending   127 136
        rt_sigtimedwait 128 137   rt_sigsuspend   130 133   sigaltstack     131 132   signalfd        282   -
        signalfd4       289  74   pause            34   -
        """,
    ),
    _call_class(
        "waiting",
        "wait for open files and for connections that are there already",
        """
        poll            7   -   ppoll         271  73   select         23   -   pselect6      270  72
        epoll_create  213   -   epoll_create1 291  20   epoll_ctl     233  21   epoll_wait    232   -
        epoll_pwait   281  22   epoll_pwait2  441 441   eventfd       284   -   eventfd2      290  19
        recvfrom       45 207   recvmsg        47 212   shutdown       48 210   getsockname    51 204
        getpeername    52 205
        """,
    ),
    _call_class(
        "time",
        "tell the time and sleep",
        """
        nanosleep        35 101   gettimeofday     96 169   time            201   -   alarm            37   -
        setitimer        38 103   getitimer        36 102   timerfd_create  283  85   timerfd_settime 286  86
        timerfd_gettime 287  87
        """,
    ),
)
WITH_DEVICE = (
    _call_class(
        "devices",
        "start the driver of CUDA: its socket cannot be connected, its timers signal the caller only",
        """
        bind              49 200   listen            50 201   accept            43 202   accept4          288 242
        memfd_create     319 279   sendmsg           46 211   timer_create     222 107   timer_settime    223 110
        timer_gettime    224 108   timer_delete     226 111   timer_getoverrun 225 109   mbind            237 235
        set_mempolicy    238 237   mlock            149 228   mlock2           325 284   munlock          150 229
        """,
    ),
)
NEWEST = 470
"""The highest number of Linux 6.18. A call with a higher number is unknown: libc then does without it."""
