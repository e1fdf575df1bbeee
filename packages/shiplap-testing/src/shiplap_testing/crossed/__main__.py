"""``python -m shiplap_testing.crossed --count 5000 --jobs 16 --device cuda``: a run, resumed where it stopped."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from shiplap_testing.crossed.declared import plan
from shiplap_testing.crossed.run import BATCH, FAILURES, LIMIT, read, run
from shiplap_testing.crossed.shrink import script, shrink
from shiplap_testing.crossed.table import markdown, reason_of, tabulate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m shiplap_testing.crossed", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="declarations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--batch", type=int, default=BATCH, help="declarations a process")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds after which a call hangs")
    parser.add_argument("--out", type=Path, default=Path("crossed"), help="folder of results; a run goes on in it")
    parser.add_argument("--shrink", type=int, default=10, help="how many different failures are shrunk")
    parser.add_argument("--only", type=int, nargs="*", help="seeds of declarations")
    parser.add_argument("--without", nargs="*", default=[], help="features to leave out, such as kernel:python_flat")
    given = parser.parse_args()
    cases = plan(given.count, given.seed, given.device)
    cases = [c for c in cases if not given.only or c.seed in given.only]
    cases = [c for c in cases if not {*c.features, *(f"way:{w}" for w in c.ways)} & {*given.without}]
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"results-{given.device}-{given.seed}.jsonl"
    for record in run(cases, path, given.device, given.jobs, given.limit, given.batch):
        if record["outcome"] in FAILURES:
            print(f"{record['seed']} {record['way']} {record['outcome']}: {record['detail'][:300]}", flush=True)
    table = tabulate(cases, read(path))
    (given.out / f"table-{given.device}.json").write_text(json.dumps(table.to_json(), indent=1))
    (given.out / f"table-{given.device}.md").write_text(markdown(table, cases))
    print(f"{dict(table.outcomes)}; {len(table.met)} pairs met, {len(table.scarce)} less than 20 times")
    by_seed = {c.seed: c for c in cases}
    shrunk: set[str] = set()
    for failure in table.failures:
        key = f"{failure['outcome']} {reason_of(failure['detail'])[:60]}"
        if failure["seed"] not in by_seed or key in shrunk or len(shrunk) >= given.shrink:
            continue
        shrunk.add(key)
        least = shrink(by_seed[failure["seed"]], failure, given.device)
        text = script(least, failure, given.device)
        target = given.out / f"failure-{failure['seed']}-{failure['way']}.py"
        target.write_text(text)
        print(f"--- {target}\n{text}", flush=True)
    return 1 if table.failures else 0


if __name__ == "__main__":
    sys.exit(main())
