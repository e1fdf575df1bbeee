"""Plain models, rewritten for a GPU, rendered by Inductor, interpreted: a JSON line a case. Run by test_triton.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from torch import Tensor
from torch.nn import functional as F

import shiplap as sl
from shiplap.rewrite import Rewrite
from shiplap_dense.rewrites import conv_norm_dense, int8_linear, linear_activation, norm_linear
from shiplap_testing import interpreted
from tests.dense.triton_cases import int8, last, shrink


def case(rewrites: list[Rewrite], fn: Callable[..., Tensor], *args: Tensor) -> None:
    with torch.no_grad(), sl.rewrites(*rewrites) as placed:
        _, error, kernels = interpreted.run(fn, *args)
    fired = sorted({m.rewrite for m in placed.matches})
    print(json.dumps({"fired": fired, "error": error, "kernels": kernels}), flush=True)


def normed(x: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
    return F.linear(gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), weight)


def main() -> None:
    torch.manual_seed(0)
    shrink()
    always: dict[str, Any] = {"always": True}
    x, weight, bias = torch.randn(2, 20, 50), torch.randn(36, 50) / 7, torch.randn(36)
    case([linear_activation(**always)[0]], lambda x, w, b: F.gelu(F.linear(x, w, b)), x, weight, bias)
    rms = next(r for r in norm_linear(**always) if r.name == "rms_norm_linear")
    case([rms], normed, x, torch.randn(50), weight)
    scale = torch.rand(36, 1) / 900
    case([int8_linear()[0]], lambda x, w, s, b: F.linear(x, w.to(torch.float32) * s, b), x, int8(36, 50), scale, bias)
    statistics = torch.randn(36), torch.rand(36) + 0.5
    case(
        [conv_norm_dense.forced()],
        lambda x, w, *s: F.batch_norm(F.conv2d(x, w), *s).relu(),
        last(2, 20, 4, 5),
        torch.randn(36, 20, 1, 1),
        *statistics,
    )


if __name__ == "__main__":
    main()
