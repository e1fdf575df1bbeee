"""No attention is silent: whatever lies between its products, a near miss names the call and what would help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shiplap.rewrite import NearMiss
from shiplap.rewrite.passthrough_ops import torch_call_name
from shiplap.rewrite.shipped import attention
from shiplap.rewrite.shipped.missed import is_softmax_by_hand, is_unnormalized_softmax
from shiplap.rewrite.shipped.softmax_region import SoftmaxRegion, find_region
from shiplap_testing.effort import sampled

WEIGHT = nn.Parameter(torch.ones(4, 1))


def drawn() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 5, 4, generator=g) for _ in "qkv"]


def looked(model: Callable[..., Tensor]) -> tuple[list[Any], list[SoftmaxRegion]]:
    """What the rewrite says of ``model``, parameters and all, and the places where its graph weighs activations."""
    placed, regions = list[Any](), list[SoftmaxRegion]()

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        tops = (
            n
            for n in gm.graph.nodes
            if torch_call_name(n) == "softmax" or is_softmax_by_hand(n) or is_unnormalized_softmax(n)
        )
        regions.extend(r for n in tops if (r := find_region(n)))
        placed.extend(attention[0].apply(gm.graph))
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend)(*drawn())
    return placed, regions


def windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores written into parts of a tensor of another shape, as sliding windows are."""
    scores = q.new_zeros(2, 3, 5, 7)
    scores[..., 1:6] = torch.einsum("bhqd,bhkd->bhqk", q, k)
    weights = F.pad(scores.softmax(-1), (0, 1)).view(2, 3, 8, 5)[..., :5, :]
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def two_kinds_of_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.cat((q @ k.mT, q @ v.mT), -1).softmax(-1)
    return weights[..., :5] @ v + weights[..., 5:] @ k


def one_choice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    soft = (k @ q.mT).softmax(-2)
    hard = torch.zeros_like(soft).scatter_(-2, soft.max(-2, keepdim=True)[1], 1.0)
    return (hard - soft.detach() + soft) @ v


def additive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ WEIGHT).softmax(-2) * v).sum(-2).sin() * k[:, :, 0]


def of_a_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    kernel = F.linear(k, WEIGHT.t()).view(2, 3, 5, 1).softmax(2)
    return v.mT @ kernel * q.mean()


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    grown = torch.exp(q @ k.mT)
    return (grown / grown.sum(-1, keepdim=True)) @ v


def product_of_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q.unsqueeze(3) * k.unsqueeze(2)).sum(-1).softmax(-1) @ v


def by_rank(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).cumsum(-1).softmax(-1) @ v


def powers(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1).pow(2) @ v


HEADS = nn.Parameter(torch.ones(3, 3))


def talking(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads that are mixed behind the softmax."""
    weights = (q @ k.mT).softmax(-1)
    return F.linear(weights.permute(0, 2, 3, 1), HEADS).permute(0, 3, 1, 2) @ v


def talking_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhij,hg->bgij", torch.einsum("bhid,bhjd->bhij", q, k), HEADS)
    return torch.einsum("bhij,hg->bgij", scores.softmax(-1), HEADS) @ v


def normalized_between_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return F.layer_norm(weights.permute(0, 2, 3, 1), (3,)).permute(0, 3, 1, 2) @ v


def normalized_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    grown = torch.exp(q @ k.mT)
    return grown @ v / grown.sum(-1, keepdim=True)


def by_logsumexp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return torch.exp(scores - scores.logsumexp(-1, keepdim=True)) @ v


@pytest.mark.parametrize(
    ("model", "says", "attends"),
    sampled(
        [
            pytest.param(*case)
            for case in [
                (talking, "(linear) lies between the softmax and the product with the values", True),
                (talking_before, "(einsum) lies between the product of queries and keys and the softmax", True),
                (
                    normalized_between_heads,
                    "(layer_norm) lies between the softmax and the product with the values",
                    True,
                ),
                (normalized_last, "the softmax is written out as an exponential that is normalized elsewhere", True),
                (by_logsumexp, "the softmax is written out as an exponential that is normalized elsewhere", True),
                (windows, "(.new_zeros) lies between the product of queries and keys and the softmax", True),
                (two_kinds_of_keys, "the weights go into 2 products", True),
                (one_choice, "the softmax is not over the last dim of the scores, [2, 3, 5, 5]", True),
                (additive, "a product of an activation and a weight of the model", False),
                (of_a_kernel, "a product of an activation and a weight of the model", False),
                (by_hand, "the softmax is written out as exp(x) / sum(exp(x))", True),
                (product_of_sums, "in another way than queries @ keys.mT does", True),
                (by_rank, "(.cumsum) lies between the product of queries and keys and the softmax", True),
                (powers, "(.pow) stands between the softmax and the product with the values", True),
            ]
        ],
        7,
    ),
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_what_weighs_activations_is_never_silent(model: Callable[..., Tensor], says: str, attends: bool) -> None:
    (miss,), (region,) = looked(model)
    assert isinstance(miss, NearMiss), miss
    assert says in miss.reason
    assert miss.fix
    assert miss.where.rpartition(":")[0] == __file__
    assert region.attends is attends


class Cached(nn.Module):
    """Attention whose keys and values are buffers that each call fills, with tokens before heads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, 3, 8, 4))
        self.register_buffer("values", torch.zeros(2, 3, 8, 4))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.keys[:, :, :5], self.values[:, :, :5] = k, v
        weights = torch.einsum("bshd,bthd->bsht", q.mT.contiguous().mT, self.keys[:, :, :5]).softmax(-1)
        return torch.einsum("bsht,bthd->bshd", weights, self.values[:, :, :5])


def test_a_cache_that_the_graph_fills_holds_activations() -> None:
    placed, regions = looked(Cached())
    assert [type(p) for p in placed] == [NearMiss]
    assert len(regions) == 1


def router(x: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights, experts = F.linear(x, WEIGHT.t().expand(6, 4)).softmax(-1).topk(2)
    return (k[..., :2] * weights).sum(-1) + v[..., 0] * experts[..., 0]


def entropy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return -(weights * weights.log()).sum(-1) + v.sum()


def probabilities(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) + v.mean()


def weights_of_channels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    gated = (q @ k.mT).mean((2, 3)).softmax(-1)[..., None, None] * v
    return F.layer_norm(gated, (4,)) @ q.mT


@pytest.mark.parametrize("model", [router, entropy, probabilities, weights_of_channels])
def test_what_weighs_no_activations_is_no_attention(model: Callable[..., Tensor]) -> None:
    assert looked(model) == ([], [])


def test_the_line_of_a_near_miss_is_the_models_own() -> None:
    """``F.pad`` calls torch's own Python, whose line says nothing about the model."""

    def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.pad(q @ k.mT, (1, 1)).softmax(-1)[..., 1:6] @ v

    (miss,), _ = looked(padded)
    assert "(pad)" in miss.reason
    assert miss.where.rpartition(":")[0] == __file__
