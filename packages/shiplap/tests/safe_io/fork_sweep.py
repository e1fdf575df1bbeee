"""A child forked at each STEP-th line of a build, whose parent ends at once: ``python fork_sweep.py FOLDER STEP``.

An flock goes with the last process that has the file open. So a child that another thread forks while a binding is
built must have closed the lock file, wherever the build was, or a child that lives long would hold the lock.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from shiplap.kernels.native import build


def forked_at(number: int, root: Path, pipe: int) -> None:
    """Build, and let another thread fork at line ``number`` of build.py; the process ends while it has the lock. Its
    status is 3 where the build has fewer lines."""
    lines = 0

    def fork() -> None:
        if not os.fork():
            os.write(pipe, str(os.getpid()).encode())
            os.close(pipe)
            while True:
                signal.pause()

    def at_line(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal lines
        if frame.f_code.co_filename != build.__file__ or frame.f_code.co_name == "_after_fork":
            return None
        lines += event == "line"
        if event == "line" and lines == number:
            forker = threading.Thread(target=fork, daemon=True)
            forker.start()
            forker.join(0.3)  # it may have to wait for what this thread is about to do
        return at_line

    def compiled(*_: object) -> str:
        os._exit(0 if lines >= number else 3)

    build._compile_source = compiled
    sys.settrace(at_line)
    build.build_once(root, "abc", "source", ["true"], wait=0)
    os._exit(4)


def main(root: Path, step: int) -> int:
    """Print at which lines a child kept the lock; the status is 0 if there is none and lines were tried."""
    kept, number = list[int](), 0
    while True:
        number += step
        reading, writing = os.pipe()
        builder = os.fork()
        if not builder:
            forked_at(number, root, writing)
        os.close(writing)
        _, status = os.waitpid(builder, 0)
        code = os.waitstatus_to_exitcode(status)
        if code:
            os.close(reading)
            break
        child = os.read(reading, 32)  # nothing where the process ended before it could fork
        os.close(reading)
        if "has been building" in build.build_once(root, "abc", "source", ["false"], wait=0):
            kept.append(number)
        if child:
            os.kill(int(child), signal.SIGKILL)
    print(f"{number - step} lines, status {code}, the lock was kept at {kept}")
    return int(code != 3 or bool(kept) or number < 10)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
