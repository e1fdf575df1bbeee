"""Run the script of a finding in a fresh process: ``python -m benchmarks.defects.reproducers --json FILE``.

Each op with a defect is audited until a check fails. The finding's script then runs in a new interpreter, which has to
show the same problem again. With ``--json`` every result is written as soon as it is there, and results that the file
has are not computed again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import shiplap as sl

from .cases import load_cases
from .planted import load_planted

Result = dict[str, Any]


class _FoundError(Exception):
    """Raised to end an audit at the first check that fails."""

    def __init__(self, finding: sl.Finding) -> None:
        super().__init__(finding.check)
        self.finding = finding


def find_first(op: sl.Op, seed: int) -> sl.Finding | None:
    """Return the first finding of an audit that fails, or None if the audit finds nothing."""

    def end(finding: sl.Finding) -> None:
        if finding.verdict == "fail":
            raise _FoundError(finding)

    try:
        sl.audit(op, seed=seed, progress=end)
    except _FoundError as e:
        return e.finding
    return None


def run_reproducer(finding: sl.Finding) -> dict[str, Any]:
    """Return how the script of the finding ended in a fresh process, and whether it shows the problem again.

    It does if it is ended by a signal, or if it ends by its own assertion and prints what the finding says.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "reproducer.py")
        script.write_text(finding.reproducer)
        done = subprocess.run(
            [sys.executable, "-P", str(script)], cwd=folder, capture_output=True, text=True, timeout=300, check=False
        )
    shown = done.stdout.strip()
    asserts = "AssertionError" in done.stderr and "assert not found.problem" in done.stderr
    asserts = asserts and "nothing found" not in shown
    return {
        "status": done.returncode,
        "shown": shown[:400],
        "fails": done.returncode < 0 or asserts,
        "stderr": "" if asserts else done.stderr.strip()[-300:],
    }


def reproduce(name: str, op: sl.Op, defect: str, seed: int) -> Result:
    """Return the first finding of one op with a defect, and how its script ended."""
    start = time.monotonic()
    finding = find_first(op, seed)
    result: Result = {"case": name, "defect": defect, "found": finding is not None}
    if finding is not None:
        result |= {"finding": asdict(finding), "script": bool(finding.reproducer)}
        result |= run_reproducer(finding) if finding.reproducer else {"fails": False, "stderr": "no script"}
    return result | {"seconds": round(time.monotonic() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.defects.reproducers", description=__doc__)
    parser.add_argument("--set", choices=("reports", "planted"), default="reports", help="which cases")
    parser.add_argument("--only", help="names of cases, separated by commas")
    parser.add_argument("--json", type=Path, required=True, help="file of the results")
    parser.add_argument("--seconds", type=float, help="begin no other case after this time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    cases = load_cases() if options.set == "reports" else load_planted()
    results: list[Result] = json.loads(options.json.read_text()) if options.json.exists() else []
    known = {r["case"] for r in results}
    end = time.monotonic() + (options.seconds or float("inf"))
    for name, case in cases.items():
        if name in known or (options.only and name not in options.only.split(",")):
            continue
        if time.monotonic() > end:
            print("the time is over: run again to continue")
            break
        results.append(result := reproduce(name, case.op("broken"), case.defect, options.seed))
        print(f"{name}: {result.get('fails')} {result['seconds']} s; {result.get('stderr', '')}", flush=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    made = [r for r in results if r["found"]]
    print(f"{sum(r['fails'] for r in made)} of {len(made)} scripts show their finding in a fresh process")


if __name__ == "__main__":
    main()
