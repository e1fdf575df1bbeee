"""Where the shipped rewrites match in six models that nobody edited: counted, run, and differentiated.

The graphs are those that Dynamo hands to a compiler; code is generated for two of them, and on request for all six.
Counts are the same on torch 2.11, 2.13 and 2.15 with transformers 5.23; a test run sees the torch that is installed.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shiplap_testing.effort import sampled

pytest.importorskip("transformers")

from shiplap.rewrite import Match, NearMiss, Rewrite
from shiplap.rewrite.group import StackedLinears, StackedNorms, WideLinears
from shiplap.rewrite.shipped import attention, conv_norm, no_ops
from shiplap_dense.rewrites import conv_norm_dense, int8_linear, linear_activation, norm_linear
from shiplap_testing.forked import python
from tests.dense.rewrite.models import build, quantise

SIX = ("bert", "llama", "mixtral", "resnet50", "vit", "convnext")
PINNED: dict[str, dict[str, int]] = {
    "bert": {"no_ops": 7, "attention": 2, "shared_input_linears": 2, "linear_gelu": 2, "linear_tanh": 1},
    "llama": {"no_ops": 16, "attention": 2, "shared_input_linears": 4, "rms_norm_linear": 4},
    "mixtral": {"no_ops": 22, "attention": 2, "shared_input_linears": 2, "rms_norm_linear": 2},
    "resnet50": {"conv_norm": 53},
    "vit": {"no_ops": 9, "attention": 2, "shared_input_linears": 2, "layer_norm_linear": 4, "linear_tanh": 1},
    "convnext": {"layer_norm_linear": 5},
    "clip": {
        "attention": 4,
        "no_ops": 9,
        "shared_input_linears": 4,
        "layer_norm_linear": 9,
        "batch_linear": 4,
        "batch_layer_norm": 4,
    },
}


def everything() -> list[Rewrite]:
    """All that ship for floating models, whether they pay here or not; each proven in
    tests/families/test_shipped_rewrites.py."""
    always: dict[str, Any] = {"always": True}
    return [
        no_ops,
        *attention,
        WideLinears(**always),
        *norm_linear(**always)[1:],
        *linear_activation(**always),
        StackedLinears(**always),
        StackedNorms(**always),
        conv_norm.forced(),
    ]


def rewritten(model: nn.Module, inputs: dict[str, torch.Tensor], rewrites: list[Rewrite]) -> tuple[Any, list[Any]]:
    """What the rewritten graph computes, and the outcomes. ``fullgraph``: a graph break is an error."""
    outcomes: list[Any] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        for rewrite in rewrites:
            outcomes.extend(rewrite.apply(gm.graph))
        gm.graph.lint()
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=backend)(**inputs), outcomes


def counted(outcomes: list[Any]) -> dict[str, int]:
    return dict(Counter(o.rewrite for o in outcomes if isinstance(o, Match)))


@pytest.mark.parametrize("name", sampled(PINNED, long=("resnet50", "clip", "mixtral", "convnext", "bert", "vit")))
def test_matches_are_pinned_and_results_and_gradients_are_those_of_eager(name: str) -> None:
    """Gradients of all parameters, through merged products, SDPA, folded norms and our ops."""
    model, inputs = build(name)
    if name == "resnet50":  # in float32, gradients of 53 layers are too far from themselves to be compared
        model, inputs = model.double(), {k: v.double() for k, v in inputs.items()}
    results, grads, outcomes = [], [], []
    for compiled in (False, True):
        model.zero_grad()
        out, outcomes = rewritten(model, inputs, everything()) if compiled else (model(**inputs), [])
        out[0].square().mean().backward()
        results.append([t for t in out.to_tuple() if isinstance(t, torch.Tensor)])
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert counted(outcomes) == PINNED[name]
    for g, e in zip(*results, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-4, atol=3e-5)
    assert len(grads[0]) > 0.5 * sum(1 for _ in model.parameters())
    assert grads[0].keys() == grads[1].keys()
    for key, grad in grads[0].items():
        torch.testing.assert_close(grads[1][key], grad, rtol=1e-3, atol=1e-6, msg=key)


@pytest.mark.long
def test_convolutions_of_our_own_in_a_resnet() -> None:
    """In channels-last, with constant weights. On the CPU all are declined; then all are forced, in the same graph."""
    import torch._inductor.config as config

    model, inputs = build("resnet50")
    model, inputs = (
        model.to(memory_format=torch.channels_last),
        {k: v.to(memory_format=torch.channels_last) for k, v in inputs.items()},
    )
    with torch.no_grad(), config.patch(freezing=True):
        expected = model(**inputs)[0]
        got, outcomes = rewritten(model, inputs, [conv_norm_dense, conv_norm_dense.forced()])
    misses = [o for o in outcomes if isinstance(o, NearMiss)]
    assert {(m.obstacle, m.reason.partition(",")[0]) for m in misses} == {("cost", "on the CPU")}
    assert len(misses) == counted(outcomes)["conv_norm_dense"] == PINNED["resnet50"]["conv_norm"]
    torch.testing.assert_close(got[0], expected, rtol=1e-4, atol=3e-5)


@pytest.mark.long
def test_a_quantised_llama_is_products_of_int8() -> None:
    model, inputs = build("llama")
    quantise(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        got, outcomes = rewritten(model, inputs, [*int8_linear()])
    assert counted(outcomes) == {"int8_linear_float32": 15}
    torch.testing.assert_close(got.logits, expected, rtol=1e-4, atol=1e-5)


CHILD = """
import json, sys, torch
from torch._dynamo.utils import counters
from torch._inductor import config
import shiplap as sl
from tests.dense.rewrite.models import build
from tests.dense.rewrite.test_models import everything
name, how, *fire = sys.argv[1:]
config.fallback_by_default = how == "quick"  # no C++ is compiled then
model, inputs = build(name)
scope = sl.rewrites(*(r for r in everything() if r.name in fire))
counters.clear()
with torch.no_grad(), scope:
    expected, got = model(**inputs)[0], torch.compile(model, fullgraph=True)(**inputs)[0]
torch.testing.assert_close(got, expected, rtol=1e-4, atol=3e-5)
hits = counters["inductor"]["fxgraph_cache_hit"], counters["aot_autograd"]["autograd_cache_hit"]
print(json.dumps([len(scope.matches), *hits]))
"""
# linear_gelu, linear_tanh and rms_norm_linear put the op of layer_norm_linear there.
CACHED = ("no_ops", "attention", "shared_input_linears", "layer_norm_linear", "conv_norm")
OPT_IN = pytest.mark.skipif("SHIPLAP_TEST_MODELS" not in os.environ, reason="minutes: SHIPLAP_TEST_MODELS=1")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how"), [("bert", "quick"), *(pytest.param(n, "all", marks=OPT_IN) for n in SIX)])
@pytest.mark.long
def test_a_second_process_hits_both_caches(name: str, how: str, tmp_path: Path) -> None:
    """All six, with all that fires in them and kernels as usual, were last run on 2026-11-21, on torch 2.13."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    fire = [n for n in (CACHED if how == "all" else ["shared_input_linears"]) if n in PINNED[name]]

    def run() -> list[int]:
        done = python("-c", CHILD, name, how, *fire, env=env)
        assert done.returncode == 0, done.stderr[-3000:]
        counts: list[int] = json.loads(done.stdout.splitlines()[-1])
        return counts

    first, second = run(), run()
    assert first[1:] == [0, 0]
    assert second[1:] == [1, 1]
    assert first[0] == sum(PINNED[name][n] for n in fire) > 0
