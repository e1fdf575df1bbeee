"""The proofs of several rewrites as values, for ``shiplap rewrite --test``. Each check comes with its evidence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from shiplap.errors import ShiplapError
from shiplap.render.lines import Line, line, plain_json
from shiplap.rewrite.base import Rewrite
from shiplap.rewrite.match import Level
from shiplap.sampling.finding import Finding

VERDICT_STYLES = {"ok": "green", "fail": "red", "skip": "dim"}


@dataclass(frozen=True)
class RewriteProof:
    """The findings of the proof of one rewrite. ``rewrite`` is its name. The rewrite is refused if the verdict of a
    finding is ``"fail"``.
    """

    rewrite: str
    level: Level
    findings: tuple[Finding, ...]

    @property
    def proven(self) -> bool:
        """Whether no check of the proof failed, so that the rewrite may be applied."""
        return all(f.verdict != "fail" for f in self.findings)

    @staticmethod
    def run(rewrite: Rewrite) -> RewriteProof:
        """Prove ``rewrite`` and return its proof, with a finding for each check. If an error of the catalogue is
        raised, for example because a pattern cannot be traced, the proof has one failed finding named ``traced``.
        """
        try:
            findings = rewrite.findings
        except ShiplapError as e:
            findings = (Finding("traced", "fail", rewrite.name, f"{e.id}: {e.got}", "", e.fix or ""),)
        return RewriteProof(rewrite.name, rewrite.level, findings)

    def lines(self) -> Iterator[Line]:
        """Yield the lines in which the proof is printed. The first line has the name, the level and the verdict. Each
        further line has a check with its evidence, and the remedy if the check failed.
        """
        verdict = "proven" if self.proven else "REFUSED"
        yield line(f"{self.rewrite} ({self.level}): {verdict}", "bold" if self.proven else "bold red")
        for f in self.findings:
            on = f" on {f.input}" if f.verdict == "fail" and f.input else f" ({f.input})" if f.input else ""
            fix = f"; {f.fix}" if f.verdict == "fail" and f.fix else ""
            yield line(f"  {f.check}: {f.evidence}{on}{fix}", VERDICT_STYLES.get(f.verdict, ""))


def prove_each(rewrites: Iterable[Rewrite]) -> tuple[RewriteProof, ...]:
    """Return the proof of each rewrite, in the given order. A rewrite that fails its proof raises no error."""
    return tuple(map(RewriteProof.run, rewrites))


def proofs_as_json(proofs: Iterable[RewriteProof]) -> dict[str, Any]:
    """Return a dict of JSON values with the proofs as a list under ``"proofs"``."""
    return {"proofs": [plain_json({**asdict(p), "proven": p.proven}) for p in proofs]}
