"""Ops that a user declared, on several ranks against one process (``shiplap_testing.ranks``)."""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import shiplap as sl
from shiplap_testing.ranks import cell, device, main


@sl.op("cells::linear")
def linear(
    x: Float[Tensor, "m k"], weight: Float[Tensor, "n k"], bias: Float[Tensor, "n"] | None = None
) -> Float[Tensor, "m n"]:
    out = x @ weight.T
    return out if bias is None else out + bias


@linear.backward(saves=("x", "weight"))
def _(grad, saved, needs):
    made = {"x": grad @ saved.weight} if needs.x else {}
    made |= {"weight": grad.T @ saved.x} if needs.weight else {}
    return made | ({"bias": grad.sum(0)} if needs.bias else {})


@sl.op("cells::running")
def running(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x.cumsum(0)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return linear(linear(x, self.inner.weight, self.inner.bias).relu(), self.outer.weight, self.outer.bias)


def expected(net: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    grads = [torch.autograd.grad(net(x).square().mean(), list(net.parameters())) for x in inputs]
    return [sum(g) / len(inputs) for g in zip(*grads, strict=True)]


def run(rank: int, world: int, *, wrap, around=None) -> str:
    net = Layer().double().to(device())
    inputs = [torch.randn(5, 6, dtype=torch.float64).to(device()) for _ in range(world)]
    wanted = expected(net, inputs)
    wrapped = wrap(net)
    out = around(wrapped, inputs[rank].requires_grad_()) if around else wrapped(inputs[rank])
    out.square().mean().backward()
    for p, w in zip(net.parameters(), wanted, strict=True):
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(grad, w, rtol=1e-12, atol=1e-12)
    return "1e-12"


def stages(net: nn.Module) -> nn.Module:
    fully_shard(net.inner, reshard_after_forward=False)
    return fully_shard(net)


def compiled(net: nn.Module) -> nn.Module:
    return torch.compile(DistributedDataParallel(net), backend="aot_eager")


plain, reentrant = partial(checkpoint, use_reentrant=False), partial(checkpoint, use_reentrant=True)
cell("DDP")(partial(run, wrap=DistributedDataParallel))
cell("DDP, find_unused_parameters")(partial(run, wrap=partial(DistributedDataParallel, find_unused_parameters=True)))
cell("DDP, static_graph")(partial(run, wrap=partial(DistributedDataParallel, static_graph=True)))
cell("DDP, gradient_as_bucket_view")(partial(run, wrap=partial(DistributedDataParallel, gradient_as_bucket_view=True)))
cell("DDP, compiled")(partial(run, wrap=compiled))
cell("FSDP2, root")(partial(run, wrap=fully_shard))
cell("checkpoint, non-reentrant")(partial(run, wrap=DistributedDataParallel, around=plain))
cell("checkpoint, reentrant")(partial(run, wrap=DistributedDataParallel, around=reentrant))


@cell("DTensor, derived rules")
def placements(rank: int, world: int) -> str:
    """Rows, the summed dim and output features cut, and a partial sum that comes in; forward and backward."""
    mesh = init_device_mesh(device().type, (world,))
    whole = [torch.randn(*shape, dtype=torch.float64).to(device()) for shape in ((7, 6), (5, 6), (5,))]
    out = linear(*[t.requires_grad_() for t in whole])
    wanted = torch.autograd.grad(out.square().sum(), whole)
    given = [(Shard(0), Replicate(), Replicate()), (Shard(1), Shard(1), Replicate()), (Replicate(), Shard(0), Shard(0))]
    made = [Shard(0), Partial("sum"), Shard(1)]
    for places, place in zip(given, made, strict=True):
        mine = [distribute_tensor(t.detach(), mesh, [p]).requires_grad_() for t, p in zip(whole, places, strict=True)]
        got = linear(*mine)
        assert got.placements == (place,), got.placements
        torch.testing.assert_close(got.full_tensor(), out)
        for g, w in zip(torch.autograd.grad(got.square().sum(), mine), wanted, strict=True):
            torch.testing.assert_close(g.full_tensor(), w)
    return "1e-7"


@cell("DTensor, no rule")
def refused(rank: int, world: int) -> str:
    mesh = init_device_mesh(device().type, (world,))
    whole = torch.randn(8).to(device())
    assert torch.equal(running(distribute_tensor(whole, mesh, [Replicate()])).full_tensor(), whole.cumsum(0))
    running(distribute_tensor(whole, mesh, [Shard(0)]))
    raise AssertionError("nothing was refused")


@cell("DTensor among tensors")
def mixed(rank: int, world: int) -> str:
    mesh = init_device_mesh(device().type, (world,))
    linear(distribute_tensor(torch.randn(8, 4).to(device()), mesh, [Shard(0)]), torch.randn(3, 4).to(device()))
    raise AssertionError("nothing was refused")


@cell("pipeline")
def pipeline(rank: int, world: int) -> str:
    """A layer a stage, two micro-batches."""
    torch.manual_seed(3)
    layers = [nn.Linear(6, 6).double().to(device()) for _ in range(world)]

    class Stage(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return linear(x, self.layer.weight, self.layer.bias).relu()

    x = torch.randn(8, 6, dtype=torch.float64).to(device())
    alone = nn.Sequential(*map(Stage, layers))
    wanted = torch.autograd.grad(alone(x).square().mean(), list(layers[rank].parameters()))
    stage = PipelineStage(Stage(layers[rank]), rank, world, device())
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: out.square().mean())
    schedule.step(*((x,) if rank == 0 else ()), target=x)
    for p, w in zip(layers[rank].parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, w, rtol=1e-12, atol=1e-12)
    return "1e-12"


if __name__ == "__main__":
    main()
