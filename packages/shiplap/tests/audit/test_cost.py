"""The cost card: numbers where there is something to measure, reasons where there is not."""

from __future__ import annotations

import json
from io import StringIO

import pytest
from rich.console import Console

from shiplap.audit import CostCard, Finding, measure_cost
from shiplap.render.findings import findings_html, findings_json, print_costs
from shiplap_testing.zoo import bad, good

CARD = CostCard("a::b", "cpu", "x float32(5,)", "native", 100.0, 2345.6, None, None, ("captured: <no> device",))
FINDING = Finding("fake", "ok", "a::b", "fine")


@pytest.fixture(scope="module")
def saxpy():
    return measure_cost(good.saxpy)


@pytest.mark.long
def test_a_c_kernel_costs_less_than_its_call(saxpy):
    assert saxpy.subject == "zoo_good::saxpy"
    assert saxpy.binding in ("native", "python")
    assert saxpy.raw_ns > 0
    card = saxpy
    for _ in range(2):  # of a busy machine one of three may be wrong
        card = card if card.raw_ns < card.eager_ns else measure_cost(good.saxpy)
    assert 0 < card.raw_ns < card.eager_ns
    assert saxpy.compiled_ns >= 0  # a slope: noise may take it to 0
    assert saxpy.captured_ns is None
    assert any(n.startswith("captured: graphs are captured on a CUDA device") for n in saxpy.notes)


@pytest.mark.long
def test_measuring_leaves_the_kernel_as_it_was(saxpy):
    kernel = good.saxpy.kernels["cpu"][0]
    assert "between" not in repr(kernel._function)
    assert measure_cost(good.saxpy).raw_ns > 0


def test_what_a_card_cannot_show_has_a_reason():
    adopted = measure_cost(good.adopted)
    assert (adopted.binding, adopted.raw_ns) == ("adopted", None)
    assert "raw: no C ABI kernel" in adopted.notes
    broken = measure_cost(bad.compiler.no_fake)
    assert broken.eager_ns > 0
    assert broken.compiled_ns is None
    assert any(n.startswith("compiled: ") for n in broken.notes)


def test_a_card_as_text_json_and_html():
    out = StringIO()
    print_costs([CARD], Console(file=out, width=100))
    assert "2,346" in out.getvalue()
    assert "captured: <no> device" in out.getvalue()
    value = json.loads(findings_json([FINDING], {}, [CARD]))
    assert value["costs"][0]["eager_ns"] == 2345.6
    assert value["costs"][0]["compiled_ns"] is None
    bare = json.loads(findings_json([FINDING], {}, no_costs="--no-cost"))
    assert (bare["costs"], bare["no_costs"]) == ([], "--no-cost")
    page = findings_html([FINDING], {}, costs=[CARD])
    assert "2,346" in page
    assert "captured: &lt;no&gt; device" in page
    assert "bound by" not in findings_html([FINDING], {})
    assert "no op has samples" in findings_html([FINDING], {})
    out = StringIO()
    print_costs([], Console(file=out, width=100), "--no-cost")
    assert "ns per call, smallest sample: --no-cost" in out.getvalue()
