"""How many defects the audit finds: ``python -m shiplap_testing.defects.score --half seen``.

Each bad op and each twin is audited in a process of its own, with limits of time and memory. A defect is *caught* where
a check fails on the bad op that does not fail on its twin. A process that crashed, hung or ran out of memory without a
finding is *lost*, which is as bad as *missed*: the audit ended with its op. What fails on a twin is a false *alarm*.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

from shiplap_testing.defects import CAUSES, Defect, defects

POLL = 0.25  # seconds between two looks at the memory of a process


class Judged(TypedDict):
    """The result of the audit of one op. ``failed`` holds the names of the checks that failed. ``status`` says how its
    process ended, which is ``done``, ``timeout``, ``memory`` or ``exit`` with the exit status. ``seconds`` is the
    duration of the audit.
    """

    failed: list[str]
    status: str  # done, timeout, memory, or "exit <code>"
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """The results of the audits for one defect. ``name`` and ``cause`` are those of the defect. ``bad`` is the result
    for the defective op, and ``good`` is that for the op without the defect.
    """

    name: str
    cause: str
    bad: Judged
    good: Judged

    @property
    def verdict(self) -> str:
        """The verdict on the defect. It is ``caught`` if a check of the audit fails on the defective op and not on the
        op without the defect.

        Otherwise it is ``missed`` if the audit of the defective op ended normally, and ``lost`` if its process crashed,
        hung or ran out of memory.
        """
        # A check that fails on the twin as well is a false alarm, and shows no defect.
        if set(self.bad["failed"]) - set(self.good["failed"]):
            return "caught"
        return "missed" if self.bad["status"] == "done" else "lost"

    @property
    def alarm(self) -> str:
        """The false alarms as one string, separated by commas. These are the names of the checks that failed on the op
        without the defect. If the audit of that op did not end normally, its status follows. The string is empty if
        there is no false alarm.
        """
        ended = [] if self.good["status"] == "done" else [self.good["status"]]
        return ", ".join([*self.good["failed"], *ended])


def count(outcomes: Iterable[Outcome]) -> dict[str, dict[str, int]]:
    """Return a mapping from cause to the numbers of ``outcomes`` that are ``caught``, ``missed`` and ``lost``, and that
    have false ``alarms``.

    Causes are in the order of ``CAUSES``, and those without an outcome are left out.
    """
    counts: dict[str, dict[str, int]] = {}
    for outcome in outcomes:
        row = counts.setdefault(outcome.cause, {"caught": 0, "missed": 0, "lost": 0, "alarms": 0})
        row[outcome.verdict] += 1
        row["alarms"] += bool(outcome.alarm)
    return {cause: counts[cause] for cause in CAUSES if cause in counts}


def report(outcomes: Sequence[Outcome]) -> str:
    """Return the report of a run with ``outcomes`` as a string of several lines.

    It has a table of verdicts by cause, a line for each defect that was not caught and for each false alarm, and the
    totals.
    """
    rows = count(outcomes)
    lines = [f"{'cause':12}{'caught':>8}{'missed':>8}{'lost':>8}{'alarms':>8}"]
    lines += [f"{cause:12}" + "".join(f"{n:8}" for n in row.values()) for cause, row in rows.items()]
    lines += [f"{o.verdict}: {o.cause}: {o.name} ({o.bad['status']})" for o in outcomes if o.verdict != "caught"]
    lines += [f"alarm: {o.cause}: {o.name}: {o.alarm}" for o in outcomes if o.alarm]
    caught = sum(o.verdict == "caught" for o in outcomes)
    alarms = sum(bool(o.alarm) for o in outcomes)
    share = 100 * caught / max(len(outcomes), 1)
    return "\n".join([*lines, f"{caught} of {len(outcomes)} caught ({share:.0f} %), {alarms} twins flagged"])


def _audit(name: str, which: str, options: argparse.Namespace) -> None:
    """Audit one op of the defect ``name``. It is the defective op if ``which`` is ``bad``, and the op without the
    defect if it is ``good``.

    Each finding is written to ``options.log`` at once, so that a crash loses none.
    """
    import shiplap as sl

    defect = defects()[name]
    op = defect.make_bad() if which == "bad" else defect.make_good()
    with options.log.open("a") as log:

        def note(finding: sl.Finding) -> None:
            """Append the check and the verdict of ``finding``, one result of the audit, to the log. With the option
            ``--first``, end the process at the first failure of a defective op.
            """
            log.write(json.dumps([finding.check, finding.verdict]) + "\n")
            log.flush()
            if options.first and which == "bad" and finding.verdict == "fail":
                log.write(json.dumps(["end", "end"]) + "\n")
                log.close()
                os._exit(0)

        for finding in sl.audit(op, budget=options.budget, seed=options.seed, progress=note):
            note(finding)
        log.write(json.dumps(["end", "end"]) + "\n")


def _judge(defect: Defect, which: str, options: argparse.Namespace) -> Judged:
    """Audit one op of ``defect`` in a process group of its own, and return the failed checks, the status and the
    seconds. ``which`` is ``bad`` for the defective op and ``good`` for the one without the defect.

    The group is killed if it exceeds the time or the memory of ``options``.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "findings")
        command = [sys.executable, "-W", "ignore", "-m", "shiplap_testing.defects.score", "--child", which]
        command += ["--only", defect.name, "--log", str(file), "--budget", str(options.budget)]
        command += ["--seed", str(options.seed), *(["--first"] if options.first else [])]
        env = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "OMP_WAIT_POLICY": "passive"}
        env |= {"PYTHONPATH": os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p)}
        # Triton reads this variable when it is imported.
        env |= {"TRITON_INTERPRET": "1"} if "triton" in defect.needs else {}
        start = time.monotonic()
        with open(os.devnull, "r+b") as nothing:
            child = subprocess.Popen(
                command, env=env, cwd=folder, start_new_session=True, stdin=nothing, stdout=nothing, stderr=nothing
            )
        status = _watch(child, start + options.timeout, options.memory << 20)
        seconds = round(time.monotonic() - start, 1)
        events = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if status == "done" and ["end", "end"] not in events:
        status = f"exit {child.returncode}"
    return {
        "failed": sorted({check for check, verdict in events if verdict == "fail"}),
        "status": status,
        "seconds": seconds,
    }


