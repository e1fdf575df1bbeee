"""``shiplap judge --suite``: a table of verdicts, which grows while the suite is judged."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shiplap.cli import console
from shiplap.errors import error
from shiplap.judge.options import JudgeOptions
from shiplap.judge.suite_run import SuiteVerdict, describe_suite, run_suite
from shiplap.judge.suites import COMPILED, FORMATS, SuiteFolders, SuiteProblem, find_problems
from shiplap.safe_io.work_folders import work_folder

INTERRUPTED = 130  # the exit status after Ctrl-C


def judge_suite(
    folder: Path,
    candidates: str,
    output: Path | None,
    jobs: int,
    sample: str,
    changes: Mapping[str, Any],
    *,
    as_json: bool,
) -> int:
    """Judge the candidate kernels for the problems in ``folder``, print a line for each, and return the exit status. If
    ``output`` is not None, the verdicts are appended to this file as JSON lines, and problems that it already has are
    not judged again.

    ``candidates`` is the folder of the candidates, ``torch.compile``, or an empty string for candidates beside their
    problems. ``jobs`` candidates compile at once. ``sample`` chooses problems as ``N`` or ``N:SEED``, or all if it is
    empty. ``changes`` has options of the judgement. If ``as_json`` is true, one JSON list is printed instead of lines.
    Raise ``SL613`` if a folder is missing or has no problems.
    """
    for place in (folder, *([Path(candidates)] if candidates not in ("", COMPILED) else [])):
        if not place.is_dir():
            raise error("SL613", where="shiplap judge --suite", got=f"no folder {place}", expected="a folder")
    verdicts: list[SuiteVerdict] = []
    # References print in this process, so JSON needs the standard output for itself.
    with work_folder("suite") as written, console.own_stdout(as_json):
        places = SuiteFolders(folder.resolve(), candidates, written.resolve(), str(changes["device"]))
        problems = _draw_sample(find_problems(places), sample)
        if not problems:
            got, expected = f"no problem in {folder}", f"problems of {', '.join(FORMATS)}"
            raise error("SL613", where="shiplap judge --suite", got=got, expected=expected)
        running = run_suite(problems, JudgeOptions(**changes), file=output, jobs=jobs)
        try:
            for verdict in running:
                verdicts.append(verdict)
                if not as_json:
                    console.echo(_verdict_row(verdict))
        except KeyboardInterrupt:
            # A second Ctrl-C must not interrupt the cleanup.
            with contextlib.suppress(KeyboardInterrupt):
                running.close()
            console.note(f"{describe_suite(verdicts)}; interrupted, {len(problems) - len(verdicts)} are left")
            return INTERRUPTED
    if as_json:
        console.emit_json([v.as_json() for v in verdicts])
    else:
        console.echo(describe_suite(verdicts))
    words = {v.verdict for v in verdicts}
    return 1 if "refused" in words else 0 if words == {"accepted"} else 3


def _draw_sample(problems: list[SuiteProblem], sample: str) -> list[SuiteProblem]:
    """Return randomly chosen ones of ``problems``, in their order. ``sample`` is ``N`` or ``N:SEED`` (seed 0 by
    default), or empty for all problems. Raise ``SL613`` for another form.
    """
    if not sample:
        return problems
    count, _, seed = sample.partition(":")
    if not count.isdigit() or (seed and not seed.isdigit()) or int(count) < 1:
        raise error("SL613", where="shiplap judge --sample", got=sample, expected="N or N:SEED, such as 25:1")
    chosen = random.Random(int(seed or 0)).sample(range(len(problems)), min(int(count), len(problems)))
    return [problems[number] for number in sorted(chosen)]


def _verdict_row(verdict: SuiteVerdict) -> str:
    """Return the line of text that shows a verdict. It has the verdict's word, the speed-up, the lowest speed-up, the
    seconds, the problem and the reason.
    """
    fast = f"{verdict.speedup:6.2f}x {verdict.min_speedup:6.2f}x" if verdict.speedup else " " * 15
    return f"{verdict.verdict:<10} {fast} {verdict.seconds:6.1f} s  {verdict.problem}  {verdict.reason}"[:200].rstrip()
