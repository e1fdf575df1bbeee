"""The passport of an op: what was proved about which code, with what, on which machine, as one JSON and one HTML file.

``issue`` audits and measures, ``write`` makes the two files, ``read`` validates one, ``moved`` says which digest of the
op at hand is no longer that of the passport. A passport holds labels and seeds of samples, no paths of a machine.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import torch

from shiplap import trust
from shiplap.audit.checks import CHECKS
from shiplap.audit.checks.stateless import located
from shiplap.audit.cost import CostCard, cost
from shiplap.audit.digest import deep_digest, libraries, packages
from shiplap.audit.engine import BUDGET_S, audit
from shiplap.audit.finding import Finding
from shiplap.audit.symbols import compilers
from shiplap.audit.verdict import judge
from shiplap.errors import error, writing
from shiplap.op import Op, OpSpec
from shiplap.op.schema import schema
from shiplap.referee.run import is_adopted
from shiplap.report import facts, passport_html
from shiplap.report.facts import driver

__all__ = [
    "SCHEMA",
    "Coverage",
    "Move",
    "Passport",
    "content_of",
    "describe",
    "digests",
    "issue",
    "moved",
    "parse",
    "read",
    "sealed",
    "write",
]

SCHEMA = "shiplap.passport/2"
LIMIT = 1 << 24  # bytes of a passport
FAR = "not on this machine"
OWN = ("shiplap", "torch")  # their versions are named apart
VERDICTS = ("fail", "incomplete", "ok", "skip")


class Row(msgspec.Struct, frozen=True):
    """A finding. The sample is named by label and seed, from which ``shiplap.audit.sample`` rebuilds it."""

    check: str
    verdict: str
    evidence: str
    input: str
    fix: str


class Covered(msgspec.Struct, frozen=True):
    """The inputs that one check has examined, as observed on the arguments that the op received."""

    samples: int
    dtypes: list[str]
    sizes: dict[str, list[str]]
    values: list[str]
    layouts: list[str]
    absent: list[str]


class Cost(msgspec.Struct, frozen=True):
    """The cost card: nanoseconds per call."""

    input: str
    binding: str
    raw_ns: float | None
    eager_ns: float
    compiled_ns: float | None
    captured_ns: float | None
    notes: list[str]


class Passport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The passport as data, in the order of the file. Maps are sorted, so that equal evidence gives equal text.

    Attributes:
        schema: ``SCHEMA``.
        declaration: the torch schema and, where declared, dims, bounds, preconditions, mutation, autocast rule.
        digests: of everything that the evidence depends on and that can move.
        verdict: ``proven``, ``incomplete`` or ``failed``, from the ``required`` checks.
        coverage: by check, what it was observed to look at.
        seal: sha256 of the file with an empty seal. A file that someone edited has another one.
    """

    schema: str
    op: str
    date: str
    device: dict[str, str]
    seed: int
    declaration: dict[str, Any]
    digests: dict[str, str]
    versions: dict[str, str]
    verdict: str
    required: list[str]
    verdicts: dict[str, int]
    findings: list[Row]
    coverage: dict[str, Covered]
    cost: Cost | None
    seal: str = ""


class Move(msgspec.Struct, frozen=True):
    """A digest that has changed since the passport was issued."""

    what: str
    then: str
    now: str

    def __str__(self) -> str:
        return f"{self.what}: {self.then[:16]} then, {self.now[:16]} now"


class Coverage:
    """Collects the inputs that checks examine. Pass it to ``audit`` as ``looked``."""

    def __init__(self) -> None:
        self.seen: dict[str, list[dict[str, Any]]] = {}

    def __call__(self, check: str, seen: dict[str, Any]) -> None:
        self.seen.setdefault(check, []).append(seen)

    def rows(self) -> dict[str, Covered]:
        """By check, each value once and in order."""
        return {check: _covered(seen) for check, seen in sorted(self.seen.items())}

    def labels(self, check: str) -> list[str]:
        """The samples of one check, by which they can be looked at again."""
        return list(dict.fromkeys(s["label"] for s in self.seen.get(check, ())))


