"""Which candidate compiled code gets: a wrong one never wins, a stale one is never served, there is always a floor."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shiplap as sl
from shiplap.declare.config import NO_CONFIG
from shiplap.dispatch import compile_cache_key, tuned_choices
from shiplap.dispatch.tuned_choices import REFERENCE
from shiplap.inductor import explain, fusion_choices, lower, prove_candidate, select_candidate, switches
from shiplap.inductor.fusion_choice import FusionChoice
from shiplap.torch_private import inductor_lowering
from shiplap.tuning.measure import Timing
from shiplap_testing.effort import sampled
from shiplap_testing.forked import WITH_VERBS, python
from tests.inductor import targets
from tests.inductor.targets import BROKEN, CRASHING, FAST_AND_WRONG, GOOD, qmm

measure = import_module("shiplap.tuning.measure")  # ``shiplap.tune`` is a function as well
gelu = torch.nn.functional.gelu
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fresh(fresh_compiler: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path / "shiplap"))
    before = list(qmm.templates["cpu"])
    with inductor_lowering.without_graph_caches():
        yield
    qmm.templates["cpu"] = before
    tuned_choices.forget_derived_choices()


def only(*configs: dict[str, Any]) -> None:
    qmm.templates["cpu"] = [dataclasses.replace(qmm.templates["cpu"][0], configs=configs)]
    tuned_choices.forget_derived_choices()


def arguments() -> tuple[torch.Tensor, ...]:
    w = torch.randint(-127, 128, (64, 96), dtype=torch.int8)
    return torch.randn(70, 64), w, torch.rand(96) / 127, torch.randn(96)


def layer(x, w, s, b):
    return gelu(qmm(x, w, s) + b)


def compiled(*args: torch.Tensor, **options: Any) -> Any:
    """The layer compiled and compared with eager; the decision that was made."""
    got, want = torch.compile(layer, fullgraph=True, **options)(*args), layer(*args)
    assert float((got - want).norm() / want.norm()) < 1e-6
    return fusion_choices("fusetest::qmm")[-1]


def test_what_is_not_proven_is_passed_over():
    """One that is wrong and one that does not compile."""
    only(FAST_AND_WRONG, BROKEN, GOOD)
    with pytest.warns(sl.ShiplapNotice, match=r"fusetest::qmm: qmm\(.*\) is (wrong|broken) and is not used"):
        made = compiled(*arguments())
    assert [v.status for v in made.verdicts] == ["wrong", "broken", "ok"]
    assert made.chosen == f"qmm({', '.join(f'{k}={v}' for k, v in sorted(GOOD.items()))})"


@pytest.mark.parametrize("bad", [FAST_AND_WRONG, BROKEN], ids=["wrong", "does not compile"])
@pytest.mark.long
def test_a_single_bad_choice_leaves_the_fallback(bad):
    only(bad)
    with pytest.warns(sl.ShiplapNotice, match="is not used"):
        made = compiled(*arguments())
    assert made.chosen == "reference"
    assert made.reason == "no template is proven for this call"


def test_the_verification_can_fail(monkeypatch):
    """Without it the wrong kernel is served: what the two tests above rest on."""
    only(FAST_AND_WRONG)
    monkeypatch.setattr(prove_candidate, "_compare_outputs", lambda *args: "")
    args = arguments()
    got = torch.compile(layer, fullgraph=True)(*args)
    assert float((got - layer(*args)).norm() / layer(*args).norm()) > 1e-2


def without_memory(*args: Any) -> str:
    raise torch.OutOfMemoryError("tried to allocate 2 GiB")


@pytest.mark.parametrize("where", sampled(["_compare_outputs", "_wait_for_call_device", "draw_sample"], 1))
def test_a_lack_of_memory_is_no_verdict_on_a_candidate(monkeypatch, where):
    """Nothing is remembered of it: with more memory, the candidate is proven in the same process."""
    only(GOOD)
    with monkeypatch.context() as patched:
        patched.setattr(prove_candidate, where, without_memory)
        with pytest.warns(sl.ShiplapNotice, match=r"is refused .*no memory to"):
            made = compiled(*arguments())
    assert made.chosen == "reference"
    torch._dynamo.reset()
    assert compiled(*arguments()).chosen != "reference"


def test_a_package_that_lacks_memory_for_a_proof_says_so(monkeypatch, tmp_path):
    """The reference, which would be compiled in its place, cannot be traced here."""
    only(GOOD)
    monkeypatch.setattr(prove_candidate, "_compare_outputs", without_memory)
    monkeypatch.setattr(inductor_lowering, "trace_to_aten", without_memory)

    class Model(torch.nn.Module):
        def forward(self, *args):
            return layer(*args)

    program = torch.export.export(Model(), arguments())
    with pytest.raises(Exception, match="SL307") as caught:
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    text = str(caught.value)
    assert "got      the reference, run by Python on cpu; no template is proven for this call; qmm(" in text
    assert "is refused (no memory to compare results" in text
    assert "fix      free memory of the device" in text


def test_a_package_says_why_no_template_is_used_where_none_was_tried():
    choice = FusionChoice("inductortest::qmm", "qmm", "m=2", "x float32", REFERENCE, "m may be any size", ())
    sizes = SimpleNamespace(problem=choice.reason)
    call: Any = SimpleNamespace(op=qmm, dtypes={}, device=torch.device("cpu"), sizes=sizes)
    with pytest.raises(sl.ShiplapError, match=r"SL307(.|\n)*by Python on cpu; m may be any size") as caught:
        lower._refuse_python(call, choice)
    assert "torch.export.Dim('rows', max=4096)" in str(caught.value)


def test_a_package_takes_a_template_where_the_reference_was_measured_as_the_fastest(monkeypatch, tmp_path):
    """A stored choice of the reference is one of speed, and a reference that cannot be traced needs Python."""
    only(FAST_AND_WRONG, GOOD)
    stored = SimpleNamespace(origin="stored", kernel=REFERENCE, label=REFERENCE, reason="the fastest of 2")
    monkeypatch.setattr("shiplap.inductor.lower.choice_for_selection", lambda *args: stored)
    monkeypatch.setattr(inductor_lowering, "trace_to_aten", without_memory)

    class Model(torch.nn.Module):
        def forward(self, *args):
            return layer(*args)

    args = arguments()
    program = torch.export.export(Model(), args)
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    assert torch.allclose(torch._inductor.aoti_load_package(path)(*args), layer(*args), rtol=1e-4, atol=1e-4)
    made = fusion_choices("fusetest::qmm")[-1]
    assert made.chosen != REFERENCE
    assert made.reason == "a package cannot run the reference in Python"
    assert [v.status for v in made.verdicts] == ["wrong", "ok"]


def fused(*args: torch.Tensor) -> tuple[int, int]:
    """How many kernels come from a template, and how many epilogues are fused into one."""
    from torch._dynamo.utils import counters

    counters.clear()
    compiled(*args)
    inductor = counters["inductor"]
    return inductor["cpp_templated_kernel_counter"], inductor["cpp_epilogue_fusion_counter"]


SWITCHED = {"on": ({}, (1, 1)), "apart": ({"fusion": False}, (1, 0)), "off": ({"templates": False}, (0, 0))}


@pytest.mark.parametrize("name", sampled(SWITCHED, long=["apart", "off"]))  # these: tests/inductor/test_explain.py
def test_switches_are_controls(name):
    only(GOOD)
    keywords, counts = SWITCHED[name]
    with switches(qmm, **keywords):
        assert fused(*arguments()) == counts
    assert (fusion_choices("fusetest::qmm")[-1].chosen == "reference") == (name == "off")


def test_a_template_may_decline_to_be_fused():
    only(GOOD)
    asked = []
    declines = {"fuses": lambda sizes: bool(asked.append(dict(sizes)))}
    qmm.templates["cpu"] = [dataclasses.replace(t, **declines) for t in qmm.templates["cpu"]]  # until the test ends
    args = arguments()
    assert fused(*args) == (1, 0)
    assert asked[0]["m"] == len(args[0])


def test_the_fallback_is_compiled_without_tuning_where_that_was_faster(monkeypatch):
    """In a graph that is tuned. What Inductor picks for a product by measurement is not always the faster one."""
    only(GOOD)
    seen, plain = [], inductor_lowering.inline_graph
    monkeypatch.setattr(
        inductor_lowering,
        "inline_graph",
        lambda *args: (seen.append(inductor_lowering.is_autotuning()), plain(*args))[1],
    )
    args = arguments()
    with select_candidate.force_candidate("fusetest::qmm", f"reference({select_candidate.UNTUNED})"):
        got = torch.compile(layer, fullgraph=True, mode="max-autotune-no-cudagraphs")(*args)
    assert seen == [False]
    assert float((got - layer(*args)).norm() / layer(*args).norm()) < 1e-6


@pytest.mark.parametrize("limit", [1e9, pytest.param(0.0, marks=pytest.mark.long)], ids=["near", "far off"])
def test_finalists_are_compiled_in_the_mode_of_the_graph(monkeypatch, limit):
    """Kernels beside a template that were compiled without tuning were others than those of the graph to come, which
    were then tuned once more, and sometimes worse. A fallback that is far off would be tuned in vain."""
    only(GOOD)
    seen, plain = {}, inductor_lowering.write_graph

    def write_graph(*args: Any) -> Any:
        if (wanted := select_candidate.forced_candidate("fusetest::qmm")) is None:  # the reference alone
            return plain(*args)
        seen[wanted] = inductor_lowering.is_autotuning()
        raise RuntimeError("nothing is raced here")

    monkeypatch.setattr(inductor_lowering, "write_graph", write_graph)
    monkeypatch.setattr(select_candidate, "_isolation", None)
    monkeypatch.setattr(select_candidate, "NEAR", 1e9)
    monkeypatch.setattr(select_candidate, "TUNED", limit)
    compiled(*arguments(), mode="max-autotune-no-cudagraphs")
    template = f"qmm({', '.join(f'{k}={v}' for k, v in sorted(GOOD.items()))})"
    untuned = {f"reference({select_candidate.UNTUNED})": True} if limit else {}
    assert seen == {"reference": bool(limit), template: True, **untuned}


def test_a_template_has_to_beat_the_fallback_by_more_than_the_clock_can_tell():
    times = {REFERENCE: 1.0, "tie": 0.995, "faster": 0.98}
    kernels = {name: SimpleNamespace(kernel=name) for name in times}
    costs = {n: select_candidate._ranking_cost(kernels[n], Timing(t, t, t, 25, True)) for n, t in times.items()}
    assert sorted(costs, key=lambda n: costs[n]) == ["faster", REFERENCE, "tie"]


@pytest.mark.parametrize(("untuned", "kept"), [(0.985, [0, 1]), (1.2, [0, 1]), (0.97, [0, 1, 2])])
def test_the_fallback_is_tuned_unless_that_is_slower_for_sure(untuned, kept):
    """Of 29 products on an H100 four were 2 to 4 % slower untuned, where the trial had both within 1 %."""
    listed = [SimpleNamespace(kernel=REFERENCE, config=NO_CONFIG), SimpleNamespace(kernel="k", config=NO_CONFIG)]
    listed.append(SimpleNamespace(kernel=REFERENCE, config=select_candidate.UNTUNED))
    times = {i: Timing(t, t, t, 25, True) for i, t in enumerate((1.0, 1.1, untuned))}
    assert list(select_candidate._without_equal_fallback(listed, times)) == kept


@pytest.mark.long
@pytest.mark.slow
def test_tuning_shows_times_drops_what_is_wrong_broken_or_crashes_and_is_done_once(monkeypatch):
    """CRASHING ends the process that runs it: that is a worker, and the compilation goes on."""
    monkeypatch.setattr(select_candidate, "SECONDS", 600.0)  # nobody is left out, however busy the machine
    monkeypatch.setattr(
        select_candidate, "NEAR", 1e9
    )  # all are raced with their neighbours, however slow they are alone
    args = arguments()
    explanation = explain(layer, *args, mode="max-autotune-no-cudagraphs", fullgraph=True)
    (made,) = explanation.fusion_choices
    timed = {v.candidate: v for v in made.verdicts if v.status == "ok"}
    assert timed.keys() == {"reference", "qmm(BM=32, BN=64, STEPS=K, WRECK=0)"}
    assert made.chosen in {*timed, "reference(tuned=False)"}  # the fallback takes part twice
    assert all(v.time_us and v.time_us > 0 and "with add, mul" in v.detail for v in timed.values())
    dropped = [v for v in made.verdicts if v.status == "dropped"]
    assert [v.time_us for v in dropped] == [None] * 3
    why = {
        json.dumps(c): v.detail
        for c in (FAST_AND_WRONG, BROKEN, CRASHING)
        for v in dropped
        if f"STEPS={c['STEPS']}, WRECK={c['WRECK']}" in v.candidate
    }
    assert "off by" in why[json.dumps(FAST_AND_WRONG)]
    assert "CppCompileError" in why[json.dumps(BROKEN)]
    assert "ended by SIGSEGV" in why[json.dumps(CRASHING)]
    assert made.reason.startswith("fastest with ")
    assert "3 dropped" in made.reason
    assert not explanation.ok

    torch._dynamo.reset()
    before = measure.benchmarks
    repeated = compiled(*args, mode="max-autotune-no-cudagraphs")
    assert measure.benchmarks == before
    assert repeated.chosen == made.chosen
    assert repeated.reason.startswith("stored: ")


def test_frozen_choices_are_not_measured(monkeypatch):
    only(GOOD)
    monkeypatch.setattr(tuned_choices, "frozen", "tuned.json")
    before = measure.benchmarks
    made = compiled(*arguments(), mode="max-autotune-no-cudagraphs")
    assert measure.benchmarks == before
    assert made.reason == "not measured: choices are frozen"
    assert made.chosen != "reference"


PROGRAM = """
    import sys, torch
    from shiplap.inductor import fusion_choices
    sys.path.insert(0, sys.argv[1])
    import edited
    args = torch.randn(20, 30), torch.randint(-127, 128, (30, 40), dtype=torch.int8), torch.rand(40) / 127
    got = torch.compile(lambda *a: torch.relu(edited.qmm(*a)))(*args)
    torch.testing.assert_close(got, torch.relu(edited.qmm.reference(*args)), rtol=1e-4, atol=1e-4)
    print("chosen:", [d.chosen for d in fusion_choices()])
