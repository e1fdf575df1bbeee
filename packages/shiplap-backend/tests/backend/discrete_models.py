"""Models on a device with memory and streams of its own. `test_discrete.py` runs this file, as `discrete_cases.py`."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shiplap_backend.models import MODELS as MODELS_OF_THE_AUDIT
from shiplap_backend.models.compared import compare_model
from tests.backend.profiling import NATIVE, NO_KERNELS

sys.path.insert(0, os.environ["SHIPLAP_DISCRETE_PROJECT"])
importlib.import_module("torch_mine").autoload()
mine: Any = torch.mine  # type: ignore[attr-defined]


class Tied(nn.Module):
    """An embedding that is the output's weight as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 8), nn.Linear(8, 7, bias=False)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(self.embed(x)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell, self.out = kind(4, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.cell(x)[0])


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), lambda: torch.randn(5, 4)),
    "convolutions": (_convolutions, lambda: torch.randn(2, 3, 8, 8)),
    "conv3d": (
        lambda: nn.Sequential(nn.Conv3d(2, 3, 2), nn.GroupNorm(1, 3), nn.GELU()),
        lambda: torch.randn(2, 2, 4, 4, 4),
    ),
    "lstm": (lambda: Recurrent(nn.LSTM), lambda: torch.randn(3, 2, 4)),
    "gru": (lambda: Recurrent(nn.GRU), lambda: torch.randn(3, 2, 4)),
    "tied transformer": (Tied, lambda: torch.randint(7, (2, 5))),
}


@pytest.mark.parametrize("device", ["mine:0", "mine:1"])
@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_on_the_cpu(name: str, device: str) -> None:
    """The optimiser is made before `.to`: the parameters stay the same objects."""

    def train(where: str) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        model, x = MODELS[name][0](), MODELS[name][1]().to(where)
        count = len(list(model.parameters()))
        # AdamW would make a step of the rounding errors in the gradient of a key's bias, which is zero.
        optimiser = (torch.optim.SGD if "tied" in name else torch.optim.AdamW)(model.parameters(), lr=0.01)
        model.to(where)
        assert len(list(model.parameters())) == count
        losses = []
        for _ in range(3):
            loss = model(x).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        return losses, {k: v.cpu() for k, v in model.state_dict().items()}

    torch.testing.assert_close(train(device), train("cpu"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODELS_OF_THE_AUDIT)
def test_models_of_the_audit(name: str) -> None:
    package, make = MODELS_OF_THE_AUDIT[name]
    if package:
        pytest.importorskip(package)
    assert compare_model(make, "mine") == ""


def test_norms_are_the_cpus() -> None:
    """Torch's composite of a layer norm scales and shifts before it takes the mean off: 2e-3 where the CPU has 0."""
    x = 300 + 100 * torch.randn(3, 1, generator=torch.Generator().manual_seed(0))
    for size in (1, 5):
        rows = x.expand(3, size).contiguous()
        assert torch.equal(
            nn.functional.layer_norm(rows.to("mine"), (size,)).cpu(), nn.functional.layer_norm(rows, (size,))
        )
    image = torch.randn(2, 3, 3, 4).permute(0, 3, 1, 2)
    got, want = nn.functional.group_norm(image.to("mine"), 2), nn.functional.group_norm(image, 2)
    assert got.stride() == want.stride()
    assert torch.equal(got.cpu(), want)


def test_a_model_over_both_devices() -> None:
    """Half of it on each: autograd copies the gradients back."""

    def step(first: str, second: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        a, b, x = nn.Linear(4, 8).to(first), nn.Linear(8, 2).to(second), torch.randn(5, 4)
        b(a(x.to(first)).tanh().to(second)).square().sum().backward()
        return [p.grad.cpu() for p in (*a.parameters(), *b.parameters()) if p.grad is not None]

    torch.testing.assert_close(step("mine:0", "mine:1"), step("cpu", "cpu"))


def test_mixed_precision_and_checkpoints() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to("mine")
    optimiser, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("mine")
    x, before = torch.randn(5, 4, device="mine"), [p.detach().cpu().clone() for p in model.parameters()]
    with torch.autocast("mine", torch.float16):
        out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        assert out.dtype == torch.float16
        loss = out.float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimiser)
    scaler.update()
    assert not torch.equal(before[0], model[0].weight.cpu())


@pytest.mark.skipif(not NATIVE, reason=NO_KERNELS)
def test_the_profiler_tells_when_kernels_ran() -> None:
    """A kernel begins after the call that asked for it, on its own device and stream, one after the other."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.PrivateUse1]
    stream, x, other = torch.Stream("mine:0"), torch.eye(200).to("mine:0"), torch.ones(8, device="mine:1")
    mine.synchronize()
    with torch.profiler.profile(activities=kinds) as profiled:
        (x @ x @ x @ x).tanh()
        with mine.stream(stream):
            x.exp()
        with mine.device(1):
            other.exp()
    events = list(profiled.events())
    kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.PrivateUse1]
    first = [e for e in kernels if (e.device_index, e.device_resource_id) == (0, 0)]
    assert [e.name for e in first] == ["aten::mm.out"] * 3 + ["aten::tanh.out"]
    for before, after in itertools.pairwise(first):
        assert before.time_range.start < before.time_range.end <= after.time_range.start
    rest = {(e.device_index, e.device_resource_id) for e in kernels if e.name == "aten::exp.out"}
    assert rest == {(0, stream.stream_id), (1, 0)}
    callers = [k.name for e in events for k in e.kernels]
    assert callers.count("aten::mm.out") == 3
    assert callers.count("aten::exp.out") == 2
