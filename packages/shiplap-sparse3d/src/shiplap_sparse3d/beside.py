"""The prefetching of tables: another stream builds them while the device works at the batch before."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from shiplap.plugin_api import error
from shiplap.plugin_api.containers import leaves
from shiplap_sparse3d.geometry import Geometry
from shiplap_sparse3d.sums import SummableTensor

__all__ = ["ahead", "hand_over"]

Batch = TypeVar("Batch")


def ahead(batches: Iterable[Batch], *, depth: int = 2) -> Iterator[Batch]:
    """Return an iterator over ``batches`` that makes the next batch and its neighbour tables in another CUDA stream.

    A strided layer that builds its tables waits for the GPU, since the data determine the number of voxels. The host
    then loses its lead over the GPU several times in a training step, and each later delay of the host delays the GPU.
    In a loop over ``ahead(batches)`` the tables of the next batch are built while the GPU works on the batch before.
    Layers find them, so the network does not wait.

    The content of a batch and the results stay the same. Batches on a CPU are passed on unchanged.

    Args:
        batches: yields batches of any form in which ``torch.utils`` finds tensors, such as tuples, lists, dicts, sparse
            tensors and registered classes. It runs in the other stream, which does not wait for the body of the loop.
            Therefore a batch must not contain tensors that the body writes. If the network itself moves a batch to the
            GPU, its tables are built by the network and not ahead.
        depth: the number of batches by which the host may be ahead of the GPU. The voxels and tables of one more batch
            are in memory.

    Raises:
        ArgumentError: ``SL208`` for a depth below 1.
    """
    if depth < 1:
        where, fix = "sparse3d.ahead, argument 'depth'", "pass depth=2, or leave it out"
        raise error("SL208", where=where, got=depth, expected="1 or more", fix=fix)
    return _prefetch(iter(batches), depth)


def _prefetch(source: Iterator[Batch], depth: int) -> Iterator[Batch]:
    """Yield the batches of ``source`` in order. If the first batch has tensors on a GPU, another CUDA stream makes the
    later ones with their neighbour tables, at most ``depth`` batches ahead.

    :func:`ahead` calls this generator after its check, so that a wrong ``depth`` is refused at the call and not at the
    first batch.
    """
    for first in source:
        device = next((t.device for t in _batch_tensors(first) if t.is_cuda), None)
        yield first
        if device is None:
            yield from source
        else:
            yield from _build_beside(first, source, device, depth)


def _build_beside(batch: Batch, source: Iterator[Batch], device: torch.device, depth: int) -> Iterator[Batch]:
    """Yield the batches of ``source`` that follow ``batch``, which the caller has already yielded. Another CUDA stream
    of ``device`` makes each of them, and builds the neighbour tables that the batch before it needed. The host stays at
    most ``depth`` batches ahead of the GPU.
    """
    # A high priority, so that the small kernels of tables do not queue behind the network's.
    beside = torch.cuda.Stream(device, priority=-1)
    beside.wait_stream(torch.cuda.current_stream(device))  # in which there may be what batches are made of
    used: deque[tuple[torch.cuda.Event, Batch]] = deque()
    while True:
        current = torch.cuda.current_stream(device)
        done = torch.cuda.Event(blocking=True)  # the host sleeps until then
        done.record(current)
        used.append((done, batch))
        if len(used) > depth:
            # Bounds the batches in memory: without waiting the host could run ahead without limit.
            used.popleft()[0].synchronize()
        with torch.cuda.stream(beside):
            try:
                following = next(source)
            except StopIteration:
                return
            # The batch before tells which tables its layers needed.
            for here, before in zip(_batch_geometries(following), _batch_geometries(batch), strict=False):
                here.build(before.recipe)
        batch = following
        hand_over(_batch_tensors(batch), beside.record_event(), current)
        yield batch


def hand_over(tensors: Iterable[Tensor], made: torch.cuda.Event, user: torch.cuda.Stream) -> None:
    """Make the CUDA stream ``user`` wait for the event ``made``, which another stream has recorded after it computed
    ``tensors``. When the tensors are released, their memory is kept until the work then queued on ``user`` has ended.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(user)
    user.wait_event(made)


def _batch_geometries(batch: Any) -> list[Geometry]:
    """Return the geometries (coordinates of voxels with their neighbour tables) in a batch. They are those of its
    sparse tensors and those that it holds directly.
    """
    sparse: list[Any] = [leaf for leaf in leaves(batch, _UNSPLIT) if isinstance(leaf, _UNSPLIT)]
    return [leaf if isinstance(leaf, Geometry) else leaf.geometry for leaf in sparse]


def _batch_tensors(batch: Any) -> list[Tensor]:
    """Return all tensors of ``batch``, followed by the coordinates and neighbour tables of its sparse tensors."""
    tables = [tensor for geometry in _batch_geometries(batch) for tensor in geometry.tensors]
    return [*(leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)), *tables]


_UNSPLIT = Geometry, SummableTensor  # the facade's sparse tensor, too
