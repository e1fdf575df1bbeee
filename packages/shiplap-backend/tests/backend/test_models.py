"""Unmodified models on the device: forward and one training step equal the CPU's, and say what fell back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from shiplap_testing.effort import sampled

from .conftest import FULL
from .models import MODELS

# What inference of these models may leave to the CPU: OpenVINO has no int64, so positions and masks are made there.
EXPECTED = {"dtype: Long", "dtype: Bool", "value: a value beyond int32"}
INDEXING = "aten::index.Tensor_out"  # of a mask, by int64 positions


def step(model: torch.nn.Module, inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> list[torch.Tensor]:
    """Loss, gradients and parameters of one step of SGD, on the CPU, in float64."""
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    loss = model(**inputs, labels=labels).loss
    loss.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimiser.step()
    return [t.detach().cpu().double() for t in (loss, *grads, *model.parameters())]


def distance(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Of the whole, since single elements near zero say little."""
    return float((got - exact).norm() / exact.norm().clamp_min(1e-6))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(MODELS, long=("resnet50", "bert-base")))
def test_a_model_is_the_cpus(dev: Any, device: str, name: str) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, inputs, labels = MODELS[name](True)
    on, there = copy.deepcopy(model).to(device), {k: v.to(device) for k, v in inputs.items()}
    with torch.no_grad():
        dev.reset_counters()
        got = on.eval()(**there).logits.cpu()
        counts = dev.counters()
        torch.testing.assert_close(got, model.eval()(**inputs).logits, rtol=1e-4, atol=1e-4)
    if FULL:  # the subset of the quick build leaves most of the model to the CPU
        assert {r for op, c in counts.items() if op != INDEXING for r in c["fallback"]} <= EXPECTED
    doubled = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    exact = step(copy.deepcopy(model).double(), doubled, labels)
    # Fifty batch norms in a row amplify rounding: the CPU's own distance from float64 is the measure (ResNet-50: 8e-3).
    for a, b, e in zip(step(on, there, labels.to(device)), step(model, inputs, labels), exact, strict=True):
        assert distance(a, e) <= max(1e-3, 2 * distance(b, e))
