"""The convolution as a template for the CPU: its neighbours go into its own store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shiplap_sparse3d import ops

__all__: list[str] = []

Sizes = Mapping[str, Any]
TILE = 16384  # sums of a tile: with the weights of a tap they stay in the second cache


def _configs(sizes: Sizes) -> tuple[dict[str, int], ...]:
    """As wide as the channels, so that hits are looked up once; tall, so that weights are read seldom."""
    wide = min(256, -(-max(sizes["co"], 1) // 32) * 32)
    return ({"BM": max(16, min(256, TILE // wide)), "BN": wide},)


def _taken(sizes: Sizes, dtypes: Mapping[str, torch.dtype], config: Mapping[str, Any]) -> bool | str:
    if "order" in dtypes:
        return "a sorted table: those are for GPUs"
    if sizes["groups"] != 1:
        return f"{sizes['groups']} groups of channels"
    if odd := sorted({str(d) for d in dtypes.values()} - {"torch.float32", "torch.bfloat16", "torch.int32"}):
        return f"{odd[0]} is neither float32 nor bfloat16"
    if empty := [name for name in ("n", "m", "k", "ci", "co") if sizes[name] == 0]:
        return f"{empty[0]} = 0"
    return True


# Level with the C kernel and a kernel of what follows, which need no compiler: docs/design/0009-sparse3d-cpu.md.
ops.conv.template(
    "cpu", "conv.cpp.jinja", configs=_configs, innermost={"feats": "ci", "table": "k"}, supports=_taken, default=False
)
