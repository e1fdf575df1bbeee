"""Attention and RMS norm as published models spell them: found, equal, and each miss with what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shiplap.rewrite import Match
from shiplap.rewrite.shipped import attention, rms_norm
from shiplap.rewrite.shipped.attention import AttentionRewrite
from shiplap.torch_private.inductor_passes import capture_graph
from shiplap_testing.effort import sampled
from tests.rewrite.specimens import near, outcomes

LOWEST = torch.finfo(torch.float32).min


def t5(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """Two terms, for each head and for each batch; no scale."""
    scores = torch.matmul(q, k.transpose(3, 2)) + bias
    weights = F.softmax((scores + mask).float(), dim=-1).type_as(scores)
    return torch.matmul(F.dropout(weights, p=0.1, training=False), v).transpose(1, 2).contiguous()


def gpt2(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) / torch.full([], 2.0)
    scores = torch.where(mask > 0, scores, torch.full([], LOWEST)) + bias
    return torch.matmul(F.softmax(scores, dim=-1).type(v.dtype), v)


def timm(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """A mask for each window, with the windows as a dim of their own."""
    scores = (q * 0.5) @ k.transpose(-2, -1) + bias
    scores = scores.view(-1, 2, 3, 5, 5) + mask.view(2, 1, 5, 5)[None]
    return (scores.view(-1, 3, 5, 5).softmax(-1) @ v).transpose(1, 2).reshape(2, 5, 12)


def falcon(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """One head of keys and values, and a division in place."""
    scores = q @ k[:, :1].transpose(-1, -2)
    scores /= 2.0
    return F.softmax(scores + mask + bias, -1, dtype=torch.float32) @ v[:, :1]


def gpt_oss(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """A sink: a column of scores of its own, which takes weight and adds no value."""
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.5 + mask
    sink = bias[0, :, 0, 0].reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    scores = torch.cat([scores, sink], dim=-1)
    weights = F.softmax(scores - scores.max(dim=-1, keepdim=True).values, dim=-1, dtype=scores.dtype)
    return torch.matmul(weights[..., :-1], v).transpose(1, 2).contiguous()


def flint(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.5 + mask
    sink = bias[0, :, 0, 0].reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return F.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1] @ v


def xlnet(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """Products by einsum, tokens ahead of the batch, and a term that is left out as 0."""
    q, k, v = (t.permute(2, 0, 1, 3).contiguous() for t in (q, k, v))
    scores = (torch.einsum("ibnd,jbnd->bnij", q, k) + bias + 0) * 0.5 - 65500 * mask.sigmoid().round()
    return torch.einsum("bnij,jbnd->ibnd", F.softmax(scores, dim=3), v)


def args() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=g) for s in (*(((2, 3, 5, 4),) * 3), (1, 3, 5, 5), (2, 1, 5, 5))]


def gemma2(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """Scores that tanh caps."""
    scores = torch.tanh(torch.matmul(q, k.transpose(2, 3)) * 0.5 / 30.0) * 30.0 + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def conformer(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """Weights that are set to 0 where scores were masked, which a row that is masked as a whole sees."""
    hidden = ((mask > 0) | (torch.arange(5) == 0)[:, None]).eq(1)
    scores = (torch.matmul(q, k.permute(0, 1, 3, 2)) + bias).masked_fill(hidden, LOWEST)
    return torch.softmax(scores, dim=-1).masked_fill(hidden, 0.0) @ v


def longt5(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """Dots in an einsum stand for the leading dims."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    scores = torch.einsum("...qhd,...khd->...hqk", q, k) + bias
    return torch.einsum("...hqk,...khd->...qhd", F.softmax(scores, -1), v).sin()


def granite(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """The result times what a sink leaves of each row."""
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.5 + mask
    left = (torch.logsumexp(scores, dim=-1) - bias[0, :, 0, 0].view(1, -1, 1)).to(torch.float32).sigmoid()
    out = torch.matmul(F.dropout(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), 0.1, False), v)
    return (out * left.unsqueeze(-1).to(out.dtype)).transpose(1, 2).contiguous()


