"""RMS norms however they are spelled: matched, or a near miss that names the line and what differs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from shiplap.rewrite import Match
from shiplap.rewrite.shipped import rms_norm
from shiplap.torch_private.inductor_passes import capture_graph
from shiplap_testing.effort import sampled
from tests.rewrite.specimens import near, outcomes

Norm = Callable[[Tensor, Tensor], Tensor]


def image_gpt(x: Tensor, w: Tensor) -> Tensor:
    return x / torch.sqrt(torch.mean(torch.square(x), axis=-1, keepdim=True) + 1e-5) * w


def ltx(x: Tensor, w: Tensor) -> Tensor:
    rms = torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True) + 1e-8)
    return (x / rms).sin() * w


SPELLINGS: dict[str, Norm] = {
    "divided by sqrt": image_gpt,
    "divided, no weight": ltx,
    "one over sqrt": lambda x, w: w * (x * (1.0 / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))),
    "reciprocal": lambda x, w: w * (x * (x.square().mean(-1, True) + 1e-6).sqrt().reciprocal()),
    "power of -0.5": lambda x, w: x * ((x * x).mean(-1, keepdim=True) + 1e-6) ** -0.5 * w,
    "divided by a power": lambda x, w: x / ((x * x).mean(-1, keepdim=True) + 1e-6).pow(0.5) * w,
    "sum by size": lambda x, w: w * x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / x.shape[-1] + 1e-6),
    "sum times one over size": lambda x, w: w * (x * torch.rsqrt((x**2).sum(-1, keepdim=True) * (1 / 8) + 1e-6)),
    "unsqueezed": lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1) + 1e-6).unsqueeze(-1) * w,
    "mean unsqueezed": lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1).unsqueeze(-1) + 1e-6) * w,
    "indexed by None": lambda x, w: x * torch.rsqrt(x.pow(2).mean(dim=-1)[..., None] + 1e-6) * w,
    "weight first": lambda x, w: w * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "no eps": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))),
    "casts apart": lambda x, w: w * (x * torch.rsqrt((x.float() * x.float()).mean(-1, True) + 1e-6)).type_as(x),
    "by vecdot": lambda x, w: x * torch.rsqrt(torch.linalg.vecdot(x, x)[..., None] / 8 + 1e-6) * w,
    "by einsum": lambda x, w: x * torch.rsqrt(torch.einsum("bld,bld->bl", x, x)[..., None] / 8 + 1e-6) * w,
    "by einsum, then unsqueezed": lambda x, w: (
        x * (torch.einsum("bld, bld -> bl", x, x) / 8 + 1e-6).rsqrt().unsqueeze(-1) * w
    ),
    "eps first": lambda x, w: torch.multiply(w, torch.mul(torch.rsqrt(1e-6 + torch.mean(x.pow(2.0), -1, True)), x)),
}
"""Each is what a published model or a page on RMS norms writes."""


@pytest.mark.parametrize("spelled", sampled(SPELLINGS.values(), 9), ids=SPELLINGS.keys())
def test_a_spelling_is_matched_and_computes_the_same(spelled: Norm) -> None:
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 3, 8, generator=g), torch.randn(8, generator=g)
    captured = capture_graph(spelled, [x, w], "pre-grad", dynamic=False)
    applied = list(rms_norm.apply(captured.graph))
    assert [type(o) for o in applied] == [Match], applied
    assert not {"rsqrt", "sqrt", "mean"} & {str(getattr(n.target, "__name__", n.target)) for n in captured.graph.nodes}
    captured.graph.owning_module.recompile()
    given = [(x, w)[role] for role in captured.roles.values() if isinstance(role, int)]
    (made,) = captured.graph.owning_module(*given)
    torch.testing.assert_close(made, spelled(x, w), rtol=1e-5, atol=1e-6)


def outside(x: Tensor, w: Tensor) -> Tensor:
    return w * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6)


def by_norm(x: Tensor, w: Tensor) -> Tensor:
    return x / (x.norm(2, dim=-1, keepdim=True) * 8**-0.5 + 1e-6) * w


def bounded(x: Tensor, w: Tensor) -> Tensor:
    return x / (torch.norm(x, dim=-1, keepdim=True) * 8**-0.5).clamp(min=1e-6) * w


def wan(x: Tensor, w: Tensor) -> Tensor:
    return F.normalize(x, dim=-1) * 8**0.5 * w


def of_channels(x: Tensor, w: Tensor) -> Tensor:
    return (x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-8)) * w


def in_place(x: Tensor, w: Tensor) -> Tensor:
    y = x.sin()
    return y.mul_(torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)) * w


def written_in_place(x: Tensor, w: Tensor) -> Tensor:
    return x * x.pow(2).mean(-1, keepdim=True).add_(1e-6).rsqrt_() * w


MISSES: dict[Norm, str] = {
    written_in_place: "writes to the mean of squares",
    outside: "adds eps to the root",
    by_norm: "adds eps to the root",
    bounded: "bounds the root from below",
    wan: "bounds the norm from below",
    of_channels: "is not over the last dim",
    in_place: "does not multiply the values",
}


@pytest.mark.parametrize("spelled", MISSES, ids=lambda f: f.__name__)
def test_what_is_no_norm_of_torch_names_its_line(spelled: Norm) -> None:
    miss = near(rms_norm, spelled, torch.randn(2, 3, 8), torch.randn(8))
    assert MISSES[spelled] in miss.reason
    assert miss.fix
    assert miss.where.startswith(f"{__file__}:")


def l2_norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) * w


def of_another(x: Tensor, w: Tensor) -> Tensor:
    return x / (w.square().mean().sqrt() + x.abs().mean(-1, keepdim=True))


def error_of(x: Tensor, w: Tensor) -> Tensor:
    return ((x - w) ** 2).mean().sqrt()


@pytest.mark.parametrize("spelled", [l2_norm, of_another, error_of, lambda x, w: F.normalize(x, dim=-1) * w])
def test_what_is_no_root_mean_square_is_left_in_silence(spelled: Norm) -> None:
    assert outcomes(rms_norm, spelled, torch.randn(2, 3, 8), torch.randn(8)) == []
