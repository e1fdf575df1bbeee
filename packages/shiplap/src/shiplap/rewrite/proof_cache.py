"""Proofs that are kept between processes, in the directory ``proofs`` of the cache.

A proof is found again by what it was about: the digest of the rewrite (the code of both functions, of their helpers, of
the samples), Shiplap's own code that rewrites and compares, the versions of torch and Python, the processor, and the
modes of torch that change results. It is kept only where these decide everything, and only if no check failed. Files
are read through ``shiplap.safe_io``: one that another user could have written, that was cut or edited, counts as
absent.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shiplap.sampling.finding import Finding
from shiplap.settings import settings
from shiplap.tuning.key import Key, code_of, environment
from shiplap.tuning.store import Store, Stored

if TYPE_CHECKING:
    from shiplap.rewrite.program import Provable

ROOMS = ("rewrite", "torch_private", "declare", "plan", "dispatch", "sampling", "sandbox")
GOOD = ("ok", "skip")


def read(rewrite: Provable, digest: str) -> tuple[Finding, ...]:
    """The findings of the proof of ``rewrite`` in another process. Empty if there is none to be believed.

    ``digest`` is that of the rewrite: to look at all of its code again takes longer than to read the file.
    """
    if not rewrite.self_contained:
        return ()
    held = _store().get(_key(rewrite, digest))
    listed = held.get("findings") if held is not None else None
    findings = tuple(map(_finding, listed)) if isinstance(listed, list) else ()
    return () if None in findings else tuple(f for f in findings if f is not None)


def write(rewrite: Provable, digest: str, findings: tuple[Finding, ...]) -> bool:
    """Keep ``findings``; whether they were kept. Those of a proof that found a fault are not."""
    if not rewrite.self_contained or any(f.verdict not in GOOD for f in findings):
        return False
    return _store().put(_key(rewrite, digest), {"findings": [asdict(f) for f in findings]})


def proofs() -> list[tuple[Stored, str]]:
    """The kept proofs, each with the reason why it serves no process like this one; empty where it may.

    Whether a rewrite has changed since only the process knows that has the rewrite.
    """
    current = {"extra.engine": code_of(*ROOMS), "extra.torch": str(torch.version.git_version), **environment("cpu")}
    listed = []
    for entry in _store().entries():
        held = entry.key.as_dict() if entry.key is not None else {}
        changed = [name for name, here in current.items() if held.get(name) != here]
        listed.append((entry, entry.problem or (f"other {', '.join(changed)}" if changed else "")))
    return listed


def remove(entry: Stored) -> bool:
    """Delete one proof; whether it is gone."""
    return _store().remove(entry.path)


def _store() -> Store:
    return Store(Path(settings().cache_dir).absolute() / "proofs", "proofs of rewrites")


def _key(rewrite: Provable, digest: str) -> Key:
    fields = {
        "op": f"rewrite {rewrite.name}",
        "source": digest,
        "extra.engine": code_of(*ROOMS),
        "extra.level": rewrite.level,
        "extra.torch": str(torch.version.git_version),
        "extra.modes": _modes(),
        **environment("cpu"),
    }
    return Key.of(fields)


def _modes() -> str:
    """What a program of a proof computes differently by."""
    return " ".join(
        (
            str(torch.get_default_dtype()),
            torch.get_float32_matmul_precision(),
            str(torch.are_deterministic_algorithms_enabled()),
            str(torch.backends.mkldnn.enabled),
        )
    )


def _finding(given: Any) -> Finding | None:
    """A finding as it was written. None for anything else: no proof says that something failed."""
    if not isinstance(given, dict) or given.keys() != asdict(Finding("", "ok", "", "")).keys():
        return None
    if given["verdict"] not in GOOD or not all(isinstance(v, str) for v in given.values()):
        return None
    return Finding(**given)
