"""Whole modules, whole models, the ends of processes and the room of a thousand lengths on generated devices.

    python benchmarks/backend_device.py --project DIR [--json benchmarks/results/backend_device.json]

DIR is a built project, as for ``backend_opinfo.py``. ``--parts`` names some of ``exits,modules,models,lengths``. Each
is a part of the record of its own, with the name of the device's runtime or, for the example with memory of its own,
``discrete`` in front.

* modules: torch's database of modules, two inputs of each in each mode, against the CPU: results, strides, gradients of
  parameters and arguments.
* models: those of ``shiplap backend audit --models``: inference, tokens and a training step against the CPU.
* exits: 200 processes that end right after a backward, for each of three programs, eight at a time, forked where torch
  is imported; and ``--processes`` that are started from nothing, for the first program.
* lengths: a thousand inputs of a length that came never before: what the process grew by, and what the cache counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "packages" / "shiplap-backend"
sys.path[:0] = [str(TESTS), str(ROOT / "benchmarks")]

import _record  # noqa: E402
from backend_opinfo import RUNTIMES, SOURCES, kind_of, pin_worker  # noqa: E402

from shiplap_backend import audit  # noqa: E402
from shiplap_backend.project import Project, open_project  # noqa: E402
from tests.backend.runtime import test_processes as processes  # noqa: E402

FORKED = 200
EXITS = {"plain": processes.BACKWARD, "slow release": processes.SLOW_RELEASE, "no memory left": processes.FULL}
LENGTHS = """
    import gc, json
    module = getattr(torch, D)
    torch.set_num_threads(1)
    layer = torch.nn.Linear(64, 64).to(D)
    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6
    def run(lengths):
        for n in lengths:
            with torch.no_grad():
                torch.nn.functional.layer_norm(torch.softmax(layer(torch.rand(n, 64).to(D)), -1) + 1, (64,))
    run(range(1001, 1011))  # what the library sets up once
    before, rows = resident(), []
    for k in range(0, 1000, 200):
        run(range(k + 1, k + 201))
        info = module.cache_info()
        rows.append([k + 200, round(resident() - before, 1), round(info["bytes"] / 1e6, 1), info["entries"]])
    module.cache_clear()
    gc.collect()
    rows.append(["cleared", round(resident() - before, 1), 0.0, 0])
    print(json.dumps(rows))
"""


def in_parallel(jobs: int, work: Callable[[int], Any], count: int) -> list[Any]:
    """The results of ``work`` for the numbers below ``count``, each on one core."""
    with ThreadPoolExecutor(jobs, initializer=pin_worker, initargs=(itertools.count(),)) as pool:
        return list(pool.map(work, range(count)))


def modules(project: Project, jobs: int) -> dict[str, Any]:
    """Cases of the database of modules, and those that are not the CPU's."""
    script = TESTS / "tests" / "backend" / "modules.py"

    def stretch(start: int) -> dict[str, Any]:
        command = [sys.executable, "-P", str(script), str(project.package.resolve()), "2", str(jobs), str(start)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return {"cases": 0, "wrong": [f"part {start} ended with status {done.returncode}: {done.stderr[-300:]}"]}
        report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return report

    reports = in_parallel(jobs, stretch, jobs)
    return {"cases": sum(r["cases"] for r in reports), "wrong": [w for r in reports for w in r["wrong"]]}


def models(project: Project, jobs: int) -> dict[str, str]:
    """The state of each model, and why where it is not the CPU's."""
    names = audit.model_names()

    def verdict(i: int) -> audit.SweepVerdict:
        return next(audit.run_sweep(project, [names[i]], ["f32"], models=True))

    return {
        v.op: f"{v.state}: {v.why.splitlines()[0]}" if v.why else v.state
        for v in in_parallel(jobs, verdict, len(names))
    }


def exits(project: Project, jobs: int, processes_anew: int) -> dict[str, Counter[str]]:
    """How many processes ended in which way, by the program and the way of its start."""

    def forked(program: str) -> Counter[str]:
        """Count what the parent prints of its children: their number and the set of their statuses."""
        many = textwrap.dedent(processes.MANY.replace("COUNT", str(FORKED))) + textwrap.dedent(program)
        status, printed = processes.ended(processes.start(project, many, loaded=False))
        clean = (status, printed) == (0, f"{FORKED} [0]\n")
        return Counter({"0": FORKED} if clean else {f"{status} {printed[-200:]}": FORKED})

    def end(_: int) -> str:
        status, printed = processes.ended(processes.start(project, EXITS["plain"]))
        return f"{status} {printed[-200:]}".strip()

    ends = {f"forked, {name}": forked(program) for name, program in EXITS.items()}
    with ThreadPoolExecutor(2 * jobs) as pool:  # not pinned: a busy machine is what made it fail
        return ends | {"started, plain": Counter(pool.map(end, range(processes_anew)))}


def lengths(project: Project, jobs: int) -> dict[str, Any]:
    """Megabytes after so many lengths: what the process grew by, what is counted, and in how many graphs."""
    status, printed = processes.ended(processes.start(project, LENGTHS))
    return {"rows": json.loads(printed.splitlines()[-1])} if not status else {"failed": printed[-500:]}


PARTS: dict[str, Callable[..., Any]] = {"exits": exits, "modules": modules, "models": models, "lengths": lengths}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--processes", type=int, default=FORKED)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    project, processes.SECONDS = open_project(o.project), 600
    kind = kind_of(project)
    sources = (*SOURCES.get(kind, SOURCES["discrete"]), f"{RUNTIMES}/common/package/*.py")
    for part in o.parts.split(","):
        found = PARTS[part](project, o.jobs, *([o.processes] if part == "exits" else []))
        print(part, json.dumps(found), flush=True)
        if o.json:  # after each part, so that what ends the script loses one
            whole = json.loads(o.json.read_text(encoding="utf-8")) if o.json.is_file() else {}
            made = _record.record(sources, ["openvino", "transformers"])
            _record.write(o.json, {**whole, **made, f"{kind} {part}": {**made, "found": found}})


if __name__ == "__main__":
    main()
