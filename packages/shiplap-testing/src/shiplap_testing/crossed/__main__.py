"""``python -m shiplap_testing.crossed --count 5000 --jobs 16 --device cuda``: a run, resumed where it stopped."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shiplap_testing import compilers
from shiplap_testing.crossed.declared import Declared, plan, plan_missing
from shiplap_testing.crossed.run import BATCH, FAILURES, LIMIT, Limits, read, run
from shiplap_testing.crossed.shrink import script, shrink
from shiplap_testing.crossed.table import Table, markdown, missing_pairs, reason_of, tabulate


def main() -> int:
    """Draw op declarations at random, call each op in several ways, such as under ``export`` and ``vmap``, and write a
    table of the outcomes to a folder.

    The command line has the number of declarations, the device, the folder and other options. At the end, reduce
    failures to small declarations. Return 1 if there are any failures, and 0 otherwise.
    """
    parser = argparse.ArgumentParser(prog="python -m shiplap_testing.crossed", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="declarations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--batch", type=int, default=BATCH, help="declarations a process")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds after which a call hangs")
    parser.add_argument("--seconds", type=float, default=math.inf, help="how long the run may take")
    parser.add_argument("--gpus", type=int, default=1, help="how many GPUs the processes share")
    parser.add_argument("--out", type=Path, default=Path("crossed"), help="folder of results; a run goes on in it")
    parser.add_argument("--shrink", type=int, default=10, help="how many different failures are shrunk")
    parser.add_argument("--only", type=int, nargs="*", help="seeds of declarations")
    parser.add_argument("--missing", type=Path, help="a record of a run: declare what it met less than 20 times")
    parser.add_argument("--without", nargs="*", default=[], help="features to leave out, such as kernel:python_flat")
    given = parser.parse_args()
    begun = time.monotonic()
    # On a GPU, nvcc compiles, for which there is no such program.
    if given.device == "cpu":
        _compile_unoptimized()
    cases = plan(given.count, given.seed, given.device)
    if given.missing:
        record = json.loads(given.missing.read_text(encoding="utf-8"))
        cases = plan_missing(missing_pairs(record["met"]), given.seed, given.device)
    cases = [c for c in cases if not given.only or c.seed in given.only]
    cases = [c for c in cases if not {*c.features, *(f"way:{w}" for w in c.ways)} & {*given.without}]
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"results-{given.device}-{given.seed}.jsonl"
    limits = Limits(given.limit, begun + given.seconds, given.gpus)
    for record in run(cases, path, given.device, given.jobs, limits, given.batch):
        if record["outcome"] in FAILURES:
            print(f"{record['seed']} {record['way']} {record['outcome']}: {record['detail'][:300]}", flush=True)
    records = read(path)
    finished = {r["seed"] for r in records if r["way"] == "whole"}
    table = tabulate(cases, records)
    print(f"{len(finished)} of {len(cases)} declarations, {time.monotonic() - begun:.0f} s")
    print(f"{dict(table.outcomes)}; {len(table.met)} pairs met, {len(table.scarce)} less than 20 times")
    _write_table(given.out, given.device, cases, table)
    _shrink_failures(given.out, given.device, cases, table, given.shrink)
    return 1 if table.failures else 0


def _compile_unoptimized() -> None:
    """Put compilers that do not optimise first on the ``PATH``, and wait until their headers are compiled. Do nothing
    unless the environment variable ``SHIPLAP_TEST_UNOPTIMIZED`` is 1.
    """
    os.environ["PATH"] = compilers.path()
    for compiled in (compilers.headers(), compilers.kernels()):
        if compiled is not None:
            compiled.wait()


def _write_table(folder: Path, device: str, cases: Sequence[Declared], table: Table) -> None:
    """Write the failures of a run as JSON into ``folder``, and ``table`` as JSON and as Markdown.

    ``table`` counts for each pair of features how often a call of a declaration with both agreed with the reference.
    ``cases`` are the declarations of the run on ``device``.
    """
    by_seed = {c.seed: c.to_json() for c in cases}
    failing = [{**r, "case": by_seed.get(r["seed"])} for r in table.failures]
    (folder / f"failures-{device}.json").write_text(json.dumps(failing, indent=1))
    (folder / f"table-{device}.json").write_text(json.dumps(table.to_json(), indent=1))
    (folder / f"table-{device}.md").write_text(markdown(table, cases))


def _shrink_failures(folder: Path, device: str, cases: Sequence[Declared], table: Table, most: int) -> None:
    """Shrink one failure of each kind, and at most ``most`` in all, to a declaration with as few features as still
    fail. Write and print a script for each that shows the failure.

    The scripts are written into ``folder``. ``cases`` are the declarations of the run on ``device``, and ``table`` has
    its failures.
    """
    by_seed = {c.seed: c for c in cases}
    shrunk: set[str] = set()
    for failure in table.failures:
        # Failures with the same reason are shrunk once.
        key = f"{failure['outcome']} {reason_of(failure['detail'])[:60]}"
        if failure["seed"] not in by_seed or key in shrunk or len(shrunk) >= most:
            continue
        shrunk.add(key)
        least = shrink(by_seed[failure["seed"]], failure, device)
        text = script(least, failure, device)
        target = folder / f"failure-{failure['seed']}-{failure['way']}.py"
        target.write_text(text)
        print(f"--- {target}\n{text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