def coatnet(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """Channels before tokens."""
    q, k, v = (t.transpose(-1, -2).contiguous() for t in (q, k, v))
    weights = ((q * 0.5).transpose(-2, -1) @ k + bias).softmax(dim=-1)
    return (v @ weights.transpose(-2, -1)).reshape(2, -1, 5).relu()


def by_logarithm(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    return F.log_softmax(q @ k.mT + bias, -1).exp() @ v


def palm(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """Keys and values that all heads share, without a dim of heads."""
    scores = torch.einsum("bhid,bjd->bhij", q, k[:, 0]) + bias
    return torch.einsum("bhij,bjd->bhid", scores.softmax(-1), v[:, 0])


def grouped(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """Two groups of heads, each with keys and values of its own."""
    q, k, v = torch.stack((q, q + 1), 2), k[:, :3], v[:, :3]
    scores = torch.einsum("bghid,bgjd->bghij", q, k) * 0.5
    return torch.einsum("bghij,bgjd->bghid", scores.softmax(-1), v)


def shared_queries(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """Latents without a batch, as in a Perceiver."""
    scores = torch.einsum("hid,bhjd->bhij", q[0], k)
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


def unread(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """Copies and sums for a visualisation that nobody asked for."""
    scores = q @ k.mT * 0.5
    kept = scores.clone()
    weights = F.softmax(scores + bias, -1)
    entropy = -(weights * weights.log()).sum(-1)  # noqa: F841
    kept = kept.detach()
    return weights @ v


def viewed_in_place(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """Scores that have one more dim for a moment."""
    scores = (q @ k.mT * 0.5).unsqueeze_(1).squeeze_(1)
    return F.softmax(scores, -1) @ v


MODELS = (t5, gpt2, timm, falcon, gpt_oss, flint, xlnet, gemma2, conformer, longt5, granite, coatnet)
MODELS += (by_logarithm, palm, grouped, shared_queries, unread, viewed_in_place)


@pytest.mark.parametrize("model", sampled(MODELS, 10), ids=lambda f: f.__name__)
def test_it_is_found_and_computes_the_same(model: Callable[..., Tensor]) -> None:
    given, placed = args(), list[Any]()

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        placed.extend(AttentionRewrite(always=True).apply(gm.graph))
        gm.graph.lint()
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        got, expected = torch.compile(model, backend=backend)(*given), model(*given)
    assert [type(o) for o in placed] == [Match], placed
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert got.stride() == expected.stride()


def test_a_share_of_other_scores_is_no_sink() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        scores = q @ k.mT * 0.5
        left = (torch.logsumexp(scores * 2, dim=-1, keepdim=True) - sink).sigmoid()
        return (scores.softmax(-1) @ v) * left

    miss = near(attention[0], model, *(torch.randn(2, 3, 5, 4) for _ in "qkv"), torch.randn(3, 1, 1))
    assert miss.obstacle == "user"


def test_weights_that_are_turned_on_the_wrong_side_are_a_near_miss() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1).transpose(-1, -2) @ v

    miss = near(attention[0], model, *(torch.randn(2, 3, 5, 4) for _ in "qkv"))
    assert miss.obstacle == "operator"
    assert miss.fix


def test_capped_scores_are_computed_in_blocks_where_that_pays() -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(torch.tanh(q @ k.mT / 30.0) * 30.0, -1) @ v

    q, k, v = (torch.randn(1, 5, 1000, 4) for _ in "qkv")
    with torch.no_grad():
        captured = capture_graph(model, [q, k, v], "pre-grad", dynamic=False)
        graph, given = captured.graph, [(q, k, v)[int(role)] for role in captured.roles.values()]
        (match,) = attention[0].apply(graph)
        assert isinstance(match, Match), match
        assert sum("tanh" in name for name in match.made) == 5
        graph.lint()
        got = torch.fx.GraphModule({}, graph)(*given)
    torch.testing.assert_close(got[0], model(q, k, v), rtol=1e-5, atol=1e-6)


class Scaled(torch.nn.Module):
    """Numbers of a module, which torch treats as symbols when shapes are dynamic."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.eps = 0.25, 1e-5

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT) * self.scale).softmax(-1) @ v

    def norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


@pytest.mark.parametrize(
    ("rewrite", "call"), [(attention[0], "forward"), pytest.param(rms_norm, "norm", marks=pytest.mark.long)]
)
def test_numbers_of_a_module_are_found_under_dynamic_shapes(rewrite: Any, call: str) -> None:
    """The number becomes a guard: with another one, the graph is compiled again and right."""
    module, placed = Scaled(), list[Any]()
    given = args()[: 3 if call == "forward" else 1]

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        placed.extend(rewrite.apply(gm.graph))
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: getattr(module, call)(*a), backend=backend, dynamic=True)
    with torch.no_grad():
        for module.scale, module.eps in ((0.25, 1e-5), (2.0, 0.5)):
            torch.testing.assert_close(compiled(*given), getattr(module, call)(*given), rtol=1e-5, atol=1e-6)
    assert [type(o) for o in placed] == [Match, Match], placed


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT / 30).tanh() * 30).softmax(-1) @ v


def talking(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.relu((q @ k.mT).softmax(-1)) @ v


def filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return scores.masked_fill(scores > 1, -1e4).softmax(-1) @ v


def other_columns(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.cat((q @ k.mT, q[..., :1]), -1)
    return scores.softmax(-1)[..., :-2] @ v[..., 1:, :]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (capped, "tanh caps the scores"),
        (other_columns, "1 columns are joined to the scores at the end, and 2 of the weights dropped"),
        (talking, "stands between the softmax and the product with the values"),
        (filled, "the mask fills in -10000"),
        (lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.5, True) @ v, "dropout drops weights"),
    ],
)
def test_a_miss_says_what_is_in_the_way_and_what_to_do(model: Callable[..., Tensor], says: str) -> None:
    miss = near(attention[0], model, *args()[:3])
    assert says in miss.reason
    assert miss.fix
    assert miss.where.rpartition(":")[0] == __file__
    assert miss.fix in str(miss)


def test_a_router_is_no_attention() -> None:
    assert (
        outcomes(attention[0], lambda x, w: (x @ w).softmax(-1).topk(2).values, *args()[:2][:1], torch.randn(4, 8))
        == []
    )


def squares(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean((1, 2), keepdim=True) + 1e-5) * w


def test_a_norm_whose_root_is_cast_is_found() -> None:
    def cast(x: Tensor) -> Tensor:
        return (x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)).sin()

    (outcome,) = outcomes(rms_norm, cast, torch.randn(3, 8, dtype=torch.bfloat16))
    assert isinstance(outcome, Match), outcome


def test_a_norm_over_other_dims_is_a_near_miss() -> None:
    miss = near(rms_norm, squares, torch.randn(2, 3, 4), torch.randn(4))
    assert "not over the last dim alone" in miss.reason
