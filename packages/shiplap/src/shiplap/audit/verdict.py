"""The verdict on an op: ``proven``, ``incomplete`` or ``failed``, from a stated set of required checks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from shiplap.audit.finding import Finding

Word = Literal["proven", "incomplete", "failed"]
EXIT_CODES: dict[Word, int] = {"proven": 0, "incomplete": 3, "failed": 1}


@dataclass(frozen=True)
class Judgement:
    """The verdict on one op.

    Attributes:
        subject: name of the op.
        word: ``failed`` when a check failed, ``incomplete`` when a required one did not examine everything.
        required: the checks that the verdict rests on.
        failed: checks that failed. ``missing``: required checks that examined nothing, with the reason.
    """

    subject: str
    word: Word
    required: tuple[str, ...]
    failed: tuple[str, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()


def judge(findings: Iterable[Finding], subject: str, required: Sequence[str]) -> Judgement:
    """Return the verdict on ``subject``. An op with an unexamined required check is never *proven*."""
    mine = [f for f in findings if f.subject == subject]
    failed = tuple(dict.fromkeys(f.check for f in mine if f.verdict == "fail"))
    there = {f.check for f in mine}
    missing = [(f.check, f.evidence) for f in mine if f.verdict == "incomplete"]
    # After a failure the remaining checks may have been left out, so they are not reported as missing.
    missing += [(name, "was not run") for name in required if name not in there and not failed]
    looked = any(f.verdict == "ok" for f in mine)
    if not looked and not failed and not missing:
        missing = [("samples", "no check applied")]
    word: Word = "failed" if failed else "incomplete" if missing else "proven"
    return Judgement(subject, word, tuple(required), failed, tuple(missing))