def _covered(seen: list[dict[str, Any]]) -> Covered:
    def union(name: str) -> list[str]:
        return sorted({value for s in seen for value in s[name]})

    names = sorted({name for s in seen for name in s["sizes"]})
    sizes = {name: {s["sizes"][name] for s in seen if name in s["sizes"]} for name in names}
    return Covered(
        samples=len(seen),
        dtypes=union("dtypes"),
        sizes={name: sorted(seen, key=_order) for name, seen in sizes.items()},
        values=union("values"),
        layouts=union("layouts"),
        absent=union("absent"),
    )


def _order(value: str) -> tuple[bool, int, str]:
    return not value.isdigit(), int(value) if value.isdigit() else 0, value


def issue(
    op: Op,
    folder: str | Path | None = None,
    *,
    device: str = "cpu",
    seed: int | None = None,
    checks: Iterable[str] | None = None,
    budget_s: float = BUDGET_S,
) -> Passport:
    """Audit and measure ``op``. With ``folder``, also write the passport there (see ``write``).

    Raises:
        AuditError: as ``audit``.
        CommandError: SL602 when the folder cannot be written.
    """
    seed = secrets.randbelow(2**31) if seed is None else seed
    looked = Coverage()
    findings = audit(op, checks=checks, seed=seed, device=device, budget_s=budget_s, looked=looked)
    passport = describe(op, findings, looked, cost(op, device=device), seed=seed, device=device)
    if folder is not None:
        write(folder, passport)
    return passport


def describe(
    op: Op,
    findings: Sequence[Finding],
    coverage: Coverage,
    card: CostCard | None,
    *,
    seed: int,
    device: str,
    date: str = "",
    required: Sequence[str] = CHECKS,
) -> Passport:
    """The sealed passport of these results; ``date`` is today in UTC by default."""
    rows = [Row(f.check, f.verdict, f.evidence, f.input, f.fix) for f in findings if f.subject == op.spec.name]
    passport = Passport(
        schema=SCHEMA,
        op=op.spec.name,
        date=date or datetime.now(UTC).strftime("%Y-%m-%d"),
        device=_device(device),
        seed=seed,
        declaration=_declaration(op.spec),
        digests=digests(op),
        versions=_versions(op, device),
        verdict=judge(findings, op.spec.name, required).word,
        required=list(required),
        verdicts={v: sum(r.verdict == v for r in rows) for v in VERDICTS},
        findings=rows,
        coverage=coverage.rows(),
        cost=_cost(card),
    )
    return msgspec.structs.replace(passport, seal=_seal(passport))


def _seal(passport: Passport) -> str:
    return hashlib.sha256(_text(msgspec.structs.replace(passport, seal=""))).hexdigest()


def _text(passport: Passport) -> bytes:
    return msgspec.json.format(msgspec.json.encode(passport), indent=1) + b"\n"


def _cost(card: CostCard | None) -> Cost | None:
    if card is None:
        return None
    times = (
        None if t is None else round(t, 1) for t in (card.raw_ns, card.eager_ns, card.compiled_ns, card.captured_ns)
    )
    raw, eager, compiled, captured = times
    return Cost(card.input, card.binding, raw, eager or 0.0, compiled, captured, list(card.notes))


def _device(device: str) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else facts()["machine"]
    return {"name": name, "type": torch.device(device).type}


def _declaration(spec: OpSpec) -> dict[str, Any]:
    related = {"bounds": spec.bounds, "dims": spec.dims}
    expressions = {name: {dim: str(e) for dim, e in sorted(content)} for name, content in related.items()}
    content: dict[str, Any] = {
        "arguments": {a.name: str(a.tensor) if a.tensor else str(a.scalar) for a in spec.args},
        "autocast": spec.autocast,
        **expressions,
        "mutates": list(spec.mutated),
        "outputs": {o.name: str(o.tensor) for o in spec.outputs},
        "requires": [str(e) for e in spec.requires],
        "tolerance": f"{spec.tolerance[0]:g}: {spec.tolerance[1]}" if spec.tolerance else {},
        "schema": f"{spec.namespace}::{schema(spec)}",
    }
    return {name: value for name, value in content.items() if value not in ({}, [])}


