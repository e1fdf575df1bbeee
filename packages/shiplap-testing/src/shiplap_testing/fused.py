"""Compiled functions beside eager ones: what tests of templates compare, and what they count.

Their graphs have to be compiled anew: ``pytest.mark.usefixtures("fresh_graphs")``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shiplap_testing.private import counters


def flat(value: Any) -> list[Tensor]:
    """The tensors of a result, which may be nested."""
    return [value] if isinstance(value, Tensor) else [t for part in value for t in flat(part)]


def check(fn: Callable[..., Any], *args: Any, tolerance: float = 2e-6, dynamic: bool = False) -> Callable[..., Any]:
    """Compile ``fn`` and compare it with eager; the compiled function."""
    compiled = torch.compile(fn, fullgraph=True, dynamic=dynamic)
    same(compiled, fn, args, tolerance)
    return compiled


def same(compiled: Callable[..., Any], fn: Callable[..., Any], args: tuple[Any, ...], tolerance: float) -> None:
    """Both return tensors of the same shapes, strides and dtypes, and of nearly the same values."""
    for got, want in zip(flat(compiled(*args)), flat(fn(*args)), strict=True):
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
        assert float((got.double() - want.double()).norm()) <= tolerance * float(want.double().norm())


def counted() -> tuple[int, int]:
    """C++ templates that were compiled, and neighbours that went into them."""
    counts = counters()["inductor"]
    return counts["cpp_templated_kernel_counter"], counts["cpp_epilogue_fusion_counter"]
