"""Converted layers in models of other forms, and trained and saved in other ways, on several ranks."""

from __future__ import annotations

import copy
import os
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from shiplap_slidesparse.tensor_parallel import Colwise, Rowwise
from shiplap_testing.ranks import cell, device, main
from tests.slidesparse.rank_cells import Adapted, Packed, _folder, assert_bits, load, packs, pair, train

MODE = "int8" if torch.__version__ >= (2, 13) else "bf16"


class Tied(nn.Module):
    """Two converted layers that hold one weight, and a trained one between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = pair(MODE)[0]
        self.between, self.second, self.head = nn.Linear(64, 32), pair(MODE)[0], nn.Linear(64, 8)
        self.second.weight, self.second.weight_scale = self.first.weight, self.first.weight_scale
        self.second.pack()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.between(self.first(x))))


def by_stage(net: nn.Module, **options) -> nn.Module:
    for stage in (m for m in net.children() if not isinstance(net, Tied)):
        fully_shard(stage, **options)
    return fully_shard(net, **options)


def same(net: nn.Module, alone: nn.Module) -> str:
    for p, want in zip(net.parameters(), alone.parameters(), strict=True):
        if p.requires_grad:
            got = p.full_tensor() if isinstance(p, DTensor) else p
            torch.testing.assert_close(got.to(want.device), want, rtol=1e-5, atol=1e-5)
    return "1e-5"


def batches(count: int) -> list[Tensor]:
    torch.manual_seed(7)
    return [torch.randn(6, 32).to(device()) for _ in range(count)]


def run(rank: int, world: int, *, make, wrap) -> str:
    net, inputs = make().to(device()), batches(world)
    alone = copy.deepcopy(net)
    with Packed():
        wanted = train(alone, inputs)
    with Packed() as seen:
        for got, want in zip(train(wrap(net), inputs[rank : rank + 1]), wanted, strict=True):
            torch.testing.assert_close(got[0], want[rank], rtol=1e-5, atol=1e-5)
    assert seen.sparse == (seen.products if packs() else 0)
    return same(net, alone)


cell("tied weights: DDP")(partial(run, make=Tied, wrap=DistributedDataParallel))
cell("tied weights: FSDP2")(partial(run, make=Tied, wrap=by_stage))
cell("FSDP2, on the CPU between uses")(
    partial(run, make=partial(Adapted, MODE), wrap=partial(by_stage, offload_policy=CPUOffloadPolicy(pin_memory=False)))
)


def accumulated(rank: int, world: int, *, sharded: bool) -> str:
    net, inputs = Adapted(MODE).to(device()), batches(2 * world)
    alone = copy.deepcopy(net)
    sum(alone(x).square().mean() for x in inputs).div(len(inputs)).backward()
    wrapped = by_stage(net) if sharded else DistributedDataParallel(net)
    for i, x in enumerate(inputs[2 * rank : 2 * rank + 2]):
        wrapped.set_requires_gradient_sync(i == 1) if sharded else setattr(
            wrapped, "require_backward_grad_sync", i == 1
        )
        (wrapped(x).square().mean() / 2).backward()
    for n in (net, alone):
        torch.optim.SGD([p for p in n.parameters() if p.requires_grad], lr=0.1).step()
    return same(net, alone)


cell("no_sync")(partial(accumulated, sharded=False))
cell("set_requires_gradient_sync")(partial(accumulated, sharded=True))


@cell("sharded states of an optimizer")
def zero(rank: int, world: int) -> str:
    net, inputs = Adapted(MODE).to(device()), batches(world)
    alone = copy.deepcopy(net)
    wrapped = DistributedDataParallel(net)
    params = [p for p in net.parameters() if p.requires_grad]
    steps = [
        ZeroRedundancyOptimizer(params, torch.optim.Adam, lr=0.01),
        torch.optim.Adam([p for p in alone.parameters() if p.requires_grad], lr=0.01),
    ]
    for _ in range(3):
        for step in steps:
            step.zero_grad()
        wrapped(inputs[rank]).square().mean().backward()
        sum(alone(x).square().mean() for x in inputs).div(world).backward()
        for step in steps:
            step.step()
    return same(net, alone)


def sharded_to(rank: int, world: int, *, into: str) -> str:
    """Saved by a thread from layers under ``fully_shard``, loaded elsewhere: the bits, and packed."""
    for mode in dict.fromkeys((MODE, "bf16", "fp8")):
        model = by_stage(pair(mode))
        where = os.path.join(_folder(), "saved")
        state, _ = get_state_dict(model, ())
        dcp.async_save(state, checkpoint_id=where, process_group=dist.new_group()).result()
        if into == "dense" and mode == "bf16":
            dense = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 24), nn.Linear(24, 8)).bfloat16().to(device())
            dense[2].float()
            load(dense, where, no_dist=True)
            assert torch.equal(dense[0].weight, pair(mode)[0].weight)
            assert torch.equal(dense[1].weight, pair(mode)[1].weight)
        other = by_stage(pair(mode, seed=5)) if into == "sharded" else pair(mode, seed=5)
        load(other, where, no_dist=into != "sharded")
        assert all(layer.fresh == packs() for layer in other[:2])
        assert_bits(other, pair(mode))
        x = batches(1)[0]
        with Packed() as seen:
            torch.testing.assert_close(other(x), pair(mode)(x), rtol=0, atol=0)
        assert seen.sparse == (seen.products if packs() else 0)
    return "same bits"


cell("saved under FSDP2, loaded by one process")(partial(sharded_to, into="one"))
cell("saved under FSDP2, loaded under FSDP2")(partial(sharded_to, into="sharded"))
cell("saved under FSDP2, loaded into a dense model")(partial(sharded_to, into="dense"))


@cell("a whole state dict of one rank, into FSDP2")
def broadcast(rank: int, world: int) -> str:
    model, whole = by_stage(pair(MODE, seed=5)), pair(MODE)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole.state_dict() if rank == 0 else {}, options=options)
    assert_bits(model, whole)
    x = batches(1)[0]
    with Packed() as seen:
        assert torch.equal(model(x), whole(x))
    assert seen.sparse == (seen.products if packs() else 0)
    return "same bits"


@cell("two dimensions", long=True)
def both(rank: int, world: int) -> str:
    """Tensor parallelism of two ranks under ``fully_shard`` of two pairs, trained; then packed anew."""
    mesh = init_device_mesh(device().type, (world // 2, 2), mesh_dim_names=("dp", "tp"))
    net, inputs = pair(MODE), batches(world // 2)
    net.insert(0, nn.Linear(32, 32).to(device()))
    alone = copy.deepcopy(net)
    wanted = train(alone, inputs)
    parallelize_module(net, mesh["tp"], {"1": Colwise(), "2": Rowwise()})
    for layer in net:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(net, mesh=mesh["dp"])
    index = mesh["dp"].get_local_rank()
    with Packed() as seen:
        for got, want in zip(train(net, inputs[index : index + 1]), wanted, strict=True):
            torch.testing.assert_close(got[0], want[index], rtol=5e-2, atol=5e-2)
    assert seen.sparse == (seen.products if packs() else 0)
    for i, part in enumerate(("weight", "weight_scale")):
        for at in (1, 2):
            got, want = getattr(net[at], part), getattr(alone[at], part)
            assert (got is None) == (want is None)  # weights of 16 bits have no scales
            assert got is None or torch.equal(got.full_tensor(), want), (i, at)
    net[1].reshard()
    net[1].pack()
    with torch.no_grad(), Packed() as seen:
        net(inputs[0])
        assert seen.sparse == (seen.products if packs() else 0)
    return "5e-2"


if __name__ == "__main__":
    main()
