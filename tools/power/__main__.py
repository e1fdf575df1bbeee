"""``make power``: plant faults in kernels, and count how many of those that matter the audit finds.

A mutant counts when it differs from the unmutated kernel, beyond tolerance, on inputs that are drawn here and not by
the audit. Only the audit may kill it. Results are lines of a JSON file, so that a run can be cut off and go on, here or
on another machine: ``--with FILE`` adds the lines of another run. ``--seconds 0`` only writes the page.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

PREPARED = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "TRITON_INTERPRET": "1",
    "SHIPLAP_NATIVE": "0",  # no binding is compiled: what is judged are kernels
    "CUDA_VISIBLE_DEVICES": "",
}


def read(files: Iterable[Path]) -> list[dict[str, Any]]:
    """The rows of earlier runs, each mutant once."""
    lines = [line for file in files if file.exists() for line in file.read_text(encoding="utf-8").splitlines()]
    return list({row["key"]: row for row in map(json.loads, lines)}.values())


def everything(seed: int, device: str = "cpu") -> list[tuple[Any, str, Any]]:
    """All mutants of all subjects of this device, shuffled: a run that is cut off has looked at some of each."""
    import subjects
    import subjects_c
    import subjects_cuda
    import subjects_more
    import subjects_triton
    from judge import mutants

    rooms = (subjects, subjects_more, subjects_c, subjects_triton, subjects_cuda)
    chosen = [subject for room in rooms for subject in room.SUBJECTS if subject.device == device]
    planted = [(subject, part, mutant) for subject in chosen for part, mutant in mutants(subject)]
    random.Random(seed).shuffle(planted)
    return planted


def work(options: argparse.Namespace) -> None:
    """One of several processes: every ``of``-th mutant that no earlier run has looked at."""
    import sympy  # what each audit's own process would load again
    import torch
    from judge import Originals, judged, key_of

    assert sympy is not None
    torch.set_num_threads(1)
    number, of = map(int, options.share.split("/"))
    known = {row["key"] for row in read([options.results, *options.also])}
    todo = [m for m in everything(options.seed, options.device) if key_of(*m) not in known]
    with tempfile.TemporaryDirectory() as folder, options.results.open("ab", buffering=0) as file:
        originals = Originals(Path(folder), options.seed, options.results.with_suffix(".originals"))
        for subject, part, mutant in todo[number::of]:
            if time.time() > options.until:
                return
            if not originals.runs(subject):
                continue  # left to another machine
            row = judged(subject, mutant, part, originals)
            file.write(json.dumps(row).encode() + b"\n")  # one write: lines of several processes do not mix


def share_out(options: argparse.Namespace) -> None:
    """Start the processes, and wait for them; what is late is ended, and its mutant left for another run."""
    until = time.time() + options.seconds
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent), "--results", str(options.results)]
    command += ["--seed", str(options.seed), "--until", str(until), "--device", options.device]
    prepared = PREPARED if options.device == "cpu" else {"SHIPLAP_NATIVE": "0"}
    command += [part for file in options.also for part in ("--with", str(file))]
    log = options.results.with_suffix(".log").open("wb")
    workers = [
        subprocess.Popen(
            [*command, "--share", f"{i}/{options.jobs}"], env={**os.environ, **prepared}, stdout=log, stderr=log
        )
        for i in range(options.jobs)
    ]
    try:
        while any(w.poll() is None for w in workers) and time.time() < until + 20:
            time.sleep(5)
            print(f"{len(read([options.results]))} mutants looked at, {until - time.time():.0f} s left", flush=True)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def main() -> None:
    parser = argparse.ArgumentParser(prog="power", description=__doc__)
    parser.add_argument("--results", type=Path, default=Path("build/power.jsonl"))
    parser.add_argument("--with", type=Path, dest="also", action="append", default=[], help="results of another run")
    parser.add_argument("--page", type=Path, default=Path("docs/power.md"))
    parser.add_argument("--seed", type=int, default=20261122)
    parser.add_argument("--seconds", type=float, default=3600.0, help="0: write the page of what there is")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="processes")
    parser.add_argument("--device", default="cpu", help="cuda: what synchronises kernels for a GPU is taken away")
    parser.add_argument("--share", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.share:
        work(options)
        return
    options.results.parent.mkdir(parents=True, exist_ok=True)
    if options.seconds > 0:
        share_out(options)
    os.environ.update(PREPARED)
    from page import HAND, page

    total = len(everything(options.seed)) + len(everything(options.seed, "cuda"))
    text = page(read([options.results, *options.also]), total)
    written = options.page.read_text(encoding="utf-8") if options.page.exists() else ""
    _, heading, rest = written.partition(HAND)  # written by hand: the score takes hours
    options.page.write_text(text + (f"\n{heading}{rest}" if heading else ""), encoding="utf-8")
    print("\n".join(line for line in text.splitlines() if line.startswith("**")))


if __name__ == "__main__":
    main()
