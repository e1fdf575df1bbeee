"""Judgements of a right kernel while descriptors, memory, disk or processes run out, or while processes are killed.

``python lacks.py MOMENTS KILLS SEED [PART/PARTS] [another]`` prints a row for each. The status is 1 if the kernel was
refused once, if an error is not of the catalogue, or if a folder or a process is left. ``nox -s lacks`` runs it, as
root or not. Processes cannot run out for root, so root becomes another user for these moments, and with ``another`` for
all of them. ``1/4`` runs every fourth row. While processes are killed, the candidate has one of its own, which waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch

import shiplap as sl
from shiplap.errors import ShiplapError
from shiplap.sandbox import launcher as program
from shiplap.sandbox.forked_launcher import ForkedLauncher
from shiplap.sandbox.proc_filesystem import list_descendants

PROBLEM = """
import torch
def reference(x):
    return torch.relu(x) * 2
def get_inputs():
    return [torch.randn(64, 32)]
"""
CANDIDATE = """
def candidate(x):
    return x + x.abs()
"""
HELPED = """
import os, time
if os.fork() == 0:
    time.sleep(600)
"""
ANOTHER = "another"
NOBODY, JUDGED_S, LONGEST_S = 65534, 10.0, 60.0
MIB = 1 << 20


def become_another(folder: Path) -> None:
    """Let this process be one of another user, who owns the folder."""
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, as of a user who has started a program


def limited(kind: int, most: int) -> Callable[[Path], None]:
    return lambda folder: resource.setrlimit(kind, (most, most))


def short_of_files(left: int) -> Callable[[Path], None]:
    def limit(folder: Path) -> None:
        held = len(os.listdir("/proc/self/fd")) + left
        resource.setrlimit(resource.RLIMIT_NOFILE, (held, held))

    return limit


def short_of_memory(left: int) -> Callable[[Path], None]:
    def limit(folder: Path) -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + left
        resource.setrlimit(resource.RLIMIT_AS, (used, used))

    return limit


def owner_of(path: Path) -> int | None:
    """Return the owner's id, or None for a process that has ended."""
    with contextlib.suppress(OSError):
        return path.stat().st_uid
    return None


def short_of_processes(left: int) -> Callable[[Path], None]:
    def limit(folder: Path) -> None:
        become_another(folder)
        mine = [p for p in Path("/proc").glob("[0-9]*") if owner_of(p) == os.geteuid()]
        most = sum(len(list(p.glob("task/*"))) for p in mine) + left
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))

    return limit


def full_disk(blocks: int) -> Callable[[Path], None]:
    """A small disk for temporary files where one can be mounted, and short files elsewhere."""

    def limit(folder: Path) -> None:
        mounted = os.geteuid() == 0 and shutil.which("mount") is not None
        small = f"size={blocks * 4}k,nr_inodes={blocks + 2}"
        mount = ["mount", "-t", "tmpfs", "-o", small, "small", str(folder / "tmp")]
        if not mounted or subprocess.run(mount, capture_output=True, check=False).returncode:
            limited(resource.RLIMIT_FSIZE, blocks * 4096)(folder)

    return limit


