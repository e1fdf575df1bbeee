"""The stand-in for torch's functional gathers, with tensors of the CPU, on two ranks."""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shiplap_testing.gathers import gather_one_by_one
from shiplap_testing.ranks import cell, main


@cell("DTensors")
def whole(rank: int, world: int) -> str:
    """Cut along either dim, with shards of different sizes: made whole, and cut along another dim."""
    mesh = init_device_mesh("cpu", (world,))
    value = torch.arange(35.0).view(5, 7)
    library = gather_one_by_one("CPU")
    with mock.patch.object(dist, "all_gather_into_tensor", wraps=dist.all_gather_into_tensor) as used:
        for dim in range(2):
            cut = distribute_tensor(value, mesh, [Shard(dim)])
            assert torch.equal(cut.full_tensor(), value)
            assert torch.equal(cut.redistribute(placements=[Replicate()]).to_local(), value)
    assert used.call_count == 4
    del library
    assert torch.equal(cut.full_tensor(), value)
    assert used.call_count == 4
    return "same bits"


@cell("several tensors")
def several(rank: int, world: int) -> str:
    functional, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
    given = [torch.full((2, 3), 1.0 + rank), torch.arange(4.0).view(2, 2).t() + 10 * rank]
    wanted = functional.all_gather_into_tensor_coalesced(given, world, group)
    wanted = [functional.wait_tensor(t).clone() for t in wanted]
    library = gather_one_by_one("CPU")
    got = functional.all_gather_into_tensor_coalesced(given, world, group)
    assert all(torch.equal(functional.wait_tensor(g), w) for g, w in zip(got, wanted, strict=True))
    del library
    return "same bits"


if __name__ == "__main__":
    main()
