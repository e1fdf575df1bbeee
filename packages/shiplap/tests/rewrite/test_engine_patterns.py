"""Patterns of inference engines: ops of a library that write to their arguments, several results, several roots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from jaxtyping import Float
from torch import Tensor
from torch._higher_order_ops.auto_functionalize import auto_functionalized

from shiplap import rewrite, rewrites
from shiplap.errors import ShiplapError
from shiplap.rewrite import Match, NearMiss
from shiplap.rewrite.graph import mutates_argument
from shiplap_testing.effort import sampled

SCHEMAS = {
    "rms_norm": "(Tensor! result, Tensor input, Tensor weight, float epsilon) -> ()",
    "quant": "(Tensor! result, Tensor input, Tensor scale) -> ()",
    "dynamic_quant": "(Tensor! result, Tensor input, Tensor! scale) -> ()",
    "norm_quant": "(Tensor! result, Tensor input, Tensor weight, Tensor scale, float epsilon) -> ()",
    "norm_dynamic_quant": "(Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon) -> ()",
}


def rms_norm(result: Tensor, input: Tensor, weight: Tensor, epsilon: float) -> None:
    result.copy_(input * torch.rsqrt(input.pow(2).mean(-1, keepdim=True) + epsilon) * weight)


def quant(result: Tensor, input: Tensor, scale: Tensor) -> None:
    result.copy_((input / scale).round().clamp(-127, 127))


def dynamic_quant(result: Tensor, input: Tensor, scale: Tensor) -> None:
    scale.copy_(input.abs().amax(-1, keepdim=True) / 127)
    quant(result, input, scale)


def norm_quant(result: Tensor, input: Tensor, weight: Tensor, scale: Tensor, epsilon: float) -> None:
    normed = torch.empty_like(input)
    rms_norm(normed, input, weight, epsilon)
    quant(result, normed, scale)


def norm_dynamic_quant(result: Tensor, input: Tensor, weight: Tensor, scale: Tensor, epsilon: float) -> None:
    normed = torch.empty_like(input)
    rms_norm(normed, input, weight, epsilon)
    dynamic_quant(result, normed, scale)


@pytest.fixture(autouse=True, scope="module")
def library() -> Iterator[None]:
    held = torch.library.Library("engine", "FRAGMENT")
    for name, schema in SCHEMAS.items():
        held.define(name + schema)
        held.impl(name, globals()[name], "CPU")
        torch.library.register_fake(f"engine::{name}", lambda *_, **__: None, lib=held)
    yield
    held._destroy()


def norm_then_quant(
    x: Float[Tensor, "m n"],
    w: Float[Tensor, "n"],
    s: Float[Tensor, ""],
) -> Tensor:
    normed = torch.empty_like(x)
    torch.ops.engine.rms_norm(normed, x, w, 1e-6)
    made = torch.empty_like(x, dtype=torch.int8)
    torch.ops.engine.quant(made, normed, s)
    return made


def fused(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    made = torch.empty_like(x, dtype=torch.int8)
    torch.ops.engine.norm_quant(made, x, w, s, 1e-6)
    return made


def wrong(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    made = torch.empty_like(x, dtype=torch.int8)
    torch.ops.engine.norm_quant(made, x, w, s, 0.5)
    return made


def model(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return norm_then_quant(x, w, s).float() * s


def drawn() -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(0)
    return torch.randn(4, 8, generator=rng), torch.rand(8, generator=rng), torch.tensor(0.05)


def compiled(made: Any, fn: Callable[..., Any], *args: Tensor, **options: Any) -> tuple[Any, Any]:
    torch._dynamo.reset()
    with rewrites(made) as placed, torch.no_grad():
        got = torch.compile(fn, backend="inductor", **options)(*args)
    return got, placed


@pytest.mark.parametrize("level", sampled(["pre-grad", "joint", "post-grad"], long=["joint", "post-grad"]))
def test_ops_that_write_are_matched_and_proven_at_each_level(level: Any) -> None:
    got, placed = compiled(rewrite(norm_then_quant, fused, level=level), model, *drawn())
    assert [type(o) for o in placed.outcomes] == [Match]
    torch.testing.assert_close(got, model(*drawn()), rtol=0, atol=0.051)
    with pytest.raises(ShiplapError, match="SL801"):
        rewrites(rewrite(norm_then_quant, wrong, level=level))


def functional(result: Any, normed: Any, input: Any, weight: Any, scale: Any) -> Any:
    """As vLLM writes a pattern: the form that such ops have behind autograd."""
    ops: Any = torch.ops.engine
    at = auto_functionalized(ops.rms_norm.default, result=normed, input=input, weight=weight, epsilon=1e-6)
    return auto_functionalized(ops.quant.default, result=result, input=at[1], scale=scale)[1]


def functional_fused(result: Any, normed: Any, input: Any, weight: Any, scale: Any) -> Any:
    ops: Any = torch.ops.engine
    named = {"result": result, "input": input, "weight": weight, "scale": scale, "epsilon": 1e-6}
    return auto_functionalized(ops.norm_quant.default, **named)[1]


def listed() -> list[tuple[Tensor, ...]]:
    x, w, s = drawn()
    return [(torch.empty_like(x, dtype=torch.int8), torch.empty_like(x), x, w, s)]


@pytest.mark.parametrize("second_form", sampled([False, True], 1))
def test_a_pattern_of_functional_calls_is_matched_in_both_forms_of_torch(second_form: bool) -> None:
    made = rewrite(functional, functional_fused, level="post-grad", samples=listed)
    with inductor.patch(enable_auto_functionalized_v2=second_form):
        got, placed = compiled(made, model, *drawn())
    assert [type(o) for o in placed.outcomes] == [Match]
    torch.testing.assert_close(got, model(*drawn()), rtol=0, atol=0.051)


def test_a_pattern_of_functional_calls_names_its_level() -> None:
    made = rewrite(functional, functional_fused, samples=listed)
    with pytest.raises(ShiplapError, match="auto_functionalized, which a graph has only behind autograd"):
        compiled(made, model, *drawn())


def two_results(
    x: Float[Tensor, "m n"],
    w: Float[Tensor, "n"],
) -> tuple[Tensor, Tensor]:
    normed, made = torch.empty_like(x), torch.empty_like(x, dtype=torch.int8)
    torch.ops.engine.rms_norm(normed, x, w, 1e-6)
    scale = x.new_empty(x.shape[0], 1)
    torch.ops.engine.dynamic_quant(made, normed, scale)
    return made, scale


def two_results_fused(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    made, scale = torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[0], 1)
    torch.ops.engine.norm_dynamic_quant(made, x, w, scale, 1e-6)
    return made, scale


@pytest.mark.long
@pytest.mark.parametrize("level", sampled(["pre-grad", "post-grad"], long=["pre-grad"]))
def test_several_results_of_one_call_are_matched(level: Any) -> None:
    def scaled(x: Tensor, w: Tensor) -> Tensor:
        made, scale = two_results(x, w)
        return made.float() * scale

    x, w, _ = drawn()
    got, placed = compiled(rewrite(two_results, two_results_fused, level=level), scaled, x, w)
    assert [type(o) for o in placed.outcomes] == [Match]
    torch.testing.assert_close(got, scaled(x, w), rtol=0, atol=0.02)


def norms_of_a_split(
    qkv: Float[Tensor, "m 24"],
    a: Float[Tensor, "8"],
    b: Float[Tensor, "8"],
) -> tuple[Tensor, Tensor]:
    q, k, _ = qkv.split([8, 8, 8], -1)
    norm = torch.nn.functional.rms_norm
    return norm(q, (8,), a, 1e-6), norm(k, (8,), b, 1e-6)


def norms_by_hand(qkv: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    q, k = qkv[:, :8], qkv[:, 8:16]
    return tuple(t * torch.rsqrt(t.pow(2).mean(-1, keepdim=True) + 1e-6) * w for t, w in ((q, a), (k, b)))  # type: ignore[return-value]


@pytest.mark.parametrize("level", sampled(["pre-grad", "joint", "post-grad"], long=["joint", "post-grad"]))
def test_several_roots_of_one_split_are_matched_where_its_rest_is_read(level: Any) -> None:
    def attends(qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
        q, k, v = qkv.split([8, 8, 8], -1)
        norm = torch.nn.functional.rms_norm
        return norm(q, (8,), a, 1e-6) * norm(k, (8,), b, 1e-6) + v.sin()

    args = torch.randn(5, 24), torch.rand(8), torch.rand(8)
    got, placed = compiled(rewrite(norms_of_a_split, norms_by_hand, level=level), attends, *args)
    assert [type(o) for o in placed.outcomes] == [Match], [str(o) for o in placed.outcomes]
    torch.testing.assert_close(got, attends(*args))


@pytest.mark.long
@pytest.mark.parametrize(("most", "matched"), [(16, 1), pytest.param(3, 0, marks=pytest.mark.long)])
def test_a_range_of_sizes_is_a_guard(most: int, matched: int) -> None:
    """Behind autograd a range holds where the marks of the sizes prove it."""
    x, w, s = drawn()
    torch._dynamo.mark_dynamic(x, 0, min=2, max=16)
    made = rewrite(norm_then_quant, fused, level="post-grad", where=f"m <= {most}")
    got, placed = compiled(made, model, x, w, s)
    assert len(placed.matches) == matched, [str(o) for o in placed.outcomes]
    torch.testing.assert_close(got, model(*drawn()), rtol=0, atol=0.051)


@pytest.mark.long
def test_what_is_read_between_two_writes_is_a_near_miss() -> None:
    def peeked(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        normed, made = torch.empty_like(x), torch.zeros_like(x, dtype=torch.int8)
        torch.ops.engine.rms_norm(normed, x, w, 1e-6)
        torch.ops.engine.quant(made, normed, s)
        return made + normed

    _, placed = compiled(rewrite(norm_then_quant, fused), peeked, *drawn())
    assert [type(o) for o in placed.outcomes if o.rewrite == "fused"] in ([], [NearMiss])
    assert not placed.matches


def test_a_call_of_a_packet_of_overloads_is_known_to_write() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    assert mutates_argument(graph.call_function(torch.ops.engine.quant, (x, x, x)))
    assert not mutates_argument(graph.call_function(torch.ops.aten.add, (x, x)))
