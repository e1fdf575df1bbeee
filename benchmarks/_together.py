"""Cases that are compiled beside each other in processes of their own, and timed while no other process is."""

from __future__ import annotations

import ctypes
import fcntl
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import torch
from torch._inductor.runtime import benchmarking

__all__ = ["Alone", "Turns", "queued", "together"]


COMPILER = ("torch._dynamo.convert_frame", "torch._inductor.compile_fx", "torch._inductor.select_algorithm")
PR_SET_PDEATHSIG = 1  # of prctl: the signal that a process gets when its parent ends
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
    """No process of the process group runs meanwhile. Those that have the device locked must not be in the group."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGSTOP)
    try:
        yield
    finally:
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


@dataclass(frozen=True)
class Turns:
    """What one process of :func:`together` agrees on with its parent, as files in ``folder``."""

    folder: Path
    name: str

    @property
    def ready(self) -> Path:
        return self.folder / f"{self.name}.ready"

    @property
    def go(self) -> Path:
        return self.folder / f"{self.name}.go"

    @property
    def told(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def device(self) -> str:
        """The file that whoever runs on the device alone has locked (:class:`Alone`)."""
        return str(self.folder / "device")

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Entered when all is compiled; the other processes stand still until :meth:`tell`."""
        self.ready.touch()
        while not self.go.exists():
            time.sleep(0.02)
        yield

    def tell(self, results: dict[str, Any]) -> None:
        part = self.told.with_suffix(".part")
        part.write_text(json.dumps(results), encoding="utf-8")
        part.rename(self.told)


def together(
    names: Sequence[str], work: Callable[[Turns, str], None], seconds: float, device: str
) -> Iterator[dict[str, Any]]:
    """What ``work(turns, name)`` tells for each name, in a process of its own, as far as ``seconds`` go.

    Whoever is ready has its turn. Processes are forked, which saves each the imports, where the device permits that.
    """
    end = time.monotonic() + seconds
    os.environ["TORCH_WARM_POOL"] = "0"  # or the compiler would start processes when it is imported
    for module in COMPILER:
        import_module(module)
    kind: Any = multiprocessing.get_context("fork" if _survives_forks(device) else "spawn")
    with tempfile.TemporaryDirectory() as made:
        running: dict[Turns, Any] = {}
        for i, name in enumerate(names):
            turns = Turns(Path(made), f"{i:02}")
            running[turns] = kind.Process(target=_begin, args=(work, turns, name))
            running[turns].start()
            with suppress(OSError):  # the child does the same; whoever is first
                os.setpgid(running[turns].pid, running[turns].pid)
        try:
            while running and time.monotonic() < end:
                turns = next((t for t, p in running.items() if t.ready.exists() or not p.is_alive()), None)
                if turns is None:
                    time.sleep(0.02)
                    continue
                process = running.pop(turns)
                if turns.ready.exists():
                    _give_turn(turns, process, [p.pid for p in running.values()])
                _end(process)
                if turns.told.exists():
                    yield json.loads(turns.told.read_text(encoding="utf-8"))
                else:
                    print(f"# {names[int(turns.name)]}: ended with status {process.exitcode}", file=sys.stderr)
        finally:
            for turns, process in running.items():
                _end(process)
                print(f"# {names[int(turns.name)]}: not compiled in {seconds:.0f} s", file=sys.stderr)


def _begin(work: Callable[[Turns, str], None], turns: Turns, name: str) -> None:
    with suppress(OSError):
        os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    work(turns, name)


def _give_turn(turns: Turns, process: Any, others: Sequence[int]) -> None:
    """Let ``process`` time what it has compiled, until it tells or ends. The ``others`` are stopped meanwhile."""
    with Alone(turns.device)(), ExitStack() as stack:  # nobody who is stopped has the device
        for other in others:
            stack.enter_context(stopped(other))
        turns.go.touch()
        while process.is_alive() and not turns.told.exists():
            time.sleep(0.02)


def _end(process: Any) -> None:
    """Kill a process with its compilers: the next one is timed."""
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def _survives_forks(device: str) -> bool:
    """Whether a forked process can use the device: what was imported may have initialised its driver."""
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            torch.zeros(1, device=device).add(1).cpu()
            os._exit(0)
        os._exit(1)
    return os.waitpid(pid, 0)[1] == 0