def moments(count: int) -> dict[str, Callable[[Path], None]]:
    """Return ``count`` ways to run out, from nothing left to nearly enough."""
    kinds = {
        "files": (short_of_files, [*range(0, 20, 2), *range(20, 60, 5)]),
        "MiB of memory": (lambda n: short_of_memory(n * MIB), [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 400]),
        "pages of a disk": (full_disk, [1, 2, 3, 4, 6, 8, 12, 16, 32, 64]),
        "file size": (lambda n: limited(resource.RLIMIT_FSIZE, n), [0, 1, 512, 4096, 8192, 16384, 65536, MIB]),
        "processes": (short_of_processes, [0, 1, 2, 3, 4, 5, 6, 8]),
    }
    every = {f"{name}, {n} left": make(n) for name, (make, values) in kinds.items() for n in values}  # type: ignore[operator]
    listed = list(every.items())
    return dict(listed[i * len(listed) // count] for i in range(count))


def verdict_of(folder: Path, killer: Callable[[ForkedLauncher], None] | None = None) -> str:
    """Return the verdict on the right kernel, with why it is incomplete or refused."""
    made = ForkedLauncher()
    if killer is not None:
        killer(made)
    with made as launcher:
        result = sl.judge(
            f"{folder}/problem.py:reference",
            f"{folder}/kernel.py:candidate",
            seconds=JUDGED_S,
            timed=False,
            launcher=launcher,
        )
    return f"{result.verdict}: {'; '.join([*(r.evidence for r in result.reasons), *dict(result.missing)])}"[:300]


def run_judgement(folder: Path, limit: Callable[[Path], None], killer: Callable[[ForkedLauncher], None] | None) -> str:
    """Return the outcome of a judgement in a fork of this process that is limited."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder / "tmp")
        try:
            limit(folder)
            if ANOTHER in sys.argv:
                become_another(folder)
            told = verdict_of(folder, killer)
        except ShiplapError as e:
            told = f"error: {e.id} {e.got}"
        except BaseException as e:
            told = (
                f"RAW {type(e).__name__}: {e} in {[f'{f.name} {f.lineno}' for f in extract_tb(e.__traceback__)][-5:]}"
            )
        os.write(writing, told.encode(errors="replace")[:400])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        signal.signal(signal.SIGALRM, lambda *_: os.killpg(child, signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
        told = pipe.read().decode(errors="replace") or "killed"
        signal.setitimer(signal.ITIMER_REAL, 0)
    os.waitpid(child, 0)
    return told


def what_is_left(folder: Path, seconds: float = 5.0) -> list[str]:
    """Return the folders and processes that are still there after a moment."""
    ends = time.monotonic() + seconds
    while True:
        left = [p.name for p in (folder / "tmp").iterdir()] + [f"process {p}" for p in list_descendants(os.getpid())]
        if not left or time.monotonic() > ends:
            return left
        time.sleep(0.02)


def make_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="lacks-"))
    (folder / "tmp").mkdir()
    (folder / "problem.py").write_text(PROBLEM)
    (folder / "kernel.py").write_text(CANDIDATE)
    return folder


def one_row(name: str, limit: Callable[[Path], None], killer: Callable[[ForkedLauncher], None] | None = None) -> bool:
    """Print a row. Return whether it is as it should be."""
    folder, began = make_folder(), time.monotonic()
    if killer is not None:
        (folder / "kernel.py").write_text(HELPED + CANDIDATE)
    told = run_judgement(folder, limit, killer)
    left = what_is_left(folder)
    wrong = told.startswith(("refused", "RAW")) or bool(left) or (told == "killed" and "the judge" not in name)
    took = f"{time.monotonic() - began:5.1f} s"
    print(f"{'WRONG' if wrong else 'right':6} {name:28} {took}  {told} {left or ''}", flush=True)
    subprocess.run(["umount", str(folder / "tmp")], capture_output=True, check=False)
    shutil.rmtree(folder, ignore_errors=True)
    return not wrong


def kill_later(whom: str, after: float) -> Callable[[ForkedLauncher], None]:
    """Return a function that lets a child kill a process of a judgement after some seconds."""

    def begin(launcher: ForkedLauncher) -> None:
        judge = os.getpid()
        alive = os.pidfd_open(judge)
        if os.fork() == 0:
            os.setsid()
            os.closerange(3, alive)
            os.closerange(alive + 1, 1 << 12)
            time.sleep(after)
            signal.pidfd_send_signal(alive, 0)  # an error if it has ended
            family = [pid for pid in list_descendants(judge) if pid != os.getpid()]
            victims = {"the judge": [judge], "the launcher": family[:1], "the candidate": family[1:2]}[whom]
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            os._exit(0)

    return begin


def main(count: int, kills: int, seed: int, part: int = 0, parts: int = 1) -> int:
    """Run all rows, or those of a part, and return the number of rows that are not as they should be."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # who loses its parent becomes a child of this process, and is seen
    program.child.take_baseline()
    torch.relu(torch.randn(4)).sum()
    verdict_of(make_folder())  # another user may not be able to read what is imported later
    rng, rows = random.Random(seed), list[tuple[Any, ...]]()
    # Those whose processes run out count all processes of a user, so they are in one part.
    listed = sorted(moments(count).items(), key=lambda each: each[0].startswith("processes"), reverse=True)
    for number in range(kills):
        whom = ("the judge", "the launcher", "the candidate")[number % 3]
        after = rng.uniform(0.0, 2.5)
        rows.append((f"kill {whom} at {after:.2f} s", lambda folder: None, kill_later(whom, after)))
    alike = sum(name.startswith("processes") for name, _ in listed)
    mine = [*(listed[:alike] if part == 0 else []), *(listed[alike:] + rows)[part::parts]]
    wrong = sum(not one_row(*row) for row in mine)
    print(f"{len(mine)} rows of {count} moments and {kills} kills of seed {seed}: {wrong} wrong")
    return wrong


if __name__ == "__main__":
    PLACE = next((a for a in sys.argv if "/" in a[1:] and a[0].isdigit()), "1/1")
    PART, PARTS = map(int, PLACE.split("/"))
    sys.exit(bool(main(*map(int, sys.argv[1:4]), PART - 1, PARTS)))
