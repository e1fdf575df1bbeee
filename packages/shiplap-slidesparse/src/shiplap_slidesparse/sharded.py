"""The weight of a layer under ``fully_shard``: a shard, which a gathered weight replaces during forward and backward.

The shard stays the same object, so a change since packing is visible without reading the weight. Torch sets the
gathered weight with ``setattr``, which the layer overrides.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

__all__ = ["gather_whole", "is_dtensor", "state_of", "state_of_shard"]


def is_dtensor(value: Any) -> bool:
    """Return whether ``value`` is a ``DTensor``, without importing that class. If the program has not imported it, no
    value is one.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def state_of(held: Tensor, weight: Tensor) -> tuple[int, ...]:
    """Return numbers that change when the parameter ``held`` is replaced, written to, or given another ``.data``.
    ``weight`` is this rank's shard of ``held``. Writes to tensors made in inference mode are not noticed.
    """
    try:
        place = weight.data_ptr()
    except RuntimeError:  # a fake tensor lies nowhere
        place = 0
    # The version counts writes in place, and the address shows a change of ``.data``.
    return id(held), place, 0 if weight.is_inference() else weight._version


def state_of_shard(shard: Any) -> tuple[int, ...]:
    """Return numbers that change when ``shard`` is written to or moved to other memory. It is the ``DTensor`` that
    ``fully_shard`` has made from a weight.
    """
    with torch.no_grad():
        local: Tensor = shard.to_local()
    return (*state_of(shard, local), 0 if shard.is_inference() else shard._version)


def gather_whole(held: Any) -> Tensor:
    """Return the whole tensor of ``held``, gathered from all ranks if it is a ``DTensor``. In that case every rank has
    to call this function. The result is on the device of the ranks, even if ``fully_shard`` keeps shards on the CPU.
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
        # The same tensor in bytes: the last axis is longer by the size of an element.
        stride = (*(step * held.itemsize for step in steps), 1)
        sent = DTensor.from_local(bits, mesh, placed, run_check=False, shape=shape, stride=stride)
        gathered: Tensor = sent.full_tensor().view(held.dtype)
    return gathered
