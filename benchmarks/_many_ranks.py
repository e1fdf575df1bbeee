"""Processes, one a GPU, of which the first one, two, four ... do the same work in turn. ``many_gpus.py`` uses them."""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Ranks", "Scale", "Works", "build_bindings", "middle"]

_REST = 10  # seconds that a part needs after its last round

Works = dict[str, tuple[int, Callable[[], object]]]
"""Name of a work → the number of ranks that do it, and what they do."""


class Scale:
    """How much work, by device."""

    def __init__(self, device: str, times: int, scenes: Sequence[int] = ()) -> None:
        gpu = device == "cuda"
        self.edge, self.times = (216, times) if gpu else (24, 2)
        steps = {16: 12, 1: 12} if gpu else {4: 1, 1: 1}  # scenes a rank → steps that are timed together
        self.scenes = {count: steps[count] for count in scenes or steps}
        self.most = 32 if gpu else 2
        self.divided = (64, 3) if gpu else (4, 1)  # scenes of all ranks, and steps
        self.hidden, self.inner, self.tokens = (4096, 14336, 16384) if gpu else (64, 128, 16)


class Ranks:
    """This process among all, and the first ``k`` of them as a group.

    Each has as many cores of its own as the others, also while they are idle: a GPU more comes with its part of a host.
    """

    def __init__(self, device: str, times: int, scenes: Sequence[int] = (), until: float = math.inf) -> None:
        self.until = until  # when they are ended, by the clock of the host
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.cores = cores = sorted(os.sched_getaffinity(0))
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
        self.scale, self.began = Scale(device, times, scenes), time.perf_counter()

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
        self,
        works: Works,
        limit: float,
        *,
        warm: int = 3,
        only: str = "",
        before: Callable[[], object] = lambda: None,
    ) -> dict[str, list[list[float]]]:
        """Seconds of the ranks of each of ``works``, in turn, again and again; first ``warm`` times untimed.

        Works of many ranks are warmed up first, so that all compile at once; with ``only`` that one alone. Rank 0 does
        what comes ``before`` each. No round begins ``limit`` seconds after the first, but two are done, unless the
        ranks are ended before the second could be.
        """

        def once(name: str) -> list[float]:
            if self.rank == 0:
                before()
            return self.timed(*works[name])

        for name in sorted(works, key=lambda name: -works[name][0]):
            for _ in range(0 if only and name != only else warm):
                once(name)
        self.say("warm")
        gc.collect()
        gc.freeze()
        started = time.perf_counter()
        seconds: dict[str, list[list[float]]] = {name: [] for name in works}
        for number in range(self.scale.times):
            spent = time.perf_counter() - started
            late = time.monotonic() + spent / max(1, number) + _REST > self.until
            if number and self.told(late or (number >= 2 and spent > limit)):
                break
            for name in works:
                seconds[name].append(once(name))
            self.say(f"round {number}:", {name: round(max(of[-1]), 4) for name, of in seconds.items()})
        gc.unfreeze()
        self.say({name: round(value, 5) for name, value in middle(seconds).items()})
        return seconds

    def say(self, *what: object) -> None:
        """Rank 0 prints how far it is: what stays of a part that does not come to its end."""
        if self.rank == 0:
            print(f"{time.perf_counter() - self.began:.1f} s:", *what, flush=True)

    def told(self, value: bool) -> bool:
        """What rank 0 says."""
        word = torch.tensor([float(value)], dtype=torch.float64)
        dist.broadcast(word, 0, group=self.quiet)
        return bool(word.item())

    def least(self, values: dict[str, float], k: int) -> dict[str, float]:
        """Of each of ``values`` the least among the first ``k`` ranks; all take part."""
        names = sorted(values)
        told: list[Tensor] = [torch.zeros(len(names), dtype=torch.float64) for _ in range(self.world)]
        dist.all_gather(told, torch.tensor([values[name] for name in names], dtype=torch.float64), group=self.quiet)
        lowest = torch.stack(told[:k]).amin(0).tolist()
        return dict(zip(names, lowest, strict=True))


def build_bindings(ranks: Ranks) -> dict[str, str]:
    """The C++ that launches kernels, built by all ranks together and loaded by each; what could not be built, and why.

    A program has it from its 32nd call on, or finds it in its cache.
    """
    from shiplap.dispatch import registry
    from shiplap.kernels.native import binding
    from shiplap.kernels.native.build_plan import make_plan

    forms = {
        op: next((k.native for k in op.kernels.get(ranks.device.type, ()) if k.native), None)
        for op in registry.declared_op_list()
    }
    ops = [
        op for op, form in forms.items() if form is not None and form.wanted and op.spec.name.startswith("sparse3d::")
    ]
    failed: dict[str, str] = {}
    if ranks.device.type != "cuda" or os.environ.get("SHIPLAP_NATIVE") == "0":
        return failed
    with ThreadPoolExecutor() as pool:
        jobs = {op: pool.submit(binding.compile_plan, make_plan(op), op) for op in ops[ranks.rank :: ranks.world]}
    failed |= {op.spec.name: str(why) for op, job in jobs.items() if (why := job.exception()) is not None}
    ranks.wait()
    for op in ops:
        try:
            binding.build(op)
        except Exception as why:
            failed[op.spec.name] = str(why)
    return failed


def middle(seconds: dict[str, list[list[float]]]) -> dict[str, float]:
    """The median of what the slowest rank took, of each work."""
    return {name: statistics.median(max(each) for each in rounds) for name, rounds in seconds.items()}
