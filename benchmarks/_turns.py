"""Parts of a benchmark in processes of their own: one after the other, or side by side until they are timed."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

__all__ = ["READY", "in_process", "in_turn"]

READY = "# ready"  # what a process prints when it has compiled; it waits for its turn then
Row = dict[str, Any]


def in_process(
    script: str,
    part: str,
    name: str,
    given: argparse.Namespace,
    caches: dict[str, str],
    ready: Callable[[], None] = lambda: None,
) -> list[Row]:
    """The rows of a part, as many as its process printed within its limit."""
    options = ["--peers", given.peers, "--rounds", str(given.rounds), *(["--eager"] if given.eager else [])]
    if part == "cells":
        options += ["--mode", given.mode, "--turn", given.turn, "--patience", str(given.patience)]
    command = [sys.executable, script, "--here", part, "--network", name, *options]
    rows: list[Row] = []
    with subprocess.Popen(command, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(given.limit, process.kill)
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("{"):
                rows.append(json.loads(line))
            elif line.strip() == READY:
                ready()
        process.wait()
        timer.cancel()
    ready()
    if process.returncode:
        print(f"# {part} of {name} ended with status {process.returncode}", file=sys.stderr, flush=True)
    return rows


def in_turn(script: str, each: list[tuple[str, str]], given: argparse.Namespace) -> list[Row]:
    """The cells of each network in its mode. Nobody is timed while somebody compiles for ``given.patience`` seconds."""
    waiting = set(each)
    with tempfile.NamedTemporaryFile() as turn, ThreadPoolExecutor(len(each)) as pool:
        fcntl.flock(turn, fcntl.LOCK_EX)

        def ready(which: tuple[str, str]) -> None:
            waiting.discard(which)
            if not waiting:
                fcntl.flock(turn, fcntl.LOCK_UN)

        def rows_of(which: tuple[str, str]) -> list[Row]:
            asked = argparse.Namespace(**{**vars(given), "mode": which[1], "turn": turn.name})
            return in_process(script, "cells", which[0], asked, {}, lambda: ready(which))

        found = [row for rows in pool.map(rows_of, each) for row in rows]
        given.eager, timed = True, {(row["network"], row["mode"]) for row in found}
        for which in each:  # whose compilation took longer than there was patience for
            found += rows_of(which) if which not in timed else []
    last = {(row["network"], row["mode"], row["voxels"]): row for row in found}  # the row with what the GPU did
    return list(last.values())
