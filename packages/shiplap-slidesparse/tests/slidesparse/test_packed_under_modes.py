"""A weight that is packed under a mode of torch serves calls after that mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

import shiplap.torch_private as compat
import shiplap_slidesparse as slidesparse

MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "inference": torch.inference_mode,
    "fake": lambda: compat.fake_mode(symbolic=True),
    "device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["int8", "bf16"])
def test_a_layer_made_under_a_mode_trains_its_input_after_it(mode: str, kind: str) -> None:
    torch.manual_seed(0)
    dense = torch.nn.Linear(32, 32)
    with MODES[mode]():
        made = slidesparse.Linear.of(dense, "6:8", kind)
    plain = slidesparse.Linear.of(dense, "6:8", kind)
    x = torch.randn(5, 32)
    given, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()
    got, expected = made(given), plain(wanted)
    assert type(got) is torch.Tensor
    assert torch.equal(got, expected)
    got.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(given.grad, wanted.grad, rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_a_weight_is_packed_again_under_a_mode_and_after_it(mode: str) -> None:
    torch.manual_seed(0)
    layer = slidesparse.Linear.of(torch.nn.Linear(32, 32), "6:8", "int8")
    before = copy.deepcopy(layer)
    layer.packed = None
    with MODES[mode]():
        layer.pack()
    layer.pack()  # writes into the tensor that is there
    x = torch.randn(3, 32)
    assert torch.equal(layer(x), before(x))
