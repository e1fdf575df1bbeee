"""``explain``: kernels, what is inside, candidates with verdicts, and reasons for what stayed outside.

Candidates with times: test_lower.py, which measures anyway.
"""

from __future__ import annotations

import json
import logging
from functools import cache
from typing import Any

import pytest
import torch

import shiplap as sl
from shiplap.inductor import Explanation, explain, switches
from shiplap.render.lines import print_lines
from shiplap_testing.effort import sampled
from tests.inductor.targets import qmm

gelu = torch.nn.functional.gelu


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path))


def arguments(m: int = 67, k: int = 33, n: int = 101) -> tuple[torch.Tensor, ...]:
    return torch.randn(m, k), torch.randint(-127, 128, (k, n), dtype=torch.int8), torch.rand(n) / 127, torch.randn(n)


@pytest.mark.long
def test_what_is_inside_a_template():
    explanation = explain(lambda x, w, s, b: gelu(qmm(x, w, s) + b), *arguments(), fullgraph=True)
    (kernel,) = explanation.kernels
    assert (kernel.kind, kernel.operators) == ("template", ("fusetest::qmm", "aten.add", "aten.gelu"))
    assert kernel.name.startswith("cpp_fused_add_gelu_qmm")
    assert kernel.name in explanation.source[0]
    assert [where.rpartition("/")[2].partition(":")[0] for where in kernel.where] == ["test_explain.py"]
    assert kernel.unfused == ()
    (choice,) = kernel.fusion_choices
    assert choice.op == "fusetest::qmm"
    assert [v.status for v in choice.verdicts] == ["ok"]
    assert choice.chosen == choice.verdicts[0].candidate
    assert explanation.ok
    assert explanation.summary == "1 kernel in 1 graph: 1 template"


OUTSIDE = {
    "sum": (lambda x, w, s, b: (qmm(x, w, s) + b).sum(1), "after", "template epilogue not satisfied", "it reduces"),
    "transposed": (
        lambda x, w, s, b: (qmm(x, w, s) + b).t().contiguous(),
        "after",
        ("memory deps did not match", "no shared data"),
        "it reads other elements than the one it writes",
    ),
    "producer": (
        lambda x, w, s, b: gelu(qmm(x.sigmoid(), w, s) + b),
        "before",
        ("template has no allowed prologue inputs", "prologue fusion only supported for Triton"),
        "take",
    ),
}


@cache
def outside(case: str) -> Explanation:
    """Explained once for all tests that read it."""
    return explain(OUTSIDE[case][0], *arguments())


@pytest.mark.parametrize("case", sampled(OUTSIDE, 1))
def test_what_stayed_outside_and_why(case):
    _, side, reason, meaning = OUTSIDE[case]
    explanation = outside(case)
    assert [k.kind for k in explanation.kernels if k.fusion_choices] == ["template"]
    (template,) = (k for k in explanation.kernels if k.kind == "template")
    (other,) = template.unfused
    assert (other.side, other.kernel) == (side, next(k.name for k in explanation.kernels if k.kind == "generated"))
    assert other.reason.startswith(reason)
    assert meaning in other.meaning


def test_an_operator_is_listed_where_it_is_computed():
    """Inductor names the producer in the template's kernel as well, since it knows where its input comes from."""
    explanation = outside("producer")
    assert [k.operators for k in explanation.kernels] == [("aten.sigmoid",), ("fusetest::qmm", "aten.add", "aten.gelu")]


def test_a_switch_is_a_reason():
    with switches(qmm, fusion=False):
        explanation = explain(lambda x, w, s, b: qmm(x, w, s) + b, *arguments())
    assert explanation.kernels[0].unfused[0].reason == "fusion for buffer explicit disabled"
    assert "switched off" in explanation.kernels[0].unfused[0].meaning


def test_templates_off_shows_the_fallback():
    with switches(qmm, templates=False):
        explanation = explain(lambda x, w, s, b: qmm(x, w, s) + b, *arguments())
    assert "template" not in [k.kind for k in explanation.kernels]
    assert [(d.chosen, d.reason) for d in explanation.fusion_choices] == [("reference", "templates are switched off")]
    assert "extern_kernels.mm" in [k.name for k in explanation.kernels]


@pytest.mark.long  # tests/inductor/test_lower.py
def test_a_wrong_template_is_named_with_its_evidence():
    with switches(qmm, only="STEPS=K / 2"), pytest.warns(sl.ShiplapNotice, match="is wrong and is not used"):
        explanation = explain(lambda x, w, s, b: qmm(x, w, s) + b, *arguments(31))
    (choice,) = explanation.fusion_choices
    assert not explanation.ok
    assert (choice.chosen, choice.reason) == ("reference", "no template is proven for this call")
    (verdict,) = choice.verdicts
    assert verdict.status == "wrong"
    assert "off by" in verdict.detail


def test_graphs_modules_and_what_compiles_to_nothing():
    def broken(x, w, s, b):
        y = qmm(x, w, s)
        torch._dynamo.graph_break()
        return y + b

    explanation = explain(broken, *arguments())
    assert (explanation.graphs, [k.graph for k in explanation.kernels]) == (2, [0, 1])
    assert explain(torch.nn.Linear(3, 4), torch.randn(2, 3)).kernels[0].kind == "extern"
    with pytest.raises(sl.ShiplapError, match="SL702: nothing was compiled") as e:
        explain(lambda x: 1, torch.randn(2))
    assert e.value.got == "no graph reached Inductor"


def test_nothing_of_the_process_is_left_changed():
    import torch._functorch.config as autograd
    import torch._inductor.config as config

    loggers = [logging.getLogger(f"torch._inductor.{n}") for n in ("scheduler.__fusion", "codecache.__output_code")]
    before = [(logger.level, logger.propagate, list(logger.handlers)) for logger in loggers]
    state = config.fx_graph_cache, autograd.enable_autograd_cache, config._post_fusion_custom_pass
    with pytest.raises(ZeroDivisionError):
        explain(lambda x: x / (1 // 0), torch.randn(2))
    explain(lambda x: x + 1, torch.randn(2))
    assert (config.fx_graph_cache, autograd.enable_autograd_cache, config._post_fusion_custom_pass) == state
    assert [(logger.level, logger.propagate, logger.handlers) for logger in loggers] == before


def test_views_render_the_same_values(capsys: pytest.CaptureFixture[str]) -> None:
    explanation = outside("sum")
    value: Any = json.loads(json.dumps(explanation.as_json({"torch": torch.__version__})))
    assert "source" not in value
    assert explanation.as_json({}, source=True)["source"] == list(explanation.source)
    assert value["kernels"][0]["unfused"][0]["reason"] == "template epilogue not satisfied"
    print_lines(explanation.lines())
    text = capsys.readouterr().out
    for part in (
        "  outside  cpp_fused_add_sum_1 (aten.add, aten.sum), which runs after it\n"
        "           Inductor: template epilogue not satisfied\n",
        f"  chosen   {explanation.fusion_choices[0].chosen}: the first candidate that is proven",
        "2 kernels in 1 graph: 1 template, 1 generated",
    ):
        assert part in text
    assert "async_compile.cpp_pybinding" in explanation.source[0]