def _watch(child: subprocess.Popen[bytes], deadline: float, limit: int) -> str:
    """Wait for the process ``child``, kill its process group, and return how it ended, as a string. It is ``done``,
    ``timeout`` after ``deadline`` on the monotonic clock, or ``memory`` if the processes of its session held more than
    ``limit`` bytes. For a failed process it is ``exit`` with the exit status.
    """
    status = "done"
    try:
        while True:
            try:
                # Memory is looked at between two waits.
                child.wait(POLL)
                break
            except subprocess.TimeoutExpired:
                pass
            if time.monotonic() > deadline or _memory(child.pid) > limit:
                status = "timeout" if time.monotonic() > deadline else "memory"
                break
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # and what it started
        child.wait()
    return f"exit {child.returncode}" if status == "done" and child.returncode else status


def _memory(session: int) -> int:
    """Return the number of bytes of memory that all processes of the session ``session`` hold together."""
    return sum(_resident(folder) for folder in Path("/proc").glob("[0-9]*") if _session(folder) == session)


def _session(folder: Path) -> int:
    """Return the session number of the process with the folder ``folder`` in ``/proc``, or -1 if it has ended."""
    try:
        # The name of a program, in parentheses, may contain blanks.
        return int((folder / "stat").read_text().rpartition(")")[2].split()[3])
    except (OSError, IndexError):
        return -1


def _resident(folder: Path) -> int:
    """Return the number of bytes of memory that the process with the folder ``folder`` in ``/proc`` holds, or 0 if it
    has ended.
    """
    try:
        return int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _outcomes(chosen: Mapping[str, Defect], options: argparse.Namespace) -> Iterator[Outcome]:
    """Audit the op with the defect and the op without it, for each defect of ``chosen``. Yield an outcome for each
    defect in the order of ``chosen``, and print a line for it.

    At most ``options.jobs`` audits run at a time.
    """
    with ThreadPoolExecutor(options.jobs) as pool:
        audits = [[pool.submit(_judge, d, which, options) for which in ("bad", "good")] for d in chosen.values()]
        for defect, (bad, good) in zip(chosen.values(), audits, strict=True):
            outcome = Outcome(defect.name, defect.cause, bad.result(), good.result())
            print(
                f"{outcome.verdict:7} {outcome.cause}: {outcome.name}; {outcome.bad}; twin {outcome.good}", flush=True
            )
            yield outcome


def _known(file: Path | None, names: Iterable[str]) -> list[Outcome]:
    """Return the outcomes of an earlier, interrupted run in ``file`` for the defects with the names ``names``. The list
    is empty if ``file`` is None or does not exist.
    """
    if file is None or not file.exists():
        return []
    rows = [row for row in json.loads(file.read_text())["outcomes"] if row["name"] in set(names)]
    return [Outcome(row["name"], row["cause"], row["bad"], row["good"]) for row in rows]


def _write(file: Path, outcomes: Sequence[Outcome]) -> None:
    """Write the counts by cause and all ``outcomes`` with their verdicts and false alarms to ``file`` as JSON."""
    rows = [{**asdict(o), "verdict": o.verdict, "alarm": o.alarm} for o in outcomes]
    file.write_text(json.dumps({"counts": count(outcomes), "outcomes": rows}, indent=1))


def _options() -> argparse.Namespace:
    """Return the parsed options of the command line. If ``--timeout`` is not given, it is three times ``--budget`` plus
    60 seconds.
    """
    parser = argparse.ArgumentParser(prog="python -m shiplap_testing.defects.score", description=__doc__)
    parser.add_argument("--half", choices=("seen", "held_out", "later", "all"), default="all")
    parser.add_argument("--cause", choices=CAUSES, help="defects of this cause only")
    parser.add_argument("--only", help="the defect of this name only")
    parser.add_argument(
        "--first", action="store_true", help="end the audit of a bad op with the first check that fails"
    )
    parser.add_argument("--jobs", type=int, default=2, help="audits at a time")
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of an audit")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds that an audit may plan with")
    parser.add_argument("--timeout", type=float, help="seconds after which an audit is ended; 3 * budget + 60")
    parser.add_argument("--memory", type=int, default=4096, help="MiB that an audit may hold")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the outcomes; those that it has are kept, not judged again")
    parser.add_argument("--child", choices=("bad", "good"), help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.timeout = options.timeout or 3 * options.budget + 60
    return options


def main() -> None:
    """Audit the chosen defects and print the report.

    With ``--json``, outcomes are written to a file after each defect, and those of an earlier run are kept. With
    ``--child``, audit only one op, for a parent process.
    """
    options = _options()
    if options.child:
        _audit(options.only, options.child, options)
        return
    chosen = {
        name: defect
        for name, defect in defects().items()
        if options.half in ("all", defect.half)
        and options.cause in (None, defect.cause)
        and options.only in (None, name)
    }
    outcomes = _known(options.json, chosen)
    known = {o.name for o in outcomes}
    for outcome in _outcomes({n: d for n, d in chosen.items() if n not in known}, options):
        outcomes.append(outcome)
        if options.json:
            _write(options.json, outcomes)
    print(report(outcomes))


if __name__ == "__main__":
    main()
