"""Hostile input and lacks in one run: mutated files, wrong calls, threads with redeclaration, sanitizers, and
judgements while something runs out or is killed.

    python benchmarks/doors.py [--parts files calls threads sanitizers lacks] [--json benchmarks/results/doors.json]
        [--cores 8] [--limit 3600] [--files 1000000] [--calls 400] [--threads 600] [--seed 3406] [--folder build/doors]

Each part is many processes, which run side by side on so many cores. ``--files`` is the number of mutated files of all
kinds, ``--calls`` that of the rounds for each op, ``--threads`` that of the seconds in which sixteen threads call an op
while another one declares it again, attaches native code and tunes. A process that runs when the limit of seconds is
over is ended and counts as cut. The folder keeps the rows of the others, for as long as the code is the same: the
next run goes on there, and the record has the rows of all runs, also of those on other machines, which it names. The
record says for each part what ran, what was wrong, and the processor seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from _record import ROOT, describe_machine, record, write
from records import code_text

sys.path[:0] = [str(ROOT)]
SOURCES = (
    *("packages/shiplap/src/shiplap/safe_io/*.py", "packages/shiplap/src/shiplap/kernels/native/*.py"),
    *("packages/shiplap/src/shiplap/dispatch/*.py", "packages/shiplap/src/shiplap/judge/suites.py"),
    *("packages/shiplap/src/shiplap/judge/library_imports.py", "packages/shiplap/src/shiplap/tuning/*.py"),
    *("tests/fuzz/fuzzer.py", "tests/families/hostile.py", "tests/families/hostile_layers.py"),
    *("packages/shiplap/src/shiplap/sandbox/*.py", "packages/shiplap/tests/sandbox/lacks.py"),
    *("packages/shiplap/tests/safe_io/storm.py", "packages/shiplap/tests/safe_io/users.py"),
)
PARTS = ("files", "calls", "threads", "sanitizers", "lacks")
PACKAGES = ("shiplap",)
FILES_EACH, ROUNDS_EACH, SECONDS_EACH, THREADS = 20_000, 50, 150, 16
MOMENTS, KILLS, LACK_PARTS = 40, 60, 8
EMPTY = re.compile(
    r"(?<=\()(?:\w+=(?:\[\]|None)(?:, )?)+|(?:, \w+=(?:\[\]|None))+"
)  # some releases of Python omit these
COUNTS = re.compile(r"(\d+) (rows|rounds|calls|uses|changes|passed|failed|wrong|errors?)\b")


@dataclass
class Job:
    """One process of a part.

    Attributes:
        kind: what of the part it runs, such as the kind of its files.
        number: which of the processes of this kind it is.
        command: the words of the command behind the name of Python.
        cores: how many cores it keeps busy.
        first: jobs with a lower number begin earlier, since they take longest.
    """

    part: str
    kind: str
    number: int
    command: list[str]
    cores: int = 1
    first: int = 9
    env: dict[str, str] = field(default_factory=dict)


def list_jobs(given: argparse.Namespace, folder: Path) -> list[Job]:
    """Return the processes of all parts, the longest first."""
    from tests.fuzz.fuzzer import SHARES
    from tests.projects import FAMILIES

    jobs: list[Job] = []
    for kind, share in SHARES.items():
        left = given.files * share // 100
        for number in range(-(-left // given.each)):
            rounds = min(given.each, left - number * given.each)
            place = folder / f"files-{kind}-{number}"
            place.mkdir()
            command = ["tests/fuzz/fuzzer.py", kind, str(rounds), str(given.seed + number), str(place)]
            jobs.append(Job("files", kind, number, command, first=3 if kind in ("metadata", "source", "suite") else 5))
    parts = max(1, given.calls // ROUNDS_EACH)
    programs = {module: ["tests/families/hostile.py", module] for _, module in sorted(FAMILIES.values())}
    for kind, program in {**programs, "layers": ["tests/families/hostile_layers.py"]}.items():
        for number in range(parts):
            command = [*program, str(given.calls // parts), str(given.seed + number)]
            jobs.append(Job("calls", kind, number, command, first=4))
    storms = max(1, -(-given.threads // SECONDS_EACH))
    for number in range(storms):
        place = folder / f"threads-{number}"
        (place / "cache").mkdir(parents=True, mode=0o700)
        program = "packages/shiplap/tests/safe_io/storm.py"
        command = [program, "everything", str(given.threads / storms), str(THREADS), str(place)]
        env = {"SHIPLAP_CACHE_DIR": str(place / "cache"), "SHIPLAP_NATIVE": "1"}
        jobs.append(Job("threads", "storm", number, command, 2, 1, env))
    for who in ("this", "another") if os.geteuid() == 0 else ("this",):
        for number in range(LACK_PARTS):
            place = f"{number + 1}/{LACK_PARTS}"
            command = ["-P", "packages/shiplap/tests/sandbox/lacks.py", str(MOMENTS), str(KILLS), str(given.seed)]
            jobs.append(Job("lacks", f"{who} user", number, [*command, place, who], first=4))
    if os.geteuid() == 0:
        jobs.append(Job("lacks", "two users", 0, ["packages/shiplap/tests/safe_io/users.py", "20"], 2, 3))
    for kind, share in (("kernels", 4), ("bindings", 4), ("device", 8)):
        workers = max(1, given.cores // share)
        jobs.append(Job("sanitizers", kind, 0, ["tools/sanitize.py", kind, "--", "-n", str(workers)], workers, 0))
    jobs.append(Job("sanitizers", "storm", 0, ["tools/sanitize.py", "storm", "--", str(given.threads // 10)], 2, 2))
    return sorted((job for job in jobs if job.part in given.parts), key=lambda job: job.first)


def run_jobs(jobs: list[Job], cores: int, ends: float, folder: Path, kept: Path) -> list[dict[str, Any]]:
    """Run the jobs on so many cores until the time ``ends``, return a row for each that has begun, and append it to the
    file ``kept``.
    """
    waiting, rows = list(jobs), list[dict[str, Any]]()
    running: dict[int, tuple[Job, float, Path, subprocess.Popen[bytes]]] = {}
    while waiting or running:
        free = cores - sum(job.cores for job, *_ in running.values())
        if waiting and (waiting[0].cores <= free or not running) and time.monotonic() < ends:
            job, began = waiting.pop(0), time.monotonic()
            log = folder / f"log-{len(waiting)}"
            env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **job.env}
            with log.open("wb") as out:
                process = subprocess.Popen(
                    [sys.executable, *job.command], cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True
                )
            # Without a reference to it, the next start of a process would wait for it in place of ``wait4``.
            running[process.pid] = job, began, log, process
            continue
        pid, status, used = os.wait4(-1, os.WNOHANG)
        if pid in running:
            job, began, log, process = running.pop(pid)
            process.returncode = os.waitstatus_to_exitcode(status)
            rows.append(describe_job(job, process.returncode, log, time.monotonic() - began))
            rows[-1] |= {"cpu_s": round(used.ru_utime + used.ru_stime, 1), "code": digest_job(job)}
            rows[-1]["machine"] = describe_machine(PACKAGES)
            print(json.dumps(rows[-1])[:300], flush=True)
            with kept.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
        elif time.monotonic() > ends:
            waiting.clear()
            for each in running:
                end_session(each)
            time.sleep(0.2)
        else:
            time.sleep(0.05)
    return rows


def end_session(leader: int) -> None:
    """Kill all processes of the session that the process ``leader`` has made. Ninja starts compilers in groups of their
    own.
    """
    from shiplap.sandbox.proc_filesystem import list_session

    for pid in list_session(leader):
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGKILL)


@cache
def digest_code(*patterns: str) -> str:
    """Return a digest of the code of files, without its docstrings and comments. It is the same for all releases of
    Python, since the next run may have another one.
    """
    files = sorted({path for pattern in patterns for path in ROOT.glob(pattern)})
    text = "\0".join(code_text(path.read_text()) for path in files)
    return hashlib.sha256(EMPTY.sub("", text).encode()).hexdigest()[:12]


def digest_job(job: Job) -> str:
    """Return a digest of the package's code and of the program that a job runs."""
    source = [pattern for pattern in SOURCES if "/src/" in pattern]
    return digest_code(*source, *(word for word in job.command if word.endswith(".py")))


