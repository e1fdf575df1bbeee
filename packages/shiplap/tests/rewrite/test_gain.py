"""Where attention is left to Inductor on a GPU. Nothing runs there: fake tensors say where they would be."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph

from shiplap.rewrite.shipped.scores import Step

gain = import_module("shiplap.rewrite.shipped.gain")
HEADS, TOKENS = 12, 512


def declined(*sizes: int, device: str = "cuda", kind: str = "add") -> str:
    """The reason for 16-bit heads of 64 with a bias, or a mask, of ``sizes``."""
    graph = Graph()
    bias = graph.placeholder("bias")
    with FakeTensorMode():
        held = [torch.empty(8, HEADS, TOKENS, 64, dtype=torch.bfloat16, device=device) for _ in range(3)]
        bias.meta["example_value"] = torch.empty(sizes, dtype=torch.bfloat16, device=device)
    return gain._declined(held, SimpleNamespace(sinks=False, steps=[Step("scale", None, 0.5), Step(kind, bias)]))


@pytest.mark.parametrize("kind", ["add", "fill", "keep"])
def test_a_bias_of_each_head_is_declined_on_a_gpu(kind):
    """T5 of 512 tokens ran 0.70 times as fast, and Swin 0.82 times (H100, torch 2.11)."""
    why = declined(1, HEADS, TOKENS, TOKENS, kind=kind)
    assert why.startswith("the bias bias of 1x12x512x512 differs from head to head")
    assert declined(HEADS, TOKENS, TOKENS, kind=kind) == why.replace("1x12x", "12x")


@pytest.mark.parametrize("sizes", [(8, 1, TOKENS, TOKENS), (1, 1, TOKENS, TOKENS), (TOKENS, TOKENS), (8, 1, 1, TOKENS)])
def test_a_mask_that_all_heads_share_is_not(sizes):
    assert declined(*sizes) == ""


def test_a_cpu_takes_either():
    assert declined(1, HEADS, TOKENS, TOKENS, device="cpu") == ""
