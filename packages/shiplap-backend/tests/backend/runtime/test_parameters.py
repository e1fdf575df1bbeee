"""``.to`` moves the memory of a Parameter and keeps the object: weights stay tied, optimisers keep what they train."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn


class Tied(nn.Module):
    """A language model's ends: the embedding and the head are one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x)) * self.scale


@pytest.mark.parametrize("how", ["to", "method", "dtype too", "there and back"])
def test_a_parameter_stays_the_object_it_is(dev: Any, device: str, how: str) -> None:
    model = Tied()
    weight, values = model.embedding.weight, model.embedding.weight.detach().clone()
    match how:
        case "to":
            model.to(device)
        case "method":
            getattr(model, device)()
        case "dtype too":
            model.to(device, torch.bfloat16)
        case "there and back":
            model.to(device).to("cpu").to(device)
    assert model.embedding.weight is weight
    assert model.head.weight is weight
    assert weight.device.type == device == model.scale.device.type
    assert [name for name, _ in model.named_parameters()] == ["embedding.weight"]
    torch.testing.assert_close(weight.detach().cpu(), values.to(weight.dtype))


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, 0.1), lambda p: torch.optim.AdamW(p, 0.1)])
def test_an_optimiser_made_before_trains(dev: Any, device: str, make: Any) -> None:
    torch.manual_seed(0)
    model = Tied()
    before, trained = model.embedding.weight.detach().clone(), []
    for where, twin in (("cpu", copy.deepcopy(model)), (device, model)):
        optimiser = make(twin.parameters())
        twin.to(where)
        for _ in range(3):
            optimiser.zero_grad()
            twin(torch.tensor([1, 2, 3], device=where)).square().sum().backward()
            optimiser.step()
        trained.append(twin.embedding.weight.detach().cpu())
    assert not torch.equal(trained[1], before)
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-4, atol=1e-5)


def test_gradients_move_along(dev: Any, device: str) -> None:
    model = Tied()
    model(torch.tensor([1])).sum().backward()
    grad = model.embedding.weight.grad
    assert grad is not None
    values = grad.clone()
    model.to(device)
    moved = model.embedding.weight.grad
    assert moved is not None
    assert moved.device.type == device
    assert torch.equal(moved.cpu(), values)


def test_a_state_dict_goes_both_ways(dev: Any, device: str) -> None:
    here, there = Tied(), Tied().to(device)
    weight = there.embedding.weight
    there.load_state_dict(here.state_dict())
    assert there.head.weight is weight
    assert torch.equal(weight.detach().cpu(), here.embedding.weight.detach())
    back = Tied()
    back.load_state_dict(there.state_dict())
    assert torch.equal(back.head.weight.detach(), here.head.weight.detach())


def test_other_layouts_are_refused_as_before(dev: Any, device: str) -> None:
    x = torch.zeros(3, device=device)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        x.data = torch.eye(3).to_sparse()
