"""NaN and infinities: samples of PyTorch's database hold few of them, and the vendor's operations differ there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.backend.equality import check, native

pytest.importorskip("openvino")

inf, nan = float("inf"), float("nan")
ROWS = torch.tensor(
    [[-inf, -inf, -inf], [inf, inf, inf], [inf, -inf, 0.0], [-inf, 1.0, 2.0], [nan, 1.0, 2.0], [1.0, nan, inf]]
)
VALUES = torch.tensor([nan, inf, -inf, 0.0, -0.0, 1e-6, -1e-6, 0.5, -100.0, 100.0, 3e38])

# The overload that must have run on the device, a call, its argument.
CASES: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "exp.out": (torch.exp, VALUES),
    "clamp.out": (lambda x: (x.clamp(-1, 1), x.clamp(nan, 1), x.clamp(-1, nan)), VALUES),
    "gt.Tensor_out": (lambda x: (x > x.flip(0), x > x), VALUES),
    "ge.Tensor_out": (lambda x: (x >= x.flip(0), x >= x), VALUES),
    "_softmax.out": (lambda x: (x.softmax(0), x.softmax(1)), ROWS),
    "topk.values": (lambda x: x.topk(2, 1)[0], ROWS),
}


@pytest.mark.parametrize("overload", CASES)
def test_nan_and_infinities(dev: Any, device: str, overload: str) -> None:
    fn, x = CASES[overload]
    check(device, fn, x)
    assert native(dev, overload) >= 1


def test_a_pool_hands_nan_on(dev: Any, device: str) -> None:
    pool = torch.nn.functional.max_pool2d
    x = ROWS[None, None].repeat(1, 2, 1, 1)
    check(device, lambda x: pool(x, 2, 1, return_indices=True), x)
    assert dev.counters()["aten::max_pool2d_with_indices.out"]["fallback"] == {"value: NaN": 1}
    check(device, lambda x: pool(x, 2, 1, return_indices=True), x.nan_to_num(0, 2, -2))
    assert native(dev, "max_pool2d_with_indices.out") == 1
