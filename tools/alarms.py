"""``nox -s alarms``: audit torch's functions as kernels of themselves, over many seeds; what fails is a false alarm.

Each pair of a function and a seed is one line of ``build/alarms.jsonl``, so that a run can be cut off and go on. First
come ``--full`` seeds of all checks, then ``--seeds`` seeds of numerics and gradient, seed by seed. The exit status is 1
if there is an alarm, 3 if something is left to do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

FIRST = 4242
SHORT = ("numerics", "gradient")
TESTS = Path(__file__).resolve().parents[1] / "packages/shiplap"
PREPARED = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "CUDA_VISIBLE_DEVICES": ""}

Task = tuple[str, str, int]  # kind, function, seed


def tasks(options: argparse.Namespace) -> list[Task]:
    """What is to be audited, in order; with ``--only`` of some functions alone."""
    sys.path.insert(0, str(TESTS))
    from tests.audit.itself import OPS

    names = [name for name in OPS if not options.only or name in options.only]
    full = [("full", name, seed) for seed in range(options.full) for name in names]
    return full + [("short", name, seed) for seed in range(options.seeds) for name in names]


def read(file: Path) -> dict[Task, dict[str, Any]]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {(row["kind"], row["op"], row["seed"]): row for row in map(json.loads, lines)}


def look(task: Task) -> dict[str, Any]:
    """The alarms of one audit, and the checks that were not finished."""
    from shiplap.audit import audit
    from tests.audit.itself import OPS

    kind, name, seed = task
    began = time.monotonic()
    findings = audit(OPS[name], checks=None if kind == "full" else SHORT, seed=FIRST + seed, budget=300)
    alarms = [f"{f.check}: {f.evidence[:200]} ({f.input[:200]})" for f in findings if f.verdict == "fail"]
    left = [f.check for f in findings if f.verdict == "incomplete"]
    seconds = round(time.monotonic() - began, 1)
    return {"kind": kind, "op": name, "seed": seed, "alarms": alarms, "incomplete": left, "seconds": seconds}


def work(options: argparse.Namespace) -> None:
    """One of several processes: every ``of``-th task that no earlier run has done."""
    import sympy  # what each audit's own process would load again

    assert sympy is not None
    number, of = map(int, options.share.split("/"))
    done = read(options.results)
    todo = [task for task in tasks(options) if task not in done]
    with options.results.open("ab", buffering=0) as file:
        for task in islice(todo, number, None, of):
            if time.time() > options.until:
                return
            file.write(json.dumps(look(task)).encode() + b"\n")  # one write: lines of several processes do not mix


def share_out(options: argparse.Namespace) -> None:
    """Start the processes, and wait for them."""
    until = time.time() + options.seconds
    command = [sys.executable, "-W", "ignore", __file__, "--results", str(options.results), "--until", str(until)]
    command += ["--seeds", str(options.seeds), "--full", str(options.full)]
    command += [part for name in options.only for part in ("--only", name)]
    workers = [
        subprocess.Popen([*command, "--share", f"{i}/{options.jobs}"], env={**os.environ, **PREPARED})
        for i in range(options.jobs)
    ]
    try:
        while any(w.poll() is None for w in workers) and time.time() < until + 120:
            time.sleep(10)
            rows = read(options.results).values()
            print(f"{len(rows)} audits, {sum(bool(r['alarms']) for r in rows)} with an alarm", flush=True)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="alarms", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="seeds of numerics and gradient")
    parser.add_argument("--full", type=int, default=3, help="seeds of all checks")
    parser.add_argument("--only", action="append", default=[], help="a function")
    parser.add_argument("--seconds", type=float, default=3500.0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--results", type=Path, default=Path("build/alarms.jsonl"))
    parser.add_argument("--share", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.share:
        work(options)
        return 0
    options.results.parent.mkdir(parents=True, exist_ok=True)
    share_out(options)
    wanted, rows = tasks(options), read(options.results)
    done = [rows[task] for task in wanted if task in rows]
    for row in done:
        for alarm in row["alarms"]:
            print(f"ALARM {row['op']}, {row['kind']}, seed {FIRST + row['seed']}: {alarm}")
    alarmed = sum(bool(row["alarms"]) for row in done)
    left = sum(bool(row["incomplete"]) for row in done)
    print(f"{len(done)} of {len(wanted)} audits, {alarmed} with an alarm, {left} with a check that is incomplete")
    return 1 if alarmed else 0 if len(done) == len(wanted) else 3


if __name__ == "__main__":
    sys.exit(main())
