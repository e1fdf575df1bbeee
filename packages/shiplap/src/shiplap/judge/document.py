"""A verdict as a file, with what it was made of, and an optional ed25519 signature beside it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from shiplap import trust
from shiplap.audit import signature
from shiplap.errors import error, writing
from shiplap.judge.target import Target
from shiplap.judge.verdict import Ruling
from shiplap.report import facts

__all__ = ["FORMAT", "read_verdict", "write_verdict"]

FORMAT = "shiplap-verdict/1"


def write_verdict(
    path: Path, ruling: Ruling, reference: Any, candidate: Any, *, sign: Path | None = None
) -> list[Path]:
    """Write a verdict with the digests of both files and the versions of this machine; returns the files.

    ``sign`` is an ed25519 private key (PEM); the signature then lies beside the file, as with passports. SL602 for a
    file that cannot be written or a key that is none, SL603 without the package cryptography.
    """
    files = {"reference": _digest(reference), "candidate": _digest(candidate)}
    content = {"format": FORMAT, "files": files, "facts": facts(), **ruling.as_json()}
    with writing(path):
        trust.write_whole(path, (json.dumps(content, indent=1) + "\n").encode())
    return [path, signature.sign(path, sign)] if sign is not None else [path]


def _digest(target: Any) -> str:
    """The SHA-256 of a target's file; empty where it has none."""
    file = Target.of(target, ("",)).file
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
    except OSError:
        return ""


def read_verdict(path: Path, *, signed_by: Path | None = None) -> dict[str, Any]:
    """The content of a verdict's file: fields of :meth:`Ruling.as_json`, ``files`` and ``facts``.

    Raises:
        ShiplapError: SL602 when the file or the public key cannot be read. SL311 for a file that is no verdict, and for
            one whose signature is not that of the public key ``signed_by`` (PEM).
    """
    try:
        raw = trust.read_file(path, 1 << 24, trust.NAMED)
    except OSError as e:
        raise error(
            "SL602", where=str(path), what="the file cannot be read", got=str(e), expected="a verdict of shiplap judge"
        ) from None
    if signed_by is not None and not signature.is_signed_by(path, signed_by, raw):
        raise error("SL311", where=str(path), got="no such signature", expected=f"one by the key {signed_by.name}")
    try:
        content = trust.parse_json(raw)
    except ValueError as e:
        raise error("SL311", where=str(path), got=str(e)[:200], expected=FORMAT) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise error("SL311", where=str(path), got="another file", expected=FORMAT)
    return content
