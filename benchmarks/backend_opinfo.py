"""PyTorch's operator database on a generated device, values and gradients of every operator compared with the CPU's.

    python benchmarks/backend_opinfo.py --project DIR [--json benchmarks/results/backend_opinfo.json]
    python benchmarks/backend_opinfo.py --pages      # docs from the record

DIR is a project that ``shiplap backend new openvino --runtime openvino`` made and ``shiplap backend build`` built, or
one of the example with memory of its own, whose record is the part ``discrete``. Seven dtypes take half an hour of one
core, ``--dtypes f32 --part float32`` ten minutes. A sweep that ``--limit`` or anything else ended goes on where it was,
with the same ``--journal FILE``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import _record  # noqa: E402

from shiplap_backend import audit  # noqa: E402
from shiplap_backend.project import Project, open_project  # noqa: E402

DTYPES = ("f32", "bf16", "f16", "i64", "i32", "u8", "bool")
RUNTIMES = "packages/shiplap-backend/src/shiplap_backend/runtimes"
COMMON = (
    f"{RUNTIMES}/common/csrc/*.cpp",
    f"{RUNTIMES}/common/include/shiplap_backend/*.h",
    "packages/shiplap-backend/src/shiplap_backend/opinfo.py",
)
SOURCES = {  # by ``kind_of``
    "openvino": (
        *COMMON,
        f"{RUNTIMES}/openvino/*.cpp",
        f"{RUNTIMES}/openvino/*.h",
        "packages/shiplap-backend/src/shiplap_backend/metadata/openvino.yaml",
    ),
    "discrete": (*COMMON, f"{RUNTIMES}/eager/*", "examples/runtime-tinyc/*.*", "examples/runtime-tinyc/discrete/*"),
}
RECORD = ROOT / "benchmarks" / "results" / "backend_opinfo.json"
PAGE = ROOT / "docs" / "backend-opinfo.md"  # every operator
SUMMARY = ROOT / "docs" / "backend.md"  # the counts, between two marks
CHUNK = 56  # cases a process
PARTS = "float32", "discrete"  # of the record: float32 alone, on OpenVINO and on the example with memory of its own

Verdicts = dict[str, list[dict[str, Any]]]  # by operator


def kind_of(project: Project) -> str:
    """The name of the runtime of ``project``, or ``discrete`` for one with memory of its own."""
    return "discrete" if project.runtime.discrete else project.runtime.name


def pin_worker(cores: itertools.count[int]) -> None:
    """Keep this thread and the processes that it starts on one core: a library that counts the cores takes all."""
    mine = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {mine[next(cores) % len(mine)]})


def sweep(
    project: Path, names: Sequence[str], dtypes: Sequence[str], samples: int, jobs: int, journal: Path, limit: float
) -> list[audit.SweepVerdict]:
    """A verdict for each operator and dtype; those in ``journal`` are not run again, and no process is started after
    ``limit`` seconds.
    """
    end, done = time.monotonic() + limit, Verdicts()
    if journal.is_file():
        done = dict(json.loads(line) for line in journal.read_text().splitlines())
    waiting, size = [n for n in names if n not in done], max(1, CHUNK // len(dtypes))
    chunks = [waiting[i : i + size] for i in range(0, len(waiting), size)]

    def verdicts(chunk: list[str]) -> Verdicts:
        found: Verdicts = {name: [] for name in chunk} if time.monotonic() < end else {}
        for v in audit.run_sweep(open_project(project), list(found), dtypes, samples=samples):
            found[v.op].append(v.as_json())
        return found

    with ThreadPoolExecutor(jobs, initializer=pin_worker, initargs=(itertools.count(),)) as pool:
        for ended in as_completed([pool.submit(verdicts, chunk) for chunk in chunks]):
            done |= ended.result()
            with journal.open("a") as file:
                file.writelines(json.dumps(item) + "\n" for item in ended.result().items())
            print(f"{len(done)}/{len(names)}", file=sys.stderr, flush=True)
    return [audit.SweepVerdict(**v) for name in names for v in done.get(name, [])]


def measure(runtime: str, verdicts: list[audit.SweepVerdict], dtypes: Sequence[str], samples: int) -> dict[str, Any]:
    """The record: counts, every state, and each reason that is not a success."""
    states: dict[str, dict[str, str]] = {}
    for v in verdicts:
        states.setdefault(v.op, {})[v.dtype] = v.state
    return _record.record(
        SOURCES[runtime],
        ["openvino"] if runtime == "openvino" else [],
        samples=samples,
        cases=len(verdicts),
        compared=sum(v.samples for v in verdicts),
        gradients=sum(v.gradients for v in verdicts),
        counts=audit.count_by_dtype(verdicts),
        dtypes=dtypes,
        states={op: " ".join(s.get(d, "-") for d in dtypes) for op, s in states.items()},
        reasons=sorted(
            {
                f"{v.op} {v.dtype} {v.state}: {v.why.splitlines()[0]}"
                for v in verdicts
                if v.state in ("fail", "crash", "refused")
            }
        ),
    )


def page(result: dict[str, Any]) -> str:
    """docs/backend-opinfo.md."""
    head = [
        "# OpenVINO and PyTorch's operator database",
        "",
        "<!-- written by benchmarks/backend_opinfo.py --pages -->",
        "",
        "<!-- backend_opinfo -->",
        *summary(result),
        "",
        "| operator | " + " | ".join(result["dtypes"]) + " |",
        "|---" * (len(result["dtypes"]) + 1) + "|",
        *(f"| `{op}` | {' | '.join(states.split())} |" for op, states in result["states"].items()),
        "",
        "Not as on the CPU, and why:",
        "",
        *(f"- `{reason}`" for reason in result["reasons"]),
        "<!-- /backend_opinfo -->",
    ]
    return "\n".join(head) + "\n"


def summary(result: dict[str, Any]) -> list[str]:
    """What the record is of, its counts, and what the states mean."""
    versions = result["versions"]
    vendor = f"OpenVINO {versions['openvino']}, " if "openvino" in versions else ""
    gradients = (
        f" {result['compared']:,} samples were compared, and the gradients of {result['gradients']:,} of them."
        if "gradients" in result
        else ""
    )
    return [
        f"{vendor}torch {versions['torch']}, {result['date']}: {len(result['states'])} operators, up to "
        f"{result['samples']} samples of each in each dtype, {result['cases']} cases.{gradients}",
        "",
        *counts(result),
        "",
        *(f"- *{state}*: {meaning}" for state, meaning in audit.STATES.items()),
        "- `-`: the operator does not have the dtype",
    ]


def counts(result: dict[str, Any]) -> list[str]:
    """Rows of the table of counts."""
    rows = [f"| dtype | pairs | {' | '.join(audit.STATES)} |", "|---" * (len(audit.STATES) + 2) + "|"]
    for dtype, n in result["counts"].items():
        rows.append(f"| {dtype} | {sum(n.values())} | {' | '.join(str(n[state]) for state in audit.STATES)} |")
    return rows


def with_summaries(text: str, result: dict[str, Any]) -> str:
    """``text`` of docs/backend.md with the counts of the record and of its parts between their marks."""
    blocks = {"backend_opinfo": summary(result)[:-1]}
    for part in PARTS:
        if part in result:
            blocks[f"backend_opinfo {part}"] = [*summary(result[part])[:2], *counts(result[part])]
    for mark, lines in blocks.items():
        before, begin, rest = text.partition(f"<!-- {mark} -->\n")
        text = before + begin + "\n".join(lines) + "\n" + rest[rest.index(f"<!-- /{mark} -->") :]
    return text


def write_pages() -> None:
    """Write what the pages say of the record."""
    result = json.loads(RECORD.read_text(encoding="utf-8"))
    PAGE.write_text(page(result), encoding="utf-8")
    SUMMARY.write_text(with_summaries(SUMMARY.read_text(encoding="utf-8"), result), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project", type=Path)
    parser.add_argument("--match", default="", help="operators that contain this")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--journal", type=Path, default=Path(os.devnull))
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", choices=PARTS, help="the part of the record that it is, by default the record")
    parser.add_argument("--pages", action="store_true", help="write the docs from the record")
    o = parser.parse_args()
    if o.project:
        project, dtypes = open_project(o.project), o.dtypes.split(",")
        names = [n for n in audit.operator_names(project) if o.match in n]
        verdicts = sweep(o.project, names, dtypes, o.samples, o.jobs, o.journal, o.limit)
        result = measure(kind_of(project), verdicts, dtypes, o.samples)
        print("\n".join([*counts(result), *result["reasons"]]))
        if o.json:
            old = json.loads(o.json.read_text(encoding="utf-8")) if o.json.is_file() else {}
            _record.write(o.json, {**old, **({o.part: result} if o.part else result)})
    if o.pages:
        write_pages()


if __name__ == "__main__":
    main()
