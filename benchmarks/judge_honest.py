"""Honest candidates on the CPU: none is refused, and the filter of allowed calls costs no time.

    python benchmarks/judge_honest.py [--before FILE] [--jobs 2] [--limit 500] [--json FILE]

``--part 2/8`` judges every eighth candidate, beginning with the third, so that several runs share the work.

The candidates are those of the judge's tests: kernels, ways to write them, twins of wrong ones, and uses of the system.
Each is judged in the sandbox, without the measurement of its speed. One of ``--share`` candidates is also judged with
the file ``--before`` in place of ``sandbox/seccomp.py``, right before or after, for the seconds of the former filter.
So many ``--jobs`` judge side by side; where they are more than half of the processors, times say little. The folder
keeps the rows, and the next run goes on there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from _record import ROOT, record, write

SOURCES = ("packages/shiplap/src/shiplap/sandbox/*.py", "packages/shiplap/src/shiplap/judge/*.py")
SECONDS, ROUNDS = 120, 5
COMPILERS = ("load_inline", "torch.compile", "gcc")  # what takes longest is judged first
Case = tuple[str, str, str, str]
LOCK = threading.Lock()  # of the file of rows


def list_cases() -> list[Case]:
    """Return (set, name, reference, candidate) of each honest candidate."""
    sys.path.insert(0, str(ROOT / "packages" / "shiplap"))
    from tests.judge import test_cheats
    from tests.judge.honest import HONEST, candidate_of, reference_of
    from tests.judge.honest_styles import STYLES
    from tests.judge.honest_system import SYSTEM
    from tests.judge.honest_ways import WAYS
    from tests.judge.omissions import HEAD, REFERENCES, SOUND

    plain, head = test_cheats.REFERENCE, test_cheats.HEAD
    cases = [("kernels", name, reference_of(name), candidate_of(name)) for name in HONEST]
    cases += [("ways", name, plain, head + text) for name, text in {**WAYS, **STYLES}.items()]
    cases += [("twins", name, HEAD + REFERENCES[what], HEAD + text) for name, (what, text) in SOUND.items()]
    cases += [("twins", name, plain, head + text) for name, text in test_cheats.HONEST.items()]
    return cases + [("system", name, plain, head + text) for name, text in SYSTEM.items()]


def serve(seconds: float) -> None:
    """Judge the candidates that standard input names, each in at most ``seconds``, and print a row for each."""
    import shiplap as sl
    from shiplap.sandbox.supervisor import SandboxLauncher

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with SandboxLauncher() as launcher:
        for line in sys.stdin:
            reference, candidate = json.loads(line)
            folder = Path(tempfile.mkdtemp(prefix="honest-"))
            (folder / "candidate").mkdir()
            (folder / "reference.py").write_text(reference)
            place = folder / "candidate" / "it.py"
            place.write_text(candidate)
            began, options = time.monotonic(), {"seconds": seconds, "rounds": ROUNDS, "timed": False}
            try:
                done = sl.judge(folder / "reference.py", place, launcher=launcher, **options)  # type: ignore[arg-type]
                why = [f"{r.check}: {r.evidence}" for r in done.reasons] or [f"{k}: {v}" for k, v in done.missing]
                row = {"verdict": "refused" if done.reasons else done.verdict, "why": "; ".join(why)[:300]}
                row["calls"] = done.calls  # type: ignore[assignment]
            except BaseException as e:
                row = {"verdict": "error", "why": repr(e)[:300]}
            print(json.dumps({**row, "seconds": round(time.monotonic() - began, 2)}), file=out, flush=True)
            shutil.rmtree(folder, ignore_errors=True)


class Server:
    """A process that judges, of this package or of a copy with another filter."""

    def __init__(self, before: Path | None, seconds: float) -> None:
        """Start the process, with ``before`` in place of the filter. A judgement takes at most ``seconds``."""
        self.copy = tempfile.TemporaryDirectory(prefix="honest-")
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        if before is not None:
            package = Path(self.copy.name) / "shiplap"
            shutil.copytree(ROOT / "packages" / "shiplap" / "src" / "shiplap", package)
            shutil.copy(before, package / "sandbox" / "seccomp.py")
            env["PYTHONPATH"] = self.copy.name
        command, pipe = [sys.executable, __file__, "--serve", "--seconds", str(seconds)], subprocess.PIPE
        self.process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)

    def judge(self, reference: str, candidate: str) -> dict[str, Any]:
        """Return the row of a candidate."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([reference, candidate]) + "\n")
        self.process.stdin.flush()
        row: dict[str, Any] = json.loads(self.process.stdout.readline() or '{"verdict": "error", "why": "it ended"}')
        return row

    def close(self) -> None:
        """End the process and remove its copy."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self.copy.cleanup()


def judge_cases(cases: list[Case], given: argparse.Namespace) -> list[dict[str, Any]]:
    """Judge the cases that the folder has no row of, until the limit, and return all rows."""
    kept = given.folder / "rows.jsonl"
    done = {(row["set"], row["name"]) for row in read_rows(kept)}
    left: Queue[tuple[int, Case]] = Queue()
    for number, case in enumerate(cases):
        if case[:2] not in done:
            left.put((number, case))
    ends = time.monotonic() + given.limit
    work = partial(judge_queued, left, cases[-1], given, kept, ends)
    threads = [threading.Thread(target=work) for _ in range(given.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return read_rows(kept)


def read_rows(kept: Path) -> list[dict[str, Any]]:
    """Return the rows of the file ``kept``."""
    return [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []


def judge_queued(left: Queue[tuple[int, Case]], last: Case, given: argparse.Namespace, kept: Path, ends: float) -> None:
    """Judge what the queue holds until the time ``ends``, and append a row for each to the file ``kept``. Each process
    that judges begins with the case ``last``, which counts for none.
    """
    servers: dict[bool, Server] = {}
    while time.monotonic() < ends:
        try:
            number, (kind, name, *texts) = left.get_nowait()
        except Empty:
            break
        row: dict[str, Any] = {"set": kind, "name": name}
        both = given.before and number % given.share == 0
        for former in ((False, True), (True, False))[number // given.share % 2] if both else (False,):
            if former not in servers:
                servers[former] = Server(given.before if former else None, given.seconds)
                servers[former].judge(*last[2:])  # what is imported later counts for none
            got = servers[former].judge(*texts)
            row.update({"before": got} if former else got)
        with LOCK, kept.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row["verdict"], kind, name, row["seconds"], row["why"][:100], flush=True)
    for server in servers.values():
        server.close()


def summarise(rows: list[dict[str, Any]], cases: list[Case]) -> dict[str, Any]:
    """Return the verdicts of each set, and the times beside those of the former filter."""
    pairs = [row for row in rows if "before" in row and row["verdict"] == row["before"]["verdict"] == "accepted"]
    ratios = sorted(row["seconds"] / row["before"]["seconds"] for row in pairs)
    sets = {kind: dict(Counter(row["verdict"] for row in rows if row["set"] == kind)) for kind, *_ in cases}
    measured: dict[str, Any] = {"cases": len(cases), "judged": len(rows), "sets": sets, "pairs": len(pairs)}
    if pairs:
        sums = [round(sum(row["seconds"] for row in part), 1) for part in (pairs, [row["before"] for row in pairs])]
        measured |= {"median_ratio": round(statistics.median(ratios), 3), "seconds": sums[0], "seconds_before": sums[1]}
    return {**measured, "not_accepted": [row for row in rows if row["verdict"] != "accepted"], "rows": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of one judgement")
    parser.add_argument("--part", default="0/1", help="which of how many parts")
    parser.add_argument("--before", type=Path, help="the former seccomp.py")
    parser.add_argument("--share", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=500.0)
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "honest")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.serve:
        serve(given.seconds)
        return 0
    given.folder.mkdir(parents=True, exist_ok=True)
    cases = list_cases()
    random.Random(7).shuffle(cases)
    cases.sort(key=lambda case: not any(word in case[3] for word in COMPILERS))
    part, parts = map(int, given.part.split("/"))
    cases = cases[part::parts]
    rows = judge_cases(cases, given)
    measured = summarise(rows, cases)
    print(json.dumps({name: measured[name] for name in measured if name not in ("rows", "not_accepted")}))
    if given.json:
        write(given.json, record(SOURCES, ("shiplap",), **measured))
    return int(any(row["verdict"] in ("refused", "error") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
