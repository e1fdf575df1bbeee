"""The judgement of a suite: candidates compile and are checked side by side, and times are measured one by one.

Each verdict is one line of JSON, written as soon as it is known. A later run with the same file goes on behind it.
"""

from __future__ import annotations

import gc
import hashlib
import json
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from shiplap import safe_io
from shiplap.errors import error, error_line
from shiplap.judge.engine import judge
from shiplap.judge.options import JudgeOptions
from shiplap.judge.suites import SuiteProblem
from shiplap.judge.target import JudgeTarget
from shiplap.sandbox.supervisor import SandboxLauncher

VERDICTS_LIMIT = 1 << 28  # bytes of the verdicts of earlier runs
UNUSABLE = "unusable"  # the verdict on a problem without a candidate, or whose reference does not run here


@dataclass(frozen=True)
class SuiteVerdict:
    """The verdict on one problem of a suite.

    Attributes:
        problem, format: the name of the problem, and of the format of its suite.
        digest: the digest of reference, candidate and options.
        verdict: the verdict of the judgement, or ``"unusable"``.
        speedup, min_speedup: the speedups that ``JudgeResult`` has.
        seconds: the duration of the judgement.
        reason: the first fault, gap or error.
        result: the fields of the ``JudgeResult`` as a dict, or None for an unusable problem.
    """

    problem: str
    format: str
    digest: str
    verdict: str
    speedup: float = 0.0
    min_speedup: float = 0.0
    seconds: float = 0.0
    reason: str = ""
    result: dict[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return all fields by name as a dict of values that ``json`` can write."""
        return asdict(self)


class TimingTurns:
    """Turns for judgements that run side by side in threads. They load, compile and check their candidates side by
    side. While one of them measures times, the others wait.

    A judgement runs inside ``judgement()``, and calls the function that this context yields between its steps.
    """

    def __init__(self) -> None:
        """Start with no judgement."""
        self._state = threading.Condition()
        self._working = 0  # judgements that neither wait nor measure times
        self._claims = 0  # judgements that measure times or wait for that
        self._busy = False

    @contextmanager
    def judgement(self) -> Iterator[Callable[[bool], None]]:
        """Return a context manager for one judgement, which is entered when no other one measures times or waits for
        that. Its value is a function that the judgement calls between its steps.

        With True, the function waits until no other judgement works. After that, none works until this judgement ends.
        With False, it waits as long as another judgement measures times or waits for that.
        """
        with self._state:
            self._state.wait_for(lambda: not self._claims)
            self._working += 1
        alone = False

        def wait_turn(times: bool) -> None:
            """Wait until this judgement may make its next step, which measures times if ``times`` is true."""
            nonlocal alone
            with self._state:
                if alone:
                    return
                self._working -= 1
                self._claims += times
                self._state.notify_all()
                self._state.wait_for(lambda: not (self._busy or (self._working if times else self._claims)))
                self._working += not times
                self._busy = alone = times

        try:
            yield wait_turn
        finally:
            with self._state:
                if alone:
                    self._busy = False
                    self._claims -= 1
                else:
                    self._working -= 1
                self._state.notify_all()


def run_suite(
    problems: Sequence[SuiteProblem],
    options: JudgeOptions,
    *,
    file: Path | None = None,
    jobs: int = 1,
) -> Generator[SuiteVerdict, None, None]:
    """Yield a verdict on each problem. Up to ``jobs`` problems are judged at a time.

    If ``file`` is given, verdicts in it from an earlier run with the same reference, candidate and options come first.
    They are not judged again. Each new verdict is appended to the file. A problem for which memory or another resource
    was missing while several were judged is judged again at the end, alone. If the caller stops early, all processes
    are ended.
    """
    # By digest: a changed candidate is judged again.
    known = {(v.problem, v.digest): v for v in read_verdicts(file)} if file is not None else {}
    left: list[tuple[SuiteProblem, str]] = []
    for problem in problems:
        digest = _digest_of(problem, options)
        if (earlier := known.get((problem.name, digest))) is not None:
            yield earlier
        else:
            left.append((problem, digest))
    turns, launchers = TimingTurns(), [SandboxLauncher() for _ in range(max(1, jobs))]
    free = list(launchers)

    def work(problem: SuiteProblem, digest: str) -> SuiteVerdict:
        """Return the verdict on one problem, judged with a launcher of sandboxed processes that no other judgement uses
        meanwhile. ``digest`` identifies the problem's sources and options.
        """
        launcher = free.pop()
        try:
            with turns.judgement() as turn:
                return _judge_problem(problem, digest, options, launcher, turn)
        finally:
            free.append(launcher)
            if options.device != "cpu":
                gc.collect()  # circles of objects may keep inputs and a reference that fill a GPU

    pool = ThreadPoolExecutor(len(launchers), "shiplap suite")
    try:
        pending, crowded = {pool.submit(work, *each): each for each in left}, list[tuple[SuiteProblem, str]]()
        while pending:
            done = wait(pending, return_when=FIRST_COMPLETED).done
            for future in [each for each in pending if each in done]:  # in the order of the problems
                verdict, judged = future.result(), pending.pop(future)
                if jobs > 1 and _lacks_memory(verdict):
                    crowded.append(judged)
                else:
                    yield _store_verdict(verdict, file)
        for judged in crowded:  # alone, since what others held may have been missing
            yield _store_verdict(work(*judged), file)
    finally:
        # Not waited for: the processes of running judgements are ended next.
        pool.shutdown(wait=False, cancel_futures=True)
        for launcher in launchers:
            launcher.finish()


def _lacks_memory(verdict: SuiteVerdict) -> bool:
    """Return whether a verdict is incomplete since the device or the machine lacked memory or another resource."""
    missing = dict((verdict.result or {}).get("missing", {}))
    return verdict.verdict == "incomplete" and not missing.keys().isdisjoint(("device", "machine", "far sizes"))


def _store_verdict(verdict: SuiteVerdict, file: Path | None) -> SuiteVerdict:
    """Append ``verdict`` to ``file`` as a line of JSON, and return it. If ``file`` is None, nothing is written."""
    if file is not None:
        begins = not file.is_file() or not file.stat().st_size or file.read_bytes()[-1:] == b"\n"
        # Behind a line that was cut off.
        safe_io.append_text(file, ("" if begins else "\n") + json.dumps(verdict.as_json()) + "\n")
    return verdict


def _judge_problem(
    problem: SuiteProblem,
    digest: str,
    options: JudgeOptions,
    launcher: SandboxLauncher,
    turn: Callable[[bool], None],
) -> SuiteVerdict:
    """Return the verdict on one problem of a suite, with ``digest`` in it.

    ``turn`` is called between the steps of the judgement, and waits for others (see ``judge``). If the reference cannot
    be loaded or raises an error, the verdict is ``"unusable"``.
    """
    named = problem.name, problem.format, digest
    if problem.unusable:
        return SuiteVerdict(*named, UNUSABLE, reason=problem.unusable)
    options = replace(options, vary_shapes=options.vary_shapes and problem.vary_shapes)
    try:
        result = judge(
            problem.reference,
            problem.candidate,
            options=options,
            launcher=launcher,
            turn=turn,
            same_operators=problem.compiled,
        )
    except Exception as e:  # of the reference, which runs in this process; the other problems go on
        return SuiteVerdict(*named, UNUSABLE, reason=error_line(e)[:300])
    reasons = [f"{r.check}: {r.evidence}" for r in result.reasons] + [f"{k}: {v}" for k, v in result.missing]
    figures = result.speedup, result.min_speedup, result.seconds
    return SuiteVerdict(*named, result.verdict, *figures, "; ".join(reasons[:1])[:300], result.as_json())


def _digest_of(problem: SuiteProblem, options: JudgeOptions) -> str:
    """Return the digest (32 hexadecimal digits) of a problem's name, its options and the source files of its reference
    and candidate. A verdict of an earlier run with the same digest is still valid.
    """
    digest = hashlib.sha256(repr((problem.name, problem.unusable, options)).encode())
    for target in (problem.reference, problem.candidate):
        digests = JudgeTarget.of(target, ("",)).read_digests() if target else {}
        digest.update(repr(sorted(digests.items())).encode())
    return digest.hexdigest()[:32]


def read_verdicts(file: Path) -> list[SuiteVerdict]:
    """Return the verdicts in a file of JSON lines, in order. A line that was cut off is left out. The list is empty if
    the file does not exist. Raise ``SL602`` for a file that cannot be read.
    """
    try:
        lines = safe_io.read_file(file, VERDICTS_LIMIT, safe_io.NAMED).splitlines()
    except FileNotFoundError:
        return []
    except OSError as e:
        raise error(
            "SL602",
            where=str(file),
            what="the verdicts of an earlier run cannot be read",
            got=safe_io.unsafe_reason(e),
            expected="a file that shiplap judge --suite has written",
            fix="name another file",
        ) from None
    verdicts: list[SuiteVerdict] = []
    for line in lines:
        with suppress(ValueError):
            verdicts.append(msgspec.convert(safe_io.parse_json(line), SuiteVerdict))
    return verdicts


def describe_suite(verdicts: Sequence[SuiteVerdict]) -> str:
    """Return the counts of the verdicts of a suite on one line, such as ``9 problems: 7 accepted, 2 refused``."""
    words = ("accepted", "refused", "incomplete", UNUSABLE)
    counts = {word: sum(v.verdict == word for v in verdicts) for word in words}
    return f"{len(verdicts)} problems: " + ", ".join(f"{n} {word}" for word, n in counts.items() if n)
