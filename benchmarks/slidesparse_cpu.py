"""Layers of slidesparse on the CPU: int8 and bf16, dense and 6:8, against torch's own products. One thread, CPU time.

A CPU has no sparse units: 6:8 multiplies 1.5 times as much as dense and cannot win. What is measured is what the
reference path costs, and what 8 bits give. Control: the same kernel reading the dense weight. Peers: torch's
``quantize_dynamic`` (one scale per tensor), torchao's W8A8 compiled by Inductor (``--torchao FOLDER`` for one outside
the environment), ``torch._int_mm`` behind a quantisation in eager PyTorch, ``F.linear`` in bfloat16 and float32. ``ms``
are medians, ``least`` the least times; ``of_best`` is our least over the least of the first two peers. Goal: 1.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _record
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from shiplap_slidesparse import Packed, layers, matmul, ops, pack, prune

SOURCES = [
    "benchmarks/slidesparse_cpu.py",
    "packages/shiplap-slidesparse/src/shiplap_slidesparse/csrc/layers.cpp",
    "packages/shiplap-slidesparse/src/shiplap_slidesparse/csrc/activations.*",
    "packages/shiplap-slidesparse/src/shiplap_slidesparse/csrc/dot*",
    "packages/shiplap-slidesparse/src/shiplap_slidesparse/csrc/numbers.h",
    "packages/shiplap-slidesparse/src/shiplap_slidesparse/csrc/operands.h",
    "packages/shiplap-slidesparse/src/shiplap_slidesparse/cpu.py::_bind_layer",
]
SHAPES = ((2048, 2048),)
ROWS = (1, 16, 256)
MIN_ROUNDS, MAX_ROUNDS = 7, 200
PEERS = ("quantize_dynamic", "torchao, compiled")


def int_mm(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """What a user writes without shiplap: quantised per row, int8 product, scaled."""
    rows = x.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    q = (x / rows).round().to(torch.int8)
    if len(q) <= 16:  # what torch asks for on a GPU; the CPU takes fewer, but code is written for both
        q = torch.nn.functional.pad(q, (0, 0, 0, 32 - len(q)))
    return torch._int_mm(q, weight.t())[: len(x)] * rows * scale


def peers(weight: Tensor, x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return 8-bit layers of torch and, where it is installed, of torchao."""

    def layer() -> nn.Module:
        made = nn.Linear(*weight.shape[::-1], bias=False)
        made.weight.data.copy_(weight)
        return nn.Sequential(made)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is going to leave torch
        dynamic = torch.ao.quantization.quantize_dynamic(layer(), {nn.Linear}, dtype=torch.qint8)
    runs: dict[str, Callable[[], Tensor]] = {"quantize_dynamic": lambda: dynamic(x)}
    try:
        from torchao import quantization as ao
    except ImportError:
        return runs
    ao.quantize_(net := layer(), ao.Int8DynamicActivationInt8WeightConfig())
    compiled = torch.compile(net, dynamic=False)
    return runs | {"torchao, compiled": lambda: compiled(x)}


def contestants(m: int, n: int, k: int) -> dict[str, Callable[[], Tensor]]:
    weight, x = prune(torch.randn(n, k), "6:8"), torch.randn(m, k)
    int8, bf16 = pack(weight, "6:8", "int8"), pack(weight, "6:8", "bf16")
    half, narrow = x.to(torch.bfloat16), weight.to(torch.bfloat16)
    assert int8.dense is not None

    def layer(x: Tensor, packed: Packed, keep: Any) -> Callable[[], Tensor]:
        kept = packed.keeping(keep)
        return lambda: matmul(x, kept)

    return peers(weight, x) | {
        "int8 6:8": layer(x, int8, "packed"),
        "int8 dense (control)": layer(x, int8, "dense"),
        "torch._int_mm": lambda: int_mm(x, int8.dense, int8.scale),
        "F.linear float32": lambda: linear(x, weight),
        "bf16 6:8": layer(half, bf16, "packed"),
        "bf16 dense (control)": layer(half, bf16, "dense"),
        "F.linear bfloat16": lambda: linear(half, narrow),
    }


def activations(m: int, k: int) -> dict[str, Callable[[], Tensor]]:
    x = torch.randn(m, k)

    def eager() -> Tensor:
        rows = x.abs().amax(1, keepdim=True) / 127
        return (x / rows).round().clamp(-127, 127).to(torch.int8)

    return {
        "quantise + lift 6:8": lambda: ops.quantise_int8(x, 4)[0],
        "quantise (control)": lambda: ops.quantise_int8(x, 2)[0],
        "quantise_fp8 + lift 6:8": lambda: ops.quantise_fp8(x, 4)[0],
        "eager PyTorch, not lifted": eager,
        "copy": x.clone,
    }


def measure(runs: dict[str, Callable[[], Tensor]], seconds: float) -> dict[str, dict[str, float]]:
    """Median and least CPU time in ms, in rounds that go through all in a random order."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    dice, end, rounds = random.Random(0), time.perf_counter() + seconds, 0
    while rounds < MIN_ROUNDS or (rounds < MAX_ROUNDS and time.perf_counter() < end):
        for name in dice.sample(list(runs), len(runs)):
            began = time.thread_time()
            runs[name]()
            taken[name].append((time.thread_time() - began) * 1e3)
        rounds += 1
    return {
        "ms": {name: round(statistics.median(values), 4) for name, values in taken.items()},
        "least": {name: round(min(values), 4) for name, values in taken.items()},
    }


def of_best(least: dict[str, float]) -> float:
    """Return our least time over the best one of the peers in 8 bits."""
    return round(least["int8 dense (control)"] / min(least[p] for p in PEERS if p in least), 3)


def agree(runs: dict[str, Callable[[], Tensor]]) -> None:
    """All compute the same layer: no contestant is measured that does not."""
    exact = runs["F.linear float32"]()
    for name, run in runs.items():
        assert float((run().float() - exact).norm() / exact.norm()) < 0.02, name


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=6.0, help="of measurement per case")
    parser.add_argument("--torchao", type=Path, help="a folder with torchao")
    given = parser.parse_args()
    if given.torchao:
        sys.path.insert(0, str(given.torchao))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows, quantised = [], []
    for n, k in SHAPES:
        for m in ROWS:
            runs = contestants(m, n, k)
            agree(runs)
            rows.append({"m": m, "n": n, "k": k, **measure(runs, given.seconds)})
            rows[-1]["of_best"] = of_best(rows[-1]["least"])
            print(rows[-1], flush=True)
    for m in (1, 256):
        quantised.append({"m": m, "k": 4096, **measure(activations(m, 4096), given.seconds / 2)})
        print(quantised[-1], flush=True)
    kernels = {op.spec.opname: [k.name for k in op.kernels["cpu"]] for op in (layers.linear_int8, layers.linear_bf16)}
    if given.json:
        _record.write(given.json, _record.record(SOURCES, [], kernels=kernels, layers=rows, activations=quantised))


if __name__ == "__main__":
    main()
