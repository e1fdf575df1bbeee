"""Proofs kept between processes: found again by what they were about, and believed only if nobody else wrote them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from shiplap.declare.code_digest import first_unfollowed
from shiplap.rewrite import PatternRewrite, prove_rewrite, rewrite
from shiplap.rewrite.shipped import no_ops, rms_norm
from shiplap.rewrite.shipped.no_ops import NoOps
from shiplap.settings import settings
from shiplap.tuning import proof_cache

RUNS: list[str] = []


def doubled(x: Float[Tensor, "*b k"]) -> Tensor:
    return x + x


def times_two(x: Tensor) -> Tensor:
    return 2.0 * x


def samples() -> list[tuple[Tensor, ...]]:
    return [(torch.arange(6.0).reshape(2, 3),)]


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of its own. Each proof that is run, rather than read, is noted."""
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path))
    module = importlib.import_module("shiplap.rewrite.prove")

    run = module.__dict__["_run_proof_programs"]
    monkeypatch.setattr(module, "_run_proof_programs", lambda r: RUNS.append(r.name) or run(r))
    RUNS.clear()


def made(by: Any = times_two, **options: Any) -> PatternRewrite:
    return rewrite(doubled, by, **{"name": "twice", "samples": samples, **options})


def files() -> list[Path]:
    return sorted((Path(settings().cache_dir) / "proofs").rglob("*.json"))


def test_another_process_reads_what_one_has_proven() -> None:
    first = prove_rewrite(made())
    assert prove_rewrite(made()) == first
    assert RUNS == ["twice"]
    assert {f.verdict for f in first} == {"ok"}


def test_another_replacement_pattern_guard_or_sample_is_another_proof() -> None:
    prove_rewrite(made())
    others = (
        made(lambda x: x * 2.0),
        made(where="x.shape[-1] == 3"),
        made(samples=lambda: [(torch.ones(4),)]),
        rewrite(lambda x: x + x + 0.0, lambda x: 2.0 * x, name="twice", samples=samples),
    )
    assert len({r.digest for r in others}) == len(others)
    for other in others:
        prove_rewrite(other)
    assert len(RUNS) == 5
    assert len(files()) == 5


def test_other_modes_or_versions_are_another_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    prove_rewrite(made())
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    prove_rewrite(made())
    monkeypatch.setattr(proof_cache, "rooms_digest", lambda *rooms: "another Shiplap")
    prove_rewrite(made())
    assert len(RUNS) == 3


@pytest.mark.parametrize("harm", ["cut", "edited", "failing", "open"])
def test_what_may_be_of_somebody_else_is_not_believed(harm: str) -> None:
    prove_rewrite(made())
    (file,) = files()
    text = file.read_text(encoding="utf-8")
    if harm == "cut":
        file.write_text(text[:-20], encoding="utf-8")
    elif harm == "edited":
        file.write_text(text.replace("programs", "PROGRAMS"), encoding="utf-8")
    elif harm == "failing":
        file.write_text(json.dumps({**json.loads(text), "sha256": "0"}), encoding="utf-8")
    else:
        file.chmod(0o666)
    prove_rewrite(made())
    assert RUNS == ["twice", "twice"]


def test_a_fault_is_looked_for_again() -> None:
    wrong = rewrite(doubled, lambda x: 3.0 * x, name="twice", samples=samples)
    rerun = rewrite(doubled, lambda x: 3.0 * x, name="twice", samples=samples)
    for each in (wrong, rerun):
        assert "fail" in {f.verdict for f in prove_rewrite(each)}
    assert (RUNS, files()) == (["twice", "twice"], [])


def test_a_rewrite_that_uses_what_its_digest_does_not_cover_is_proven_in_each_process() -> None:
    assert (no_ops.code_is_fully_hashed, rms_norm.code_is_fully_hashed, made().code_is_fully_hashed) == (
        True,
        True,
        True,
    )
    assert made(lambda x: _Scale(2.0).of(x)).code_is_fully_hashed
    assert not made(lambda x: getattr(SCALE, "".join("of"))(x)).code_is_fully_hashed
    assert first_unfollowed(lambda x: torch.ops.some_library.mul(x, 2.0)) == "torch.ops.some_library::mul"
    assert first_unfollowed(lambda x: torch.ops.aten.mul(x, 2.0)) == ""
    assert first_unfollowed(_scaled) == ""
    assert first_unfollowed(lambda x: json.loads(x)) == ""
    assert first_unfollowed(lambda x: F.gelu(x) + times_two(x)) == ""


class _Scale:
    def __init__(self, by: float) -> None:
        self.by = by

    def of(self, x: Tensor) -> Tensor:
        return x * self.by


SCALE = _Scale(2.0)


def _scaled(x: Tensor, by: _Scale = SCALE) -> Tensor:
    return by.of(x)


def test_a_proof_looks_at_the_code_of_its_rewrite_before_and_after() -> None:
    """And not for each file of the cache: all functions of a rewrite are followed for its digest."""
    asked: list[str] = []

    class Counted(NoOps):
        @property
        def digest(self) -> str:
            asked.append(super().digest)
            return asked[-1]

    assert {f.verdict for f in prove_rewrite(Counted())} <= {"ok", "skip"}
    assert asked == [no_ops.digest] * 2
