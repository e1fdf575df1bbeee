"""Fusions of inference engines, each as one pattern over ops with their schemas: proven, and placed in compiled code.

The ops have the schemas that serving engines register: results are written to arguments, residuals in place, scales are
optional, and a collective is an op of its own or the two calls of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
import torch.distributed as dist
from torch import Tensor
from torch._higher_order_ops.auto_functionalize import auto_functionalized as functional
from torch.nn import functional as F

from shiplap import rewrite, rewrites
from shiplap.rewrite import Match
from shiplap.torch_private import graph_nodes
from shiplap.torch_private.inductor_passes import capture_graph
from shiplap_testing.effort import sampled

E, D, HEADS, KEYS = 1e-6, 8, 4, 2
CODES = torch.int8
C: Any = torch.ops.serving

SCHEMAS = {
    "rms_norm": "(Tensor! result, Tensor input, Tensor weight, float epsilon) -> ()",
    "fused_add_rms_norm": "(Tensor! input, Tensor! residual, Tensor weight, float epsilon) -> ()",
    "static_quant": "(Tensor! result, Tensor input, Tensor scale) -> ()",
    "token_quant": "(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()",
    "group_quant": "(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps, bool ue8m0) -> ()",
    "silu_and_mul": "(Tensor! result, Tensor input) -> ()",
    "rotary_embedding": "(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cache,"
    " bool is_neox, int offset=0, bool inverse=False) -> ()",
    "all_reduce": "(Tensor x, str group_name) -> Tensor",
    "norm_static_quant": "(Tensor! result, Tensor input, Tensor weight, Tensor scale, float epsilon) -> ()",
    "add_norm_static_quant": "(Tensor! result, Tensor input, Tensor! residual, Tensor weight, Tensor scale, float e)"
    " -> ()",
    "norm_token_quant": "(Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon, Tensor? scale_ub,"
    " Tensor!? residual) -> ()",
    "norm_group_quant": "(Tensor! result, Tensor input, Tensor weight, Tensor! scale, float epsilon, int group_size)"
    " -> ()",
    "silu_and_mul_quant": "(Tensor! result, Tensor input, Tensor scale) -> ()",
    "silu_and_mul_group_quant": "(Tensor! result, Tensor! scales, Tensor input, int group_size) -> ()",
    "qk_norm_rope": "(Tensor! qkv, int num_heads_q, int num_heads_k, int head_dim, float eps, Tensor q_weight,"
    " Tensor k_weight, Tensor cache, bool is_neox, Tensor position_ids) -> ()",
    "all_reduce_add_norm": "(Tensor! input, Tensor! residual, Tensor weight, float epsilon, str group_name) -> ()",
    "all_reduce_add_norm_quant": "(Tensor! input, Tensor! residual, Tensor! result, Tensor weight, Tensor scale,"
    " float e, str group_name) -> ()",
}


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, E)


def codes(x: Tensor) -> Tensor:
    return x.round().clamp(-127, 127)


def gated(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return F.silu(a) * b


def turned(x: Tensor, positions: Tensor, cache: Tensor) -> Tensor:
    cos, sin = cache[positions].chunk(2, -1)
    a, b = x.view(x.shape[0], -1, D).chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).view(x.shape)


def rms_norm(result, input, weight, epsilon):
    result.copy_(normed(input, weight))


def fused_add_rms_norm(input, residual, weight, epsilon):
    residual.add_(input)
    input.copy_(normed(residual, weight))


def static_quant(result, input, scale):
    result.copy_(codes(input / scale))


def token_quant(result, input, scale, scale_ub=None):
    scale.copy_(input.abs().amax(-1, keepdim=True) / 127)
    result.copy_(codes(input / scale))


def group_quant(input, output_q, output_s, group_size, eps, ue8m0):
    grouped = input.unflatten(-1, (-1, group_size))
    output_s.copy_(grouped.abs().amax(-1) / 127)
    output_q.copy_(codes(grouped / output_s[..., None]).flatten(-2))


def silu_and_mul(result, input):
    result.copy_(gated(input))


def rotary_embedding(positions, query, key, head_size, cache, is_neox, offset=0, inverse=False):
    query.copy_(turned(query, positions, cache))
    if key is not None:
        key.copy_(turned(key, positions, cache))


def all_reduce(x, group_name):
    return x * 2


def norm_static_quant(result, input, weight, scale, epsilon):
    static_quant(result, normed(input, weight), scale)


def add_norm_static_quant(result, input, residual, weight, scale, e):
    residual.add_(input)
    static_quant(result, normed(residual, weight), scale)


def norm_token_quant(result, input, weight, scale, epsilon, scale_ub=None, residual=None):
    if residual is not None:
        input = residual.add_(input)
    token_quant(result, normed(input, weight), scale)


def norm_group_quant(result, input, weight, scale, epsilon, group_size):
    group_quant(normed(input, weight), result, scale, group_size, E, False)


def silu_and_mul_quant(result, input, scale):
    static_quant(result, gated(input), scale)


def silu_and_mul_group_quant(result, scales, input, group_size):
    group_quant(gated(input), result, scales, group_size, E, False)


def qk_norm_rope(qkv, num_heads_q, num_heads_k, head_dim, eps, q_weight, k_weight, cache, is_neox, position_ids):
    q, k, _ = qkv.split([num_heads_q * D, num_heads_k * D, num_heads_k * D], -1)
    for part, weight in ((q, q_weight), (k, k_weight)):
        part.copy_(turned(normed(part.unflatten(-1, (-1, D)), weight).flatten(-2), position_ids, cache))


def all_reduce_add_norm(input, residual, weight, epsilon, group_name):
    residual.add_(input * 2)
    input.copy_(normed(residual, weight))


def all_reduce_add_norm_quant(input, residual, result, weight, scale, e, group_name):
    residual.add_(input * 2)
    input.copy_(normed(residual, weight))
    static_quant(result, input, scale)


@pytest.fixture(autouse=True, scope="module")
def library() -> Iterator[None]:
    held = torch.library.Library("serving", "FRAGMENT")
    for name, schema in SCHEMAS.items():
        held.define(name + schema, tags=torch.Tag.needs_exact_strides)
        held.impl(name, globals()[name], "CPU")
        fake = (lambda x, group_name: torch.empty_like(x)) if name == "all_reduce" else (lambda *_, **__: None)
        torch.library.register_fake(f"serving::{name}", fake, lib=held)
    yield
    held._destroy()


# --- the calls that patterns are made of, in the form that such ops have behind autograd ------------------------------


def empty(x: Tensor, *shape: int, dtype: torch.dtype = CODES) -> Tensor:
    return torch.empty(shape or x.shape, dtype=dtype, device=x.device)


def of_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional(C.rms_norm.default, result=torch.empty_like(x), input=x, weight=weight, epsilon=E)[1]


def of_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    at = functional(C.fused_add_rms_norm.default, input=x, residual=residual, weight=weight, epsilon=E)
    return at[1], at[2]


def of_static(x: Tensor, scale: Tensor) -> Tensor:
    return functional(C.static_quant.default, result=empty(x), input=x, scale=scale)[1]


def of_token(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = empty(x, x.shape[0], 1, dtype=torch.float32)
    at = functional(C.token_quant.default, result=empty(x), input=x, scale=scale, scale_ub=None)
    return at[1], at[2]


def of_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    scales = empty(x, x.shape[0], x.shape[1] // D, dtype=torch.float32)
    named = {"input": x, "output_q": empty(x), "output_s": scales, "group_size": D, "eps": 1e-10, "ue8m0": False}
    at = functional(C.group_quant.default, **named)
    return at[1], at[2]


def of_silu(x: Tensor) -> Tensor:
    return functional(C.silu_and_mul.default, result=empty(x, x.shape[0], x.shape[1] // 2, dtype=x.dtype), input=x)[1]


# --- fusions: arguments, the pattern, its replacement, and the model that has it --------------------------------------

FUSIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], Callable[[], list[Tensor]]]] = {}


def drawn(*shapes: tuple[int, ...]) -> Callable[[], list[Tensor]]:
    rng = torch.Generator().manual_seed(0)
    return lambda: [
        torch.randn(s, generator=rng.manual_seed(i)) if s else torch.tensor(0.05) for i, s in enumerate(shapes)
    ]


def fusion(name: str, *shapes: tuple[int, ...]) -> Callable[[type], type]:
    """Keep the three functions of a class as a fusion."""

    def kept(cls: Any) -> type:
        FUSIONS[name] = (cls.pattern, cls.replacement, cls.model, getattr(cls, "args", drawn(*shapes)))
        return cls

    return kept


@fusion("norm, static quantisation", (5, 16), (16,), ())
class _NormStatic:
    def pattern(x, w, s):
        return of_static(of_norm(x, w), s)

    def replacement(x, w, s):
        return functional(C.norm_static_quant.default, result=empty(x), input=x, weight=w, scale=s, epsilon=E)[1]

    def model(x, w, s):
        y, q = torch.empty_like(x), empty(x)
        C.rms_norm(y, x, w, E)
        C.static_quant(q, y, s)
        return q * s


@fusion("residual, norm, static quantisation", (5, 16), (5, 16), (16,), ())
class _AddNormStatic:
    def pattern(x, r, w, s):
        y, r = of_add_norm(x, r, w)
        return of_static(y, s), r

    def replacement(x, r, w, s):
        named = {"result": empty(x), "input": x, "residual": r, "weight": w, "scale": s, "e": E}
        at = functional(C.add_norm_static_quant.default, **named)
        return at[1], at[2]

    def model(x, r, w, s):
        x, r, q = x * 1, r * 1, empty(x)
        C.fused_add_rms_norm(x, r, w, E)
        C.static_quant(q, x, s)
        return q * s, r


@fusion("norm, quantisation of tokens", (5, 16), (16,))
class _NormToken:
    def pattern(x, w):
        return of_token(of_norm(x, w))

    def replacement(x, w):
        scale = empty(x, x.shape[0], 1, dtype=torch.float32)
        named = {"result": empty(x), "input": x, "weight": w, "scale": scale, "epsilon": E}
        at = functional(C.norm_token_quant.default, **named, scale_ub=None, residual=None)
        return at[1], at[2]

    def model(x, w):
        y, q, scale = torch.empty_like(x), empty(x), empty(x, 5, 1, dtype=torch.float32)
        C.rms_norm(y, x, w, E)
        C.token_quant(q, y, scale, None)
        return q * scale


@fusion("residual, norm, quantisation of tokens", (5, 16), (5, 16), (16,))
class _AddNormToken:
    def pattern(x, r, w):
        y, r = of_add_norm(x, r, w)
        q, scale = of_token(y)
        return q, r, scale

    def replacement(x, r, w):
        scale = empty(x, x.shape[0], 1, dtype=torch.float32)
        named = {"result": empty(x), "input": x, "weight": w, "scale": scale, "epsilon": E}
        at = functional(C.norm_token_quant.default, **named, scale_ub=None, residual=r)
        return at[1], at[3], at[2]

    def model(x, r, w):
        x, r, q, scale = x * 1, r * 1, empty(x), empty(x, 5, 1, dtype=torch.float32)
        C.fused_add_rms_norm(x, r, w, E)
        C.token_quant(q, x, scale, None)
        return q * scale, r


@fusion("norm, quantisation of groups", (5, 16), (16,))
class _NormGroups:
    def pattern(x, w):
        return of_groups(of_norm(x, w))

    def replacement(x, w):
        scales = empty(x, x.shape[0], x.shape[1] // D, dtype=torch.float32)
        named = {"result": empty(x), "input": x, "weight": w, "scale": scales, "epsilon": E, "group_size": D}
        at = functional(C.norm_group_quant.default, **named)
        return at[1], at[2]

    def model(x, w):
        y, q, scales = torch.empty_like(x), empty(x), empty(x, 5, 2, dtype=torch.float32)
        C.rms_norm(y, x, w, E)
        C.group_quant(y, q, scales, D, 1e-10, False)
        return q.unflatten(-1, (2, D)) * scales[..., None]


@fusion("gate, static quantisation", (5, 32), ())
class _SiluStatic:
    def pattern(x, s):
        return of_static(of_silu(x), s)

    def replacement(x, s):
        result = empty(x, x.shape[0], x.shape[1] // 2)
        return functional(C.silu_and_mul_quant.default, result=result, input=x, scale=s)[1]

    def model(x, s):
        y, q = empty(x, 5, 16, dtype=x.dtype), empty(x, 5, 16)
        C.silu_and_mul(y, x)
        C.static_quant(q, y, s)
        return q * s


@fusion("gate, quantisation of groups", (5, 32))
class _SiluGroups:
    def pattern(x):
        return of_groups(of_silu(x))

    def replacement(x):
        (rows, width), half = x.shape, x.shape[1] // 2
        result, scales = empty(x, rows, half), empty(x, rows, width // 2 // D, dtype=torch.float32)
        at = functional(C.silu_and_mul_group_quant.default, result=result, scales=scales, input=x, group_size=D)
        return at[1], at[2]

    def model(x):
        y, q, scales = empty(x, 5, 16, dtype=x.dtype), empty(x, 5, 16), empty(x, 5, 2, dtype=torch.float32)
        C.silu_and_mul(y, x)
        C.group_quant(y, q, scales, D, 1e-10, False)
        return q.unflatten(-1, (2, D)) * scales[..., None]


SIZES = [HEADS * D, KEYS * D, KEYS * D]


@fusion("norms of heads, rotary embedding")
class _NormRope:
    @staticmethod
    def args():
        qkv, a, b, cache = drawn((5, sum(SIZES)), (D,), (D,), (9, D))()
        return [qkv, torch.arange(5), a, b, cache]

    def pattern(qkv, positions, q_weight, k_weight, cache):
        q, k, v = qkv.split(SIZES, dim=-1)
        q, k = (of_norm(t.view(t.shape[0], -1, D), w).view(t.shape) for t, w in ((q, q_weight), (k, k_weight)))
        named = {"query": q, "key": k, "head_size": D, "cache": cache, "is_neox": True}
        at = functional(C.rotary_embedding.default, positions=positions, **named)
        return at[1], at[2], v

    def replacement(qkv, positions, q_weight, k_weight, cache):
        named = {"q_weight": q_weight, "k_weight": k_weight, "cache": cache, "is_neox": True, "position_ids": positions}
        numbers = {"num_heads_q": HEADS, "num_heads_k": KEYS, "head_dim": D, "eps": E}
        return functional(C.qk_norm_rope.default, qkv=qkv, **numbers, **named)[1].split(SIZES, dim=-1)

    def model(qkv, positions, q_weight, k_weight, cache):
        q, k, v = (qkv * 1).split(SIZES, dim=-1)
        q, k = q.view(-1, HEADS, D), k.view(-1, KEYS, D)
        a, b = torch.empty_like(q), torch.empty_like(k)
        C.rms_norm(a, q, q_weight, E)
        C.rms_norm(b, k, k_weight, E)
        a, b = a.view(5, -1), b.view(5, -1)
        C.rotary_embedding(positions, a, b, D, cache, True)
        return a + 0, b + 0, v.sin()


@fusion("sum over ranks, residual, norm", (5, 16), (5, 16), (16,))
class _ReduceNorm:
    def pattern(x, r, w):
        return of_add_norm(C.all_reduce(x, "tp:0"), r, w)

    def replacement(x, r, w):
        named = {"input": x, "residual": r, "weight": w, "epsilon": E, "group_name": "tp:0"}
        at = functional(C.all_reduce_add_norm.default, **named)
        return at[1], at[2]

    def model(x, r, w):
        y, r = C.all_reduce(x, "tp:0"), r * 1
        C.fused_add_rms_norm(y, r, w, E)
        return y + 0, r


@fusion("sum over ranks, residual, norm, static quantisation", (5, 16), (5, 16), (16,), ())
class _ReduceNormQuant:
    def pattern(x, r, w, s):
        y, r = of_add_norm(C.all_reduce(x, "tp:0"), r, w)
        return of_static(y, s), r

    def replacement(x, r, w, s):
        named = {"input": x, "residual": r, "result": empty(x), "weight": w, "scale": s, "e": E, "group_name": "tp:0"}
        at = functional(C.all_reduce_add_norm_quant.default, **named)
        return at[3], at[2]

    def model(x, r, w, s):
        y, r, q = C.all_reduce(x, "tp:0"), r * 1, empty(x)
        C.fused_add_rms_norm(y, r, w, E)
        C.static_quant(q, y, s)
        return q * s, r


def compiled(made: Any, model: Callable[..., Any], args: list[Tensor]) -> tuple[Any, Any]:
    torch.compiler.reset()
    with rewrites(made) as placed, torch.no_grad():
        return torch.compile(model, fullgraph=True)(*args), placed


# Each is a part of another fusion, or like one that has another product in front or behind.
PARTS = (
    "norm, static quantisation",
    "norm, quantisation of groups",
    "norm, quantisation of tokens",
    "residual, norm, static quantisation",
    "gate, static quantisation",
    "sum over ranks, residual, norm",
)


@pytest.mark.parametrize("second_form", [pytest.param(False, marks=pytest.mark.long, id="first"), True])
@pytest.mark.parametrize("name", sampled(FUSIONS, 1, long=PARTS))
def test_a_fusion_is_proven_and_placed(name, second_form):
    pattern, replacement, model, args = FUSIONS[name]
    made = rewrite(pattern, replacement, name="fusion", level="post-grad", samples=lambda: [tuple(args())])
    with inductor.patch(enable_auto_functionalized_v2=second_form):
        got, placed = compiled(made, model, args())
    assert [type(o) for o in placed.outcomes] == [Match], [str(o) for o in placed.outcomes]
    wanted = model(*args())
    pairs = zip(got, wanted, strict=True) if isinstance(got, tuple) else [(got, wanted)]
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=0.051)


def written_through_a_view(model: Callable[..., Any], args: list[Tensor]) -> tuple[Any, Any]:
    """Return the graph of a model with ``rms_norm``, whose written views are separate, and the node of that call."""
    with inductor.patch(enable_auto_functionalized_v2=True):
        graph = capture_graph(model, args, "post-grad", dynamic=False).graph
    before = [n.format_node() for n in graph.nodes]
    graph_nodes.separate_written_views(graph, {C.rms_norm.default}, "post-grad")
    graph.lint()
    (call,) = [n for n in graph.nodes if n.args[:1] == (C.rms_norm.default,)]
    return before == [n.format_node() for n in graph.nodes], call


def test_a_call_that_is_separated_and_stays_compiles():
    """For ops that need their exact strides, torch keeps the eager values beside the arguments of a call."""

    def pattern(x, w):
        return of_norm(x, w).cos()

    def replacement(x, w):
        return normed(x, w).cos()

    def model(x, w):
        y = torch.zeros(80)
        C.rms_norm(y.view(5, 16), x, w, E)
        return y.sin()

    args = drawn((5, 16), (16,))
    made = rewrite(pattern, replacement, level="post-grad", samples=lambda: [tuple(args())])
    with inductor.patch(enable_auto_functionalized_v2=True):
        got, placed = compiled(made, model, args())
    assert not [o for o in placed.outcomes if isinstance(o, Match)]
    torch.testing.assert_close(got, model(*args()))


def test_a_view_of_an_argument_of_the_graph_stays():
    """Inductor would copy all of such an argument, as a cache, if the call wrote to a node that is a view of it."""

    def model(x, w, cache):
        C.rms_norm(cache.view(5, 16), x, w, E)
        return x.sin()

    same, call = written_through_a_view(model, [*drawn((5, 16), (16,))(), torch.zeros(80)])
    assert call.kwargs["_all_bases"][0].op == "placeholder"
    assert same


def test_the_result_of_a_write_has_memory_of_its_own():
    """Readers of the result would count as readers of what is written to, which Inductor would copy then."""

    def model(x, w):
        y = torch.zeros(80)
        C.rms_norm(y.view(5, 16), x, w, E)
        return y.sin()

    same, call = written_through_a_view(model, drawn((5, 16), (16,))())
    assert not same
    (base,), (result,) = call.kwargs["_all_bases"], [u for u in call.users if u.args[1] == 1]
    held, made = graph_nodes.node_value(base), graph_nodes.node_value(result)
    assert held.shape == made.shape == (5, 16)
    assert held.untyped_storage()._cdata != made.untyped_storage()._cdata


@pytest.fixture
def group() -> Iterator[str]:
    """The name of a group of two ranks, of which this process is one and the other does not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


@pytest.mark.parametrize("level", sampled(["pre-grad", "joint", "post-grad"], long=["pre-grad", "joint"]))
def test_a_collective_of_torch_is_part_of_a_pattern(group, level):
    reduce, wait = torch.ops._c10d_functional.all_reduce, torch.ops._c10d_functional.wait_tensor

    def pattern(x, r, w):
        total = wait(reduce(x, "sum", group)) + r
        return normed(total, w), total

    def replacement(x, r, w):
        total = r + wait(reduce(x, "sum", group))
        return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + E) * w, total

    def model(x, r, w):
        y, r = pattern(x.sin(), r, w)
        return y.cos(), r

    args = drawn((5, 16), (5, 16), (16,))
    made = rewrite(pattern, replacement, level=level, samples=lambda: [tuple(args())])
    got, placed = compiled(made, model, args())
    assert [type(o) for o in placed.outcomes] == [Match], [str(o) for o in placed.outcomes]
    for a, b in zip(got, model(*args()), strict=True):
        torch.testing.assert_close(a, b)
