"""An op whose template gathers rows by an index, multiplies, and stores to permuted rows: what sparse kernels do."""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Float, Int32
from torch import Tensor

import shiplap as sl

CONFIGS = [
    {"BLOCK_M": 32, "BLOCK_N": 16, "BLOCK_K": 16, "SPLITS": 1, "num_warps": 4, "num_stages": 2},
    {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "SPLITS": 1, "num_warps": 4, "num_stages": 2},
    {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 64, "SPLITS": 3, "num_warps": 4, "num_stages": 2},
]


@sl.op("directtest::gathered", requires=("g == groups",))
def gathered(
    feats: Float[Tensor, "n g*ci"],
    weight: Float[Tensor, "g k ci co"],
    table: Int32[Tensor, "m k"],
    order: Int32[Tensor, "m"] | None = None,
    bias: Float[Tensor, "g*co"] | None = None,
    reflect: bool = False,
    groups: int = 1,
    scale: float = 1.0,
    after: Literal["nothing", "relu"] = "nothing",
) -> Float[Tensor, "m g*co"]:
    """``scale * (sum over k of feats[table[:, k]] @ weight[:, k] + bias)`` by groups; ``order`` changes no value."""
    taps = weight.flip(1) if reflect else weight
    feats = torch.cat((feats, feats.new_zeros(1, feats.shape[1])))  # what row -1 reads
    rows = feats[table.long()].unflatten(-1, (groups, -1))
    out = torch.einsum("mkgi,gkio->mgo", rows, taps).flatten(1)
    out = scale * (out if bias is None else out + bias)
    return out.relu() if after == "relu" else out


@gathered.samples
def _(rng: torch.Generator, sizes: dict[str, Any], dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    n, m, k, g, ci, co = (sizes[name] for name in ("n", "m", "k", "g", "ci", "co"))
    table = torch.randint(-1, max(n, 1), (m, k), generator=rng, dtype=torch.int32) if n else torch.full((m, k), -1)
    tensors = (
        torch.randn(n, g * ci, generator=rng).to(dtype),
        torch.randn(g, k, ci, co, generator=rng).to(dtype),
        table.to(torch.int32),
        torch.randperm(m, generator=rng).to(torch.int32),
        torch.randn(g * co, generator=rng).to(dtype),
    )
    return (*(t.to(device) for t in tensors), sizes["reflect"], g, sizes["scale"], sizes["after"])


def fits(sizes: dict[str, Any], dtypes: dict[str, torch.dtype], config: dict[str, Any]) -> bool | str:
    """Channels of a group are one tile."""
    if dtypes["feats"] == torch.float64:
        return "sums are float32"
    if config["SPLITS"] > 1 and sizes["after"] != "nothing":
        return "what comes after the addition of the partial sums"
    wide = sizes["ci"] > config["BLOCK_K"] or sizes["co"] > config["BLOCK_N"]
    return f"BLOCK_K={config['BLOCK_K']}, BLOCK_N={config['BLOCK_N']} do not hold a group" if wide else True


def fits_here(sizes: dict[str, Any], dtypes: dict[str, torch.dtype], config: dict[str, Any]) -> bool | str:
    """As ``fits``, for the interpreter, which multiplies the bits of bfloat16."""
    return "bfloat16" if dtypes["feats"] == torch.bfloat16 else fits(sizes, dtypes, config)


def attach(device: str) -> None:
    gathered.template(
        device,
        "gathered.triton.jinja",
        configs=CONFIGS,
        supports=fits_here if device == "cpu" else fits,
        split_k=lambda sizes, config: config["SPLITS"],
        grid=lambda sizes, config, cdiv: (
            cdiv(sizes["m"], config["BLOCK_M"]) * sizes["groups"] * config["SPLITS"],
            1,
            1,
        ),
    )
