"""``shiplap cache`` shows the kept proofs of rewrites and removes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import Float

import shiplap as sl
from shiplap.tuning import proof_cache


def doubled(x: Float[torch.Tensor, "n"]) -> torch.Tensor:
    return x + x


def by(x: torch.Tensor) -> torch.Tensor:
    return 2.0 * x


@pytest.fixture
def proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path))
    made = sl.rewrite(doubled, by, name="twice", samples=lambda: [(torch.ones(3),)])
    assert made.code_is_fully_hashed
    assert {f.verdict for f in made.findings} <= {"ok", "skip"}
    (file,) = (tmp_path / "proofs").rglob("*.json")
    return file


def listed(run: Any, *args: str) -> Any:
    result = run("cache", *args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_proof_is_shown_and_removed(run: Any, proof: Path) -> None:
    (row,) = listed(run, "ls", "proofs")["proofs"]
    assert row == {"file": str(proof), "rewrite": "rewrite twice", "problem": ""}
    assert "1 kept, 1 may serve" in run("cache", "ls").stdout
    assert listed(run, "gc")["proofs"] == 0
    assert proof.exists()
    assert listed(run, "rm", "proofs")["proofs"] == 1
    assert not proof.exists()
    assert "no proofs are kept" in run("cache", "ls", "proofs").stdout


def test_a_proof_by_another_shiplap_is_garbage(run: Any, proof: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof_cache, "rooms_digest", lambda *rooms: "another")
    (row,) = listed(run, "ls", "proofs")["proofs"]
    assert row["problem"] == "other extra.engine"
    assert listed(run, "gc")["proofs"] == 1
    assert not proof.exists()
