"""Arguments of eager calls of the dense ops on a GPU, and how far results may be from the reference."""

from __future__ import annotations

from typing import Any

import torch

import shiplap as sl

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def reference(op: sl.Op, args: Any) -> torch.Tensor:
    call = op.bind(args)
    wide = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in call.args]
    return op.run_reference(tuple(wide))


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30)) if want.numel() else 0.0


EAGER = {
    "int8_mm": lambda d: (
        randn(70, 90, dtype=d),
        torch.randint(-127, 128, (50, 90), device="cuda", dtype=torch.int8),
        torch.rand(50, device="cuda").to(d) / 100,
        randn(50, dtype=d),
    ),
    "grouped_mm": lambda d: (
        randn(70, 90, dtype=d),
        randn(5, 90, 50, dtype=d),
        torch.tensor([10, 10, 40, 45, 60], dtype=torch.int32, device="cuda"),
    ),
    "mm": lambda d: (randn(70, 90, dtype=d), randn(90, 50, dtype=d), randn(50, dtype=d)),
    "mm even": lambda d: (randn(128, 64, dtype=d), randn(64, 256, dtype=d)),
    "bmm": lambda d: (randn(3, 40, 50, dtype=d), randn(3, 50, 33, dtype=d)),
    "conv2d": lambda d: (
        randn(2, 13, 11, 16, dtype=d),
        randn(24, 3, 3, 16, dtype=d),
        randn(24, dtype=d),
        [2, 2],
        [1, 1],
        [1, 1],
    ),
}
