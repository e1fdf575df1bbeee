"""Cases that are compiled all at once, each in a process of its own, and then timed one after the other."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch._inductor.runtime import benchmarking

__all__ = ["Turns", "together"]


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

    def search_alone(self) -> None:
        """What Inductor times from now on, it times while no other process does."""
        kind: Any = type(benchmarking.benchmarker)
        plain = kind.benchmark_gpu

        def benchmark_gpu(*args: Any, **kwargs: Any) -> Any:
            with self.locked("search"):
                return plain(*args, **kwargs)

        kind.benchmark_gpu = benchmark_gpu

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
