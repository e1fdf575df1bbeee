"""Networks of other forms than those of ``rank_cells``, and other ways to train them, on several ranks."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import shiplap_sparse3d as sparse3d
from shiplap.plugin_api.containers import register_container
from shiplap_sparse3d.plan import Plan
from shiplap_testing.ranks import cell, device, main
from tests.sparse3d.scenes import scene

STEPS, RATE = 3, 0.1
Scenes = list[sparse3d.SparseTensor]


class UNet(nn.Module):
    """Two levels, skip connections by ``cat``; takes and returns a ``SparseTensor``."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down1 = sparse3d.SubMConv3d(4, 6, 3), sparse3d.SparseConv3d(6, 8, 2, 2)
        self.mid, self.down2 = sparse3d.SubMConv3d(8, 8, 3), sparse3d.SparseConv3d(8, 10, 2, 2)
        self.up2, self.join = sparse3d.SparseInverseConv3d(10, 8, 2), sparse3d.SubMConv3d(16, 8, 1)
        self.up1, self.head = sparse3d.SparseInverseConv3d(8, 6, 2), sparse3d.SubMConv3d(12, 3, 3)

    def forward(self, x: sparse3d.SparseTensor) -> sparse3d.SparseTensor:
        fine = self.stem(x)
        coarse = self.mid(self.down1(fine))
        back = self.join(sparse3d.cat([self.up2(self.down2(coarse)), coarse]))
        return self.head(sparse3d.cat([self.up1(back), fine]))


class Heads(nn.Module):
    """Two sparse tensors on different voxels, and a tensor, in a dict with a list in it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = sparse3d.SubMConv3d(4, 6, 3), sparse3d.SparseConv3d(6, 5, 2, 2)
        self.fine, self.pool, self.score = sparse3d.SubMConv3d(6, 2, 3), sparse3d.GlobalPool("avg"), nn.Linear(5, 2)

    def forward(self, x: sparse3d.SparseTensor) -> dict[str, object]:
        x = self.stem(x)
        coarse = self.down(x)
        return {"levels": [self.fine(x), coarse], "score": self.score(self.pool(coarse))}


@dataclass
class Level:
    """What a user hands from one module to the next: the voxels, and a plan that he has made beforehand."""

    x: sparse3d.SparseTensor
    plan: Plan
    stride: int = 1


class Registered(Level):
    """Such a class that torch knows. With ``static_graph`` it would lose gradients of another, silently."""


register_container(
    Registered, lambda v: ([v.x, v.plan], v.stride), lambda children, stride: Registered(*children, stride)
)

# fully_shard of torch 2.11 does not look into dataclasses that it does not know, also those of plain tensors
Handed = Level if torch.__version__ >= (2, 13) else Registered


class Lower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = sparse3d.SubMConv3d(4, 6, 3)

    def forward(self, level: Level) -> Level:
        return Handed(self.conv(level.x), level.plan, level.stride)


class Upper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3) / 3)

    def forward(self, level: Level) -> Level:
        return Handed(level.x.replace(level.x.feats @ self.weight), level.plan, level.stride)


class Planned(nn.Module):
    """Dataclasses of a user between its modules, and out of it."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = Lower(), Upper()

    def forward(self, x: sparse3d.SparseTensor) -> Level:
        out = self.upper(self.lower(Handed(x, x.geometry.subm(3))))
        return Registered(out.x, out.plan, out.stride)


def scenes(world: int, empty: bool = False) -> Scenes:
    made = [scene(60 + 30 * rank, (8, 8, 8), 4, seed=rank).to(device()) for rank in range(world)]
    if empty:
        last = made[-1]
        made[-1] = sparse3d.SparseTensor(last.feats[:0], last.coords[:0], last.spatial_shape, last.batch_size)
    return made


def loss(out: object) -> Tensor:
    """The squares of all features; a sum, so that a scene without voxels has one."""
    if isinstance(out, Level):
        return loss(out.x)
    if isinstance(out, dict):
        return sum(map(loss, out.values()), torch.zeros((), dtype=torch.float64))
    if isinstance(out, list):
        return sum(map(loss, out), torch.zeros((), dtype=torch.float64))
    return (out if isinstance(out, Tensor) else out.feats).square().sum() / 100


def stepped(net: nn.Module, batches: list[Scenes]) -> dict[str, Tensor]:
    """The weights of ``net`` after a step of SGD for each batch, along the mean of the gradients of its scenes."""
    net = copy.deepcopy(net)
    params = list(net.parameters())
    for batch in batches:
        grads = [torch.autograd.grad(loss(net(x)), params) for x in batch]
        with torch.no_grad():
            for p, *parts in zip(params, *grads, strict=True):
                p.sub_(RATE * sum(parts) / len(batch))
    return {n: p.detach() for n, p in net.named_parameters()}


def same(net: nn.Module, wanted: dict[str, Tensor]) -> str:
    for name, p in net.named_parameters():
        got = (p.full_tensor() if hasattr(p, "full_tensor") else p).to(device())
        torch.testing.assert_close(got.detach(), wanted[name], rtol=1e-10, atol=1e-10, msg=lambda m, n=name: n + m)
    return "1e-10"


def by_stage(net: nn.Module, **options) -> nn.Module:
    for stage in net.children():
        fully_shard(stage, **options)
    return fully_shard(net, **options)


