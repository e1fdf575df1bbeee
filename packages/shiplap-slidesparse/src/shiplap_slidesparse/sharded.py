"""What ``fully_shard`` makes of the weight of a layer: a shard, whose place the gathered weight takes for a while.

The shard stays the same object, so whether it was written to since the weight was packed is known without a look at
the weight. Torch puts a gathered weight into its place with ``setattr``, which a layer notices.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

__all__ = ["is_dtensor", "state_of", "state_of_shard", "whole"]


def is_dtensor(value: Any) -> bool:
    """Whether ``value`` is a DTensor. Where nobody has imported them, nothing is."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def state_of(held: Tensor, weight: Tensor) -> tuple[int, ...]:
    """What changes when the parameter ``held`` does, or its ``.data``; ``weight`` is what this rank has of it.

    Tensors made in inference mode do not tell of writes.
    """
    try:
        place = weight.data_ptr()
    except RuntimeError:  # a fake tensor lies nowhere
        place = 0
    return id(held), place, 0 if weight.is_inference() else weight._version


def state_of_shard(shard: Any) -> tuple[int, ...]:
    """What changes when ``shard``, a DTensor, is written to or gets other memory."""
    with torch.no_grad():
        local: Tensor = shard.to_local()
    return (*state_of(shard, local), 0 if shard.is_inference() else shard._version)


def whole(held: Any) -> Tensor:
    """``held``, gathered from all ranks if it is a DTensor: then each of them has to call this.

    It lies on the device of the ranks, also where ``fully_shard`` keeps shards on the CPU.
    """
    if not is_dtensor(held):
        plain: Tensor = held
        return plain
    from torch.distributed.tensor import DTensor

    mesh, placed = held.device_mesh, held.placements
    with torch.no_grad():
        bits = held.to_local().to(mesh.device_type).view(torch.uint8)  # few backends send float8
        *steps, _ = held.stride()
        shape = torch.Size((*held.shape[:-1], held.shape[-1] * held.itemsize))
        stride = (*(step * held.itemsize for step in steps), 1)
        sent = DTensor.from_local(bits, mesh, placed, run_check=False, shape=shape, stride=stride)
        gathered: Tensor = sent.full_tensor().view(held.dtype)
    return gathered
