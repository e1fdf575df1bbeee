"""SwiGLU and GEGLU as models write them: found, proven, equal, and left alone on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shiplap.rewrite import Match, NearMiss, prove_rewrite
from shiplap_dense.rewrites import gated_linear


def llama(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def t5(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    hidden = F.linear(x, up)
    return hidden * torch.nn.functional.gelu(F.linear(x, gate), approximate="tanh")


def phi3(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    first, second = F.linear(x, torch.cat((gate, up))).chunk(2, dim=-1)
    return second * F.silu(first)


def diffusers(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    hidden, second = F.linear(x, torch.cat((gate, up)), bias).chunk(2, dim=-1)
    return hidden * F.gelu(second)


def whole_gelu(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, up) * F.gelu(F.linear(x, gate))


def glm(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    first, second = F.linear(x, torch.cat((gate, up))).chunk(2, dim=-1)
    return F.gelu(first) * second


def tanh_first(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    first, second = F.linear(x, torch.cat((gate, up)), bias).chunk(2, dim=-1)
    return F.gelu(first, approximate="tanh") * second


def swiglu(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    hidden, second = F.linear(x, torch.cat((gate, up)), bias).chunk(2, dim=-1)
    return hidden * F.silu(second)


def tanh_last(x: Tensor, gate: Tensor, up: Tensor, bias: Tensor) -> Tensor:
    hidden, second = F.linear(x, torch.cat((gate, up))).chunk(2, dim=-1)
    return hidden * F.gelu(second, approximate="tanh")


MODELS = {
    llama: "gated_silu",
    whole_gelu: "gated_gelu",
    t5: "gated_gelu_tanh",
    phi3: "gated_silu_first_half",
    glm: "gated_gelu_first_half",
    tanh_first: "gated_gelu_tanh_first_half",
    swiglu: "gated_silu_last_half",
    diffusers: "gated_gelu_last_half",
    tanh_last: "gated_gelu_tanh_last_half",
}


def test_every_pattern_has_a_model() -> None:
    assert sorted(MODELS.values()) == sorted(r.name for r in gated_linear())


def drawn() -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(s, generator=g) for s in ((2, 3, 6), (4, 6), (4, 6), (8,)))


@pytest.mark.long  # llama, in make test: test_models.py
@pytest.mark.parametrize("model", MODELS, ids=lambda f: f.__name__)
def test_it_is_found_proven_and_equal(model: Callable[..., Tensor]) -> None:
    rewrites = gated_linear(always=True)
    made = next(r for r in rewrites if r.name == MODELS[model])
    assert {f.verdict for f in prove_rewrite(made)} == {"ok"}
    placed = list[object]()

    def backend(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        for rewrite in rewrites:
            placed.extend(o for o in rewrite.apply(gm.graph) if isinstance(o, Match))
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    given = drawn()
    torch.testing.assert_close(torch.compile(model, backend=backend)(*given), model(*given), rtol=1e-5, atol=1e-5)
    assert [m.rewrite for m in placed if isinstance(m, Match)] == [MODELS[model]]


def test_on_a_cpu_it_is_declined_with_a_reason() -> None:
    placed = list[object]()

    def backend(gm: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        placed.extend(o for r in gated_linear() if r.name == "gated_silu" for o in r.apply(gm.graph))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(llama, backend=backend)(*drawn())
    costs = [o for o in placed if isinstance(o, NearMiss) and o.obstacle == "cost"]
    assert [o.rewrite for o in costs] == ["gated_silu"]
    assert "on the CPU" in costs[0].reason
