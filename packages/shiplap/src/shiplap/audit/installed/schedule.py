"""Audit all ops of an installed package: each stage passes through all ops before the next one begins."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock

import msgspec

from shiplap.audit.installed.apart import RecordedCalls
from shiplap.audit.installed.engine import InstalledRequest, OpAudit, Subject
from shiplap.audit.installed.jobs import Level
from shiplap.audit.installed.result import InstalledOp

_SEARCHES = (0.15, 0.2, 0.2)  # the part of all time that a search may take of each op, and of those that are left
_CHEAP = 0.4  # the part of the time that is left which the cheap checks may take, which follow each search
_SEARCHING = 0.8  # the part of all time after which no op is searched again: a busy machine takes longer for a search
# The part of the time that is left which a level may take. What a level does not take is left to the next ones.
_CHECKS = {Level.DEAR: 0.6, Level.MALFORMED: 1.0}
_LEAST_SECONDS = 0.5  # of processor time of an op in a stage, also where no time is left


@dataclass
class _Turns:
    """The division of ``seconds`` among ops of which ``jobs`` run at once, from the time at which this is made.

    ``report`` is called with the stage and the name of an op, the number of ops that the stage has passed, and the
    number of all of its ops.
    """

    seconds: float
    jobs: int
    report: Callable[[str, int, int], None]
    _lock: Lock = field(default_factory=Lock)
    _began: float = field(default_factory=time.monotonic)

    @property
    def passed(self) -> float:
        """The part of the time that has passed."""
        return (time.monotonic() - self._began) / self.seconds

    def of_the_rest(self, part: float) -> Callable[[int], float]:
        """Return a function whose value is the seconds of an op before whose turn ``waiting`` ops are left: a share of
        ``part`` of the time that is left. What one op does not use is left to those behind it.
        """
        until = time.monotonic() + part * (self._began + self.seconds - time.monotonic())
        return lambda waiting: (until - time.monotonic()) * self.jobs / max(waiting, 1)

    def take(
        self,
        stage: str,
        audits: Sequence[OpAudit],
        share: Callable[[int], float],
        turn: Callable[[OpAudit, float], None],
    ) -> None:
        """Call ``turn(audit, seconds)`` for each of ``audits``, of which ``share`` returns the seconds."""
        passed = 0

        def one(audit: OpAudit) -> None:
            """Let one op take its turn."""
            nonlocal passed
            with self._lock:
                seconds = max(share(len(audits) - passed), _LEAST_SECONDS)
                passed += 1
                self.report(f"{stage} {audit.name}", passed, len(audits))
            turn(audit, seconds)

        # Threads suffice: each op runs in processes of its own, for which a thread only waits.
        with ThreadPoolExecutor(self.jobs) as pool:
            for _ in pool.map(one, audits):
                pass


def audit_installed_ops(
    ops: Mapping[str, Subject],
    recorded: RecordedCalls,
    asked: InstalledRequest,
    jobs: int = 1,
    done: Callable[[InstalledOp], None] = lambda op: None,
    minutes: float = math.inf,
    report: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[InstalledOp]:
    """Return the audit results of torch ops and functions, in the order of ``ops``, which maps their names to overloads
    and addresses.

    Calls of all ops are searched for, and cheap checks run on those that are found at once. Ops without a call are
    searched again with the arguments of the others. Then all ops pass through one level of checks after the other, so
    that an op whose checks take long takes no time from others. The stages divide ``minutes`` among the ops.
    ``recorded`` has the calls that a program made. ``jobs`` ops are audited at a time, each in processes of its own.
    ``done`` is called, by a thread, with what is known of an op after each search and each level of checks, and
    ``report`` shows the progress.
    """
    audits = [OpAudit(name, op, recorded.calls.get(name, ()), asked) for name, op in ops.items()]
    # Without a limit, each search and each level takes what the request allows.
    turns = _Turns(min(60 * minutes, 1e9), jobs, report)
    results = dict[str, InstalledOp]()

    def keep(audit: OpAudit, *, is_searched: bool = True) -> None:
        """Store and pass on what is known of one op, whose audit is not complete unless it ``is_searched``."""
        objects = ", ".join(recorded.objects.get(audit.name, ()))
        result = audit.result(f"a script cannot make what recorded calls pass as {objects}" if objects else "")
        results[audit.name] = replace(result, complete=result.complete and is_searched)
        done(results[audit.name])

    for number, part in enumerate(_SEARCHES):
        missed = [audit for audit in audits if number == 0 or not audit.is_searched]
        # This is processor time: on a busy machine a search takes longer, and finds as much.
        seconds = min(part * turns.seconds * jobs / max(len(missed), 1), asked.seconds)

        def reach(
            audit: OpAudit,
            check_seconds: float,
            seconds: float = seconds,
            number: int = number,
        ) -> None:
            """Search for calls of one op, among others with the arguments of those found so far, and check them."""
            if number == 0 or turns.passed < _SEARCHING:
                # In the first one, of each family, few ops are known, and one that is only similar misleads a search.
                siblings = [call for each in audits for call in each.calls_for_others()] if number else []
                audit.reach(seconds, check_seconds, siblings)
            keep(audit, is_searched=audit.is_searched or number == len(_SEARCHES) - 1)

        turns.take("search for calls of", missed, turns.of_the_rest(_CHEAP), reach)
    for level, part in _CHECKS.items():

        def check(audit: OpAudit, seconds: float, level: Level = level) -> None:
            """Run the checks of one level on one op."""
            audit.check(level, seconds)
            keep(audit)

        reached = [audit for audit in audits if audit.calls]
        turns.take(f"{level.name.lower()} checks of", reached, turns.of_the_rest(part), check)
    return [results[name] for name in ops]


def prepare_process() -> None:
    """Import torch's compiler in this process, so that processes forked from it need not do so. The import takes
    seconds.
    """
    import torch

    torch.compile(torch.sin, backend="aot_eager")(torch.ones(1))


def stored_results(file: Path, version: str | None = None) -> dict[str, InstalledOp]:
    """Return the results of an interrupted run as a dict by name of the op, read from its file of JSON lines. A line
    that was cut off and an op whose audit was interrupted are left out. If ``version`` is not None, results of other
    versions of the package are left out, too. The dict is empty if there is no file.
    """
    results: dict[str, InstalledOp] = {}
    if file.is_file():
        for text in file.read_bytes().splitlines():
            with contextlib.suppress(msgspec.DecodeError, RecursionError):
                result = msgspec.json.decode(text, type=InstalledOp)
                if version is None or msgspec.json.decode(text).get("version") == version:
                    results[result.op] = result
    return {name: result for name, result in results.items() if result.complete}
