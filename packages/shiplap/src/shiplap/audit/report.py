"""``Report``: the findings on an op and the verdict that follows from them and from a stated set of required checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from shiplap.audit.causes import group_by_cause
from shiplap.cached_property import cached_property
from shiplap.dispatch import AdoptedOp, Op
from shiplap.render.result import ResultWithVerdict, Row
from shiplap.sampling.finding import Finding
from shiplap.sampling.ledger import AUDIT, Cell, Ledger

ReportVerdict = Literal["proven", "incomplete", "failed"]
FEW = 5  # checks that fit into one line


@dataclass(frozen=True, repr=False)
class Report(ResultWithVerdict):
    """The findings of an audit of one op, and its verdict. Iterating over it yields the findings.

    A report has no truth value, so a test has to say ``assert report.proven``.

    Attributes:
        subject: the name of the op.
        findings: one finding for each check, in the order of the checks.
        required: the names of the checks on which the verdict rests.
        ledger: the cells that these checks have covered. A cell is a combination of a property that samples vary (such
            as ``size``) and of what a check observes (such as ``gradient``). There are none if nothing was recorded.
        no_kernel_on: the type of the device, if the op has no kernel there, so that only its reference ran. It is empty
            if the op has one.
        verdict: ``"failed"`` if a check failed. Otherwise it is ``"incomplete"`` if a required check did not examine
            all its samples, or a required cell of the ledger has no sample. It is ``"proven"`` in all other cases.
    """

    subject: str
    findings: tuple[Finding, ...]
    required: tuple[str, ...]
    ledger: tuple[Cell, ...] = ()
    no_kernel_on: str = ""
    _good: ClassVar[str] = "proven"

    @cached_property
    def failed(self) -> tuple[str, ...]:
        """The names of the checks that failed, in order and without repetitions."""
        return tuple(dict.fromkeys(f.check for f in self.findings if f.verdict == "fail"))

    @cached_property
    def causes(self) -> tuple[tuple[Finding, ...], ...]:
        """The failed findings in groups with one cause each, the most harmful group first. The first finding of a group
        is the most harmful one.
        """
        return group_by_cause(self.findings)

    @cached_property
    def missing(self) -> tuple[tuple[str, str], ...]:
        """The checks without a full result, as pairs of the check's name and the reason. Such a check was required and
        not run, was not completed, or has examined no sample of a required kind.
        """
        ran = {f.check for f in self.findings}
        missing = [(f.check, f.evidence) for f in self.findings if f.verdict == "incomplete"]
        missing += [(name, "was not run") for name in self.required if name not in ran and not self.failed]
        named = {name for name, _ in missing}
        missing += [(c.looked_by, f"{c} is untouched: {c.reason}") for c in self.untouched if c.looked_by not in named]
        applied = any(f.verdict == "ok" for f in self.findings)
        if not applied and not self.failed and not missing:
            missing = [("samples", "no check applied")]
        return tuple(missing)

    @property
    def untouched(self) -> tuple[Cell, ...]:
        """The required cells of the ledger that apply to the op but that no sample covered. A cell is a combination of
        a property that samples vary (such as ``size``) and of what is observed (such as ``gradient``).
        """
        return tuple(c for c in self.ledger if c.required and c.state == "untouched")

    @property
    def verdict(self) -> ReportVerdict:
        """The verdict on the op. It is ``failed`` if a check failed, ``incomplete`` if none failed and one lacks a full
        result, and ``proven`` otherwise.
        """
        return "failed" if self.failed else "incomplete" if self.missing else "proven"

    @property
    def proven(self) -> bool:
        """Whether every required check passed or does not apply to the op, and none was left out."""
        return self.verdict == "proven"

    @property
    def headline(self) -> str:
        """One line of text with the op's name and the verdict. The causes of failures, the missing checks, or the
        checks that passed follow. If no kernel ran, the line says so.
        """
        only = f"; only the reference ran, since the op has no kernel for {self.no_kernel_on}" * bool(self.no_kernel_on)
        reasons: dict[str, list[str]] = {}  # reason -> checks: where the time is over, it is one reason for many
        for check, reason in self.missing:
            reasons.setdefault(reason, []).append(check)
        why = _name_causes(self.causes) or "; ".join(f"{', '.join(checks)}: {each}" for each, checks in reasons.items())
        if why:
            return f"{self.subject}: {self.verdict} ({why}){only}"
        few = len(self.required) <= FEW  # the verdict alone would claim more than these checks show
        passed = len({f.check for f in self.findings if f.verdict == "ok"})  # those that apply
        by = f" for {', '.join(self.required)} alone" if few else f" by {passed} checks"
        return f"{self.subject}: {self.verdict}{by}{only}"

    @property
    def rows(self) -> tuple[Row, ...]:
        """The findings as rows of a table. Each row has the check, the verdict, the evidence and lines of detail."""
        return tuple(Row(f.check, f.verdict, f.evidence, _details(f)) for f in self.findings)

    def __iter__(self) -> Iterator[Finding]:
        """Return an iterator over the findings of the report."""
        return iter(self.findings)

    def __len__(self) -> int:
        """Return the number of findings in the report."""
        return len(self.findings)


def _name_causes(causes: Sequence[Sequence[Finding]]) -> str:
    """Return the names of the checks that show the ``causes`` of failures, in one string. A name is followed by the
    number of other checks that fail for the same reason, if there are any.
    """
    shown = []
    for first, *others in causes:
        more = {f.check for f in others} - {first.check}
        also = f" and {len(more)} more" if more else ""
        also += f" for another {first.varied}" if more and first.varied else ""
        shown.append(f"{first.check}{also}")
    return ", ".join(dict.fromkeys(shown))


def _details(finding: Finding) -> tuple[str, ...]:
    """Return one line each for the input of a failed finding and for its fix. Return an empty tuple for other
    verdicts.
    """
    shown = {"input": finding.input, "fix": finding.fix} if finding.verdict == "fail" else {}
    return tuple(f"{name:<7}{text}" for name, text in shown.items() if text)


def device_without_kernel(op: Op, device: str) -> str:
    """Return the type of ``device`` if the op has neither a kernel nor a template for it, and otherwise an empty
    string. It is empty also for an adopted op, whose kernels another library has registered.
    """
    kind = device.partition(":")[0]
    return "" if isinstance(op, AdoptedOp) or op.kernels.get(kind) or op.templates.get(kind) else kind


def make_report(
    subject: str, findings: Sequence[Finding], required: Sequence[str], ledger: Ledger, no_kernel_on: str = ""
) -> Report:
    """Return the report on ``subject``, the name of an op, from its findings and the names of the required checks.
    ``ledger`` holds the number of samples for each property that samples vary and each thing that is observed.
    ``no_kernel_on`` is the type of a device on which only the reference ran, or empty.
    """
    worst = sorted(findings, key=lambda f: ("fail", "incomplete", "ok", "skip").index(f.verdict), reverse=True)
    verdicts = {f.check: (f.verdict, f.evidence) for f in worst}
    return Report(subject, tuple(findings), tuple(required), ledger.cells(AUDIT, verdicts), no_kernel_on)
