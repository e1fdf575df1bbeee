"""Passports on the command line: written after an audit, and held to the op at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shiplap.cli import console
from shiplap.errors import error

if TYPE_CHECKING:
    from shiplap.audit import CostCard, Finding, Judgement
    from shiplap.audit.passport import Coverage, Passport
    from shiplap.op import Op

__all__ = ["verify", "write_all"]


def write_all(
    folder: Path,
    ops: Sequence[Op],
    findings: Sequence[Finding],
    coverage: Mapping[str, Coverage],
    costs: Sequence[CostCard],
    verdicts: Sequence[Judgement],
    *,
    seed: int,
    device: str,
) -> list[Path]:
    """The passport of each op that has samples; returns the JSON files."""
    from shiplap.audit.passport import describe, write

    required = {v.subject: v.required for v in verdicts}
    cards = {card.subject: card for card in costs}
    unsampled = {f.subject for f in findings if f.check == "samples"}
    written = []
    for name, op in ((op.spec.name, op) for op in ops):
        if name not in unsampled:
            passport = describe(
                op, findings, coverage[name], cards.get(name), seed=seed, device=device, required=required[name]
            )
            written.append(write(folder, passport)[0])
    return written


def verify(files: Sequence[Path], ops: Sequence[Op], *, json: bool, key: Path | None = None) -> int:
    """Say of each passport whether it is that of its op, and proves it: 0, 1 or 3 as an audit; SL602, SL501."""
    rows = [_verified(file, ops, key) for file in files]
    if json:
        console.emit_json({"passports": rows})
    else:
        for row in rows:
            _print(row)
    failed = [row["moved"] or row["verdict"] == "failed" or _failing(row) or row["signed"] is False for row in rows]
    if any(failed):
        return 1
    return 3 if any(row["verdict"] != "proven" for row in rows) else 0


def _verified(file: Path, ops: Sequence[Op], key: Path | None) -> dict[str, Any]:
    from shiplap.audit.passport import content_of, moved, parse
    from shiplap.audit.signature import is_signed_by

    content = content_of(file)  # read once: what is signed is what is believed
    passport = parse(file, content)
    op = next((op for op in ops if op.spec.name == passport.op), None)
    if op is None:
        raise error(
            "SL501",
            where=str(file),
            what="no target declares the op of this passport",
            got=passport.op,
            expected=f"one of {', '.join(op.spec.name for op in ops)}",
            fix="name the target that declares the op",
        )
    rechecked = [] if moved(passport, op) else _recheck(passport, op)
    moves = [{"what": m.what, "then": m.then, "now": m.now} for m in moved(passport, op)]
    return {
        "file": str(file),
        "op": passport.op,
        "date": passport.date,
        "device": passport.device["name"],
        "verdict": passport.verdict,
        "signed": None if key is None else is_signed_by(file, key, content),
        "verdicts": passport.verdicts,
        "moved": moves,
        "looked_at_again": rechecked,
        "elsewhere": _elsewhere(passport),
    }


RECHECKS, RECHECK_S = 3, 20.0  # checks of a passport that are run once more, and seconds for them


def _recheck(passport: Passport, op: Op) -> list[dict[str, str]]:
    """Some of the checks that were ok, with the samples of the passport's seed."""
    from shiplap.audit import audit

    usual = ("numerics", "edges", "schema", "fresh", "arguments")
    fine = [row.check for row in passport.findings if row.verdict == "ok"]
    chosen = [name for name in usual if name in fine][:RECHECKS]
    device = passport.device["type"]
    findings = audit(op, checks=chosen, seed=passport.seed, device=device, budget_s=RECHECK_S) if chosen else []
    return [{"check": f.check, "verdict": f.verdict, "evidence": f.evidence} for f in findings]


def _failing(row: dict[str, Any]) -> list[str]:
    return [rechecked["check"] for rechecked in row["looked_at_again"] if rechecked["verdict"] == "fail"]


def _elsewhere(passport: Passport) -> dict[str, list[str]]:
    """Versions that are others here: the digests may hold and the evidence be of another torch all the same."""
    from shiplap.report import facts

    here = facts()
    return {name: [then, here[name]] for name, then in passport.versions.items() if name in here and here[name] != then}


def _print(row: dict[str, Any]) -> None:
    out = console.out()
    verdict = "is no longer that of the op" if row["moved"] else "is that of the op"
    out.print(f"{row['op']}: passport of {row['date']} {verdict}", markup=False)
    for move in row["moved"]:
        out.print(f"  {move['what']}: {move['then'][:16]} then, {move['now'][:16]} now", markup=False)
    out.print(f"  its verdict: {row['verdict']}", markup=False)
    if row["signed"] is not None:
        out.print(f"  {'signed' if row['signed'] else 'NOT signed'} by the key given", markup=False)
    if row["looked_at_again"]:
        names = ", ".join(rechecked["check"] for rechecked in row["looked_at_again"])
        failing = ", ".join(_failing(row))
        out.print(f"  looked at again: {names}" + (f"; {failing} FAILS now" if failing else ""), markup=False)
    for kind, words in (("fail", "had failed"), ("incomplete", "had not looked at everything")):
        if count := row["verdicts"].get(kind):
            out.print(f"  {count} checks {words}", markup=False)
    for name, (then, now) in row["elsewhere"].items():
        out.print(f"  evidence is of {name} {then}, here is {now}", markup=False)
    if row["moved"]:
        out.print("  fix      audit it again: shiplap audit TARGET --passport DIR", markup=False)
