"""What a user of slidesparse calls, on a GPU: converted layers, moved, tuned, prepared, captured and compiled."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shiplap_slidesparse as slidesparse
from shiplap_slidesparse import ops
from shiplap_slidesparse.lt import native
from tests.slidesparse.gpu.cases import CUDA, MARKS, captured
from tests.slidesparse.gpu.cases import sparse as sparse

pytestmark = MARKS


def network() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 100, bias=False))


def converted(mode: str, pattern: str = "6:8", dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """On the CPU; sizes of 8 bits are exact there and on a GPU."""
    model = network().to(dtype)
    slidesparse.convert(model, pattern, mode)
    return model.eval()


@pytest.mark.parametrize("mode", ["int8", "fp8", "bf16"])
@pytest.mark.parametrize("pattern", ["2:4", "6:8"])
def test_a_model_moves_to_the_gpu_and_back(sparse, mode, pattern):
    here = converted(mode, pattern, torch.bfloat16)
    there = copy.deepcopy(here).to(CUDA)
    layers = [m for m in there.modules() if isinstance(m, slidesparse.Linear)]
    assert len(layers) == 2
    assert all(m.fresh and m.layout == ops.CUSPARSELT for m in layers)
    x = torch.randn(33, 256).bfloat16()
    with torch.no_grad():
        want, got = here(x), there(x.to(CUDA)).cpu()
        repeated = there.cpu()(x)
    if mode == "int8":
        assert torch.equal(got, want)
    torch.testing.assert_close(got, want, rtol=2**-5, atol=2**-5)
    assert torch.equal(repeated, want)


@pytest.mark.parametrize("mode", ["int8", "fp8", "bf16"])
def test_a_weight_is_packed_and_comes_back(sparse, mode):
    weight = slidesparse.prune(torch.randn(100, 200, device=CUDA), "6:8")
    packed = slidesparse.pack(weight, "6:8", mode)
    assert packed.layout == ops.CUSPARSELT
    kept = packed.keeping("packed")
    assert torch.equal(kept.weight().float(), packed.weight().float())
    assert torch.equal(kept.to("cpu").weight().float(), packed.weight().float().cpu())
    x = torch.randn(2, 3, 200, device=CUDA, dtype=torch.bfloat16)
    dense, slid = (slidesparse.matmul(x, packed.keeping(form)) for form in ("dense", "packed"))
    torch.testing.assert_close(dense, slid, rtol=2**-6, atol=2**-3)


def test_prepared_models_are_captured(sparse):
    model = converted("fp8").to(CUDA)
    slidesparse.prepare(model, (48,))
    made = native.count_plans()
    with torch.no_grad():
        graph, static, out = captured(model, torch.randn(48, 256, device=CUDA, dtype=torch.bfloat16))
        static.copy_(torch.randn_like(static))
        graph.replay()
        assert torch.equal(out, model(static))
    assert native.count_plans() == made


@pytest.mark.whole_device
def test_choices_change_no_integer(sparse, tmp_path, monkeypatch):
    monkeypatch.setenv("SHIPLAP_CACHE_DIR", str(tmp_path))
    model = converted("int8")[:1].to(CUDA)
    x = torch.randn(64, 256, device=CUDA, dtype=torch.bfloat16)
    with torch.no_grad():
        before = model(x)
        choices = slidesparse.tune(model, rows=(64,), seconds=10)
        assert [c.op.rpartition("::")[2] for c in choices] == ["mm_int8", "sparse_mm_int8", "linear_int8"]
        assert all(c.kernel for c in choices), [f.evidence for c in choices for f in c.findings]
        assert torch.equal(model(x), before)


@pytest.mark.parametrize("mode", ["int8", "fp8"])
def test_a_compiled_model_is_one_captured_graph(sparse, mode):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = converted(mode).to(CUDA)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(32, 256, device=CUDA, dtype=torch.bfloat16)
            torch.testing.assert_close(compiled(x), model(x), rtol=2**-6, atol=2**-6)
    assert counters["inductor"]["cudagraph_skips"] == 0
