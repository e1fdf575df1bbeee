"""A crossed run: batches of declarations in child processes, results as JSON lines, a table of pairs at the end."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from shiplap_testing.crossed.declared import Declared

BATCH = 50  # declarations a process and a library
LIMIT = 240.0  # seconds without a line after which a process hangs: a way of a call, or a library
FAILURES = ("differs", "raised", "crashed", "hung")

Record = dict[str, Any]
_numbers = itertools.count()  # of children, which take the GPUs in turns


class Limits(NamedTuple):
    """The limits of a run. ``silence`` is the number of seconds without a line of results after which a process counts
    as hung. ``end`` is the time, on the monotonic clock, at which the run stops. ``gpus`` is the number of GPUs that
    its processes share.
    """

    silence: float = LIMIT
    end: float = math.inf  # of time.monotonic()
    gpus: int = 1


USUAL = Limits()


def environment(folder: Path, device: str, gpus: int = 1) -> dict[str, str]:
    """Return the environment variables for a child process, which are those of this process and further ones.

    The further variables put all caches below ``folder``. Unless ``device`` is ``cuda``, they switch on Triton's
    interpreter. On ``cuda``, each child gets the next of ``gpus`` GPUs in turn.
    """
    cache = folder / "cache"
    cache.mkdir(mode=0o700, exist_ok=True)
    own = {
        "SHIPLAP_CACHE_DIR": str(cache),
        "SHIPLAP_NATIVE": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        # Many children run at a time, so that each has one thread.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        # After a crash, stderr has the stack of each thread.
        "PYTHONFAULTHANDLER": "1",
    }
    if device != "cuda":
        own["TRITON_INTERPRET"] = "1"
    elif gpus > 1:
        own["CUDA_VISIBLE_DEVICES"] = str(next(_numbers) % gpus)
    return {**os.environ, **own}


def run_batch(cases: Sequence[Declared], device: str, tell: Callable[[Record], None], limits: Limits = USUAL) -> None:
    """Run the op declarations ``cases`` in a child process on ``device``, and call ``tell`` with each record.

    A record is a dict with the seed, how the op was called (such as under ``vmap``) and the outcome. ``limits`` says
    when a silent process is killed and when the run stops. After a crash or a hang, another child runs the declarations
    that are left.
    """
    skip: list[tuple[int, str]] = []
    left = list(cases)
    while left:
        with tempfile.TemporaryDirectory(prefix="crossed-") as scratch:
            folder = Path(scratch)
            done, begun, status = _child(left, skip, device, folder, limits, tell)
        if status in ("done", "stopped"):
            return
        seed, way = begun
        detail = status
        tell({"seed": seed, "way": way, "outcome": "hung" if status == "hung" else "crashed", "detail": detail})
        if seed < 0:  # the batch cannot even be declared: halves find out why
            if len(left) == 1:
                tell({"seed": left[0].seed, "way": "declare", "outcome": "crashed", "detail": detail})
                tell({"seed": left[0].seed, "way": "whole", "outcome": "done"})
                return
            half = len(left) // 2
            run_batch(left[:half], device, tell, limits)
            run_batch(left[half:], device, tell, limits)
            return
        finished = {(r["seed"], r["way"]) for r in done if "way" in r}
        skip += [*finished, (seed, way)]
        if way in ("packaged", "exit"):
            for case in left:
                tell({"seed": case.seed, "way": "whole", "outcome": "done"})
            return
        # A case ahead of the crash may still wait for its package, which comes last.
        whole = {r["seed"] for r in done if r.get("way") == "whole"}
        left = [case for case in left if case.seed not in whole]


def _child(
    cases: Sequence[Declared],
    skip: Iterable[tuple[int, str]],
    device: str,
    folder: Path,
    limits: Limits,
    tell: Callable[[Record], None],
) -> tuple[list[Record], tuple[int, str], str]:
    """Run the op declarations ``cases`` in one child process on ``device``, except for the pairs of seed and way of
    calling in ``skip``. Call ``tell`` with each record.

    Return the records, the pair of seed and way that was begun last, and how the process ended. The end is ``done``,
    ``stopped``, ``hung``, or the exit status with the end of the log. If the run was stopped, no records are returned.
    """
    results = folder / "results"
    results.touch()
    message = json.dumps({"cases": [c.to_json() for c in cases], "skip": list(skip)})
    log = (folder / "log").open("wb")
    command = [sys.executable, "-m", "shiplap_testing.crossed.child", str(folder), device]
    given = environment(folder, device, limits.gpus)
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=given, start_new_session=True)
    assert child.stdin is not None
    child.stdin.write(message.encode())
    child.stdin.close()
    lines: list[Record] = []
    since, hung, ended, stopped = time.monotonic(), False, False, False
    calling = False  # torch is imported, and libraries are compiled, before the first call: that may take its time
    reader = results.open(encoding="utf-8")
    while not ended:
        ended = child.poll() is not None
        time.sleep(0.0 if ended else 0.1)
        text = reader.read()
        # The child may be in the middle of a line.
        while text and not text.endswith("\n") and not ended:
            text += reader.read()
        for line in text.splitlines():
            lines.append(json.loads(line))
            calling |= lines[-1].get("seed", -1) >= 0
            if "outcome" in lines[-1]:
                tell(lines[-1])
            since = time.monotonic()
        if not ended and time.monotonic() - since > (limits.silence if calling else max(limits.silence, LIMIT)):
            hung = True
            _end(child)
        elif not ended and time.monotonic() > limits.end:
            _end(child)
            stopped = ended = True
    log.close()
    reader.close()
    if stopped:
        return [], (-1, "stopped"), "stopped"
    begun = next(((r["seed"], r["begin"]) for r in reversed(lines) if "begin" in r), (-1, "declare"))
    records = [r for r in lines if "outcome" in r]
    if any("end" in r for r in lines):  # an exit after that has lost nothing, but is a crash all the same
        return records, (cases[-1].seed, "exit"), "done" if child.returncode == 0 else f"status {child.returncode}"
    tail = (folder / "log").read_text(errors="replace")[-1500:]
    return records, begun, "hung" if hung else f"status {child.returncode}: {tail}"


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the process group of ``child``, and wait until the process has ended."""
    import signal

    # The group, since a compiler that the child started would go on.
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def run(
    cases: Sequence[Declared],
    path: Path,
    device: str = "cpu",
    jobs: int = 1,
    limits: Limits = USUAL,
    batch: int = BATCH,
) -> Iterator[Record]:
    """Run those op declarations of ``cases`` that have no result in the file ``path`` yet. Append each new record to
    the file, and yield it.

    A record is a dict with the seed, how the op was called (such as under ``vmap``) and the outcome. ``jobs`` threads
    run batches of ``batch`` declarations in child processes on ``device``, within ``limits``.
    """
    done = {r["seed"] for r in read(path) if r.get("way") == "whole"}
    left = [c for c in cases if c.seed not in done]
    batches = [left[i : i + batch] for i in range(0, len(left), batch)]
    lock = threading.Lock()
    fresh: list[Record] = []
    if path.exists() and not path.read_bytes().endswith(b"\n"):  # a line that was cut off
        path.write_bytes(path.read_bytes() + b"\n")
    with path.open("a", encoding="utf-8") as file, ThreadPoolExecutor(jobs) as pool:

        def tell(record: Record) -> None:
            """Append ``record``, the outcome of one call, to the file of results and to the list ``fresh``, from which
            ``run`` yields.
            """
            with lock:
                file.write(json.dumps(record) + "\n")
                file.flush()
                fresh.append(record)

        def work(some: list[Declared]) -> None:
            """Run the batch ``some`` of declarations in a child process, unless the time limit of the whole run has
            passed.
            """
            # Batches that are still in the queue of the pool do not begin after the end.
            if time.monotonic() < limits.end:
                run_batch(some, device, tell, limits)

        futures = [pool.submit(work, some) for some in batches]
        while True:
            ended = all(future.done() for future in futures)
            with lock:
                # Records are yielded outside of the lock, so that a slow caller stops no thread.
                ready, fresh[:] = list(fresh), []
            yield from ready
            if ended:
                break
            time.sleep(0.2)
        for future in futures:
            future.result()


def read(path: Path) -> list[Record]:
    """Return the records in the file ``path`` as a list. Lines that were cut off are left out. The list is empty if the
    file does not exist.
    """
    found: list[Record] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found
