"""DTensors on a GPU whose ranks speak gloo: torch gathers them with a function that takes CPU memory only.

``DTensor.full_tensor`` and every redistribution that gathers call ``_c10d_functional.all_gather_into_tensor``. With
gloo, torch passes this on to ``allgather_into_tensor_coalesced``, which reads the memory of a GPU from the host: the
process ends with a segmentation fault (https://github.com/pytorch/pytorch/issues/152645, which was open for torch
2.11). ``dist.all_gather_into_tensor`` copies through the host and works, so it stands in for it here.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

__all__ = ["gather_one_by_one"]


def _gathered(tensor: Tensor, group_size: int, group: str | dist.ProcessGroup) -> Tensor:
    """The tensors of all ranks, one below the other. torch 2.11 passes a group by its name, 2.13 may pass it itself."""
    within = _resolve_process_group(group) if isinstance(group, str) else group
    out = tensor.new_empty(tensor.shape[0] * group_size, *tensor.shape[1:])
    dist.all_gather_into_tensor(out, tensor.contiguous(), group=within)
    return out


def _all_gathered(tensors: list[Tensor], group_size: int, group: str | dist.ProcessGroup) -> list[Tensor]:
    return [_gathered(tensor, group_size, group) for tensor in tensors]


def gather_one_by_one(key: str = "CUDA") -> torch.library.Library:
    """Replace torch's functional gathers for tensors with the dispatch key ``key``, as long as the library lives."""
    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", _gathered, key)
    library.impl("all_gather_into_tensor_coalesced", _all_gathered, key)
    return library
