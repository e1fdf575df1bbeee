"""Patterns and models of these tests: small, compiled to the graph that a rewrite sees, and no further."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shiplap.rewrite import Match, NearMiss, Rewrite, rewrite
from shiplap.torch_private.inductor_passes import capture_graph


def samples() -> list[tuple[Tensor, ...]]:
    """One sample is a proof as well, and quicker than all that an annotation admits."""
    g = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(s, generator=g, dtype=torch.float64) for s in ((5, 3), (7, 3), (7,)))]


def pattern(x, w, b):
    return F.gelu(F.linear(x, w, b))


def replacement(x, w, b):
    return F.gelu(torch.addmm(b, x, w.t()))


def linear_gelu(by: Callable[..., Any] = replacement, **options: Any) -> Rewrite:
    return rewrite(pattern, by, **{"name": "linear_gelu", "samples": samples, **options})


def outcomes(made: Rewrite, fn: Callable[..., Any], *args: Tensor, train: bool = False) -> Sequence[Match | NearMiss]:
    """What ``made`` does to ``fn`` as torch compiles it, without generating code."""
    leaves = [a.detach().requires_grad_(train and a.is_floating_point()) for a in args]
    graph = capture_graph(fn, leaves, made.level, dynamic=False).graph
    applied = list(made.apply(graph))
    graph.lint()
    return applied


def near(made: Rewrite, fn: Callable[..., Any], *args: Tensor) -> NearMiss:
    """The only outcome, which is a near miss."""
    (outcome,) = outcomes(made, fn, *args)
    assert isinstance(outcome, NearMiss), outcome
    return outcome
