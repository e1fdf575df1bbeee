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
    """Return the tensors of ``value``, which is a tensor or nested lists and tuples of tensors, in order."""
    return [value] if isinstance(value, Tensor) else [t for part in value for t in flat(part)]


def check(fn: Callable[..., Any], *args: Any, tolerance: float = 2e-6, dynamic: bool = False) -> Callable[..., Any]:
    """Compile ``fn`` as one graph, assert that its results on ``args`` agree with those of eager mode, and return the
    compiled function.

    The assertion and the relative ``tolerance`` are those of :func:`same`. ``dynamic`` is passed to ``torch.compile``.
    """
    compiled = torch.compile(fn, fullgraph=True, dynamic=dynamic)
    same(compiled, fn, args, tolerance)
    return compiled


def same(compiled: Callable[..., Any], fn: Callable[..., Any], args: tuple[Any, ...], tolerance: float) -> None:
    """Assert that ``compiled`` and ``fn`` return tensors of equal shapes, strides and dtypes for ``args``, with close
    values.

    The norm of the difference of two tensors may be at most ``tolerance`` times the norm of the tensor that ``fn``
    returns.
    """
    for got, want in zip(flat(compiled(*args)), flat(fn(*args)), strict=True):
        assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
        assert float((got.double() - want.double()).norm()) <= tolerance * float(want.double().norm())


def counted() -> tuple[int, int]:
    """Return the number of C++ templates that Inductor has compiled and the number of neighbouring operations that it
    has fused into them, as a pair. Both count from the last time that the counters were cleared.
    """
    counts = counters()["inductor"]
    return counts["cpp_templated_kernel_counter"], counts["cpp_epilogue_fusion_counter"]
