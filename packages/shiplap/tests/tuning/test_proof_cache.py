"""One cache keeps the proofs of rewrites and templates; what decides a proof is part of its key."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shiplap.tuning import proof_cache
from shiplap.tuning.proof_cache import keep_proof, kept_proofs, proof_key, read_proof, remove_proof
from shiplap.tuning.store import ChoiceStore


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path))
    return tmp_path / "proofs"


def test_a_proof_is_kept_found_listed_and_removed(folder: Path) -> None:
    key = proof_key("test::op", "digest of code", sizes="n = 4")
    assert read_proof(key) is None
    assert keep_proof(key, {"verdict": "ok"})
    assert read_proof(proof_key("test::op", "digest of code", sizes="n = 4")) == {"verdict": "ok"}
    assert read_proof(proof_key("test::op", "digest of code", sizes="n = 5")) is None
    ((entry, problem),) = kept_proofs()
    assert (entry.key, problem, entry.path.is_relative_to(folder)) == (key, "", True)
    assert remove_proof(entry)
    assert kept_proofs() == []


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (torch, "get_default_dtype", lambda: torch.float64),
        (torch, "get_float32_matmul_precision", lambda: "medium"),
        (torch, "are_deterministic_algorithms_enabled", lambda: True),
        (proof_cache, "rooms_digest", lambda *rooms: "other code"),
    ],
)
def test_a_mode_or_an_edit_makes_another_key(
    where: object, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = proof_key("test::op", "digest of code")
    monkeypatch.setattr(where, name, value)
    assert proof_key("test::op", "digest of code") != key


def test_a_proof_on_another_device_is_listed_without_asking_for_it(folder: Path) -> None:
    fields = {**proof_key("test::op", "digest of code").as_dict(), "device": "cuda", "device_name": "some GPU"}
    assert ChoiceStore(folder, keyed=True).put(proof_cache.Key.of(fields), {"verdict": "ok"})
    assert [problem for _, problem in kept_proofs()] == [""]
