"""One of two processes that train together: run as ``group.py PACKAGE RANK STORE``, where PACKAGE may be ``cpu``.

Prints one JSON value, which must not depend on the device.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shiplap_backend.sweep import load_device


def trained(device: str, rank: int) -> list[list[float]]:
    """The parameters and buffers of a model after three steps on batches that differ between the processes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).to(device)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank + 5)
    for _ in range(3):
        loss = parallel(torch.randn(6, 4).to(device)).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return [value.float().flatten().tolist() for value in model.state_dict().values()]


def collectives(device: str, rank: int) -> Iterator[Any]:
    """What each collective gives. ``x`` is a view with strides, as gradients may be."""

    def fresh() -> Tensor:
        return torch.arange(12.0, device=device).view(3, 4).t()[::2] + rank

    x = fresh()
    dist.all_reduce(x)
    yield x
    work = dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    yield x
    many = [torch.empty(2, 3, device=device) for _ in range(2)]
    dist.all_gather(many, fresh().contiguous())
    yield many
    whole = torch.empty(4, 3, device=device)
    dist.all_gather_into_tensor(whole, fresh().contiguous())
    yield whole
    part = torch.empty(2, 3, device=device)
    dist.reduce_scatter_tensor(part, whole)
    yield part
    swapped = torch.empty(2, device=device)
    dist.all_to_all_single(swapped, torch.arange(2.0, device=device) + 10 * rank)
    yield swapped
    dist.broadcast(part, 1)
    yield part
    dist.reduce(part, 0)
    dist.gather(part, many if rank == 0 else None, 0)
    dist.scatter(part, many if rank == 0 else None, 0)
    yield part
    there = torch.empty_like(part)
    ops = [dist.P2POp(dist.isend, part + rank, 1 - rank), dist.P2POp(dist.irecv, there, 1 - rank)]
    for handle in dist.batch_isend_irecv(ops):
        handle.wait()
    yield there
    group = dist.new_group([0, 1])
    dist.all_reduce(there, group=group)
    yield there
    on_host = torch.full((2,), float(rank))
    dist.all_reduce(on_host)
    yield on_host
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    yield objects


def main(package: str, rank: int, store: str) -> None:
    device = "cpu" if package == "cpu" else load_device(Path(package))
    kind = "gloo" if device == "cpu" else device
    patience = timedelta(seconds=240)
    dist.init_process_group(kind, store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=patience)

    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.cpu().tolist()
        return [plain(v) for v in value] if isinstance(value, list) else value

    report = {"trained": trained(device, rank), "collectives": [plain(v) for v in collectives(device, rank)]}
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