def digests(op: Op) -> dict[str, str]:
    """By name: the op's identity and what it is made of, and the libraries of its C ABI kernels as files."""
    by_part = {"declaration": op.spec.digest, "op": op.identity, "reference": deep_digest(op.reference)}
    if op.gradient is not None:
        by_part["gradient"] = deep_digest([op.gradient.fn, op.gradient.saves, *(part.op for part in op.gradient.ops)])
    if op.sampler is not None:
        by_part["builder"] = deep_digest(op.sampler)
    for device, kernels in op.kernels.items():
        for kernel in kernels:
            parts = [kernel.identity, kernel.function, kernel.supports]
            by_part[f"kernel {device}/{kernel.name}"] = deep_digest(parts)
    by_part |= {f"package {name}": text for name, text in packages(op).items() if name not in OWN}
    there, absent = located(op)
    by_part |= {f"library {path.name}": hashlib.sha256(path.read_bytes()).hexdigest() for path in there}
    by_part |= {f"library {name}": FAR for name in absent}
    if is_adopted(op):
        loaded = libraries()
        by_part |= {f"library {name}": text for name, text in loaded.items()}
        if not loaded:
            by_part["implementation"] = "another library's: not in any digest"
    return dict(sorted(by_part.items()))


def _versions(op: Op, device: str) -> dict[str, str]:
    known = {name: facts()[name] for name in ("python", "shiplap", "system", "torch", "triton")}
    made = sorted({text for path in located(op)[0] for text in compilers(path)})
    known["compiler"] = "; ".join(made) or ("not recorded in the libraries" if located(op)[0] else "none used")
    if device.startswith("cuda"):
        known |= {"cuda": str(torch.version.cuda), "driver": driver()}
    return dict(sorted(known.items()))


def write(folder: str | Path, passport: Passport) -> tuple[Path, Path]:
    """``NAMESPACE.NAME.DEVICE.passport.json`` and ``.html`` in ``folder``, which is made. SL602 if that fails."""
    stem = f"{passport.op.replace('::', '.')}.{passport.device['type']}.passport"
    paths = Path(folder) / f"{stem}.json", Path(folder) / f"{stem}.html"
    with writing(folder, "the passport", "a writable directory"):
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        trust.write_whole(paths[0], _text(passport))
        trust.write_whole(paths[1], passport_html(msgspec.to_builtins(passport)).encode())
    return paths


def read(path: str | Path) -> Passport:
    """A passport from its JSON file. SL602 for anything else, another version of the schema, or a broken seal."""
    return parse(path, content_of(path))


def content_of(path: str | Path) -> bytes:
    """The bytes of the file of a passport, for :func:`parse` and for a signature. SL602 if they cannot be read."""
    try:
        return trust.read_file(path, LIMIT, trust.NAMED)
    except OSError as e:
        raise _distrusted(path, e.strerror or e, "a file that can be read") from None


def parse(path: str | Path, content: bytes) -> Passport:
    """The passport of which ``content`` was read from ``path``; raises what :func:`read` does."""
    try:
        head = trust.parse_json(content)
    except ValueError as e:
        raise _distrusted(path, e, "JSON") from None
    if not isinstance(head, dict) or head.get("schema") != SCHEMA:
        raise _distrusted(path, head.get("schema") if isinstance(head, dict) else type(head).__name__, SCHEMA)
    try:
        passport = msgspec.convert(head, Passport)
    except msgspec.ValidationError as e:
        raise _distrusted(path, e, f"the fields of {SCHEMA}") from None
    if missing := ({"type", "name"} - passport.device.keys()) | ({*VERDICTS} - passport.verdicts.keys()):
        raise _distrusted(path, f"no {', '.join(sorted(missing))}", f"the fields of {SCHEMA}")
    if not sealed(passport):
        raise _distrusted(path, "a seal that is not that of its content", "a file as shiplap wrote it")
    return passport


def _distrusted(path: str | Path, got: object, expected: str) -> Exception:
    return error(
        "SL602",
        where=str(path),
        what="the passport cannot be trusted",
        got=got,
        expected=expected,
        fix="issue the passport again: shiplap audit TARGET --passport DIR",
    )


def sealed(passport: Passport) -> bool:
    """Whether the content matches its seal. A seal detects accidental edits, and does not protect against forgery."""
    return passport.seal == _seal(passport)


def moved(passport: Passport, op: Op) -> list[Move]:
    """The digests of ``op`` that differ from its passport, including those that only one of the two has."""
    then, now = passport.digests, digests(op)
    if passport.op != op.spec.name:
        return [Move("name", passport.op, op.spec.name)]
    names = sorted(then.keys() | now.keys())
    return [Move(n, then.get(n, "absent"), now.get(n, "absent")) for n in names if then.get(n) != now.get(n)]
