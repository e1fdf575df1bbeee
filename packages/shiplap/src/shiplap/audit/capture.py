"""Capture a call into a CUDA graph over static buffers, replay the graph, and track free device memory.

A capture that fails leaves torch's allocator, generator and current stream in the middle of it. ``record_cuda_graph``
restores all three, so that a check may fail a capture on purpose and continue.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shiplap import torch_private
from shiplap.errors import error_line
from shiplap.sampling.case import tensors_among, tree_map
from shiplap.sampling.layouts import clone_exactly

GRAPH_NODE_KINDS = {  # cudaGraphNodeType
    0: "kernel",
    1: "memcpy",
    2: "memset",
    3: "host callback",
    4: "child graph",
    5: "empty node",
    10: "memory allocation",
    11: "memory release",
}
POISON_BYTE = 0xFF  # NaN in every floating dtype, -1 in every signed integer
# The largest request that torch's allocator serves from its segments of small blocks.
SMALL_SEGMENT_BYTES = 1 << 20
# A comparison takes several bytes of temporary memory for each byte, so it is made in parts.
COMPARED_BYTES = 1 << 24
MOST_POISONED_BYTES = 1 << 30  # bytes; a process that has more lying free is not the one that an audit runs in


class CaptureError(Exception):
    """The error that a capture into a CUDA graph failed. Its message is the error of the call or of CUDA."""


@dataclass(frozen=True)
class CopyNode:
    """A node of a CUDA graph that copies ``size`` bytes from the address ``source`` to the address ``target`` at every
    replay.
    """

    source: int
    target: int
    size: int


@dataclass(frozen=True)
class GraphRecording:
    """A call that was captured in the CUDA graph ``graph`` on ``stream``. ``args`` are the arguments that each replay
    reads, and ``outs`` the results that it writes. ``nodes`` counts the nodes of the graph by kind, and ``copies``
    lists those that copy memory. ``allocations`` is the number of allocations from the graph's memory pool during the
    capture.
    """

    graph: torch.cuda.CUDAGraph
    stream: torch.cuda.Stream
    args: tuple[Any, ...]
    outs: tuple[Tensor, ...]
    nodes: Counter[str]
    copies: tuple[CopyNode, ...]
    allocations: int

    def replay(self, args: tuple[Any, ...] | None = None) -> tuple[Tensor, ...]:
        """Replay the CUDA graph and return its results, which are the same tensors each time. If ``args`` is given, the
        values of its tensors are first copied into the tensors that the graph reads.
        """
        with on_stream(self.stream):
            if args is not None:
                copy_into_buffers(self.args, args)
            self.graph.replay()
        return self.outs


def copy_into_buffers(buffers: tuple[Any, ...], args: tuple[Any, ...]) -> None:
    """Copy the values of the tensors in ``args`` into the tensors at the same positions in ``buffers``. The tensors of
    each pair must have the same shape.
    """
    for buffer, value in zip(tensors_among(buffers), tensors_among(args), strict=True):
        buffer.copy_(value)


@contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Return a context manager in whose body ``stream`` is the current CUDA stream. The device is synchronised before
    and after the body.
    """
    torch.cuda.synchronize(stream.device)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        torch.cuda.synchronize(stream.device)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Return a context manager in whose body torch raises an error for each operation that synchronises the host with
    the device.
    """
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def record_cuda_graph(
    call: Callable[[tuple[Any, ...]], tuple[Tensor, ...]],
    args: tuple[Any, ...],
    stream: torch.cuda.Stream,
    pool: Any = None,
    mode: str = "global",
) -> GraphRecording:
    """Capture ``call`` on copies of ``args`` into a CUDA graph on ``stream``, and return the recording. Raise
    ``CaptureError`` with the reason if the capture fails.

    The memory pool is ``pool``, or a new one if it is None. ``mode`` is CUDA's capture mode. A graph that was not
    captured in the mode ``"global"`` must not be replayed, since other modes accept calls that can crash a replay.
    """
    with on_stream(stream):
        static = tree_map(clone_exactly, args)
    # The raw graph is kept, because its nodes are read below.
    graph, handle = torch.cuda.CUDAGraph(keep_graph=True), pool or torch.cuda.graph_pool_handle()
    before = 0

    def count_and_call() -> tuple[Tensor, ...]:
        """Store the number of allocations so far in ``before``, and return the results of ``call`` on ``static``."""
        nonlocal before
        before = _count_allocations(stream)
        return call(static)

    with on_stream(stream):
        outs, failure = torch_private.capture_graph(graph, count_and_call, handle, mode)
    if failure is not None:
        raise CaptureError(error_line(failure))
    made = _count_allocations(stream) - before
    nodes, copies = _nodes_and_copies(graph)
    if mode == "global":  # torch 2.11 on CUDA 13 crashes over a graph with addresses that cudaFree has taken back
        graph.instantiate()
    return GraphRecording(graph, stream, static, outs, nodes, copies, made)


def _count_allocations(stream: torch.cuda.Stream) -> int:
    """Return the number of allocations that torch has made on the stream's device so far."""
    return int(torch.cuda.memory_stats(stream.device).get("allocation.all.allocated", 0))


