"""``Finding``: the verdict of one check. The CLI, JSON, HTML and pytest views render this value and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "fail", "skip", "incomplete"]


@dataclass(frozen=True)
class Finding:
    """The verdict of one check of the audit, or of a candidate before it is timed, on one op.

    Attributes:
        check: the id of the check, which is the name of its file.
        verdict: ``"ok"`` or ``"fail"``. It is ``"skip"`` if the check does not apply to the op, and ``"incomplete"`` if
            it applies, but could not examine all that it has to examine. Neither of these means ``"ok"``.
        subject: the name of the op.
        evidence: what was seen. For ``"skip"`` and ``"incomplete"``, the reason.
        input: the sample that shows the evidence, or the number of samples that were run.
        fix: one action that repairs the fault.
        varied: the names of the properties of samples, such as size or layout, that all failing samples vary. Empty if
            the first sample, which varies none, fails, too.
        reproducer: a Python script that makes the sample again and shows the same failure.
    """

    check: str
    verdict: Verdict
    subject: str
    evidence: str
    input: str = ""
    fix: str = ""
    reproducer: str = ""
    varied: str = ""
