"""How many breaks and recompiles of small programs get a remedy that was shown to remove them.

    python benchmarks/doctor_remedies.py [NAME ...] [--programs FOLDER] [--json]

``--json`` records all programs; with names, it renews those in the record and keeps the others, and several processes
may share the names between them.

Each program of ``benchmarks/doctor/`` is written after a public report, which its first line names. Its remedies are
tried as ``shiplap doctor --try`` tries them, without the measurement of times. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from _record import ROOT, record, write

from shiplap.doctor import try_remedies
from shiplap.errors import ShiplapError

RESULT = ROOT / "benchmarks" / "results" / "doctor_remedies.json"


def treat(program: Path) -> dict[str, Any]:
    """Return the entries of one program, each with the remedy that helped or the reasons why none did.

    It runs in a folder of its own, since all Python files of a folder are one program to the doctor.
    """
    report = program.read_text().splitlines()[0].strip('"')
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(program, folder)
        os.chdir(folder)
        try:
            treated = try_remedies([sys.executable, program.name], measure=False)
        except ShiplapError as e:
            return {"report": report, "error": str(e).splitlines()[0], "entries": []}
        finally:
            os.chdir(ROOT)
    entries = [
        {
            "line": t.where.rpartition(":")[2],
            "call": t.call,
            "cause": t.cause,
            "owner": t.owner,
            "remedy": (t.remedy if t.removed else "") or ("with another" if t.with_others else ""),
            "reduced": list(t.times) if t.remedy and not t.removed else [],
            "caveat": t.caveat,
            "refused": t.refused,
            "compared": t.outputs + t.gradients,
        }
        for t in treated.tried
    ]
    counts = [len(d.breaks) + len(d.recompiles) for d in (treated.before, treated.after)]
    return {"report": report, "before": counts[0], "after": counts[1], "entries": entries}


def count(found: dict[str, dict[str, Any]]) -> tuple[int, int]:
    """Return the number of entries with a remedy, and of all entries."""
    entries = [e for result in found.values() for e in result["entries"]]
    return sum(bool(e["remedy"]) for e in entries), len(entries)


def save(made: dict[str, dict[str, Any]], *, anew: bool) -> None:
    """Write the programs ``made`` to the record, beside those of other processes that write to it.

    With ``anew`` the record holds no other programs.
    """
    with open(__file__) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = {} if anew or not RESULT.is_file() else json.loads(RESULT.read_text())["programs"]
        programs = dict(sorted({**kept, **made}.items()))
        removed, entries = count(programs)
        sources = ["packages/shiplap/src/shiplap/doctor/*.py", "benchmarks/doctor/*.py"]
        write(RESULT, record(sources, ["shiplap"], removed=removed, entries=entries, programs=programs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--programs", type=Path, default=ROOT / "benchmarks" / "doctor")
    parser.add_argument("--json", action="store_true", help="write the record")
    arguments = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for program in sorted(arguments.programs.resolve().glob("*.py")):
        if arguments.names and program.stem not in arguments.names:
            continue
        result = found[program.stem] = treat(program)
        print(f"{program.stem}: {result.get('error', '')}", flush=True)
        for e in result["entries"]:
            left = "; ".join(f"{k}: {v}" for k, v in e["refused"].items())
            print(
                f"  {e['line']:>4} {e['call'][:40]:40} {e['cause'][:44]:44} {e['remedy'] or 'no remedy: ' + left[:300]}"
            )
        if arguments.json:  # after each, so that an interrupted run keeps what it has
            save({program.stem: result}, anew=not arguments.names and len(found) == 1)
    removed, entries = count(found)
    print(f"{removed} of {entries} entries in {len(found)} programs have a remedy that was shown to remove them")


if __name__ == "__main__":
    main()
