"""What goes through the host in the place of torch's own, with tensors of the CPU, on two ranks."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shiplap_testing.ranks import cell, main
from shiplap_testing.through_host import through_host


@cell("DTensors")
def whole(rank: int, world: int) -> str:
    """Cut along either dim, with shards of different sizes: made whole, and cut along another dim."""
    mesh = init_device_mesh("cpu", (world,))
    value = torch.arange(35.0).view(5, 7)
    with mock.patch.object(dist, "all_gather_into_tensor", wraps=dist.all_gather_into_tensor) as used:
        with through_host("cpu"):
            for dim in range(2):
                cut = distribute_tensor(value, mesh, [Shard(dim)])
                assert torch.equal(cut.full_tensor(), value)
                assert torch.equal(cut.redistribute(placements=[Replicate()]).to_local(), value)
        assert used.call_count == 4
        assert torch.equal(cut.full_tensor(), value)
        assert used.call_count == 4
    return "same bits"


@cell("several tensors")
def several(rank: int, world: int) -> str:
    functional, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    given = [torch.full((2, 3), 1.0 + rank), torch.arange(4.0).view(2, 2).t() + 10 * rank]
    wanted = functional.all_gather_into_tensor_coalesced(given, world, group)
    wanted = [functional.wait_tensor(t).clone() for t in wanted]
    with through_host("cpu"):
        got = functional.all_gather_into_tensor_coalesced(given, world, group)
    assert all(torch.equal(functional.wait_tensor(g), w) for g, w in zip(got, wanted, strict=True))
    return "same bits"


@cell("messages")
def passed(rank: int, world: int) -> str:
    """One rank tells the next, with each function of torch, into a tensor with strides of its own."""
    told, heard = torch.arange(6.0).view(2, 3) + rank, torch.zeros(3, 2).t().requires_grad_()
    after, before = (rank + 1) % world, (rank - 1) % world
    with through_host("cpu"):
        works = [dist.isend(told, after), dist.irecv(heard, before)]
        [work.wait() for work in works]
        assert torch.equal(heard, torch.arange(6.0).view(2, 3) + before)
        heard.data.zero_()
        both = [dist.P2POp(dist.isend, told, after), dist.P2POp(dist.irecv, heard, before)]
        [work.wait() for work in dist.batch_isend_irecv(both)]
        assert torch.equal(heard, torch.arange(6.0).view(2, 3) + before)
        heard.data.zero_()
        if rank:
            dist.send(told, after)
        else:
            assert dist.recv(heard) == before
            assert torch.equal(heard, torch.arange(6.0).view(2, 3) + before)
    return "same bits"


@cell("a pipeline")
def stages(rank: int, world: int) -> str:
    torch.manual_seed(3)
    layers = [nn.Linear(6, 6) for _ in range(world)]
    x = torch.randn(8, 6)
    wanted = torch.autograd.grad(nn.Sequential(*layers)(x).square().mean(), list(layers[rank].parameters()))
    with through_host("cpu"):
        stage = PipelineStage(layers[rank], rank, world, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: out.square().mean())
        schedule.step(*((x,) if rank == 0 else ()), target=x)
    for p, w in zip(layers[rank].parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, w)
    return "1e-6"


if __name__ == "__main__":
    main()
