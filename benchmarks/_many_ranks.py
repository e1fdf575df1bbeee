"""Processes, one a GPU, of which the first one, two, four ... do the same work in turn. ``many_gpus.py`` uses them."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Ranks", "Scale", "Works", "middle"]

Works = dict[str, tuple[int, Callable[[], object]]]
"""Name of a work → the number of ranks that do it, and what they do."""


class Scale:
    """How much work, by device."""

    def __init__(self, device: str, times: int) -> None:
        gpu = device == "cuda"
        self.edge, self.times = (216, times) if gpu else (24, 1)
        self.scenes = {1: 12, 16: 6} if gpu else {1: 1, 4: 1}  # scenes a rank → steps that are timed together
        self.points, self.area = (2_400_000, (1024, 832)) if gpu else (20_000, (64, 32))
        self.tile = 64 if gpu else 16
        self.hidden, self.inner, self.tokens = (4096, 14336, 16384) if gpu else (64, 128, 16)


class Ranks:
    """This process among all, and the first ``k`` of them as a group.

    Each has as many cores of its own as the others, also while they are idle: a GPU more comes with its part of a host.
    """

    def __init__(self, device: str, times: int) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= self.world:
            share = len(cores) // self.world
            os.sched_setaffinity(0, cores[share * self.rank : share * (self.rank + 1)])
        if device == "cuda":
            torch.cuda.set_device(self.rank)
        self.device = torch.device("cuda", self.rank) if device == "cuda" else torch.device("cpu")
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=300))
        self.quiet = dist.new_group(backend="gloo")  # whoever waits in it keeps its GPU idle
        self.sizes = [k for k in (1, 2, 4, 8, 16) if k <= self.world]
        self.groups = {k: dist.new_group(list(range(k))) for k in self.sizes}
        self.scale = Scale(device, times)

    def wait(self) -> None:
        """Until all are here, the GPUs idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier(self.quiet)

    def timed(self, k: int, work: Callable[[], object]) -> list[float]:
        """Seconds in which each of the first ``k`` ranks does ``work``. No garbage is collected meanwhile."""
        gc.collect()
        self.wait()
        spent = torch.zeros(self.world, dtype=torch.float64)
        if self.rank < k:
            gc.disable()
            started = time.perf_counter()
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            spent[self.rank] = time.perf_counter() - started
            gc.enable()
        dist.all_reduce(spent, group=self.quiet)
        seconds: list[float] = spent[:k].tolist()
        return seconds

    def rounds(
        self, works: Works, *, warm: int = 3, before: Callable[[], object] = lambda: None
    ) -> dict[str, list[list[float]]]:
        """Seconds of the ranks of each of ``works``, in turn, again and again; first ``warm`` times untimed.

        Rank 0 does what comes ``before`` each.
        """

        def once(name: str) -> list[float]:
            if self.rank == 0:
                before()
            return self.timed(*works[name])

        for name in works:
            for _ in range(warm):
                once(name)
        gc.collect()
        gc.freeze()
        seconds: dict[str, list[list[float]]] = {name: [] for name in works}
        for _ in range(self.scale.times):
            for name in works:
                seconds[name].append(once(name))
        gc.unfreeze()
        return seconds

    def least(self, values: dict[str, float], k: int) -> dict[str, float]:
        """Of each of ``values`` the least among the first ``k`` ranks; all take part."""
        names = sorted(values)
        told: list[Tensor] = [torch.zeros(len(names), dtype=torch.float64) for _ in range(self.world)]
        dist.all_gather(told, torch.tensor([values[name] for name in names], dtype=torch.float64), group=self.quiet)
        lowest = torch.stack(told[:k]).amin(0).tolist()
        return dict(zip(names, lowest, strict=True))


def middle(seconds: dict[str, list[list[float]]]) -> dict[str, float]:
    """The median of what the slowest rank took, of each work."""
    return {name: statistics.median(max(each) for each in rounds) for name, rounds in seconds.items()}