def _nodes_and_copies(graph: torch.cuda.CUDAGraph) -> tuple[Counter[str], tuple[CopyNode, ...]]:
    """Return the number of nodes of each kind in a CUDA graph, and the nodes that copy memory. Both are empty if the
    CUDA runtime library is not found by its usual name.
    """
    kinds: Counter[str] = Counter()
    copies = []
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
    except OSError:
        return kinds, ()
    raw, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t(0)
    # Without an array the runtime returns the number of nodes.
    if runtime.cudaGraphGetNodes(raw, None, ctypes.byref(count)):
        return kinds, ()
    nodes, kind = (ctypes.c_void_p * max(1, count.value))(), ctypes.c_int(0)
    runtime.cudaGraphGetNodes(raw, nodes, ctypes.byref(count))
    for node in nodes[: count.value]:
        runtime.cudaGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind))
        kinds[GRAPH_NODE_KINDS.get(kind.value, f"type {kind.value}")] += 1
        if (
            node
            and GRAPH_NODE_KINDS.get(kind.value) == "memcpy"
            and (copy := _read_copy_node(runtime, node)) is not None
        ):
            copies.append(copy)
    return kinds, tuple(copies)


class _MemcpyParams(ctypes.Structure):
    """The CUDA struct ``cudaMemcpy3DParms``, with the members of its nested structs in one array each."""

    _fields_ = (
        ("source_array", ctypes.c_void_p),
        ("source_at", ctypes.c_size_t * 3),
        ("source", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t * 3),
        ("target_array", ctypes.c_void_p),
        ("target_at", ctypes.c_size_t * 3),
        ("target", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t * 3),
        ("extent", ctypes.c_size_t * 3),
        ("kind", ctypes.c_int),
    )


def _read_copy_node(runtime: Any, node: int) -> CopyNode | None:
    """Return the source, the target and the size in bytes of a memcpy node of a CUDA graph. Return None if the runtime
    does not report them.
    """
    params = _MemcpyParams()
    if runtime.cudaGraphMemcpyNodeGetParams(ctypes.c_void_p(node), ctypes.byref(params)):
        return None
    # A copy of one dim has 0 or 1 as height and depth.
    width, height, depth = params.extent
    return CopyNode(params.source or 0, params.target or 0, width * max(1, height) * max(1, depth))


class Canaries:
    """Free memory of torch's caches, allocated and filled with a pattern. A write to freed memory then changes the
    pattern, and a read of freed memory returns it.

    It consists of device memory of every stream and of page-locked host memory in blocks of up to 64 KiB. The memory is
    freed with this object.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocate the free blocks of torch's allocator on ``device``, and blocks of page-locked host memory, and fill
        them with a pattern.
        """
        torch.cuda.synchronize(device)
        self.held = [_poison_block(size, stream, device) for size, stream in _free_blocks(device)]
        self.host = [
            torch.full((1 << e,), POISON_BYTE, dtype=torch.uint8, pin_memory=True) for e in range(17) for _ in "12"
        ]
        torch.cuda.synchronize(device)

    def damaged(self) -> int:
        """Return the number of bytes of the filled device memory that no longer have the pattern. They were written
        although they had been freed.

        The memory is compared in parts, since a comparison takes several bytes of temporary memory for each byte.
        """
        return sum(int((part != POISON_BYTE).sum()) for t in self.held for part in t.split(COMPARED_BYTES))


def _poison_block(size: int, stream: int, device: torch.device) -> Tensor:
    """Return a new tensor of ``size`` bytes of device memory with every byte set to ``POISON_BYTE``. It is allocated on
    ``stream``, a raw CUDA stream.
    """
    with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device)):
        return torch.full((size,), POISON_BYTE, dtype=torch.uint8, device=device)


def _free_blocks(device: torch.device) -> list[tuple[int, int]]:
    """Return pairs ``(bytes, stream)`` of the free blocks of torch's caching allocator that belong to no CUDA graph
    pool, the largest first. The largest ones are left out if the sum would exceed ``MOST_POISONED_BYTES``.

    Torch serves requests of up to 1 MiB from small segments. A larger free block of such a segment is returned as
    several blocks, since no single request can get it.
    """
    index, addresses = torch.device(device).index or 0, []
    for segment in torch.cuda.memory_snapshot():
        # Memory of a graph's pool belongs to the graph, also where it is inactive.
        if segment["device"] != index or tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            continue
        for block in segment["blocks"]:
            left = block["size"] if block["state"] == "inactive" else 0
            most = SMALL_SEGMENT_BYTES if segment["segment_type"] == "small" else left
            while left > 0:
                addresses.append((min(left, most), segment["stream"]))
                left -= most
    total, chosen = 0, []
    for size, stream in sorted(addresses):  # small ones are the likelier to be anybody's scratch
        if (total := total + size) <= MOST_POISONED_BYTES:
            chosen.append((size, stream))
    return chosen[::-1]


def delay_stream(stream: torch.cuda.Stream) -> torch.cuda.Event:
    """Queue work of some milliseconds on a CUDA stream, and return the event that marks its end.

    Work that waits for the event runs late. Work that should wait but does not runs too early, and its results are
    wrong.
    """
    with torch.cuda.stream(stream):
        a, b = (torch.ones(4096, 4096, device=stream.device) for _ in range(2))
        for _ in range(3):
            torch.mm(a, a, out=b)
        event: torch.cuda.Event = stream.record_event()
        return event
