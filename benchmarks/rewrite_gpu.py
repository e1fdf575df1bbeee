"""``benchmarks/rewrite.py`` on CUDA: groups, with and without CUDA graphs, and the rewrites that put our kernels there.

The latter are compiled with ``max-autotune-no-cudagraphs``, off as well as on: the peer is Inductor's own choice of
kernels. Beside torch and Triton it needs jaxtyping, wadler-lindig, msgspec and platformdirs; no transformers.
``--tiny --device cpu --rounds 2`` is a rehearsal: every case runs on a CPU, our kernels forced and in small.

    python benchmarks/rewrite_gpu.py [--json benchmarks/results/rewrite_gpu.json] [--rounds 60] [--only NAME]

Run again with the same ``--json``, it goes on where it was stopped. ``--together`` compiles all cases at once, each in
a process of its own, and times each as soon as it is compiled, while the others stand still; what compilers time, they
time one at a time. Those that are compiled with max-autotune come first.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # before the compiler is imported: see rewrite.py
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from _together import Alone, Turns, together
from rewrite import SOURCES, Block, Case, arguments, block, keep, kept, measured, run, towers
from torch import Tensor, nn
from torch.nn import functional as F

from shiplap.inductor.fusion_choice import fusion_choices
from shiplap.rewrite import Rewrite
from shiplap.rewrite.shipped.attention import AttentionRewrite as FusedAttention
from shiplap_dense.rewrites import conv_norm_dense, int8_linear, linear_activation, norm_linear

OURS = (
    "benchmarks/rewrite_gpu.py",
    "benchmarks/_together.py",
    *SOURCES,
    "packages/shiplap-dense/src/shiplap_dense/rewrites.py",
    "packages/shiplap/src/shiplap/rewrite/shipped/attention.py",
    "packages/shiplap/src/shiplap/rewrite/shipped/conv_norm.py",
)
TUNED = "max-autotune-no-cudagraphs"
BF16 = torch.bfloat16


class Mlp(nn.Sequential):
    """A linear layer and GELU, as in ViT and BERT."""

    def __init__(self, k: int) -> None:
        super().__init__(nn.Linear(k, 4 * k), nn.GELU())


class Normed(nn.Module):
    """RMS norm as transformers writes it, and the one linear layer that reads it."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.gain, self.linear = nn.Parameter(torch.ones(k)), nn.Linear(k, 3 * k, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.linear(self.gain * scaled.to(x.dtype))


class Quantised(nn.Module):
    """A linear layer whose weights are int8 and unpacked where they are used."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 128, (4 * k, k), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(4 * k, 1) / (127 * k**0.5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


class Bottleneck(nn.Sequential):
    """1x1, 3x3 and 1x1 with their norms: a block of ResNet-50 without its shortcut."""

    def __init__(self, k: int) -> None:
        sizes = ((4 * k, k, 1), (k, k, 3), (k, 4 * k, 1))
        layers = [(nn.Conv2d(i, o, n, padding=n // 2, bias=False), nn.BatchNorm2d(o), nn.ReLU()) for i, o, n in sizes]
        super().__init__(*(m for layer in layers for m in layer))


class Attention(nn.Module):
    """Written out, as transformers does: the softmax in float32, a mask that is added, the heads joined."""

    mask: Tensor | None

    def __init__(self, heads: int, masked: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.heads = heads
        future = torch.ones(masked, dtype=torch.bool).triu(1) if masked else None
        self.register_buffer("mask", None if future is None else torch.zeros(masked).masked_fill(future, -1e9))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in x.chunk(3, -1))
        scores = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5
        weights = F.softmax(scores if self.mask is None else scores + self.mask, dim=-1, dtype=torch.float32)
        return torch.matmul(weights.to(q.dtype), v).transpose(1, 2).flatten(2)


class FusedCall(Attention):
    """The same by torch's fused call, as models have it by default."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in x.chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask).transpose(1, 2).flatten(2)


def attended(always: bool) -> list[Rewrite]:
    """As it ships, or wherever it is found."""
    return [FusedAttention(always=always)]


def heads(size: int, count: int, batch: int, tokens: int, dtype: torch.dtype, *how: str) -> Case:
    """Untuned: the products of the written-out form are the library's either way, and tuning them takes a minute."""
    name, mask = ", ".join([f"{count} heads of {size}, {batch}x{tokens} tokens", *how]), (batch, 1, tokens, tokens)
    masked = mask if "mask" in how else ()
    return Case(
        name,
        lambda: Attention(count, masked),
        (batch, tokens, 3 * count * size),
        only(attended, "attention"),
        dtype=dtype,
        fused=lambda: FusedCall(count, masked),
    )


