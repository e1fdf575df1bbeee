"""Proofs that are kept between processes, in the directory ``proofs`` of the cache: of rewrites and of templates.

A proof is found again by what it was about: the digest of the code that was proven, Shiplap's own code that rewrites,
renders, draws and compares, the versions of torch and its libraries, the processor or the device with its driver, and
the modes of torch that change results. Only proofs without a fault are kept. Files are read through
``shiplap.safe_io``: one that another user could have written, that was cut or edited, or that lacks the seal of this
user, counts as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shiplap.settings import settings
from shiplap.tuning.key import Key, key_environment, rooms_digest
from shiplap.tuning.store import ChoiceStore, StoredEntry

# The code that makes a proof. An edit of it makes every kept proof stale.
ROOMS = ("rewrite", "inductor", "torch_private", "codegen", "declare", "plan", "dispatch", "sampling", "sandbox")


def proof_key(subject: str, source: str, device: str = "cpu", **extra: str) -> Key:
    """Return the key under which a proof (the record of a check that found no fault) is kept. The key holds what was
    checked, the type of the device, and the versions and settings of this process on which results depend.

    Args:
        subject: the name of what is proven.
        source: the digest of its code.
        device: the device on which it was run, such as ``"cuda:0"``.
        extra: further facts on which the proof depends.
    """
    fields = {
        "op": subject,
        "source": source,
        "device": torch.device(device).type,
        **{f"extra.{name}": text for name, text in extra.items()},
        "extra.modes": _result_modes(),
        **_circumstances(device),
    }
    return Key.of(fields)


def read_proof(key: Key) -> Mapping[str, Any] | None:
    """Return the value that was stored with a proof under ``key``, or None if there is none. A proof is the record of a
    check that found no fault.
    """
    return _store().get(key)


def keep_proof(key: Key, value: Mapping[str, Any]) -> bool:
    """Store ``value`` under ``key`` for later processes, as a proof (the record of a check that found no fault). Return
    whether it was written to the cache.
    """
    return _store().put(key, value)


def kept_proofs() -> list[tuple[StoredEntry, str]]:
    """Return all stored proofs as pairs of the entry of the store and a reason. The reason says why a process with the
    present settings cannot use the proof, and is an empty string if it can.

    A change of the proven code does not show, since only a process that loads the code can compare it. For a proof on
    an accelerator, the device and the versions of its libraries are not compared.
    """
    listed = []
    for entry in _store().entries():
        fields = entry.key.as_dict() if entry.key is not None else {}
        current = _circumstances("cpu") if fields.get("device") == "cpu" else _software()
        changed = [name for name, here in current.items() if fields.get(name) != here]
        listed.append((entry, entry.problem or (f"other {', '.join(changed)}" if changed else "")))
    return listed


def remove_proof(entry: StoredEntry) -> bool:
    """Delete one stored proof from the cache. Return whether it no longer exists."""
    return _store().remove(entry.path)


def _store() -> ChoiceStore:
    """Return the store of proofs, which is the folder ``proofs`` of the cache. Its files are sealed with a secret key
    of the user.
    """
    return ChoiceStore(Path(settings().cache_dir).absolute() / "proofs", "proofs", keyed=True)


def _software() -> dict[str, str]:
    """Return two fields of a key. They are the digest of the code of Shiplap that makes proofs, and the commit of
    torch.
    """
    return {"extra.engine": rooms_digest(*ROOMS), "extra.torch": str(torch.version.git_version)}


def _circumstances(device: str) -> dict[str, str]:
    """Return the fields of a key on which a proof on ``device`` depends besides the proven code. They are the digest of
    Shiplap's code, torch's commit, the machine and the versions of libraries.
    """
    return {**_software(), **key_environment(device)}


def _result_modes() -> str:
    """Return, in one string, the global settings of torch that change the results of a reference or of a user's
    program, such as the default dtype.
    """
    modes = (
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.mkldnn.enabled,
        torch.are_deterministic_algorithms_enabled(),
    )
    return " ".join(map(str, modes))
