"""Tuning under torch.distributed: one rank tunes, and the others receive its choices as JSON in a tensor.

Nothing is pickled, so a received message cannot run code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from shiplap.errors import error


def rank_and_count() -> tuple[int, int]:
    """Return this process's rank and the number of ranks. They are ``(0, 1)`` in a program that is not distributed."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def run_on_rank_zero(work: Callable[[], Any]) -> Any:
    """Run ``work`` on rank 0 and return its result on every rank. JSON must be able to represent the result.

    If ``work`` raises an exception, rank 0 raises it again, and the other ranks raise ``SL611``.
    """
    rank, _ = rank_and_count()
    failure: BaseException | None = None
    content: dict[str, Any] = {}
    if rank == 0:
        try:
            content = {"result": work()}
        except Exception as e:  # the others must not wait for ever
            failure, content = e, {"error": f"{type(e).__name__}: {e}"}
    content = _broadcast_json(content)
    if failure is not None:
        raise failure
    if "error" in content:
        raise error(
            "SL611",
            where=f"rank {rank}",
            what="rank 0 could not tune",
            got=content["error"],
            expected="choices from rank 0",
            fix="correct the error that rank 0 printed",
        )
    return content["result"]


def broadcast_device() -> torch.device:
    """Return a device on which the default process group can send a tensor. It is the CPU if the group serves the CPU.
    Otherwise it is the current device of the first device type that the group serves.

    The configuration of a group names the backend of each device type, as in ``"cpu:gloo,cuda:nccl"``. A group of NCCL
    alone serves GPUs only.
    """
    served = [pair.partition(":")[0] for pair in torch.distributed.get_backend_config().split(",")]
    if "cpu" in served:
        return torch.device("cpu")
    return torch.device(served[0], torch.get_device_module(served[0]).current_device())


def _broadcast_json(content: dict[str, Any]) -> dict[str, Any]:
    """Return the ``content`` of rank 0 on every rank. Its length is broadcast first, then its JSON in a tensor of
    bytes.

    Rank 0 decodes its own bytes as well, so that all ranks use the same value.
    """
    dist, device = torch.distributed, broadcast_device()
    data = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8).to(device)
    # A receiver has to allocate the tensor before it can receive, so the length is sent first.
    size = torch.tensor([data.numel()], device=device)
    dist.broadcast(size, src=0)
    if dist.get_rank() != 0:
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, src=0)
    received: dict[str, Any] = json.loads(bytes(data.cpu().tolist()))
    return received
