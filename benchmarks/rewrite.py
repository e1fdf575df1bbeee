"""Group fusions on and off: many small linear layers, and layers of one input in blocks like Llama's.

Contestants of a case: ``off`` (torch.compile, the control), ``on`` (with the rewrite as it ships; where it declines it
is the graph of ``off``, and the ratio is the noise), ``forced`` (merged although the model of costs declines),
``inductor`` (torch's own ``batch_linear``, off by default) and ``eager``. Each is a model of its own. A round times
each once, in random order; ratios are taken inside a round. CPU: process time on one thread. CUDA: wall time of calls
that are waited for together.

    python benchmarks/rewrite.py [--device cuda] [--json benchmarks/results/rewrite.json] [--rounds 60]
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import statistics
import sys
import time
import types
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # a graph from a cache is merged already: it counts nothing

import torch
import torch._inductor.config as inductor
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import _record  # noqa: E402

import shiplap as sl  # noqa: E402
from shiplap.rewrite.group import Group, StackedLinears, WideLinears  # noqa: E402

GROUP = "src/shiplap/rewrite/group"
SOURCES = ("benchmarks/rewrite.py", f"{GROUP}/linear.py", f"{GROUP}/cost.py", f"{GROUP}/base.py")
TORCHS_OWN = {"batch_linear": {"min_fuse_set_size": 2}}


class Towers(nn.Module):
    """``count`` features, a small layer for each: recommenders, per-sensor encoders, heads of an ensemble."""

    def __init__(self, count: int, k: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(k, k) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.relu(layer(x[i])) for i, layer in enumerate(self.layers)], 1)


class Block(nn.Module):
    """Projections of a decoder's block: query, key and value of one input, gate and up of another."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(k, k, bias=False), nn.Linear(k, k, bias=False)
        self.key, self.value = nn.Linear(k, k // 4, bias=False), nn.Linear(k, k // 4, bias=False)
        self.gate, self.up = nn.Linear(k, 3 * k, bias=False), nn.Linear(k, 3 * k, bias=False)
        self.down = nn.Linear(3 * k, k, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) * torch.cat([self.key(x).tanh()] * 2 + [self.value(x).sigmoid()] * 2, -1)
        x = x + self.out(scores)
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


@dataclass(frozen=True)
class Case:
    name: str
    model: Callable[[], nn.Module]
    x: tuple[int, ...]
    rewrite: type[Group]
    train: bool = False
    frozen: bool = False
    mode: str | None = None


def towers(count: int, rows: int, k: int, **how: Any) -> Case:
    name = f"{count} layers, {rows} rows, {k}x{k}" + "".join(f", {w}" for w in how)
    return Case(name, lambda: Towers(count, k), (count, rows, k), StackedLinears, **how)


def block(rows: int, k: int, **how: Any) -> Case:
    return Case(
        f"block of {k}, {rows} rows" + "".join(f", {w}" for w in how), lambda: Block(k), (rows, k), WideLinears, **how
    )


def cases(device: str) -> list[Case]:
    small = [towers(16, 4, 64), towers(64, 4, 32), towers(16, 1, 32), towers(4, 4, 256), towers(2, 4, 32)]
    if device == "cpu":
        blocks = [block(1, 64), block(1, 64, frozen=True), block(4, 256), block(4, 256, frozen=True), block(64, 256)]
        return [*small, *blocks, towers(16, 256, 64), towers(16, 4, 64, train=True)]
    graphs = {"mode": "reduce-overhead"}
    large = [block(rows, k) for rows, k in ((1, 1024), (16, 1024), (16, 4096), (2048, 4096))]
    frozen = [block(rows, k, frozen=True) for rows, k in ((1, 1024), (16, 4096), (2048, 4096))]
    captured = [towers(64, 4, 32, **graphs), towers(16, 4, 64, **graphs), block(1, 1024, **graphs)]
    return [
        *small,
        towers(16, 256, 64),
        towers(64, 4, 32, train=True),
        *large,
        *frozen,
        *captured,
        block(16, 4096, frozen=True, **graphs),
    ]


def of_its_own(model: nn.Module) -> nn.Module:
    """A copy whose code Dynamo has not seen: neither its cache nor its limits are shared."""
    forward = type(model).forward
    code = types.FunctionType(forward.__code__.replace(), forward.__globals__, "forward", None, forward.__closure__)
    copied = copy.deepcopy(model)
    copied.__class__ = type(type(model).__name__, (type(model),), {"forward": code})
    return copied


def contestant(
    case: Case, model: nn.Module, x: Tensor, rewrite: Group | None, **patch: Any
) -> tuple[Callable[[], Any], int]:
    """A call that is compiled, and how many groups were merged in it."""
    run = torch.compile(of_its_own(model), mode=case.mode)
    scope = sl.rewrites(rewrite) if rewrite else None

    def call() -> Any:
        out = run(x)
        if case.train:
            out.sum().backward()
        return out

    with scope or nullcontext(), inductor.patch(freezing=case.frozen, **patch):
        for _ in range(3):
            call()
    return call, len(scope.matches) if scope else 0


def measured(case: Case, device: str, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, x = case.model().to(device).train(case.train), torch.randn(*case.x, device=device)
    eager = of_its_own(model)
    with torch.set_grad_enabled(case.train):
        calls: dict[str, Callable[[], Any]] = {"off": contestant(case, model, x, None)[0]}
        calls["on"], merged = contestant(case, model, x, case.rewrite())
        if not merged:
            calls["forced"], forced = contestant(case, model, x, case.rewrite(always=True))
            assert forced, case
        if case.rewrite is StackedLinears:
            calls["inductor"] = contestant(case, model, x, None, pre_grad_fusion_options=TORCHS_OWN)[0]
        calls["eager"] = lambda: eager(x).sum().backward() if case.train else eager(x)
        expected = eager(x)
        for name, call in calls.items():
            if name != "eager":
                torch.testing.assert_close(call(), expected, rtol=2e-3, atol=2e-3)
        times = timed(calls, device, rounds)
    ratios = {n: statistics.median(o / t for o, t in zip(times["off"], ts, strict=True)) for n, ts in times.items()}
    return {
        "case": case.name, "rewrite": case.rewrite.name, "merged": merged,
        "us": {n: round(statistics.median(ts) * 1e6, 1) for n, ts in times.items()},
        "off over": {n: round(r, 3) for n, r in ratios.items() if n != "off"},
    }  # fmt: skip


def timed(calls: dict[str, Callable[[], Any]], device: str, rounds: int) -> dict[str, list[float]]:
    clock = time.process_time if device == "cpu" else time.perf_counter
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def once(call: Callable[[], Any], count: int) -> float:
        wait()
        start = clock()
        for _ in range(count):
            call()
        wait()
        return (clock() - start) / count

    count = max(1, round(3e-3 / max(1e-6, once(calls["off"], 20))))
    times: dict[str, list[float]] = {n: [] for n in calls}
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            times[name].append(once(calls[name], count))
    return times


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", default="", help="cases with this in their name")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high" if args.device == "cuda" else "highest")
    device = torch.cuda.get_device_name() if args.device == "cuda" else ""
    found: list[dict[str, Any]] = []
    for case in cases(args.device):
        if args.only not in case.name:
            continue
        found.append(measured(case, args.device, args.rounds))
        print(json.dumps(found[-1]), flush=True)
        if args.json:  # after each case: an hour of a shared machine may end early
            packages = ["triton"] if device else []
            _record.write(args.json, _record.record(SOURCES, packages, device, rounds=args.rounds, cases=found))


if __name__ == "__main__":
    main()
