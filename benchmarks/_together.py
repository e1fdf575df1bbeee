"""Cases that are compiled beside each other in processes of their own, and timed while no other process is."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from torch._inductor.runtime import benchmarking

__all__ = ["Alone", "Turns", "queued", "stopped", "together"]


URGENT = -5  # niceness of a thread that keeps others waiting


class Alone:
    """The device, for one process at a time; a thread that has it may ask again.

    Processes that share it run beside each other while nobody has it alone. Nobody who waits is overtaken.

    Attributes:
        seconds: of this process until it had the device (``waited``), and for which it then had it, by its use.
    """

    def __init__(self, path: str) -> None:
        self.path, self.lock = path, threading.RLock()
        self.file: IO[str] | None = None
        self.shared = False
        self.seconds: Counter[str] = Counter()

    @contextmanager
    def __call__(self, use: str = "used", *, shared: bool = False) -> Iterator[None]:
        asked = time.monotonic()
        with self.lock, ExitStack() as ending:
            outermost, before = self.file is None, self.shared
            if outermost:
                self.file = ending.enter_context(open(self.path, "w"))
                ending.callback(setattr, self, "file", None)
            if outermost or (before and not shared):
                self._take(shared)
                if not outermost:  # what is shared around this is shared again
                    ending.callback(self._take, True)
            given = time.monotonic()
            yield
            self.seconds["waited"] += given - asked
            self.seconds[use] += time.monotonic() - given
            if outermost:
                with suppress(PermissionError):
                    os.setpriority(os.PRIO_PROCESS, 0, 0)

    def _take(self, shared: bool) -> None:
        """Exchange what this process has, in the order of asking."""
        assert self.file is not None
        fcntl.flock(self.file, fcntl.LOCK_UN)  # whoever has the turn waits for those who share, and so for this process
        with open(f"{self.path}.turn", "w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            fcntl.flock(self.file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        with suppress(PermissionError):  # this thread before the compilers of other processes
            os.setpriority(os.PRIO_PROCESS, 0, 0 if shared else URGENT)
        self.shared = shared

    def around(self, owner: Any, name: str, *, shared: bool = False) -> None:
        """``owner.name``, no property, runs while no other process has the device, or has it alone."""
        plain, bound = getattr(owner, name), isinstance(vars(owner).get(name), classmethod)

        def run(*args: Any, **named: Any) -> Any:
            with self(name, shared=shared):
                return plain(*args, **named)

        setattr(owner, name, staticmethod(run) if bound else run)

    def searches(self) -> None:
        """What Inductor times: each kernel, and the choices of one product together."""
        self.around(benchmarking.benchmarker, "benchmark_gpu")
        self.around(import_module("torch._inductor.select_algorithm").AlgorithmSelectorCache, "benchmark_choices")

    def selections(self) -> None:
        """What Shiplap verifies and times. Candidates run in this process: in another one nobody waits.

        Seconds of waiting are no seconds of a search, so a search ends when it is done.
        """
        select, bench = import_module("shiplap.inductor.select_candidate"), import_module("shiplap.tuning.bench")
        measure = import_module("shiplap.tuning.measure")
        select._isolation, select.SECONDS = None, 1e5
        self.around(select, "race_runs")
        self.around(bench, "race_runs")
        self.around(bench.Verifier, "check", shared=True)
        self.around(measure.CudaClock, "ready", shared=True)


@contextmanager
def stopped(group: int) -> Iterator[None]:
    """No process of the process group runs meanwhile; with 0 nothing is stopped.

    Those that have the device locked must not be in the group.
    """
    if group:
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGSTOP)
    try:
        yield
    finally:
        if group:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGCONT)


def queued(items: Sequence[Any], counter: Path) -> Iterator[Any]:
    """The ``items`` that no other process with the same ``counter`` has taken."""
    while True:
        with open(counter, "a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            taken = int(file.read() or 0)
            file.truncate(0)
            file.write(str(taken + 1))
        if taken >= len(items):
            return
        yield items[taken]


class Turns:
    """What the processes agree on, as files in ``folder``."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Entered by one process at a time, when all are ready."""
        (self.folder / f"{self.name}.ready").touch()
        while not (self.folder / "go").exists():
            time.sleep(0.05)
        with self.locked("turn"):
            yield

    @contextmanager
    def locked(self, what: str) -> Iterator[None]:
        with open(self.folder / what, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def tell(self, results: dict[str, Any]) -> None:
        part = self.folder / f"{self.name}.part"
        part.write_text(json.dumps(results), encoding="utf-8")
        part.rename(part.with_suffix(".json"))


def together(
    names: Sequence[str], command: Sequence[str], seconds: float, after: Path | None = None
) -> Iterator[dict[str, Any]]:
    """What ``command FOLDER NAME CASE`` tells, for each case; nothing of one that is not ready after ``seconds``.

    Nobody has a turn before the file ``after`` exists, or the ``seconds`` are over.
    """
    with tempfile.TemporaryDirectory() as made:
        folder, end = Path(made), time.monotonic() + seconds
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        running = {f"{i:02}": subprocess.Popen([*command, made, f"{i:02}", n], env=env) for i, n in enumerate(names)}
        while True:
            ready = {f.stem for f in folder.glob("*.ready")} | {n for n, p in running.items() if p.poll() is not None}
            waited_for = after is None or after.exists()
            if (waited_for and not running.keys() - ready) or time.monotonic() > end:
                break
            time.sleep(0.1)
        for late in running.keys() - ready:
            running[late].kill()
            print(f"# {names[int(late)]}: not compiled in {seconds:.0f} s", file=sys.stderr)
        (folder / "go").touch()
        for name, process in running.items():
            process.wait()
            if (told := folder / f"{name}.json").exists():
                yield json.loads(told.read_text(encoding="utf-8"))
