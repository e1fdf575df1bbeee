"""Parts of a benchmark in processes of their own: one after the other, or side by side except while one is timed."""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["DONE", "READY", "in_process", "in_turn"]

READY = "# ready"  # what a process prints when it has warmed up or compiled, and waits to be asked for times
DONE = "# done"  # and when it has printed these
Row = dict[str, Any]


class _Process:
    """One part. It takes requests as lines, ``compile`` and ``time``, and ends with its input."""

    def __init__(self, script: str, part: str, name: str, options: Sequence[str], caches: dict[str, str]) -> None:
        command = [sys.executable, script, "--here", part, "--network", name, *options]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.what = f"{part} of {name} {' '.join(options)}"
        self.mark = f"SHIPLAP_PART={uuid.uuid4().hex}"
        environment = {**os.environ, **caches, "SHIPLAP_PART": self.mark.partition("=")[2]}
        self.process = subprocess.Popen(command, env=environment, **pipes)  # type: ignore[call-overload]
        self.rows: list[Row] = []
        self.marks = queue.Queue[str]()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            if line.startswith("{"):
                self.rows.append(json.loads(line))
                print(line, end="", flush=True)
            else:
                self.marks.put(line.strip())
        self.marks.put("")  # it has ended

    def wait(self, mark: str, until: float, *, ends: bool = True) -> bool:
        """Whether it printed ``mark`` by then. A process that did not is ended, unless it may go on."""
        try:
            while (seen := self.marks.get(timeout=max(0.1, until - time.monotonic()))) != mark:
                if not seen:
                    return False
        except queue.Empty:
            if not ends:
                return False
            print(f"# {self.what}: no {mark!r} in time", file=sys.stderr, flush=True)
            self.signal(signal.SIGKILL)
            return False
        return True

    def signal(self, which: int) -> None:
        """Send it, and whatever it has started: compilers of PyTorch are processes in sessions of their own."""
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), which)

    def ask(self, what: str) -> None:
        with suppress(BrokenPipeError):  # it has ended, which whoever waits for it will see
            self.process.stdin.write(f"{what}\n")
            self.process.stdin.flush()

    def end(self, patience: float = 10.0) -> None:
        self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        self.signal(signal.SIGKILL)
        self.reader.join(patience)
        if (code := self.process.wait()) and code != -signal.SIGKILL:
            print(f"# {self.what} ended with status {code}", file=sys.stderr, flush=True)


def in_process(script: str, part: str, name: str, given: argparse.Namespace, caches: dict[str, str]) -> list[Row]:
    """The rows of a part, as many as its process printed within its limit."""
    process = _Process(script, part, name, [], caches)
    process.wait(DONE, time.monotonic() + given.limit)
    process.end()
    return process.rows


@contextmanager
def _still(processes: list[_Process]) -> Iterator[None]:
    """None of them runs meanwhile."""
    for each in processes:
        each.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for each in processes:
            each.signal(signal.SIGCONT)


def in_turn(
    script: str, each: list[tuple[str, str]], given: argparse.Namespace, between: Callable[[], None] = lambda: None
) -> list[Row]:
    """The cells of each network in its mode, eager, and compiled unless ``given.eager``; nobody works while one is
    timed. All get ``given.patience`` seconds to warm up, and as many to compile; those that have compiled after
    ``given.early`` seconds are timed then. ``between`` is called after that, while the others stand still.
    """

    def start(name: str, mode: str, peers: str) -> _Process:
        options = ["--mode", mode, "--peers", peers, "--rounds", str(given.rounds)]
        return _Process(script, "cells", name, options, {})

    slow = [start(name, mode, who) for who, name, mode in (s.split(":") for s in given.slow.split(",") if s)]
    fast = [start(name, mode, given.peers) for name, mode in each]
    try:
        _by_phases(fast, slow, given, between)
    finally:
        for process in (*fast, *slow):
            process.end()
    last = {}  # the row with what the GPU did
    for row in (row for process in (*fast, *slow) for row in process.rows):
        last[row["network"], row["mode"], row["voxels"], row["compiled"], *row["ms"]] = row
    return list(last.values())


def _by_phases(
    fast: list[_Process], slow: list[_Process], given: argparse.Namespace, between: Callable[[], None]
) -> None:
    """Warm up, time, compile, time."""
    until = time.monotonic() + given.patience
    ready = [p for p in fast if p.wait(READY, until)]
    with _still(slow):
        ready = _timed(ready, given.limit)
    for process in [] if given.eager else ready:
        process.ask("compile")
    waiting = [*([] if given.eager else ready), *slow]
    for seconds, last in (given.early, False), (given.patience - given.early, True):
        until = time.monotonic() + seconds
        ready = [p for p in waiting if p.wait(READY, until, ends=last)]
        waiting = [p for p in waiting if p not in ready]
        with _still([] if last else waiting):
            _timed(ready, given.limit)
            if not last:
                between()


def _timed(processes: list[_Process], limit: float) -> list[_Process]:
    """Let them time one after the other; those that did."""
    done = []
    for process in processes:
        process.ask("time")
        if process.wait(DONE, time.monotonic() + limit):
            done.append(process)
    return done
