"""``audit(op)``: run the checks one after another, each to a finding, within a time budget."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from shiplap.audit.check import Subject
from shiplap.audit.checks import CHECKS, load
from shiplap.audit.finding import Finding
from shiplap.errors import LibraryError, error
from shiplap.op import Op
from shiplap.referee.run import call, last_line, needs_builder, quiet, reference
from shiplap.referee.samples import Case, Samples, describe

__all__ = ["audit"]


def audit(
    op: Op,
    *,
    checks: Iterable[str] | None = None,
    seed: int | None = None,
    device: str | None = None,
    samples: Callable[..., tuple[Any, ...]] | None = None,
    budget_s: float = 60.0,
    progress: Callable[[Finding], None] | None = None,
    looked: Callable[[str, Case], None] | None = None,
) -> list[Finding]:
    """Prove ``op`` against its declaration and reference on generated samples: one finding per check.

    Args:
        op: from ``sl.op`` or ``sl.adopt``.
        checks: names out of ``shiplap.audit.CHECKS``, all by default, or ``ON_REQUEST``.
        seed: of all random values; a fresh one by default. Findings name it.
        device: where to run, ``"cpu"`` by default.
        samples: a builder as for ``@op.samples``, used in this audit only.
        budget_s: seconds after which the rest is skipped, and says so. Dynamo's caches are reset on the way.
        progress: called with each finding as it is made.
        looked: called with the name of a check and each sample that it looked at, those set aside excepted.

    Raises:
        AuditError: SL501 for what is no declared op, SL502 without samples, SL503 for an unknown check.
        LibraryError: SL4xx when the kernel's library is not there.

    Example:
        >>> failed = [f for f in audit(axpy) if f.verdict == "fail"]  # doctest: +SKIP
    """
    if not isinstance(op, Op):
        raise error(
            "SL501",
            where="audit()",
            what="not a declared op",
            got=f"{type(op).__name__} {op}",
            expected="what @sl.op or @sl.adopt returned",
            fix='declare what it should do: @sl.op(...), or @sl.adopt("namespace::name")',
        )
    chosen = [load(name) for name in (CHECKS if checks is None else checks)]
    with quiet(), _sampler(op, samples):
        subject = Subject(op, Samples(op, secrets.randbelow(2**31) if seed is None else seed, device or "cpu"))
        subject.looked = looked or subject.looked
        _preflight(op, subject.samples)
        subject.deadline = time.monotonic() + budget_s
        findings = []
        for check in chosen:
            if time.monotonic() > subject.deadline:
                finding = Finding(check.name, "skip", subject.name, f"out of budget_s={budget_s:g}")
            else:
                finding = _run(check, subject)
            findings.append(finding)
            if finding.verdict == "fail":
                subject.failed.add(check.name)
            if progress is not None:
                progress(finding)
    return findings


def _preflight(op: Op, samples: Samples) -> None:
    """What would make every check fail alike is an error, not a finding of each."""
    case = samples.build(samples.base)
    try:
        reference(op, case.args)
    except Exception as e:
        if needs_builder(op):
            raise error(
                "SL502",
                where=op.spec.name,
                got=f"the reference raised {last_line(e)}",
                expected="integers that mean something to the op",
            ) from e
        raise error(
            "SL502",
            where=op.spec.name,
            got=f"the reference raised {last_line(e)}",
            expected=f"a result for {describe(op, case)}",
            fix="correct the reference, or exclude the input with requires=(...)",
        ) from e
    try:
        call(op, case.fresh())
    except LibraryError:
        raise
    except Exception:
        return  # a finding of the checks


def _run(check: Any, subject: Subject) -> Finding:
    try:
        finding: Finding = check.run(subject)
        return finding
    except Exception as e:  # a check must not take the audit down with it
        return Finding(
            check.name,
            "fail",
            subject.name,
            f"the check itself raised {last_line(e)}",
            input=f"seed {subject.samples.seed}",
            fix="report this: the auditor is wrong, not the op",
        )


@contextmanager
def _sampler(op: Op, builder: Callable[..., tuple[Any, ...]] | None) -> Iterator[None]:
    before = op.sampler
    op.sampler = builder or before
    try:
        yield
    finally:
        op.sampler = before
