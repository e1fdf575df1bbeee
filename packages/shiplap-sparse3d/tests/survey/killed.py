"""Run by test_survey.py: ``shiplap survey`` in processes that are killed at random moments, and one that is not.

``killed.py TIMES SCAN OUT MODEL``. The processes are forked from this one, which has imported all they need.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from shiplap.cli.app import main
from shiplap_sparse3d import survey  # noqa: F401 - the processes share what it imports
from shiplap_testing.forked import child


def start(source: str, out: Path, model: str) -> int:
    """The pid of ``shiplap survey SOURCE OUT``."""

    def run() -> None:
        sys.argv = ["shiplap", "survey", source, str(out), "--model", f"{model}:model", "--tile", "16"]
        main()

    return child(run)


def status_of(pid: int, options: int = 0) -> int | None:
    """How it ended; None if it has not, and ``options`` say not to wait."""
    ended, status = os.waitpid(pid, options)
    return os.waitstatus_to_exitcode(status) if ended else None


if __name__ == "__main__":
    times, source, out, model = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
    draw, kills, begun = random.Random(0), 0, out.with_name(f"{out.name}.survey") / "survey.json"
    while kills < times:
        job = start(source, out, model)
        status = status_of(job, os.WNOHANG)
        while not begun.exists() and status is None:
            time.sleep(0.02)
            status = status_of(job, os.WNOHANG)
        time.sleep(draw.uniform(0, 0.8))
        status = status_of(job, os.WNOHANG) if status is None else status
        if status is None:
            os.kill(job, signal.SIGKILL)
            kills, status = kills + 1, status_of(job)
        assert status in (0, -signal.SIGKILL), status
        if status == 0:
            out.unlink()
    assert status_of(start(source, out, model)) == 0
    print(f"killed {kills} times, and whole")
