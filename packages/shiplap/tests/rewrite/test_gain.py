"""Where attention is left to Inductor on a GPU. Nothing runs there: fake tensors say where they would be."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph

from shiplap.rewrite.shipped.scores import ScoreStep

gain = import_module("shiplap.rewrite.shipped.speedup_model")
HEADS, TOKENS = 12, 512


def declined(*sizes: int, device: str = "cuda", kind: str = "add", learned: bool = False) -> str:
    """The reason for 16-bit heads of 64 with a bias, or a mask, of ``sizes``."""
    graph = Graph()
    bias = graph.placeholder("bias")
    with FakeTensorMode():
        held = [torch.empty(8, HEADS, TOKENS, 64, dtype=torch.bfloat16, device=device) for _ in range(3)]
        bias.meta["example_value"] = torch.empty(sizes, dtype=torch.bfloat16, device=device, requires_grad=learned)
    return gain._why_no_fused_kernel(
        held, SimpleNamespace(sinks=False, steps=[ScoreStep("scale", None, 0.5), ScoreStep(kind, bias)])
    )


@pytest.mark.parametrize("sizes", [(1, HEADS, TOKENS, TOKENS), (HEADS, TOKENS, TOKENS), (1, HEADS, 256, TOKENS)])
def test_a_bias_of_each_head_pays_where_all_batches_share_it(sizes):
    """4.3 times as fast as what Inductor writes for T5 of 512 tokens (H100, torch 2.11)."""
    assert declined(*sizes) == ""


@pytest.mark.parametrize(
    ("sizes", "kind", "why"),
    [
        ((1, HEADS, TOKENS, TOKENS), "fill", "that is added and that all batches share"),
        ((1, HEADS, TOKENS, TOKENS), "keep", "that is added and that all batches share"),
        ((8, HEADS, TOKENS, TOKENS), "add", "that is added and that all batches share"),
        ((1, HEADS, 49, 49), "add", "of at least 256 tokens, a multiple of 8, and heads of up to 128"),
        ((1, HEADS, TOKENS, 260), "add", "of at least 256 tokens, a multiple of 8, and heads of up to 128"),
    ],
)
def test_another_bias_of_each_head_is_declined_on_a_gpu(sizes, kind, why):
    """Swin of windows of 49 ran 0.82 times as fast."""
    shown = "x".join(map(str, sizes))
    begin = f"the bias bias of {shown} differs from head to head: torch's fused kernels pay for one "
    assert declined(*sizes, kind=kind) == begin + why


def test_a_bias_that_is_learned_is_declined_while_it_is_trained():
    assert declined(1, HEADS, TOKENS, TOKENS, learned=True).endswith("pay for one without a gradient")
    with torch.no_grad():
        assert declined(1, HEADS, TOKENS, TOKENS, learned=True) == ""


@pytest.mark.parametrize("sizes", [(8, 1, TOKENS, TOKENS), (1, 1, TOKENS, TOKENS), (TOKENS, TOKENS), (8, 1, 1, TOKENS)])
def test_a_mask_that_all_heads_share_is_not(sizes):
    assert declined(*sizes) == ""


def test_a_cpu_takes_either():
    assert declined(1, HEADS, TOKENS, TOKENS, device="cpu") == ""
