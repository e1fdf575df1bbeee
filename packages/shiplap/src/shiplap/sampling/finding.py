"""``Finding``: the verdict of one check. The CLI, JSON, HTML and pytest views render this value and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "fail", "skip", "incomplete"]


@dataclass(frozen=True)
class Finding:
    """The verdict of one check of the audit, or of a candidate before it is timed, on one op.

    Attributes:
        check: id of the check, the name of its file.
        verdict: ``"skip"`` when the check does not apply to the op; ``"incomplete"`` when it applies and did not get
            to look, or not at everything. Neither is ever a synonym of ``"ok"``.
        subject: name of the op.
        evidence: what was seen. For ``"skip"`` and ``"incomplete"`` the reason.
        input: the sample that shows it, or how many samples were run.
        fix: one thing to do about it.
        varied: the axes that all failing samples vary, in one text. Empty if the first sample fails, too.
        reproducer: a Python script that rebuilds the sample and fails the same way.
    """

    check: str
    verdict: Verdict
    subject: str
    evidence: str
    input: str = ""
    fix: str = ""
    reproducer: str = ""
    varied: str = ""
