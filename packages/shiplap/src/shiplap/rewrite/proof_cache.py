"""Keep proofs of rewrites between processes, in the directory ``proofs`` of the cache.

The key of a proof is the digest of the rewrite (the code of both functions, of their helpers, of the samples),
Shiplap's own code that rewrites and compares, the versions of torch and Python, the processor, and the modes of torch
that change results. A proof is kept only where these decide everything, and only if no check failed. Files are read
through ``shiplap.safe_io``: a file that another user could have written, or that was cut or edited, counts as absent.
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

# The packages of Shiplap whose code decides the verdict of a proof. A change in one makes stored proofs void.
ROOMS = ("rewrite", "torch_private", "declare", "plan", "dispatch", "sampling", "sandbox")
# A failed proof is not stored, since the user is about to edit the code.
GOOD = ("ok", "skip")


def read(rewrite: Provable, digest: str) -> tuple[Finding, ...]:
    """Return the findings of the proof of ``rewrite`` in another process, or an empty tuple if no valid proof is
    stored.

    ``digest`` is that of the rewrite: computing it again takes longer than reading the file.
    """
    if not rewrite.self_contained:
        return ()
    held = _store().get(_key(rewrite, digest))
    listed = held.get("findings") if held is not None else None
    findings = tuple(map(_finding, listed)) if isinstance(listed, list) else ()
    # One entry of a wrong form makes the whole file worthless.
    return () if None in findings else tuple(f for f in findings if f is not None)


def write(rewrite: Provable, digest: str, findings: tuple[Finding, ...]) -> bool:
    """Store ``findings``, and return whether they were stored. A proof that found a fault is not stored."""
    if not rewrite.self_contained or any(f.verdict not in GOOD for f in findings):
        return False
    return _store().put(_key(rewrite, digest), {"findings": [asdict(f) for f in findings]})


def proofs() -> list[tuple[Stored, str]]:
    """Return the stored proofs, each with the reason why no process like this one can use it, empty where one can.

    Whether a rewrite has changed since is known only in a process that has the rewrite.
    """
    current = {"extra.engine": code_of(*ROOMS), "extra.torch": str(torch.version.git_version), **environment("cpu")}
    listed = []
    for entry in _store().entries():
        held = entry.key.as_dict() if entry.key is not None else {}
        changed = [name for name, here in current.items() if held.get(name) != here]
        listed.append((entry, entry.problem or (f"other {', '.join(changed)}" if changed else "")))
    return listed


def remove(entry: Stored) -> bool:
    """Delete one proof, and return whether it is gone."""
    return _store().remove(entry.path)


def _store() -> Store:
    """Return the store of proofs in the directory of the settings."""
    return Store(Path(settings().cache_dir).absolute() / "proofs", "proofs of rewrites")


def _key(rewrite: Provable, digest: str) -> Key:
    """Return the key under which the proof of ``rewrite`` is stored."""
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
    """Return the modes of torch that change the results of a program, as text."""
    return " ".join(
        (
            str(torch.get_default_dtype()),
            torch.get_float32_matmul_precision(),
            str(torch.are_deterministic_algorithms_enabled()),
            str(torch.backends.mkldnn.enabled),
        )
    )


def _finding(given: Any) -> Finding | None:
    """Return a finding as it was written, or None for any other value. A stored proof contains no failure."""
    if not isinstance(given, dict) or given.keys() != asdict(Finding("", "ok", "", "")).keys():
        return None
    if given["verdict"] not in GOOD or not all(isinstance(v, str) for v in given.values()):
        return None
    return Finding(**given)
