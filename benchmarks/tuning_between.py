"""How long a tuning takes in this checkout, and in another one: ``python benchmarks/tuning_between.py COMMIT``.

The cases of ``_tuning_ops.py`` are tuned by processes of their own with empty caches, in turns, on the CPU. Told are
the seconds of the clock of each turn and the ratio of the means, after torch has been imported. ``--at-most 1.5`` fails
where a case takes more than that. Nothing else should run on the machine. Design note 0005 has the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parent.parent
BUDGET = 60  # seconds of a tuning


def work(case: str) -> None:
    """Tune, with the packages that are on the path."""
    import _tuning_ops

    import shiplap as sl

    began = time.perf_counter()
    for op, samples in _tuning_ops.CASES[case]:
        sl.tune(op, samples, BUDGET, progress=False)
    print(json.dumps(time.perf_counter() - began))


def seconds(checkout: Path, case: str) -> float:
    """Of one turn, by the packages of ``checkout``, which may lie in one folder or in several."""
    sources = [*checkout.glob("packages/*/src"), checkout / "src"]
    with tempfile.TemporaryDirectory() as cache:
        path = os.pathsep.join(str(source) for source in sources if source.is_dir())
        environment = {**os.environ, "PYTHONPATH": path, "SHIPLAP_CACHE_DIR": cache}
        command = [sys.executable, "-W", "ignore", __file__, "--work", case]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    """Compare; exit status 1 if a case is slower than asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", nargs="?", default="HEAD", help="what to compare with")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--at-most", type=float, default=0.0, metavar="RATIO", help="fail where a case is slower")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work:
        work(asked.work)
        return 0
    import _tuning_ops

    slower = False
    with tempfile.TemporaryDirectory() as home:
        before = Path(home) / "before"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "-q", "--detach", before, asked.commit], check=True)
        try:
            for case in _tuning_ops.CASES:
                turns = [(seconds(before, case), seconds(ROOT, case)) for _ in range(asked.turns)]
                then, now = (list(each) for each in zip(*turns, strict=True))
                ratio = mean(now) / mean(then)
                slower |= bool(asked.at_most) and ratio > asked.at_most
                told = {"case": case, "before": then, "now": now, "ratio": ratio}
                print(json.dumps(told, default=str), flush=True)
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", before], check=False)
    return int(slower)


if __name__ == "__main__":
    sys.exit(main())
