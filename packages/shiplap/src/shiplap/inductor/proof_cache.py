"""Proofs of candidates that are kept: equal layers of a network are proven once, also by the next process.

A proof is found again by everything that it was about: the op and the code of all its kernels, the candidate and the
text of the kernel as it was rendered, the sizes, dtypes, scalars and memory of the call, the range of its sizes,
Shiplap's own code that renders, draws and compares, the device, its driver and the versions of the libraries. A proof
that failed is remembered by this process only.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shiplap.declare.code_digest import code_digest
from shiplap.inductor.fusion_choice import Verdict
from shiplap.settings import settings
from shiplap.tuning.key import Key, code_of, environment
from shiplap.tuning.store import Store, Stored

if TYPE_CHECKING:
    from shiplap.inductor.template_candidate import TemplateCandidate

ROOMS = ("inductor", "torch_private", "codegen", "declare", "plan", "dispatch", "sampling", "sandbox")
MOST = 4096
_here: dict[tuple[str, Key], Verdict] = {}


def known(candidate: TemplateCandidate) -> Verdict | None:
    """The verdict on an equal candidate for an equal call. None where there is none, or it cannot be rendered."""
    key = _key(candidate)
    if key is None:
        return None
    verdict = _here.get((settings().cache_dir, key))
    if verdict is None and _store().get(key) is not None:
        shown = candidate.call.sizes.text
        verdict = _here[settings().cache_dir, key] = Verdict(candidate.label, "ok", f"for {shown}" if shown else "")
    return verdict


def remember(candidate: TemplateCandidate, verdict: Verdict) -> None:
    """Keep the verdict of a proof: for this process, and if it is good on disk."""
    key = _key(candidate)
    if key is None:
        return
    while len(_here) >= MOST:
        _here.pop(next(iter(_here)), None)
    _here[settings().cache_dir, key] = verdict
    if verdict.status == "ok":
        _store().put(key, {"verdict": "ok"})


def entries() -> list[tuple[Stored, str]]:
    """The kept proofs, each with the reason why it serves no process like this one; empty where it may."""
    listed = []
    for entry in _store().entries():
        held = entry.key.as_dict() if entry.key is not None else {}
        engine = "" if held.get("extra.engine") == code_of(*ROOMS) else "other code of shiplap"
        listed.append((entry, entry.problem or engine))
    return listed


def remove(entry: Stored) -> bool:
    """Delete one proof; whether it is gone."""
    return _store().remove(entry.path)


def _store() -> Store:
    return Store(Path(settings().cache_dir).absolute() / "templates", "proofs of templates")


def _key(candidate: TemplateCandidate) -> Key | None:
    try:
        rendered = candidate.digest
    except Exception:  # the proof says why
        return None
    call = candidate.call
    sampler = call.op.sampler
    fields = {
        "op": call.op.spec.name,
        "source": call.identity,
        "device": call.device.type,
        "extra.candidate": candidate.label,
        "extra.kernel": rendered,
        "extra.recipe": str(call.recipe),
        "extra.sizes": call.sizes.text,
        "extra.samples": "" if sampler is None else code_digest(sampler),
        "extra.engine": code_of(*ROOMS),
        "extra.torch": str(torch.version.git_version),
        "extra.modes": _modes(),
        **environment(str(call.device)),
    }
    return Key.of(fields)


def _modes() -> str:
    """What the reference computes differently by."""
    words = torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    return " ".join(map(str, (*words, torch.are_deterministic_algorithms_enabled())))
