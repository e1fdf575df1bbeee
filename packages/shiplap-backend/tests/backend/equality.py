"""What the tests of a built device share: results compared with those of the CPU, and counts of native calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def check(device: str, fn: Callable[..., Any], *args: Any) -> None:
    """``fn`` on the device equals ``fn`` on the CPU: values, dtype, sizes and strides."""
    want = fn(*args)
    got = fn(*(a.to(device) if isinstance(a, Tensor) else a for a in args))
    for g, w in zip(_list(got), _list(want), strict=True):
        assert (g.device.type, g.dtype, g.shape, g.stride()) == (device, w.dtype, w.shape, w.stride())
        torch.testing.assert_close(g.cpu(), w, equal_nan=True)


def _list(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def native(dev: Any, op: str) -> int:
    return int(dev.counters().get(f"aten::{op}", {"native": 0})["native"])
