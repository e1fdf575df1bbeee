"""Equal layers are proven once, by any process; kernels of later calls are compiled before their turn; progress."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.autotune_process import TritonBenchmarkRequest
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering

from shiplap.dispatch import tuned_choices
from shiplap.inductor import precompile, prove_candidate
from shiplap.inductor.fusion_choice import CandidateVerdict
from shiplap.inductor.template_candidate import TemplateCandidate
from shiplap.torch_private import inductor_lowering, inductor_templates
from shiplap.tuning import proof_cache
from shiplap.tuning.proof_cache import kept_proofs, remove_proof
from tests.inductor.targets import GOOD, qmm


class LoweredError(Exception):
    """Ends a compilation behind the lowering: no compiler of C++ is waited for."""


class Proofs(list[str]):
    """The digests of the candidates that were run; ``status`` is what comes of it."""

    status = "ok"

    def __call__(self, candidate: TemplateCandidate) -> CandidateVerdict:
        self.append(candidate.digest)
        return CandidateVerdict(candidate.label, self.status)


@pytest.fixture
def proofs(fresh_compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proofs]:
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "shiplap"))
    done = Proofs()
    monkeypatch.setattr(prove_candidate, "_run_proof", done)
    monkeypatch.setattr(inductor_templates, "compile_apart", lambda choice: False)

    def ended(graph: Any) -> Any:
        raise LoweredError

    monkeypatch.setattr(GraphLowering, "codegen", ended)
    before = list(qmm.templates["cpu"])
    qmm.templates["cpu"] = [dataclasses.replace(qmm.templates["cpu"][0], configs=(GOOD,))]
    tuned_choices.forget_derived_choices()
    with inductor_lowering.without_graph_caches():
        yield done
    qmm.templates["cpu"] = before
    tuned_choices.forget_derived_choices()


def lowered(*rows: int) -> None:
    """Lower one layer for each number of rows, all with the same weights."""
    weight = torch.randint(-127, 128, (64, 96), dtype=torch.int8)
    scale = torch.rand(96) / 127

    def layers(*xs: torch.Tensor) -> list[torch.Tensor]:
        return [torch.relu(qmm(x, weight, scale)) for x in xs]

    torch.compiler.reset()
    with pytest.raises(Exception, match="LoweredError"), torch.no_grad():
        torch.compile(layers, fullgraph=True)(*(torch.randn(n, 64) for n in rows))


def test_equal_layers_are_proven_once_also_by_the_next_process(proofs):
    lowered(70, 70, 70, 33)
    assert len(proofs) == len(set(proofs)) == 2
    prove_candidate._verdicts.clear()  # as in another process
    lowered(33, 70)
    assert len(proofs) == 2
    entries = kept_proofs()
    assert [why for _, why in entries] == ["", ""]
    assert all(remove_proof(entry) for entry, _ in entries)
    prove_candidate._verdicts.clear()
    lowered(70)
    assert len(proofs) == 3


def test_a_proof_is_of_one_code(proofs, monkeypatch):
    lowered(70)
    monkeypatch.setattr(proof_cache, "rooms_digest", lambda *rooms: "other code of the referee")
    lowered(70)
    assert len(proofs) == 2
    qmm.templates["cpu"] = [dataclasses.replace(t, source=t.source + "\n// edited") for t in qmm.templates["cpu"]]
    tuned_choices.forget_derived_choices()
    lowered(70)
    assert len(proofs) == 3


def test_a_failed_proof_is_not_kept_for_others(proofs):
    proofs.status = "wrong"
    with pytest.warns(UserWarning, match="is wrong and is not used"):
        lowered(70, 70)
    assert len(proofs) == 1
    assert kept_proofs() == []
    prove_candidate._verdicts.clear()
    lowered(70)
    assert len(proofs) == 2


def test_what_will_be_proven_is_compiled_before_its_turn(proofs, monkeypatch):
    """The stand-ins render the text of the kernel that the proof renders: another one would be compiled in vain."""
    ahead: list[str] = []
    monkeypatch.setattr(TemplateCandidate, "compile_apart", lambda self: bool(ahead.append(self.digest)))
    lowered(70, 33, 70, 34)
    assert set(ahead) == set(proofs)
    assert len(ahead) == 3
    lowered(70, 33)
    assert len(ahead) == 3  # proven already


def request(path: Path) -> Any:
    made = object.__new__(TritonBenchmarkRequest)
    made.module_path, made.module_cache_key, made.kernel_name = str(path), "key", "kernel"
    return made


@pytest.mark.parametrize("fails", [False, True], ids=["compiled", "failed"])
def test_a_kernel_of_a_worker_process_is_run_and_not_compiled_again(tmp_path, monkeypatch, fails):
    """Triton's cache may not have it for this process: Inductor's workers may have another assembler."""
    module, here, kernel = ModuleType("rendered"), list[int](), object()

    def result() -> object:
        if fails:
            raise RuntimeError("no such device")
        return kernel

    choice = SimpleNamespace(bmreq=request(tmp_path / "a.py"), precompile=lambda: here.append(1))
    monkeypatch.setitem(inductor_templates._futures, str(tmp_path / "a.py"), SimpleNamespace(result=result))
    monkeypatch.setattr(PyCodeCache, "load_by_key_path", lambda key, path: module)
    monkeypatch.setattr(inductor_templates, "_loaded", set())
    for _ in range(2):  # by the thread that waits for it, and when it is run
        inductor_templates.precompile_kernel(choice)
    assert here == [1, 1] * fails
    assert vars(module).get("kernel") is (None if fails else kernel)


def test_a_long_compilation_says_what_it_is_at(monkeypatch, capsys):
    class Graph:
        pass

    def told() -> str:
        shown = precompile.start_progress(2, Graph())
        shown.began = time.monotonic() - 9
        shown.step("mylib::conv")
        shown.step("mylib::conv")
        return capsys.readouterr().err

    assert not sys.stderr.isatty()
    assert told() == ""
    monkeypatch.setenv("SHIPLAP_PROGRESS", "1")
    assert told() == "torch.compile: mylib::conv, kernel 1 of 2, 9 s\n"  # the second line would come 5 s later
    monkeypatch.setattr(precompile, "PATIENCE", 60.0)
    assert told() == ""
