"""Layers of slidesparse on the CPU: int8 and bf16, dense and 6:8, against torch's own products. One thread, CPU time.

A CPU has no sparse units: 6:8 multiplies 1.5 times as much as dense and cannot win. What is measured is what the
reference path costs, and what 8 bits give. Control: the same kernel reading the dense weight. Peers: ``torch._int_mm``
behind a quantisation in eager PyTorch, ``F.linear`` in bfloat16 and float32.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _record
import torch
from torch import Tensor
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
ROWS = (1, 16, 128)
MIN_ROUNDS, MAX_ROUNDS = 7, 200


def int_mm(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """What a user writes without shiplap: quantised per row, int8 product, scaled."""
    rows = x.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    q = (x / rows).round().to(torch.int8)
    if len(q) <= 16:  # what torch asks for on a GPU; the CPU takes fewer, but code is written for both
        q = torch.nn.functional.pad(q, (0, 0, 0, 32 - len(q)))
    return torch._int_mm(q, weight.t())[: len(x)] * rows * scale


def contestants(m: int, n: int, k: int) -> dict[str, Callable[[], Tensor]]:
    weight, x = prune(torch.randn(n, k), "6:8"), torch.randn(m, k)
    int8, bf16 = pack(weight, "6:8", "int8"), pack(weight, "6:8", "bf16")
    half, narrow = x.to(torch.bfloat16), weight.to(torch.bfloat16)
    assert int8.dense is not None

    def layer(x: Tensor, packed: Packed, keep: Any) -> Callable[[], Tensor]:
        kept = packed.keeping(keep)
        return lambda: matmul(x, kept)

    return {
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


def measure(runs: dict[str, Callable[[], Tensor]], seconds: float) -> dict[str, float]:
    """Median CPU time in ms, in rounds that go through all in a random order."""
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
    return {name: round(statistics.median(values), 4) for name, values in taken.items()}


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
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows, quantised = [], []
    for n, k in SHAPES:
        for m in ROWS:
            runs = contestants(m, n, k)
            agree(runs)
            rows.append({"m": m, "n": n, "k": k, "ms": measure(runs, given.seconds)})
            print(rows[-1], flush=True)
    for m in (1, 128):
        quantised.append({"m": m, "k": 4096, "ms": measure(activations(m, 4096), given.seconds / 2)})
        print(quantised[-1], flush=True)
    kernels = {op.spec.opname: [k.name for k in op.kernels["cpu"]] for op in (layers.linear_int8, layers.linear_bf16)}
    if given.json:
        _record.write(given.json, _record.record(SOURCES, [], kernels=kernels, layers=rows, activations=quantised))


if __name__ == "__main__":
    main()