def around(net: nn.Module) -> nn.Module:
    """Each stage is checkpointed, under DDP."""
    for stage in net.children():
        stage.forward = partial(checkpoint, stage.forward, use_reentrant=False)
    return DistributedDataParallel(net, static_graph=True)


def train(rank: int, world: int, *, make, wrap, empty: bool = False, optimizer=torch.optim.SGD) -> str:
    net, batches = make().double().to(device()), [scenes(world, empty)] * STEPS
    wanted = stepped(net, batches)
    wrapped = wrap(net)
    steps = optimizer(wrapped.parameters(), lr=RATE)
    for batch in batches:
        steps.zero_grad()
        loss(wrapped(batch[rank])).backward()
        steps.step()
    return same(net, wanted)


ddp = DistributedDataParallel
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": ddp,
    "DDP, static_graph": partial(ddp, static_graph=True),
    "DDP, find_unused_parameters": partial(ddp, find_unused_parameters=True),
    "FSDP2, root": fully_shard,
    "FSDP2, each stage": by_stage,
    "FSDP2, on the CPU between uses": partial(by_stage, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "checkpoint": around,
}
for way, wrap in WAYS.items():
    for make in (UNet, Heads, Planned):
        cell(f"{make.__name__}: {way}")(partial(train, make=make, wrap=wrap))
for way in ("DDP", "DDP, static_graph", "FSDP2, each stage"):
    cell(f"a rank without voxels: {way}")(partial(train, make=UNet, wrap=WAYS[way], empty=True))
cell("sharded states of an optimizer")(
    partial(train, make=UNet, wrap=ddp, optimizer=partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.SGD))
)


def accumulated(rank: int, world: int, *, sharded: bool) -> str:
    """Two scenes of each rank in a step, gradients of the first are kept to itself."""
    net, given = UNet().double().to(device()), scenes(2 * world)
    wanted = stepped(net, [given])
    wrapped = by_stage(net) if sharded else ddp(net)
    for i, x in enumerate(given[2 * rank : 2 * rank + 2]):
        if sharded:
            wrapped.set_requires_gradient_sync(i == 1)
        with nullcontext() if sharded or i == 1 else wrapped.no_sync():
            (loss(wrapped(x)) / 2).backward()
    torch.optim.SGD(wrapped.parameters(), lr=RATE).step()
    return same(net, wanted)


cell("no_sync")(partial(accumulated, sharded=False))
cell("set_requires_gradient_sync")(partial(accumulated, sharded=True))


@cell("join")
def uneven(rank: int, world: int) -> str:
    """Rank 0 has two scenes more than the others. While others have none, torch divides by all ranks none the less."""
    net, given = UNet().double().to(device()), scenes(world)
    alone = copy.deepcopy(net)
    for batch in ([given[0], *given[1:]], given[:1], given[:1]):
        grads = [torch.autograd.grad(loss(alone(x)), list(alone.parameters())) for x in batch]
        with torch.no_grad():
            for p, *parts in zip(alone.parameters(), *grads, strict=True):
                p.sub_(RATE * sum(parts) / world)
    wrapped = ddp(net)
    steps = torch.optim.SGD(wrapped.parameters(), lr=RATE)
    with wrapped.join():
        for x in [given[rank]] * (3 if rank == 0 else 1):
            steps.zero_grad()
            loss(wrapped(x)).backward()
            steps.step()
    return same(net, {n: p.detach() for n, p in alone.named_parameters()})


def folder() -> str:
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    return os.path.join(names[0], "saved")


@cell("saved meanwhile, with the states of an optimizer")
def resumed(rank: int, world: int) -> str:
    """Two steps, saved while the third runs; another network goes on from there."""
    net, x = UNet().double().to(device()), scenes(world)
    made = [by_stage(copy.deepcopy(net)), by_stage(UNet().double().to(device()))]
    steps = [torch.optim.Adam(n.parameters(), lr=RATE) for n in made]

    def step(i: int) -> None:
        steps[i].zero_grad()
        loss(made[i](x[rank])).backward()
        steps[i].step()

    step(0), step(0)
    model, states = get_state_dict(made[0], steps[0])
    where = folder()
    own = dist.new_group()  # a thread saves, and must not come between the collectives of training
    saving = dcp.async_save({"model": model, "states": states}, checkpoint_id=where, process_group=own)
    step(0)
    saving.result()
    model, states = get_state_dict(made[1], steps[1])
    dcp.load({"model": model, "states": states}, checkpoint_id=where)
    set_state_dict(made[1], steps[1], model_state_dict=model, optim_state_dict=states)
    step(1)
    return same(made[1], {n: p.full_tensor().detach() for n, p in made[0].named_parameters()})


def features(rank: int, world: int, *, place) -> str:
    """DTensors as features: of the whole, or of a part of the channels."""
    mesh, x = init_device_mesh(device().type, (world,)), scenes(world)[0]
    layer = sparse3d.SubMConv3d(4, 8, 3).double().to(device())
    layer(x.replace(distribute_tensor(x.feats, mesh, [place])))
    raise AssertionError("nothing was refused")


cell("DTensor as features, whole")(partial(features, place=Replicate()))
cell("DTensor as features, cut along channels")(partial(features, place=Shard(1)))
cell("DTensor as features, cut along voxels")(partial(features, place=Shard(0)))


if __name__ == "__main__":
    main()