def groups() -> list[Case]:
    graphs: dict[str, Any] = {"mode": "reduce-overhead"}
    small = [towers(16, 4, 64), towers(64, 4, 32), towers(4, 4, 256), towers(2, 4, 32)]
    small += [towers(16, 256, 64), towers(16, 1024, 64), towers(4, 1024, 256), towers(4, 4096, 256)]
    blocks = [block(1, 1024), block(16, 4096), block(2048, 4096), block(1, 1024, frozen=True)]
    blocks.append(block(16, 4096, frozen=True))
    captured = [towers(16, 4, 64, **graphs), block(1, 1024, **graphs), block(16, 4096, frozen=True, **graphs)]
    return [*small, towers(16, 4, 64, train=True), *blocks, *captured]


def only(of: Callable[..., Sequence[Rewrite]], *names: str) -> Callable[[bool], Sequence[Rewrite]]:
    """Those of ``of(always=...)`` that a case is about; kept, since each object is proven once."""
    return cache(lambda always: tuple(r for r in of(always=always) if r.name in names))


def kernels(small: bool) -> list[Case]:
    """Those that put our kernels there. ``small``: sizes for a rehearsal, and a dtype that every CPU has."""
    k, many, pixels, channels = (8, 4, 4, 4) if small else (4096, 2048, 56, 64)
    how: dict[str, Any] = {"mode": TUNED, "dtype": torch.float32 if small else BF16}
    gelu = only(linear_activation, "linear_gelu")
    normed = only(norm_linear, "no_ops", "rms_norm_linear" if small else "rms_norm_linear_bfloat16")
    int8 = only(int8_linear, "int8_linear_float32" if small else "int8_linear_bfloat16")
    conv = only(lambda always: [conv_norm_dense.forced() if always else conv_norm_dense], "conv_norm_dense")
    cases = []
    for rows in (many,) if small else (16, many):
        cases += [
            Case(f"gelu, {rows} rows", lambda: Mlp(k), (rows, k), gelu, **how),
            Case(f"RMS norm, {rows} rows", lambda: Normed(k), (1, rows, k), normed, **how),
            Case(f"int8, {rows} rows", lambda: Quantised(k), (rows, k), int8, **how),
        ]
    images = 4 if small else 32, 4 * channels, pixels, pixels
    last: dict[str, Any] = {"layout": torch.channels_last, "frozen": True}
    return [
        *cases,
        Case("bottleneck", lambda: Bottleneck(channels), images, conv, **last, **how),
        *attentions(small),
    ]


def attentions(small: bool) -> list[Case]:
    """A decoder's, a ViT's, and heads for which no fused kernel was written."""
    if small:
        return [heads(8, 2, 2, 4, torch.float32), heads(8, 2, 2, 4, torch.float32, "mask")]
    large, many = (128, 32, 2, 2048, BF16), (64, 12, 32, 197)
    return [
        heads(*large),
        heads(*large, "mask"),
        heads(*many, BF16),
        heads(*many, BF16, "mask"),
        heads(*many, torch.float32, "float32"),
        heads(1024, 4, 2, 2048, BF16),
    ]


def rehearsed(case: Case) -> Case:
    """``case`` on a CPU: small, without CUDA graphs or tuning."""
    if case.name.startswith("block"):
        case = dataclasses.replace(case, model=lambda: Block(64), x=(2, 64))
    return dataclasses.replace(case, mode=None)


def take_turn(args: argparse.Namespace, turns: Turns, name: str) -> None:
    """Compile one case, wait for its turn, time it and tell."""
    # What Inductor and Shiplap time while others compile, they time alone.
    alone = Alone(turns.device)
    alone.searches()
    alone.selections()
    case = next(c for c in listed(args) if c.name == name)
    os.nice(0 if case.mode == TUNED else 10)  # those that compile longest come first
    torch._inductor.config.compile_threads = 3 if case.mode == TUNED else 1
    prepare(args)
    turns.tell(measured(case, args.device, args.rounds, turns.turn) | {"choices": chosen()})


def chosen() -> list[str]:
    """What was chosen for our ops in this process, and why."""
    return [f"{c.op}: {c.chosen}: {c.reason}" for c in fusion_choices()]


def listed(args: argparse.Namespace) -> list[Case]:
    wanted = [*kernels(args.tiny), *groups()]
    return [rehearsed(c) for c in wanted] if args.tiny else wanted


def prepare(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high" if args.device == "cuda" else "highest")


def run_together(args: argparse.Namespace) -> None:
    """Compile cases at once and time whoever is ready, in ``args.together`` seconds."""
    cases = kept(args.json, OURS)
    left = [c.name for c in listed(args) if re.search(args.only, c.name) and all(f["case"] != c.name for f in cases)]
    for told in together(left, partial(take_turn, args), args.together, args.device):
        cases.append(told)
        print(json.dumps(told), flush=True)
        keep(args.json, OURS, args.device, args.rounds, cases)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small sizes: whether every case runs, not how fast")
    parser.add_argument("--together", type=float, metavar="SECONDS", help="compile all at once, in so many seconds")
    args = parser.parse_args()
    if args.together:
        run_together(args)
    else:
        prepare(args)
        run(listed(args), OURS, args.device, args.rounds, args.json, args.only)


if __name__ == "__main__":
    main()
