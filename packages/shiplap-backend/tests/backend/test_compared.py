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
from shiplap_backend.models import MODELS, ModelCase
from shiplap_backend.models.compared import compare_model

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

    def make() -> ModelCase:
        return ModelCase(Model(first, replaces), (torch.tensor([[1, 2, 3], [4, 5, 6]]),))

    try:
        got = compare_model(make, "cpu")
    except RuntimeError as e:  # of torch itself
        got = str(e)
    assert re.search(message, got) if message else got == ""


class First(nn.Module):
    """``first`` in the device's runs, which are two and come before those of the CPU, and ``later`` in these."""

    def __init__(self, parameters: dict[str, Tensor], first: Any, later: Any) -> None:
        super().__init__()
        self.weights = nn.ParameterDict(parameters)
        self.first, self.later, self.calls = first, later, itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return (self.first if next(self.calls) < 2 else self.later)(self.weights, x)

    def __deepcopy__(self, memo: dict[int, Any]) -> First:
        made = First({name: p.detach().clone() for name, p in self.weights.items()}, self.first, self.later)
        made.calls = self.calls
        return made


def judged(parameters: dict[str, Tensor], first: Any, later: Any, *size: int) -> str:
    return compare_model(lambda: ModelCase(First(parameters, first, later), (torch.randn(*size),)), "cpu")


def test_a_gradient_of_nothing_is_the_rounding_that_the_cpu_has_too() -> None:
    """The bias before an instance norm has no gradient but rounding: another order of a sum gives another one."""

    def norm(w: Any, x: Tensor) -> Tensor:
        return nn.functional.instance_norm(nn.functional.conv2d(x, w["weight"], w["bias"])).relu()

    def other(w: Any, x: Tensor) -> Tensor:
        made = nn.functional.conv2d(x.flip(3), w["weight"].flip(3), w["bias"])
        return nn.functional.instance_norm(made).flip(3).relu()

    parameters = {"weight": torch.randn(3, 2, 3, 3), "bias": torch.randn(3)}
    assert judged(parameters, other, norm, 2, 2, 6, 6) == ""


def test_a_small_gradient_is_judged_by_its_own_size() -> None:
    """It is a hundred-thousandth of the other one, and a tenth of it is lost."""
    parameters = {"large": torch.randn(4), "small": torch.randn(4)}

    def model(w: Any, x: Tensor) -> Tensor:
        return x * w["large"] + 1e-5 * x.square() * w["small"]

    def lossy(w: Any, x: Tensor) -> Tensor:
        small = w["small"]
        return x * w["large"] + 1e-5 * x.square() * (0.9 * small + 0.1 * small.detach())

    assert judged(parameters, model, model, 5, 4) == ""
    assert re.match("gradient of weights.small is 1.0e-01 from float64", judged(parameters, lossy, model, 5, 4))


@pytest.mark.parametrize(("error", "message"), [(1e-4, ""), (1e-2, "from float64")])
def test_the_error_that_moved_weights_make_is_rounding(error: float, message: str) -> None:
    """The CPU's difference of nearly equal weights is exact by chance; a unit in their last place moves it by 1e-4."""
    parameters = {"w": torch.tensor([1.0, -0.999])}

    def model(w: Any, x: Tensor) -> Tensor:
        return x * w["w"].sum()

    def rounded(w: Any, x: Tensor) -> Tensor:
        return model(w, x) * (1 + error)

    got = judged(parameters, rounded, model, 5)
    assert message in got if message else got == ""


def test_further_runs_of_the_cpu_excuse_no_error_of_a_model_that_amplifies_none() -> None:
    layer = {"w": torch.randn(3, 4)}

    def model(w: Any, x: Tensor) -> Tensor:
        return x @ w["w"].T

    assert re.match(r"result 0 is 1\.\de-05 from", judged(layer, lambda w, x: model(w, x) * (1 + 1.2e-5), model, 5, 4))


@pytest.mark.parametrize("name", ["perceptron", "lstm-gru", "packed-lstm", "tied-transformer", "experts", "fourier"])
def test_the_cpu_is_as_the_cpu(name: str) -> None:
    package, make = MODELS[name]
    assert package == ""
    assert compare_model(make, "cpu") == ""


def test_there_are_thirty_and_each_says_what_it_needs() -> None:
    assert len(MODELS) >= 30
    assert audit.model_names() == sorted(MODELS)
    assert {package for package, _ in MODELS.values()} >= {"", "transformers", "timm", "torchvision", "diffusers"}


def test_a_model_whose_package_is_missing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(sweep, "load_device", lambda _: "cpu")
    monkeypatch.setattr(torch.cpu, "reset_counters", lambda: None, raising=False)
    monkeypatch.setattr(torch.cpu, "counters", dict, raising=False)
    monkeypatch.setitem(MODELS, "other", ("no_such_package_of_models", MODELS["perceptron"][1]))
    rows = [row for row in sweep.model_results(tmp_path, ["other", "perceptron"]) if "op" in row]
    left, ran = (audit._parse_verdict(row) for row in rows)
    assert (left.state, left.why) == ("left", "needs the package 'no_such_package_of_models'")
    assert (ran.state, ran.samples, ran.why) == ("core", 1, "")
