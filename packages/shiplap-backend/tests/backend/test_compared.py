"""The judge of whole models: it is silent on the CPU itself, and names each thing that a device may get wrong."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shiplap_backend import audit, sweep
from shiplap_backend.models import MODELS, Case
from shiplap_backend.models import compared as judge
from shiplap_backend.models.compared import compared

CALLS = {"forward": 0}


class Model(nn.Module):
    """Tied weights. What is made by ``first`` runs in place of ``later`` where the device's run is: it comes first."""

    def __init__(self, first: Callable[[Tensor], Tensor], replaces: bool = False) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(2))
        self.first, self.replaces = first, replaces

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if self.replaces and CALLS["forward"] == 0:
            self.out.weight = nn.Parameter(self.out.weight.detach().clone())
        return super().to(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        CALLS["forward"] += 1
        y = self.out(self.embed(x))
        return self.first(y) if CALLS["forward"] <= 2 else y  # inference and training of the device


def _strange(y: Tensor) -> Tensor:
    return y.transpose(0, 1).contiguous().transpose(0, 1)


class _Unseen(torch.autograd.Function):
    """A value that is right, whose gradient is lost by a hundredth."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 1.01


WRONG: dict[str, tuple[Callable[[Tensor], Tensor], bool, str]] = {
    "nothing": (lambda y: y, False, ""),
    "a value": (lambda y: y * (1 + 1e-4), False, "result 0 is 1.0e-04 from float64"),
    "a NaN": (lambda y: torch.where(y == y.max(), torch.nan, y), False, "NaN in other places"),
    "strides": (_strange, False, "a result is .* for .*"),
    "a dtype": (lambda y: y.double(), False, "a result is .*float64"),
    "a gradient": (_Unseen.apply, False, "gradient of embed.weight is 1.0e-02 from float64"),
    "a gradient that is not made": (lambda y: y.detach() * 1, False, "does not require grad"),
    "a parameter": (lambda y: y, True, "a parameter is another object"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    first, replaces, message = WRONG[name]
    CALLS["forward"] = 0

    def make() -> Case:
        return Case(Model(first, replaces), (torch.tensor([[1, 2, 3], [4, 5, 6]]),))

    try:
        got = compared(make, "cpu")
    except RuntimeError as e:  # of torch itself
        got = str(e)
    assert re.search(message, got) if message else got == ""


def test_a_gradient_of_nothing_is_measured_by_the_others() -> None:
    """The bias before an instance norm has no gradient but rounding."""

    def make() -> Case:
        return Case(nn.Sequential(nn.Conv2d(2, 3, 3), nn.InstanceNorm2d(3), nn.ReLU()), (torch.randn(2, 2, 6, 6),))

    assert compared(make, "cpu") == ""
    assert judge.SMALL * judge.NEAR < 1e-5


@pytest.mark.parametrize("name", ["perceptron", "lstm-gru", "packed-lstm", "tied-transformer", "experts", "fourier"])
def test_the_cpu_is_as_the_cpu(name: str) -> None:
    package, make = MODELS[name]
    assert package == ""
    assert compared(make, "cpu") == ""


def test_there_are_thirty_and_each_says_what_it_needs() -> None:
    assert len(MODELS) >= 30
    assert audit.models() == sorted(MODELS)
    assert {package for package, _ in MODELS.values()} >= {"", "transformers", "timm", "torchvision", "diffusers"}


def test_a_model_whose_package_is_missing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(sweep, "load", lambda _: "cpu")
    monkeypatch.setattr(torch.cpu, "reset_counters", lambda: None, raising=False)
    monkeypatch.setattr(torch.cpu, "counters", dict, raising=False)
    monkeypatch.setitem(MODELS, "other", ("no_such_package_of_models", MODELS["perceptron"][1]))
    rows = [row for row in sweep.of_models(tmp_path, ["other", "perceptron"]) if "op" in row]
    left, ran = (audit._verdict(row) for row in rows)
    assert (left.state, left.why) == ("left", "needs the package 'no_such_package_of_models'")
    assert (ran.state, ran.samples, ran.why) == ("core", 1, "")


@pytest.mark.parametrize(("seeds", "message"), [(1, ""), (judge.SEEDS, "from float64")])
def test_a_little_too_far_off_is_asked_again_with_other_weights(seeds: int, message: str) -> None:
    """MobileNetV3's gradients were 4.4e-5 off, the CPU's 1.4e-5; with four other seeds both were as near."""
    calls = itertools.count()

    class Near(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            n = next(calls)  # two of the device come before two of the CPU and two in float64
            return super().forward(x) * (1 + 1.2e-5 * (n % 6 < 2 and n < 6 * seeds))

    got = compared(lambda: Case(Near(4, 3), (torch.randn(5, 4),)), "cpu")
    assert message in got if message else got == ""
