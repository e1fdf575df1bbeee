"""Ops that a user declared, on several ranks against one process (``shiplap_testing.ranks``)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

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


class Affine(nn.Linear):
    """A stage of its own, whose product is the op."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Layer(nn.Module):
    def __init__(self, around: Callable[..., Tensor] | None = None, unused: bool = False) -> None:
        super().__init__()
        self.inner, self.outer, self.around = Affine(6, 8), Affine(8, 6), around
        self.unused = nn.Linear(6, 6) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.around(self.inner, x) if self.around else self.inner(x)
        return self.outer(hidden.relu())


def expected(net: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    params = [p for name, p in net.named_parameters() if "unused" not in name]
    grads = [torch.autograd.grad(net(x).square().mean(), params) for x in inputs]
    return [sum(g) / len(inputs) for g in zip(*grads, strict=True)]


def run(rank: int, world: int, *, wrap, around=None, unused: bool = False, tolerance: float = 1e-12) -> str:
    """The gradients, twice: in the second step, what torch has learnt of the graph in the first is in force."""
    dtype = torch.float64 if tolerance < 1e-6 else torch.float32
    net = Layer(None, unused).to(device(), dtype)
    inputs = [torch.randn(5, 6, dtype=dtype).to(device()).requires_grad_(around is not None) for _ in range(world)]
    wanted = expected(net, inputs)
    net.around = around
    wrapped = wrap(net)
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(inputs[rank]).to(dtype).square().mean().backward()
        params = [p for name, p in net.named_parameters() if "unused" not in name]
        for p, w in zip(params, wanted, strict=True):
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            torch.testing.assert_close(grad, w, rtol=tolerance, atol=tolerance)
    return f"{tolerance:.0e}".replace("e-0", "e-")


def fsdp(net: Layer, *, stages: bool = False, **options) -> nn.Module:
    for stage in (net.inner, net.outer) if stages else ():
        fully_shard(stage, **options)
    return fully_shard(net, **options)


def compiled(net: nn.Module, wrap) -> nn.Module:
    return torch.compile(wrap(net), backend="aot_eager")


def _save_ours(ctx, op, *args, **kwargs):
    ours = getattr(op, "namespace", "") == "cells"
    return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE


plain, reentrant = partial(checkpoint, use_reentrant=False), partial(checkpoint, use_reentrant=True)
selective = partial(plain, context_fn=partial(create_selective_checkpoint_contexts, _save_ours))
stages, narrow = partial(fsdp, stages=True), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
ddp = DistributedDataParallel
cell("DDP")(partial(run, wrap=ddp))
cell("DDP, find_unused_parameters")(partial(run, wrap=partial(ddp, find_unused_parameters=True), unused=True))
cell("DDP, static_graph")(partial(run, wrap=partial(ddp, static_graph=True)))
cell("DDP, gradient_as_bucket_view")(partial(run, wrap=partial(ddp, gradient_as_bucket_view=True)))
cell("DDP, compiled")(partial(run, wrap=partial(compiled, wrap=ddp)))
cell("FSDP2, root")(partial(run, wrap=fsdp))
cell("FSDP2, each stage")(partial(run, wrap=stages))
cell("FSDP2, bfloat16 policy")(partial(run, wrap=partial(stages, mp_policy=narrow), tolerance=3e-2))
cell("FSDP2, compiled", long=True)(partial(run, wrap=partial(compiled, wrap=stages)))
cell("checkpoint, non-reentrant")(partial(run, wrap=ddp, around=plain))
cell("checkpoint, selective")(partial(run, wrap=ddp, around=selective))
cell("checkpoint, reentrant")(partial(run, wrap=ddp, around=reentrant))
cell("checkpoint in FSDP2")(partial(run, wrap=stages, around=plain))


@cell("tensor parallel")
def cut_weights(rank: int, world: int) -> str:
    """Rows of the first weight on each rank and columns of the second, as Megatron cuts them: one step of training."""
    mesh = init_device_mesh(device().type, (world,))
    net = Layer().double().to(device())
    x = torch.randn(5, 6, dtype=torch.float64).to(device())
    wanted = expected(net, [x])
    for layer, weight, bias in ((net.inner, Shard(0), Shard(0)), (net.outer, Shard(1), Replicate())):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [weight]))
        layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), mesh, [bias]))
    out = net(distribute_tensor(x, mesh, [Replicate()]))
    out.square().mean().backward()
    for p, w in zip(net.parameters(), wanted, strict=True):
        assert p.grad.placements == p.placements
        torch.testing.assert_close(p.grad.full_tensor(), w, rtol=1e-12, atol=1e-12)
    return "1e-12"


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
