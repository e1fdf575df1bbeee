"""The experts of a mixture: converted, or named with the reason; exact, trained through, and in graphs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import shiplap_slidesparse as ss
from shiplap_slidesparse import layers
from shiplap_slidesparse.quantise import quantise_weight
from tests.slidesparse.models import TOKENS, mixtral


@pytest.mark.parametrize(("dtype", "most"), [("int8", 0.03), ("fp8", 0.1)])
def test_a_mixture_is_converted_with_its_experts(dtype: str, most: float) -> None:
    net = mixtral()
    with torch.no_grad():
        before = net(TOKENS).logits
        done = ss.convert(net, dtype=dtype)
        after = net(TOKENS).logits
    experts = [c.name for c in done.converted if "experts" in c.name]
    assert len(experts) == 4
    assert experts[0] == "model.layers.0.mlp.experts.gate_up_layer"
    assert 0 < (before - after).norm() < most * before.norm()
    named = {s.name for s in done.skipped}
    kept = sum(p.numel() for n, p in net.named_parameters() if n in named or n.removesuffix(".weight") in named)
    total = sum(p.numel() for p in mixtral().parameters())
    assert kept + sum(c.n * c.k for c in done.converted) > 0.99 * total
    assert done.share == pytest.approx(sum(c.n * c.k for c in done.converted) / total)
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(net)(TOKENS).logits, after)
    net.half().float()  # a cast leaves the weights and their scales alone
    assert net.model.layers[0].mlp.experts.down_layer.weight_scale.dtype == torch.float32


def test_experts_that_are_kept_are_named_with_the_reason() -> None:
    net = mixtral()
    done = ss.convert(net, "6:8")
    reasons = {s.name: s.reason for s in done.skipped}
    assert reasons["model.layers.1.mlp.experts.down_proj"].startswith("experts are multiplied in int8 and fp8 with all")
    assert reasons["model.layers.1.mlp.gate.weight"] == "MixtralTopKRouter is no layer that convert knows"
    done = ss.convert(mixtral(), skip=["model.layers.0.mlp.experts", "layers.1.mlp.experts.down_proj", "lm_head"])
    reasons = {s.name: s.reason for s in done.skipped}
    assert reasons["model.layers.0.mlp.experts.gate_up_proj"] == "skip='model.layers.0.mlp.experts'"
    assert reasons["model.layers.1.mlp.experts.gate_up_proj"] == "skip='layers.1.mlp.experts.down_proj'"


def test_state_of_experts_is_loaded() -> None:
    net, other = mixtral(), mixtral()
    ss.convert(net)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    ss.convert(other)
    other.load_state_dict(net.state_dict())
    with torch.no_grad():
        assert torch.equal(other(TOKENS).logits, net(TOKENS).logits)


def test_gradients_pass_to_the_input_of_experts() -> None:
    net, dense = mixtral(), mixtral()
    ss.convert(net)
    grads = []
    for each in (net, dense):
        x = torch.nn.Parameter(dense.model.embed_tokens(TOKENS).detach())
        each(inputs_embeds=x).logits.square().sum().backward()
        grads.append(x.grad)
    assert (grads[0] - grads[1]).norm() < 0.1 * grads[1].norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", [layers.experts_int8, layers.experts_fp8], ids=lambda op: op.spec.opname)
@pytest.mark.parametrize(("m", "n", "k", "experts"), [(7, 5, 40, 3), (0, 4, 8, 2), (33, 16, 32, 1), (5, 3, 0, 2)])
def test_the_product_is_that_of_the_reference(
    op: Any, dtype: torch.dtype, m: int, n: int, k: int, experts: int
) -> None:
    torch.manual_seed(0)
    kind = torch.int8 if op is layers.experts_int8 else torch.float8_e4m3fn
    weight, scale = quantise_weight(torch.randn(experts * n, k), kind)
    chosen = torch.randint(-1, experts + 1, (m,))  # some rows have no expert
    x = torch.randn(m, k).to(dtype)
    got = op(x, chosen, scale, weight, experts)
    torch.testing.assert_close(got, op.reference(x, chosen, scale, weight, experts))
    assert not got[(chosen < 0) | (chosen == experts)].any()
    each = layers.linear_int8 if kind == torch.int8 else layers.linear_fp8
    for e in range(experts):
        part = slice(e * n, (e + 1) * n)
        alone = each(x[chosen == e], scale[part], weight[part].contiguous())
        assert torch.equal(got[chosen == e], alone)


def test_a_mixture_is_compiled_into_one_graph() -> None:
    net = mixtral()
    ss.convert(net)
    block = net.model.layers[0].mlp
    x = torch.randn(1, 6, 48)
    with torch.no_grad():
        graph = torch.compile(block, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(graph(x), block(x))