"""


@pytest.mark.long
def test_an_edited_template_is_never_served_from_a_cache(tmp_path):
    """First process: miss. Same again: hit. Config, then template edited: miss, with what was edited."""
    source = Path(targets.__file__).with_name("qmm.cpp.jinja").read_text()
    module = Path(targets.__file__).read_text().replace("fusetest::qmm", "fusetest::edited")
    module = module.replace("[GOOD, FAST_AND_WRONG, BROKEN, CRASHING]", "[GOOD]")
    (tmp_path / "edited.py").write_text(module)
    (tmp_path / "qmm.cpp.jinja").write_text(source)
    shutil.copy(Path(targets.__file__).with_name("sized.cpp.jinja"), tmp_path)
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    env = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "SHIPLAP_CACHE_DIR": str(tmp_path / "shiplap"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }

    def run() -> str:
        done = python("-W", "ignore", tmp_path / "program.py", tmp_path, env=env, imported=WITH_VERBS)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.strip()

    good = "chosen: ['qmm(BM=32, BN=64, STEPS=K, WRECK=0)']"
    assert run() == good
    assert run() == "chosen: []"  # nothing was lowered: the caches served it
    (tmp_path / "edited.py").write_text(module.replace('"BM": 32', '"BM": 16'))
    assert run() == "chosen: ['qmm(BM=16, BN=64, STEPS=K, WRECK=0)']"
    wrong = source.replace("t[m * {{BN}} + n] *=", "t[m * {{BN}} + n] *= 2.f *")
    assert wrong != source
    (tmp_path / "qmm.cpp.jinja").write_text(wrong)
    assert run() == "chosen: ['reference']"  # edited into a wrong one


def test_a_changed_lowering_is_another_key(monkeypatch):
    import_module("shiplap.inductor.install")  # as the first trace does
    before = compile_cache_key.op_cache_key(qmm)
    monkeypatch.setattr(import_module("shiplap.tuning.key"), "rooms_digest", lambda *rooms: "another lowering")
    assert compile_cache_key.op_cache_key(qmm) != before
