"""Attempts on those who look after the sandbox: the supervisor, its limits, its clock, and the referee that reads.

``python -m tests.sandbox.supervised [NAME ...]`` prints a row for each. An attempt is the source of a candidate, which
is loaded and called in a sandboxed process of small limits. It has got through if its last call returns, or if a
process or a folder is left behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from shiplap.sampling.compare import Difference
from shiplap.sandbox.arguments import ArgumentArena
from shiplap.sandbox.candidate import CandidateError, ExpectedEffects, MachineLack, TargetProcess
from shiplap.sandbox.proc_filesystem import list_session
from shiplap.sandbox.protocol import LoadTarget
from shiplap.sandbox.supervisor import Bounds, SandboxLauncher

BOUNDS = Bounds(seconds=6.0, memory=1 << 28, processes=4, file_size=1 << 24)
CALLS = 3
LEFT_S = 20.0  # seconds until what an attempt has left must be gone
HEAD = """
import ctypes, errno, mmap, os, signal, socket, struct, sys, threading, time
import torch
child = sys.modules["shiplap.sandbox.child"]
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
EXIT = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
held = []
def called(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def leaderless(work):
    pid = os.fork()
    if pid == 0:
        threading.Thread(target=work).start()
        time.sleep(0.02)
        libc.syscall(EXIT, 0)  # the first thread alone
    time.sleep(0.1)
    return pid
def sharing(flags=0x100 | signal.SIGCHLD):  # CLONE_VM
    held.append(ctypes.create_string_buffer(1 << 16))
    top = ctypes.addressof(held[-1]) + (1 << 16) & ~15
    called(libc.clone(libc.sleep, ctypes.c_void_p(top), flags, ctypes.c_void_p(9)))
def apart():  # CLONE_VM, CLONE_FS, CLONE_SIGHAND, CLONE_THREAD, CLONE_SYSVSEM, and not CLONE_FILES
    sharing(0x50b00)
def filled():
    for _ in range(480):
        held.extend(socket.socketpair())
        held[-1].setblocking(False)
        try:
            while True:
                held[-1].send(bytes(1 << 16))
        except BlockingIOError:
            pass
def forked(work, times=1):
    for _ in range(times):
        if os.fork() == 0:
            try:
                work()
            finally:
                os._exit(0)
def touched(size, flags=0x22, step=4096):
    at = libc.mmap(None, size, 3, flags, -1, 0)
    if at == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    for i in range(0, size, step):
        ctypes.memset(at + i, 1, 1)
    return at
usual = child.send_message
def after_answer(work):
    def send(*args):
        usual(*args)
        work()
    child.send_message = send
"""
Looked = Callable[[SandboxLauncher, TargetProcess], str]


def plain(body: str, before: str = "") -> str:
    """A candidate with this body, after ``before`` at import."""
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    return f"{HEAD}{before}\ndef candidate(x):\n{lines}    return x + 1\n"


WAIT = "time.sleep(3)"
# What counts: memory, processes, threads and time that a check of the limits might not see.
COUNTED = {
    "memory of a child without its first thread": "leaderless(lambda: (time.sleep(.1), touched(1 << 29), "
    f"{WAIT}))\n{WAIT}",
    "memory of a child's child": f"forked(lambda: forked(lambda: (touched(1 << 29), {WAIT})))\n{WAIT}",
    "memory in many small children": f"forked(lambda: (touched(100 << 20), {WAIT}), 4)\n{WAIT}",
    "memory of an orphan": f"forked(lambda: forked(lambda: (time.sleep(.2), touched(1 << 29), {WAIT})))\n{WAIT}",
    "memory of a thread's own stack": "threading.stack_size(1 << 29)\n"
    f"t = threading.Thread(target=lambda: (touched(1 << 29, 0x20022), {WAIT}))\nt.start()\n{WAIT}",
    "shared pages that are dropped": "for _ in range(16):\n    at = touched(1 << 25, 0x21)\n"
    f"    called(libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(1 << 25), 4))\n{WAIT}",
    "shared pages that are paged out": "for _ in range(16):\n    at = touched(1 << 25, 0x21)\n"
    f"    called(libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(1 << 25), 21))\n{WAIT}",
    "shared pages that a child holds": "def keep():\n    for _ in range(16):\n        at = touched(1 << 25, 0x21)\n"
    f"        libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(1 << 25), 4)\n    {WAIT}\nforked(keep)\n{WAIT}",
    "page tables": "size = 1 << 38\nat = libc.mmap(None, size, 1, 0x4022, -1, 0)\n"
    "libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(size), 15)\n"
    f"for i in range(0, size, 1 << 21):\n    ctypes.string_at(at + i, 1)\n{WAIT}",
    "huge pages": f"touched(1 << 29, 0x40022, 1 << 21)\n{WAIT}",
    "pages that are locked": "at = touched(1 << 26)\ncalled(libc.mlock(ctypes.c_void_p(at), ctypes.c_size_t(1 << 26)))",
    "memory in sockets": "forked(lambda: None)\nfor _ in range(4):\n    if os.fork() == 0:\n        break\n"
    f"for _ in range(480):\n    held.extend(socket.socketpair())\n{WAIT}",
    "memory in pipes": "for _ in range(4):\n    if os.fork() == 0:\n        break\n"
    f"for _ in range(480):\n    held.append(os.pipe())\n{WAIT}",
    "memory in sockets of threads with files of their own": "def own():\n"
    f"    held.append(called(libc.close_range(1 << 20, 1 << 21, 2)))\n    filled()\n    {WAIT}\n"
    f"for _ in range(5):\n    threading.Thread(target=own).start()\n{WAIT}\n"
    "if not held:\n    raise OSError(errno.EPERM, 'no thread has files of its own')",
    "memory in sockets of threads that are no libc's": "for _ in range(5):\n    mark = len(held)\n    filled()\n"
    "    apart()\n    [end.close() for end in held[mark:-1]]\n    del held[mark:-1]\n" + WAIT,
    "processes without their first thread": f"for _ in range(8):\n    leaderless(lambda: {WAIT})\n{WAIT}",
    "processes whose parents have ended": f"forked(lambda: forked(lambda: {WAIT}, 4), 3)\n{WAIT}",
    "processes of a thread": f"t = threading.Thread(target=lambda: forked(lambda: {WAIT}, 8))\nt.start()\n{WAIT}",
    "processes that share memory": f"for _ in range(8):\n    sharing()\n{WAIT}",
    "a bomb of forks": "ends = time.time() + 3\nwhile time.time() < ends:\n    try:\n        os.fork()\n"
    "    except OSError:\n        pass",
    "a bomb of vforks": "ends = time.time() + 3\nwhile time.time() < ends:\n"
    "    os.posix_spawn('/bin/sleep', ['sleep', '9'], {})",
    "ended children that nobody waits for": "while True:\n    forked(lambda: None, 500)\n    time.sleep(.01)",
    "threads without end": "def wait():\n    time.sleep(60)\nthreading.stack_size(1 << 16)\n"
    f"for _ in range(4500):\n    threading.Thread(target=wait, daemon=True).start()\n{WAIT}",
    "a child whose name is that of a stopped one": "libc.prctl(15, b') T 1 1 1', 0, 0, 0)\n"
    f"forked(lambda: {WAIT}, 8)\n{WAIT}",
    "an answer that never ends": "held.append(usual)\n"
    "child.send_message = lambda c, data, *a: [(c.sendall(data[:1]), time.sleep(.03)) for _ in iter(int, 1)]",
    "an answer of 4 GiB": "child.send_message = lambda c, data, *a: "
    "c.sendall(struct.pack('=I', 0xFFFFFFFF) + bytes(1 << 16))",
    "an answer that is cut off": "child.send_message = lambda c, data, *a: (c.sendall(data[:6]), time.sleep(9))",
    "an answer of another kind": "child.send_message = lambda c, data, *a: c.sendall(child.pack_message("
    "child.protocol.Number(1)))",
    "an answer nested a million times": "child.send_message = lambda c, data, *a: c.sendall("
    "struct.pack('=I', 1 << 19) + b'\\x91' * (1 << 19))",
    "a limit of its own that is raised": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))",
    "a file that is too long": "with open('long', 'wb') as f:\n    f.truncate(1 << 30)",
    "output without end": "while True:\n    os.write(1, b'x' * (1 << 20))",
    "processor time that is waited for": "while True:\n    pass",
    "shared pages with a name of their own": "for _ in range(16):\n    at = touched(1 << 25, 0x21)\n"
    "    libc.prctl(0x53564D41, 0, ctypes.c_ulong(at), ctypes.c_ulong(1 << 25), b'mine')\n"
    f"    called(libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(1 << 25), 4))\n{WAIT}",
    "shared pages behind the end of a map": "for _ in range(16):\n    at = touched(1 << 25, 0x21)\n"
    f"    called(libc.munmap(ctypes.c_void_p(at + 4096), ctypes.c_size_t((1 << 25) - 4096)))\n{WAIT}",
    "shared pages behind the end of a map that has a name": "for _ in range(16):\n    at = touched(1 << 25, 0x21)\n"
    "    libc.prctl(0x53564D41, 0, ctypes.c_ulong(at), ctypes.c_ulong(1 << 25), b'mine')\n"
    f"    called(libc.munmap(ctypes.c_void_p(at + 4096), ctypes.c_size_t((1 << 25) - 4096)))\n{WAIT}",
    "shared pages of /dev/zero": "file = os.open('/dev/zero', os.O_RDWR)\nfor _ in range(16):\n"
    "    at = libc.mmap(None, 1 << 25, 3, 1, file, 0)\n    ctypes.memset(at, 1, 1 << 25)\n"
    f"    called(libc.munmap(ctypes.c_void_p(at + 4096), ctypes.c_size_t((1 << 25) - 4096)))\n{WAIT}",
    "shared pages that a map which is moved leaves": "for _ in range(16):\n    at = touched(1 << 25, 0x21)\n"
    "    libc.mremap.restype = ctypes.c_void_p\n"
    f"    libc.mremap(ctypes.c_void_p(at), ctypes.c_size_t(1 << 25), ctypes.c_size_t(4096), 1)\n{WAIT}",
    "names without end": "os.mkdir('n')\nfor i in range(130_000):\n"
    f"    os.close(os.open(f'n/{{i}}', os.O_CREAT))\n{WAIT}",
    "names of one file without end": "open('f', 'w').close()\nfor i in range(130_000):\n    if not i % 10_000:\n"
    f"        name = f'f{{i}}'\n        open(name, 'w').close()\n    os.link(name, f'l{{i}}')\n{WAIT}"
    "\nif os.statvfs('.').f_favail:\n    raise OSError('names of one file take no room of their own')",
    "folders without end": f"for i in range(110_000):\n    os.mkdir(str(i))\n{WAIT}",
    "paths of mapped files without end": "for _ in range(2000):\n    os.mkdir('x' * 250)\n    os.chdir('x' * 250)\n"
    "f = os.open('f', os.O_CREAT | os.O_RDWR)\nos.ftruncate(f, 4096)\n"
    "for _ in range(1500):\n    libc.mmap(None, 4096, 1, 1, f, 0)",
    "blocks behind the end of its output": "number = {'x86_64': 285, 'aarch64': 47}[os.uname().machine]\n"
    f"called(libc.syscall(number, 1, 1, ctypes.c_long(0), ctypes.c_long(1 << 29)))\nos.close(1)\nos.close(2)\n{WAIT}",
    "removed files of which a page is mapped": "for i in range(40):\n"
    "    f = os.open(str(i), os.O_CREAT | os.O_RDWR, 0o600)\n    os.posix_fallocate(f, 0, 1 << 24)\n"
    f"    held.append(libc.mmap(None, 4096, 3, 1, f, 0))\n    os.close(f)\n    os.unlink(str(i))\n{WAIT}",
    "removed files of a child without its first thread": "def work():\n    time.sleep(.1)\n    for i in range(40):\n"
    "        f = os.open(str(i), os.O_CREAT | os.O_RDWR, 0o600)\n        os.posix_fallocate(f, 0, 1 << 24)\n"
    f"        held.append(f)\n        os.unlink(str(i))\n    time.sleep(60)\nleaderless(work)\n{WAIT}",
    "files in a folder that cannot be listed": "os.umask(0)\nos.mkdir('h', 0o300)\nfor i in range(40):\n"
    f"    open(f'h/{{i}}', 'wb').write(bytes(1 << 23))\n{WAIT}",
    "files in a folder that cannot be listed, by a mask": "libc.umask(0o400)\nos.mkdir('h')\nos.listdir('h')\n"
    "raise OSError('it can be listed')",
}
# What runs or is written while the process should stand.
STANDING = {
    "a helper without its first thread": (f"leaderless(lambda: {WAIT})", ""),
    "a helper in a copy of the kernel's": (
        "os.write(pipe[1], b'x')",
        "pipe, room = os.pipe(), touched(1 << 28, 0x21, 1 << 28)\n"
        "def copy():\n    with open('/usr/bin/env', 'rb') as f:\n        os.read(pipe[0], 1)\n"
        "        while True:\n            f.seek(0)\n"
        "            f.readinto((ctypes.c_char * (1 << 28)).from_address(room))\n"
        "leaderless(copy)\n",
    ),
    "a helper that shares memory": ("", "sharing()\n"),
    "a helper that is an orphan": ("", f"forked(lambda: forked(lambda: {WAIT}))\n"),
    "a helper that traces nobody and waits": ("", "forked(lambda: time.sleep(9))\n"),
    "a parent that waits for its vfork": (
        "after_answer(lambda: os.posix_spawn('/bin/sh', ['sh', '-c', 'kill -STOP $$'], {}))",
        "",
    ),
    "an end after the answer": ("after_answer(lambda: os._exit(0))", ""),
    "an end of the first thread alone": ("after_answer(lambda: libc.syscall(EXIT, 0))", ""),
    "another program after the answer": ("after_answer(lambda: os.execv('/bin/sleep', ['sleep', '9']))", ""),
    "a signal that continues, of its own timer": (
        "event = struct.pack('=QiiQQ', 0, signal.SIGCONT, 0, 0, 0) + bytes(32)\n"
        "called(libc.syscall(222, 1, ctypes.create_string_buffer(event), ctypes.create_string_buffer(8)))",
        "",
    ),
    "a signal that continues, at the end of a child": ("called(libc.syscall(56, signal.SIGCONT, 0, 0, 0, 0))", ""),
    "a signal that continues, by a descriptor": (
        "import fcntl\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETSIG, signal.SIGCONT)",
        "",
    ),
    "a stop that is ignored": ("signal.signal(signal.SIGSTOP, signal.SIG_IGN)", ""),
    "a child that ends while the others stand": ("forked(lambda: os.kill(0, signal.SIGSTOP))", ""),
    "a child that waits for the disk": (
        "os.write(pipe[1], b'x')",
        "pipe = os.pipe()\ndef flush():\n    with open('big', 'wb') as f:\n        os.read(pipe[0], 1)\n"
        "        while True:\n            f.seek(0)\n            f.write(bytes(1 << 23))\n"
        "            os.fsync(f.fileno())\nforked(flush)\n",
    ),
    "a timer of processor time that goes on": (
        "signal.signal(signal.SIGVTALRM, lambda *_: None)\nsignal.setitimer(signal.ITIMER_VIRTUAL, .001, .001)\n"
        "forked(lambda: time.sleep(9))",
        "",
    ),
}


def located(place: str) -> str:
    """A candidate whose harness answers that the results lie at ``place``, the arguments of a ``TensorLocation``."""
    return f"""
made = torch.ones(4)
at = made.data_ptr()
child._describe_place = lambda v: child.protocol.TensorLocation({place})
return made
"""


# Where the results lie, and what the referee reads.
READ = {
    "results in no memory": "x = torch.ones(4)\nlibc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]\n"
    "at = touched(4096)\nheld.append(at)\nlibc.munmap(at, 4096)\n"
    "made = torch.frombuffer((ctypes.c_char * 16).from_address(at), dtype=torch.float32)\nreturn made",
    "results in memory of the clock": "line = next(l for l in open('/proc/self/maps') if '[vvar' in l)\n"
    "at = int(line.split('-')[0], 16)\n"
    "return torch.frombuffer((ctypes.c_char * 16).from_address(at), dtype=torch.float32)",
    "results in a file that is cut off": "with open('short', 'w+b') as f:\n    f.truncate(4096)\n"
    "    m = mmap.mmap(f.fileno(), 4096)\n"
    "    held.append(m)\n    made = torch.frombuffer(m, dtype=torch.float32, count=4)\n    f.truncate(0)\nreturn made",
    "results at an address of Linux": "made = torch.ones(4)\n"
    "child._describe_place = lambda v: child.protocol.TensorLocation('float32', [4], [1], 1 << 61, 'cpu')\nreturn made",
    "results behind a guard": "at = touched(1 << 21)\nmade = torch.frombuffer((ctypes.c_char * 16).from_address(at), "
    "dtype=torch.float32)\ncalled(libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(1 << 21), 102))\n"
    "held.append(at)\nreturn made",
    "results of more elements than a number holds": located("'float32', [1 << 32, 1 << 32], [0, 0], at, 'cpu'"),
    "results of no size": located("'float32', [-4], [1], at, 'cpu'"),
    "results with steps backwards": located("'float32', [4], [-1], at, 'cpu'"),
    "results with steps out of memory": located("'float32', [4], [1 << 60], at, 'cpu'"),
    "results of a kind that is a function": located("'load', [4], [1], at, 'cpu'"),
    "results of a kind in parts": located("'nn.Module', [4], [1], at, 'cpu'"),
    "results of no kind": located("'', [4], [1], at, 'cpu'"),
    "results of quarters of bytes": located("'quint4x2', [4], [1], at, 'cpu'"),
    "results on a device that is not there": located("'float32', [4], [1], at, 'cuda'"),
    "results on no device": located("'float32', [4], [1], at, 'meta'"),
    "results of a hundred dims": located("'float32', [1] * 100, [1] * 100, at, 'cpu'"),
    "results at an address with tags": located("'float32', [4], [1], at | 1 << 57, 'cpu'"),
    "results at the end of all addresses": located("'float32', [4], [1], (1 << 63) - 8, 'cpu'"),
    "results at the page of old calls": located("'float32', [4], [1], 0xffffffffff600000 & (1 << 63) - 1, 'cpu'"),
    "a hole in its arguments": "import ctypes\n"
    "fds = [int(n) for n in os.listdir('/proc/self/fd')]\n"
    "for fd in fds:\n    if 'memfd' in os.readlink(f'/proc/self/fd/{fd}'):\n        os.ftruncate(fd, 0)\n"
    "raise OSError('no file is open')",
    "its output read again": "os.open('/proc/self/fd/1', os.O_RDONLY)",
    "the folder of its neighbour": "os.listdir('../' + str(int(os.path.basename(os.getcwd())) - 1))",
    "the folder above its own": "os.listdir('..')",
    "its own folder renamed": "os.rename(os.getcwd(), os.getcwd() + '0')",
    "a link in place of its folder": "import shutil\nhere = os.getcwd()\nos.rmdir(here)\nos.symlink('/', here)",
    "its own memory by its file": "open('/proc/self/mem', 'r+b').read(1)",
    "the pages of the machine": "open('/proc/self/pagemap', 'rb').read(8)",
    "its score when memory runs out": "open('/proc/self/oom_score_adj', 'w').write('0')",
}
# What is left when all is over.
LEFT = {
    "a folder that cannot be listed": "os.umask(0)\nname = str(time.time_ns())\n"
    "os.mkdir(name, 0o300)\nopen(name + '/x', 'w').close()",
    "folders within folders": "for _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')",
    "names that control a terminal": "for n in ('\\x1b[2J', 'a\\nb', '-rf', '$(id)', '\\u202e', '*'):\n"
    "    open(n, 'w').close()",
    "a link to everything": "os.symlink('/', str(time.time_ns()))",
    "ten thousand files": "for i in range(10_000):\n    os.close(os.open(str(i), os.O_CREAT))",
    "a child that is stopped": f"forked(lambda: os.kill(0, signal.SIGSTOP) or {WAIT})",
    "a child that ignores every signal": "def deaf():\n    for n in range(1, 32):\n        if n not in (9, 19):\n"
    "            signal.signal(n, signal.SIG_IGN)\n    time.sleep(60)\nforked(deaf)",
    "an orphan without its first thread": "forked(lambda: leaderless(lambda: time.sleep(60)))",
}
KILLED = {
    "a child of a launcher that is killed": "forked(lambda: time.sleep(60))",
    "an orphan of a launcher that is killed": "forked(lambda: forked(lambda: time.sleep(60)))\ntime.sleep(.2)",
    "a child without its first thread, of a launcher that is killed": "leaderless(lambda: time.sleep(60))",
}


def run_candidate(launcher: SandboxLauncher, text: str, *, alone: bool = False, kill: bool = False) -> tuple[str, int]:
    """Return what became of a candidate's calls, and the id of its process."""
    folder = Path(tempfile.mkdtemp(prefix="supervised-"))
    (folder / "it.py").write_text(text)
    prisoner = launcher.start([str(folder)], BOUNDS)
    target = TargetProcess(prisoner)
    told = "returned"
    try:
        target.load(LoadTarget(str(folder / "it.py"), ["candidate"], "function", [], 1), ArgumentArena())
        prisoner.alone = alone
        for _ in range(CALLS):
            target.call([torch.ones(4)], ExpectedEffects([torch.empty(4)], lambda got: Difference()))
    except (CandidateError, MachineLack) as e:
        told = f"{type(e).__name__}: {e}"
    if kill:
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.close()
    else:
        prisoner.kill()
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    return told, prisoner.pid


def what_is_left(pid: int, folder: str) -> str:
    """Return which processes of a candidate's session, and which folder, are still there after a while."""
    ends = time.monotonic() + LEFT_S
    while (left := list_session(pid)) or (folder and os.path.exists(folder)):
        if time.monotonic() > ends:
            return f"left {len(left)} processes {folder if folder and os.path.exists(folder) else ''}"
        time.sleep(0.01)
    return ""


def run_all(names: list[str]) -> list[tuple[str, str, bool]]:
    """Return (name, outcome, whether it got through) for each attempt, or for those of these names."""
    rows: list[tuple[str, str, bool]] = []

    def wanted(name: str) -> bool:
        return not names or any(part in name for part in names)

    def add(name: str, told: str, left: str, *, returns: bool = False) -> None:
        through = bool(left) or (told == "returned" and not returns)
        rows.append((name, f"{told[:110]} {left}".strip(), through))
        print(f"{'GOT THROUGH' if through else 'refused':12} {name:62} {rows[-1][1]}", flush=True)

    with SandboxLauncher() as launcher:
        for name, body in {**COUNTED, **READ}.items():
            if wanted(name):
                told, pid = run_candidate(launcher, plain(body))
                add(name, told, what_is_left(pid, ""))
        for name, (body, before) in STANDING.items():
            if wanted(name):
                told, pid = run_candidate(launcher, plain(body or "pass", before), alone=True)
                add(name, told, what_is_left(pid, ""))
    for name, body in {**LEFT, **KILLED}.items():
        if wanted(name):
            with SandboxLauncher() as own:
                told, pid = run_candidate(own, plain(body), kill=name in KILLED)
                folder = own.folder
            add(name, told, what_is_left(pid, folder), returns=True)
    return rows


if __name__ == "__main__":
    ROWS = run_all(sys.argv[1:])
    print(f"{len(ROWS)} attempts, {sum(through for _, _, through in ROWS)} got through")
    sys.exit(any(through for _, _, through in ROWS))
