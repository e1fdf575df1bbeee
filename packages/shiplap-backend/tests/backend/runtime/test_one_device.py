"""Which tensors of the CPU may stand among the device's: by torch's rule for CUDA, native or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

MIXED = {
    "add": lambda x, c: x + c,
    "mm": lambda x, c: x @ c,
    "a factor without dims": lambda x, c: torch.mm(x, x, out=torch.empty(3, 3)),
    "cdist": lambda x, c: torch.cdist(x[None], c[None]),
    "searchsorted": lambda x, c: torch.searchsorted(x, c),
    "bincount": lambda x, c: torch.bincount(x.long()[0], c[0]),
    "solve": lambda x, c: torch.linalg.solve(x, c),
    "where": lambda x, c: torch.where(x > 0, x, c),
    "gather": lambda x, c: torch.gather(x, 0, c.long()),
    "index_select": lambda x, c: torch.index_select(x, 0, torch.tensor([0])),
    "out": lambda x, c: torch.erfinv(x, out=c),
    "embedding": lambda x, c: torch.nn.functional.embedding(torch.tensor([0]), x),
    "softmax's gradient": lambda x, c: torch.ops.aten._softmax_backward_data(x, c, 0, torch.float32),
}


@pytest.mark.parametrize("name", MIXED)
def test_two_devices_are_refused(dev: Any, device: str, name: str) -> None:
    x, c = torch.eye(3, device=device), torch.ones(3, 3)
    with pytest.raises(RuntimeError, match=r"[Ee]xpected all tensors to be on the same device"):
        MIXED[name](x, c)


ACCEPTED = {
    "a number": lambda x, c: x + torch.tensor(2.0),
    "a number for the fallback": lambda x, c: torch.atan2(x, torch.tensor(2.0)),
    "index": lambda x, c: x[torch.tensor([0, 2])],
    "two indices": lambda x, c: x[torch.tensor([0, 2]), torch.tensor([1, 1])],
    "mask": lambda x, c: x[torch.tensor([True, False, True])],
    "index_put_": lambda x, c: x.clone().index_put_((torch.tensor([0]),), torch.tensor(5.0, device=x.device)),
    "fill": lambda x, c: x.clone().fill_(torch.tensor(3.0)),
    "masked_fill": lambda x, c: x.masked_fill(x > 0, torch.tensor(3.0)),
    "copy": lambda x, c: x.clone().copy_(c),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_numbers_and_indices_of_the_cpu(dev: Any, device: str, name: str) -> None:
    x, c = torch.arange(9.0).reshape(3, 3), torch.full((3, 3), 4.0)
    got, want = ACCEPTED[name](x.to(device), c), ACCEPTED[name](x, c)
    assert got.device.type == device
    assert torch.equal(got.cpu(), want)


def test_the_gradient_of_an_index_of_the_cpu(dev: Any, device: str) -> None:
    x = torch.arange(6.0, device=device, requires_grad=True)
    x[torch.tensor([0, 2, 2])].sum().backward()
    assert x.grad is not None
    assert x.grad.cpu().tolist() == [1, 0, 2, 0, 0, 0]
