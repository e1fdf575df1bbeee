"""An op with an output that may be absent, on several ranks against one process."""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import shiplap as sl
from shiplap_testing.ranks import cell, device, main


@sl.op("cells::gated", outputs=("out", "gate"))
def gated(
    x: Float[Tensor, "m k"], weight: Float[Tensor, "k"], bias: Float[Tensor, "k"] | None = None
) -> tuple[Float[Tensor, "m k"], Float[Tensor, "m k"] | None]:
    y = x * weight
    return (y, None) if bias is None else (y + bias, torch.tanh(y))


@gated.backward(saves=("x", "weight"))
def _(grad, saved, needs):
    out, _gate = grad
    made = {"x": out * saved.weight} if needs.x else {}
    made |= {"weight": (out * saved.x).sum(0)} if needs.weight else {}
    return made | ({"bias": out.sum(0)} if needs.bias else {})


class Gated(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.bias = nn.Parameter(torch.randn(4)) if bias else None

    def forward(self, x: Tensor) -> dict[str, Tensor | None]:
        out, gate = gated(x, self.weight, self.bias)
        return {"out": out, "gate": gate}


def run(rank: int, world: int, *, wrap, bias: bool, around=None) -> str:
    net = Gated(bias).double().to(device())
    inputs = [torch.randn(3, 4, dtype=torch.float64).to(device()) for _ in range(world)]
    grads = [torch.autograd.grad(net(x)["out"].square().sum(), list(net.parameters())) for x in inputs]
    wrapped = wrap(net)
    out = around(wrapped, inputs[rank]) if around else wrapped(inputs[rank])
    assert (out["gate"] is None) == (not bias)
    out["out"].square().sum().backward()
    for p, *parts in zip(net.parameters(), *grads, strict=True):
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(grad, sum(parts) / world, rtol=1e-12, atol=1e-12)
    return "1e-12"


for bias in (False, True):
    ddp = DistributedDataParallel
    cell(f"DDP, {bias}")(partial(run, wrap=ddp, bias=bias))
    cell(f"DDP, static_graph, {bias}")(partial(run, wrap=partial(ddp, static_graph=True), bias=bias))
    cell(f"FSDP2, {bias}")(partial(run, wrap=fully_shard, bias=bias))
    cell(f"checkpoint, {bias}")(partial(run, wrap=ddp, bias=bias, around=partial(checkpoint, use_reentrant=False)))


@cell("DTensor")
def distributed(rank: int, world: int) -> str:
    """No rule is derived where the number of outputs is up to the call."""
    mesh = init_device_mesh(device().type, (world,))
    x, weight = torch.randn(4, 4).to(device()), torch.randn(4).to(device())
    gated(distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(weight, mesh, [Replicate()]))
    raise AssertionError("nothing was refused")


if __name__ == "__main__":
    main()
