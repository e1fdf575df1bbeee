"""Ranks that share a GPU speak gloo, and gloo of torch reads the memory of a GPU from the host in two places.

* ``DTensor.full_tensor`` and every redistribution that gathers call ``_c10d_functional.all_gather_into_tensor``, which
  torch passes on to ``allgather_into_tensor_coalesced`` of gloo: the process ends with a segmentation fault
  (https://github.com/pytorch/pytorch/issues/152645, which was open for torch 2.11).
* ``isend`` and ``irecv``, and so torch's pipelines, fail with "Bad address".

The other operations copy through the host, and here these do so too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from shiplap_testing.private import process_group

Group = str | dist.ProcessGroup  # torch 2.11 passes its name, 2.13 may pass it itself
KEYS = {"cpu": "CPU", "cuda": "CUDA"}  # type of a device → its dispatch key


def _gathered(tensor: Tensor, group_size: int, group: Group) -> Tensor:
    """Return the tensors ``tensor`` of all ranks of ``group``, concatenated along dim 0.

    ``group_size`` is the number of ranks. The function calls an operation that gloo supports for tensors on a GPU.
    """
    within = process_group(group) if isinstance(group, str) else group
    out = tensor.new_empty(tensor.shape[0] * group_size, *tensor.shape[1:])
    dist.all_gather_into_tensor(out, tensor.contiguous(), group=within)
    return out


def _all_gathered(tensors: list[Tensor], group_size: int, group: Group) -> list[Tensor]:
    """Return a list with one tensor for each of ``tensors``. It is the concatenation, along dim 0, of the tensors at
    this index on all ranks of ``group``. ``group_size`` is the number of ranks.
    """
    return [_gathered(tensor, group_size, group) for tensor in tensors]


class _Arriving:
    """The handle of a receive, which the replaced ``irecv`` returns for a tensor on a device. The tensor is filled when
    :meth:`wait` returns. ``work`` is the handle of the receive into ``host``, a tensor on the CPU.
    """

    def __init__(self, work: dist.Work, host: Tensor, tensor: Tensor) -> None:
        """Store ``work``, the handle of a receive into the CPU tensor ``host``, and ``tensor``, to which :meth:`wait`
        copies ``host``.
        """
        self.work, self.host, self.tensor = work, host, tensor

    def wait(self, *timeout: Any) -> bool:
        """Wait for the receive, copy the received tensor to the device, and return whether the receive succeeded.
        ``timeout`` is passed to the ``wait`` of the receive.
        """
        done = bool(self.work.wait(*timeout))
        with torch.no_grad():  # a pipeline receives into tensors that require a gradient
            self.tensor.copy_(self.host)
        return done

    def _source_rank(self) -> int:
        """Return the number of the rank that sent the tensor."""
        return int(self.work._source_rank())


@contextmanager
def through_host(device: str = "cuda") -> Iterator[None]:
    """Return a context manager that replaces gathers of DTensors and messages between two ranks. In its context, these
    operations pass tensors on ``device`` through the memory of the CPU.
    """
    send, receive = distributed_c10d.isend, distributed_c10d.irecv

    def isend(tensor: Tensor, *args: Any, **options: Any) -> Any:
        """Send ``tensor`` as ``torch.distributed.isend`` does, and return the handle. If it is on ``device`` (argument
        of ``through_host``), a copy on the CPU is sent.
        """
        return send(tensor.detach().cpu() if tensor.device.type == device else tensor, *args, **options)

    def irecv(tensor: Tensor, *args: Any, **options: Any) -> Any:
        """Receive into ``tensor`` as ``torch.distributed.irecv`` does, and return the handle, or None if there is none.
        If ``tensor`` is on ``device`` (argument of ``through_host``), a tensor on the CPU receives first.
        """
        if tensor.device.type != device:
            return receive(tensor, *args, **options)
        host = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
        work = receive(host, *args, **options)
        return None if work is None else _Arriving(work, host, tensor)

    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", _gathered, KEYS[device])
    library.impl("all_gather_into_tensor_coalesced", _all_gathered, KEYS[device])
    replaced = {"isend": isend, "irecv": irecv}
    with mock.patch.multiple(distributed_c10d, **replaced), mock.patch.multiple(dist, **replaced):
        yield
    del library  # with it, what was registered
