"""Crossed declarations on the CPU: how often each pair of features met, what was refused, and what failed.

    python benchmarks/crossed_cpu.py RESULTS [MORE ...] [--seed 32] [--commit C ...]
        [--json benchmarks/results/crossed_cpu.json]

``RESULTS`` is the file of a run, ``results-cpu-SEED.jsonl``, which ``python -m shiplap_testing.crossed`` writes. The
run may have been stopped: declarations count that it has finished. ``C`` is the commit that ran, if another is checked
out by now, or one ``COMMIT:DECLARATIONS`` for each part of the run; the plan of each must be that of the one checked
out. ``MORE`` are the results of further runs, each with ``--missing``, a record of those before it, and the next seed.
Pairs
that were met less than twenty times are listed with what was refused there, and why.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _record import record, write

from shiplap_testing.crossed.declared import plan, plan_missing
from shiplap_testing.crossed.impossible import is_one_kind
from shiplap_testing.crossed.run import FAILURES, read
from shiplap_testing.crossed.table import ENOUGH, missing_pairs, tabulate

SOURCES = ("packages/shiplap-testing/src/shiplap_testing/crossed/*.py", "packages/shiplap/src/shiplap/dispatch/*.py")


def tabulate_run(results: Path, seed: int, more: Sequence[Path] = ()) -> dict[str, Any]:
    """Return the numbers of a run, its table of pairs, and its failures in words. ``more`` are the results of
    further runs, each for pairs that those before it met too rarely.
    """
    records = read(results)
    finished = {r["seed"] for r in records if r["way"] == "whole"}
    planned = plan(max(finished) - seed * 1_000_000 + 1, seed)
    for number, file in enumerate(more, 1):
        met = tabulate(planned, [r for r in records if r["seed"] in finished]).met
        planned += plan_missing(missing_pairs({f"{a} x {b}": n for (a, b), n in met.items()}), seed + number)
        records += read(file)
        finished = {r["seed"] for r in records if r["way"] == "whole"}
    cases = [case for case in planned if case.seed in finished]
    assert len(cases) == len(finished), "another plan ran"
    table = tabulate(cases, [r for r in records if r["seed"] in finished])
    pairs = {f"{a} x {b}": table.met[a, b] for a, b in sorted({*table.met, *table.refused})}
    reasons = Counter[str]()
    for record_ in records:
        if record_["outcome"] == "refused" and record_["seed"] in finished:
            reasons[record_["detail"].partition(":")[0]] += 1
    return {
        "seed": seed,
        "declarations": len(finished),
        "calls": sum(table.outcomes.values()),
        "outcomes": dict(table.outcomes),
        "failures": [f"{r['seed']} {r['way']} {r['outcome']}: {r['detail'][:200]}" for r in table.failures],
        "failing_kinds": list(FAILURES),
        "pairs": len(pairs),
        "pairs_met": sum(1 for n in pairs.values() if n),
        "pairs_met_enough": sum(1 for n in pairs.values() if n >= ENOUGH),
        "enough": ENOUGH,
        "refusals": dict(reasons.most_common()),
        "ways": {way: dict(counts) for way, counts in sorted(table.ways.items())},
        "met": pairs,
        "scarce": {f"{a} x {b}": dict(table.refused.get((a, b), {})) for a, b in table.scarce},
        "impossible": {f"{a} x {b}": why for (a, b), why in table.impossible.items() if not is_one_kind(a, b)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("more", type=Path, nargs="*", help="results of further runs, with --missing")
    parser.add_argument("--seed", type=int, default=32)
    parser.add_argument("--commit", nargs="*", default=[])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    measured = tabulate_run(given.results, given.seed, given.more)
    result = record(SOURCES, ("shiplap",), **measured)
    if given.commit:
        result["commit"], result["parts"] = given.commit[-1].partition(":")[0], given.commit
    for name in ("declarations", "calls", "outcomes", "pairs", "pairs_met", "pairs_met_enough", "failures"):
        print(f"{name}: {measured[name]}")
    if given.json:
        write(given.json, result)


if __name__ == "__main__":
    main()
