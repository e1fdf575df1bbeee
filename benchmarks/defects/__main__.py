"""Scoreboard of checkers of ops: ``python -m benchmarks.defects --tool shiplap``.

Each op with a defect and each sound twin is given to a checker. A defect is *found* where the checker reports a failure
for the broken op, and a twin is *flagged* where it reports one for the sound op. With ``--json`` every result is
written as soon as it is there, and results that the file has are not computed again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .cases import load_cases
from .planted import PlantedCase, load_planted
from .registry import Case, Kind
from .tools import TOOLS

Result = dict[str, Any]
Cases = dict[str, Case | PlantedCase]


def _jobs(options: argparse.Namespace, cases: Cases) -> Iterator[tuple[Case | PlantedCase, Kind, int]]:
    """Yield what to check: broken ops for the first seed, and twins for every seed."""
    for kind in options.kinds.split(","):
        for seed in options.seeds if kind == "sound" else options.seeds[:1]:
            for name, case in cases.items():
                if not options.only or name in options.only.split(","):
                    yield case, kind, seed


def _check(tool: str, case: Case | PlantedCase, kind: Kind, seed: int) -> Result:
    start = time.monotonic()
    try:
        found, evidence = TOOLS[tool](case.op(kind), seed)
    except Exception as e:  # a checker that fails has found nothing
        found, evidence = None, [f"{type(e).__name__}: {e}"[:400]]
    seconds = round(time.monotonic() - start, 1)
    return {"tool": tool, "case": case.name, "kind": kind, "seed": seed} | {
        "found": found,
        "evidence": evidence,
        "seconds": seconds,
    }


def summarize(results: list[Result], tool: str, cases: Cases) -> str:
    """Return the lines of the scoreboard for one tool: its counts, and what it missed or flagged."""
    mine = [r for r in results if r["tool"] == tool and r["case"] in cases]
    broken = [r for r in mine if r["kind"] == "broken"]
    sound = [r for r in mine if r["kind"] == "sound"]
    found = [r for r in broken if r["found"]]
    flagged = [r for r in sound if r["found"]]
    spent = sum(r["seconds"] for r in mine)
    lines = [
        f"{tool}: {len(found)} of {len(broken)} defects found, {len(flagged)} of {len(sound)} checks of twins flagged, "
        f"{sum(r['found'] is None for r in mine)} unanswered, {spent:.0f} s"
    ]
    lines += [f"  missed: {r['case']}: {cases[r['case']].defect}" for r in broken if not r["found"]]
    lines += [f"  flagged: {r['case']} (seed {r['seed']}): {'; '.join(r['evidence'])[:160]}" for r in flagged]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.defects", description=__doc__)
    parser.add_argument("--tool", choices=sorted(TOOLS), default="shiplap")
    parser.add_argument("--kinds", default="broken,sound", help="broken, sound, or both")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="twins are checked with each of them")
    parser.add_argument("--set", choices=("reports", "planted", "all"), default="reports", help="which cases")
    parser.add_argument("--only", help="names of cases, separated by commas")
    parser.add_argument("--json", type=Path, help="file of the results, which an interrupted run continues")
    parser.add_argument("--seconds", type=float, help="begin no other check after this time")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    cases: Cases = {}
    cases |= load_cases() if options.set != "planted" else {}
    cases |= load_planted() if options.set != "reports" else {}
    results: list[Result] = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    known = {(r["tool"], r["case"], r["kind"], r["seed"]) for r in results}
    start = time.monotonic()
    for case, kind, seed in _jobs(options, cases):
        if (options.tool, case.name, kind, seed) in known:
            continue
        if options.seconds and time.monotonic() - start > options.seconds:
            print("the time is over: run again to continue")
            break
        results.append(result := _check(options.tool, case, kind, seed))
        print(
            f"{case.name} {kind} {seed}: {result['found']} {result['seconds']} s; {result['evidence'][:1]}", flush=True
        )
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(summarize(results, options.tool, cases))


if __name__ == "__main__":
    sys.exit(main())
