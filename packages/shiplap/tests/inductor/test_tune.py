"""``sl.tune`` and templates in C++: they are measured in compiled code, and compiled code then uses the choice."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import shiplap as sl
from shiplap.dispatch import tuned_choices
from shiplap.inductor import fusion_choices
from shiplap.torch_private import inductor_lowering
from shiplap.tuning import ChoiceStore, freeze, frozen, frozen_table, thaw
from tests.inductor.targets import FAST_AND_WRONG, GOOD, qmm

measure = import_module("shiplap.tuning.measure")  # ``shiplap.tune`` is a function as well
SMALL = {**GOOD, "BM": 16}
SIZES = {"m": 70, "k": 64, "n": 96}


@pytest.fixture(autouse=True)
def fresh(fresh_compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "shiplap"))
    monkeypatch.setattr(frozen_table, "_made", {})
    before = list(qmm.templates["cpu"])
    with inductor_lowering.without_graph_caches():
        yield
    qmm.templates["cpu"] = before
    tuned_choices.forget_derived_choices()
    thaw()


def only(*configs: dict[str, Any], **changes: Any) -> None:
    qmm.templates["cpu"] = [dataclasses.replace(qmm.templates["cpu"][0], configs=configs, **changes)]
    tuned_choices.forget_derived_choices()


def tuned() -> tuple[Any, Any]:
    """The choices for eager calls and for compiled code."""
    eager, compiled = sl.tune(qmm, [SIZES], budget=200, isolate=False, progress=False)
    return eager, compiled


def run(*, neighbours: bool) -> Any:
    """What a plain ``torch.compile`` chooses, compared with the reference."""
    w = torch.randint(-127, 128, (64, 96), dtype=torch.int8)
    args = torch.randn(70, 64), w, torch.rand(96) / 127

    def layer(x, w, s):
        return torch.relu(qmm(x, w, s)) if neighbours else qmm(x, w, s)

    torch._dynamo.reset()
    with torch.no_grad():
        got, want = torch.compile(layer, fullgraph=True)(*args), layer(*args)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    return fusion_choices("fusetest::qmm")[-1]


@pytest.mark.long
def test_a_template_that_runs_in_compiled_code_only_is_measured_and_used(tmp_path: Path) -> None:
    only(FAST_AND_WRONG, GOOD, SMALL)
    eager, compiled = tuned()
    assert (eager.compiled, eager.kernel, eager.findings) == (False, "reference", ())
    assert (compiled.compiled, compiled.tried, compiled.origin) == (True, 4, "measured")
    assert [f.verdict for f in compiled.findings] == ["fail"], "the wrong candidate was dropped"
    assert "STEPS=K / 2" in compiled.findings[0].evidence
    before = measure.benchmarks
    alone, near = run(neighbours=False), run(neighbours=True)
    assert alone.chosen == near.chosen == compiled.label
    assert near.reason.startswith("the choice of sl.tune; ")
    _, repeated = tuned()
    assert (repeated.origin, repeated.label) == ("stored", compiled.label)
    written = freeze(tmp_path / "tuned.json")
    assert sorted(c.compiled for c in written) == [False, True]
    for entry in ChoiceStore().entries():
        ChoiceStore().remove(entry.path)
    taken = frozen(tmp_path / "tuned.json")
    assert [c.label for c in taken if c.compiled] == [compiled.label]
    assert run(neighbours=True).chosen == compiled.label
    assert "frozen" in run(neighbours=False).reason
    assert measure.benchmarks == before


def prefer(patch: pytest.MonkeyPatch, steps: str) -> None:
    chosen = f"qmm(BM=16, BN=64, STEPS={steps}, WRECK=0)"
    # Both are imported before one is patched: else the second one imports what stands in the first, and keeps it.
    for module in [import_module(f"shiplap.inductor.{name}") for name in ("select_candidate", "lower")]:
        patch.setattr(module, "preferred_candidate", lambda *a: chosen)


def test_the_choice_is_tried_before_the_first_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    only(GOOD, SMALL)
    prefer(monkeypatch, "K")
    assert run(neighbours=True).chosen.startswith("qmm(BM=16")


def test_a_template_that_serves_eager_calls_is_measured_in_compiled_code_on_request() -> None:
    """As a Triton template on a GPU: there is a kernel of its name."""
    only(GOOD)

    @qmm.kernel("cpu", name="qmm")
    def twin(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        return qmm.reference(x, w, s)

    try:
        (eager,) = sl.tune(qmm, [SIZES], budget=200, isolate=False, progress=False)
        (skipped,) = [f for f in eager.findings if f.check == "tune.candidates"]
        assert skipped.evidence.startswith("qmm in compiled code: compiled code tries the choice for eager calls first")
        eager, compiled = sl.tune(qmm, [SIZES], budget=200, isolate=False, progress=False, compiled=True)
        assert not [f for f in eager.findings if f.check == "tune.candidates"]
        assert (compiled.compiled, compiled.tried, compiled.origin) == (True, 2, "measured")
        assert run(neighbours=True).reason.startswith("the choice of sl.tune; ")
    finally:
        qmm.kernels["cpu"] = [k for k in qmm.kernels["cpu"] if k.name != "qmm"]
        qmm.install_fast_path()
    only_eager = sl.tune(qmm, [SIZES], budget=200, isolate=False, progress=False, compiled=False)
    assert [c.compiled for c in only_eager] == [False]
    assert "qmm: runs in compiled code alone" in only_eager.choices[0].findings[-1].evidence


@pytest.mark.long
def test_without_a_choice_the_first_candidate_is_taken() -> None:
    only(GOOD, SMALL)
    assert run(neighbours=True).chosen.startswith("qmm(BM=32")


@pytest.mark.long
def test_a_choice_does_not_stand_for_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    only(GOOD, {**SMALL, "STEPS": "K / 2"})
    prefer(monkeypatch, "K / 2")
    with pytest.warns(sl.ShiplapNotice, match="is wrong and is not used"):
        made = run(neighbours=True)
    assert made.chosen.startswith("qmm(BM=32")


def test_what_is_left_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    only(GOOD, SMALL, supports=lambda sizes, dtypes, config: config["BM"] == 32 or "no small tiles")
    _, compiled = tuned()
    assert [(f.verdict, f.check) for f in compiled.findings] == [("skip", "tune.candidates")]
    assert compiled.findings[0].evidence == "qmm(BM=16, BN=64, STEPS=K, WRECK=0): no small tiles"

    def broken(*args: Any) -> None:
        raise RuntimeError("no compiler")

    only({**GOOD, "BN": 48})
    monkeypatch.setattr(import_module("shiplap.inductor.tune_templates"), "template_candidates", broken)
    _, compiled = tuned()
    assert (compiled.label, compiled.origin) == ("reference", "default")
    assert "qmm: the op cannot be compiled here: " in compiled.findings[0].evidence
    assert "no compiler" in compiled.findings[0].evidence
    assert json.dumps(compiled.as_json())


def test_frozen_choices_measure_no_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(GOOD, SMALL)
    freeze(tmp_path / "empty.json")
    frozen(tmp_path / "empty.json")
    before = measure.benchmarks
    _, compiled = tuned()
    assert (compiled.origin, compiled.label[:9]) == ("default", "qmm(BM=32")
    monkeypatch.setenv("SHIPLAP_STRICT", "1")
    with pytest.raises(sl.ShiplapError, match="SL607"):
        tuned()
    assert measure.benchmarks == before