def describe_job(job: Job, status: int, log: Path, seconds: float) -> dict[str, Any]:
    """Return the row of a job that has ended: the numbers that it printed last, and its words if it failed."""
    text = log.read_text(errors="replace")
    lines = [line for line in text.splitlines() if COUNTS.search(line)]
    tests = job.part == "sanitizers" and job.kind != "storm"
    last = lines[-1:] if not tests else [line for line in lines if " in " in line]
    counts: dict[str, int] = defaultdict(int)
    for number, what in (found for line in last for found in COUNTS.findall(line)):
        counts[what] += int(number)
    how = "right" if status == 0 else "cut" if status == -signal.SIGKILL else f"status {status}"
    what = {"part": job.part, "kind": job.kind, "number": job.number, "outcome": how}
    row: dict[str, Any] = {**what, **counts, "seconds": round(seconds, 1)}
    wrong = [line[:300] for line in text.splitlines() if line.startswith(("WRONG", "E  ", "ERROR", "==ERROR"))]
    return row if status == 0 else {**row, "words": "\n".join([*wrong[:20], text[-1500:]])}


def summarise(rows: list[dict[str, Any]], jobs: list[Job]) -> dict[str, Any]:
    """Return the sums of each part and kind."""
    summary: dict[str, Any] = {}
    for part, kind in dict.fromkeys((job.part, job.kind) for job in jobs):
        mine = [row for row in rows if (row["part"], row["kind"]) == (part, kind)]
        sums: dict[str, Any] = defaultdict(int)
        for row in mine:
            for name, value in row.items():
                if isinstance(value, (int, float)) and name != "number":
                    sums[name] += value
        sums["processes"] = len(mine)
        sums["planned"] = sum((job.part, job.kind) == (part, kind) for job in jobs)
        sums["not_right"] = [row["outcome"] for row in mine if row["outcome"] != "right"]
        summary[f"{part} {kind}"] = {k: round(v, 1) if isinstance(v, float) else v for k, v in sums.items()}
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=3600.0)
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--threads", type=int, default=600)
    parser.add_argument("--each", type=int, default=FILES_EACH, help="mutated files of a process")
    parser.add_argument("--seed", type=int, default=3406)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "doors")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    began = time.monotonic()
    given.folder.mkdir(parents=True, exist_ok=True)
    kept = given.folder / "rows.jsonl"
    before = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    with tempfile.TemporaryDirectory(prefix="doors-", ignore_cleanup_errors=True) as folder:
        jobs = list_jobs(given, Path(folder))
        done = [row for row in before if row["outcome"] != "cut"]
        known = {(row["part"], row["kind"], row["number"], row["code"]): row for row in done}
        names = [(job.part, job.kind, job.number, digest_job(job)) for job in jobs]
        left = [job for job, name in zip(jobs, names, strict=True) if name not in known]
        rows = [known[name] for name in names if name in known]
        rows += run_jobs(left, given.cores, began + given.limit, Path(folder), kept)
    measured = summarise(rows, jobs)
    wrong = [row for row in rows if row["outcome"] != "right"]
    for name, sums in measured.items():
        print(name, json.dumps(sums))
    if given.json:
        machines = [row.pop("machine") for row in rows if "machine" in row]
        result = record(SOURCES, PACKAGES, machines=machines, seed=given.seed, parts=measured, failures=wrong)
        write(given.json, result)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
