"""``Finding``: the verdict of one check. The CLI, JSON, HTML and pytest views render this value and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "fail", "skip", "incomplete"]


@dataclass(frozen=True)
class Finding:
    """The verdict on one op of one check of the audit, or of a check that a candidate has to pass before it is timed.

    Attributes:
        check: the id of the check, which is the name of its file.
        verdict: ``"ok"`` or ``"fail"``. It is ``"skip"`` if the check does not apply to the op, and ``"incomplete"`` if
            it applies, but could not examine all that it has to examine. Neither of these means ``"ok"``.
        subject: the name of the op.
        evidence: what was seen. For ``"skip"`` and ``"incomplete"``, the reason.
        input: the sample that shows the evidence, or the number of samples that were run.
        fix: one action that repairs the fault.
        varied: the names of the properties, such as size or layout, in which every failing sample differs from the
            first sample. It is empty if the first sample fails, too.
        example: small arguments that show the fault, the op's result and the expected one, if there are some.
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
    example: str = ""
