"""PyTorch's operator database on the generated OpenVINO device, every operator in seven dtypes, compared with the CPU.

    python benchmarks/backend_opinfo.py --project DIR [--json benchmarks/results/backend_opinfo.json]
    python benchmarks/backend_opinfo.py --pages      # docs from the record

DIR is a project that ``shiplap backend new openvino --runtime openvino`` made and ``shiplap backend build`` built. It
takes ten minutes of one core; with ``--journal FILE`` a sweep that was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import _record  # noqa: E402

from shiplap_backend import audit  # noqa: E402
from shiplap_backend.project import open_project  # noqa: E402

DTYPES = ("f32", "bf16", "f16", "i64", "i32", "u8", "bool")
RUNTIMES = "packages/shiplap-backend/src/shiplap_backend/runtimes"
SOURCES = (
    f"{RUNTIMES}/common/csrc/*.cpp",
    f"{RUNTIMES}/common/include/shiplap_backend/*.h",
    f"{RUNTIMES}/openvino/*.cpp",
    f"{RUNTIMES}/openvino/*.h",
    "packages/shiplap-backend/src/shiplap_backend/metadata/openvino.yaml",
    "packages/shiplap-backend/src/shiplap_backend/opinfo.py",
)
RECORD = ROOT / "benchmarks" / "results" / "backend_opinfo.json"
PAGE = ROOT / "docs" / "backend-opinfo.md"  # every operator
SUMMARY = ROOT / "docs" / "backend.md"  # the counts, between two marks
CHUNK = 24  # operators between two lines of the journal


def sweep(project: Path, names: list[str], samples: int, jobs: int, journal: Path | None) -> list[audit.SweepVerdict]:
    """A verdict for each operator and dtype; those in ``journal`` are not run again."""
    done: dict[str, list[dict[str, Any]]] = {}
    if journal is not None and journal.is_file():
        done = dict(json.loads(line) for line in journal.read_text().splitlines())
    for i in range(0, len(names), CHUNK):
        wanted = [n for n in names[i : i + CHUNK] if n not in done]
        if not wanted:
            continue
        start = time.perf_counter()
        verdicts: dict[str, list[dict[str, Any]]] = {name: [] for name in wanted}
        for v in audit.run_sweep(open_project(project), wanted, DTYPES, samples=samples, jobs=jobs):
            verdicts[v.op].append(v.as_json())
        done |= verdicts
        if journal is not None:
            with journal.open("a") as file:
                file.writelines(json.dumps(item) + "\n" for item in verdicts.items())
        print(f"{i + CHUNK}/{len(names)}, {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return [audit.SweepVerdict(**v) for name in names for v in done[name]]


def measure(verdicts: list[audit.SweepVerdict], samples: int) -> dict[str, Any]:
    """The record: counts, every state, and each reason that is not a success."""
    states: dict[str, dict[str, str]] = {}
    for v in verdicts:
        states.setdefault(v.op, {})[v.dtype] = v.state
    return _record.record(
        SOURCES,
        ["openvino"],
        samples=samples,
        cases=len(verdicts),
        counts=audit.count_by_dtype(verdicts),
        dtypes=DTYPES,
        states={op: " ".join(s.get(d, "-") for d in DTYPES) for op, s in states.items()},
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
    return [
        f"OpenVINO {versions['openvino']}, torch {versions['torch']}, {result['date']}: {len(result['states'])} "
        f"operators, up to {result['samples']} samples of each in each dtype, {result['cases']} cases.",
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


def with_summary(text: str, result: dict[str, Any]) -> str:
    """``text`` of docs/backend.md with the counts between its marks."""
    before, mark, rest = text.partition("<!-- backend_opinfo -->\n")
    after = rest[rest.index("<!-- /backend_opinfo -->") :]
    return before + mark + "\n".join(summary(result)[:-1]) + "\n" + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project", type=Path)
    parser.add_argument("--match", default="", help="operators that contain this")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pages", action="store_true", help="write the docs from the record")
    options = parser.parse_args()
    if options.project:
        names = [n for n in audit.operator_names(open_project(options.project)) if options.match in n]
        verdicts = sweep(options.project, names, options.samples, options.jobs, options.journal)
        result = measure(verdicts, options.samples)
        print("\n".join([*counts(result), *result["reasons"]]))
        if options.json:
            _record.write(options.json, result)
    if options.pages:
        result = json.loads(RECORD.read_text(encoding="utf-8"))
        PAGE.write_text(page(result), encoding="utf-8")
        SUMMARY.write_text(with_summary(SUMMARY.read_text(encoding="utf-8"), result), encoding="utf-8")


if __name__ == "__main__":
    main()
