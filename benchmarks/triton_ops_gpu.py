"""Four ops of plain Triton functions, each as ``sl.triton`` and as torch's ``triton_op``.

Softmax, layer norm, matmul with bias and GELU, and a step of SGD with momentum: the ops of the tests
(``tests/gpu/launched_ops.py``), and the same ``@triton.jit`` functions in ``triton_op``, with the same tiles. Each at a
size that the host decides and at one that the device does, eager and compiled with a pointwise neighbour. Microseconds
for one of ``CALLS`` in a row, all rows in turns, medians; ``ratios`` are medians of the ratios within a round, of which
1 or less is no slower. ``noise`` is the same ratio of ``triton_op`` to itself. ``--json FILE`` writes the record.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import triton_op, wrap_triton

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "packages" / "shiplap"))
from _record import record, write
from overhead_gpu import driver

from shiplap.kernels.native import binding
from tests.gpu import launched_ops as ops

SOURCES = [
    "benchmarks/triton_ops_gpu.py",
    "packages/shiplap/tests/gpu/launched_ops.py",
    *(f"packages/shiplap/src/shiplap/kernels/triton/{name}.py" for name in ("kernel", "program", "specialize")),
    "packages/shiplap/src/shiplap/codegen/templates/launcher.cpp.jinja",
]
CALLS, WARM = 40, 40
Step = Callable[..., Any]


@triton_op("launched_peer::softmax", mutates_args=())
def softmax(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    n, m = x.shape
    block = triton.next_power_of_2(m)
    wrap_triton(ops.softmax_kernel)[(n,)](x, out, m, x.stride(0), x.stride(1), BLOCK=block, num_warps=8)
    return out


@triton_op("launched_peer::layer_norm", mutates_args=())
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    out = torch.empty_like(x)
    n, m = x.shape
    wrap_triton(ops.layer_norm_kernel)[(n,)](x, weight, bias, out, m, 1e-5, BLOCK=triton.next_power_of_2(m))
    return out


@triton_op("launched_peer::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    (n, k), m = x.shape, weight.shape[0]
    out = x.new_empty(n, m)
    bm, bn, bk, warps = ops.TILES[0]
    strides = x.stride(0), x.stride(1), weight.stride(0), weight.stride(1)
    tiles = {"BM": bm, "BN": bn, "BK": bk, "num_warps": warps, "num_stages": 3}
    wrap_triton(ops.linear_gelu_kernel)[(triton.cdiv(n, bm), triton.cdiv(m, bn))](
        x, weight, bias, out, n, k, m, *strides, **tiles
    )
    return out


@triton_op("launched_peer::momentum_", mutates_args=("param", "velocity"))
def momentum_(param: Tensor, grad: Tensor, velocity: Tensor, lr: float) -> None:
    n = param.shape[0]
    wrap_triton(ops.momentum_kernel)[(triton.cdiv(n, 1024),)](
        param, grad, velocity, lr, 0.9, 0.0, n, NESTEROV=False, BLOCK=1024
    )


def arguments(name: str, large: bool) -> tuple[Any, ...]:
    def half(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.float16)

    if name == "softmax":
        return (half(*((8192, 4096) if large else (64, 1024))),)
    if name == "layer_norm":
        n, m = (8192, 4096) if large else (64, 1024)
        return half(n, m), half(m), half(m)
    if name == "linear_gelu":
        n, k, m = (2048, 1024, 4096) if large else (64, 256, 256)
        return half(n, k), half(m, k) / 16, half(m)
    sizes = 1 << (25 if large else 12)
    return (*(torch.randn(sizes, device="cuda") for _ in range(3)), 1e-3)


def neighbour(op: Step) -> Step:
    """The op and something that Inductor makes beside it."""

    def step(x: Tensor, *rest: Any) -> Tensor:
        y = op(x, *rest)
        return torch.relu(x if y is None else y) + 1

    return step


PAIRS: dict[str, tuple[Step, Step]] = {
    "softmax": (ops.softmax, softmax),
    "layer_norm": (ops.layer_norm, layer_norm),
    "linear_gelu": (ops.linear_gelu, linear_gelu),
    "momentum_": (ops.momentum_, momentum_),
}


def in_a_row(step: Step, args: tuple[Any, ...]) -> float:
    """Microseconds of one call."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(CALLS):
        step(*args)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / CALLS * 1e6


def agree(ours: Step, theirs: Step, args: tuple[Any, ...]) -> None:
    """The same values, of copies of what is written to."""
    results = []
    for step in (ours, theirs):
        own = tuple(a.clone() if isinstance(a, Tensor) else a for a in args)
        results.append((step(*own), *(a for a in own if isinstance(a, Tensor))))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)


def measured(ours: Step, theirs: Step, args: tuple[Any, ...], rounds: int) -> dict[str, float]:
    agree(ours, theirs, args)
    runs = {"sl_triton": ours, "triton_op": theirs, "again": theirs}
    for step in runs.values():
        for _ in range(WARM):
            step(*args)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        order = list(runs.items())[:: 1 if turn % 2 else -1]
        for name, step in order:
            times[name].append(in_a_row(step, args))
    by = times["triton_op"]
    return {
        "sl_triton_us": median(times["sl_triton"]),
        "triton_op_us": median(by),
        "ratio": median(a / b for a, b in zip(times["sl_triton"], by, strict=True)),
        "noise": median(a / b for a, b in zip(times["again"], by, strict=True)),
    }


def rows(rounds: int) -> Iterator[dict[str, Any]]:
    for op in ops.OPS:
        binding.build(op)
    for name, (ours, theirs) in PAIRS.items():
        for size in ("small", "large"):
            args = arguments(name, size == "large")
            yield {"op": name, "size": size, "mode": "eager", **measured(ours, theirs, args, rounds)}
            torch._dynamo.reset()
            pair = [torch.compile(neighbour(op), fullgraph=True, dynamic=False) for op in (ours, theirs)]
            yield {"op": name, "size": size, "mode": "compiled", **measured(*pair, args, rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record here")
    parser.add_argument("--rounds", type=int, default=21)
    options = parser.parse_args()
    began, cells = time.monotonic(), []
    with torch.no_grad():
        for row in rows(options.rounds):
            cells.append(row)
            print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
    device = f"{torch.cuda.get_device_name()}, driver {driver()}, CUDA {torch.version.cuda}"
    if options.json:
        write(options.json, record(SOURCES, ["triton"], device, cells=cells, seconds=round(time.monotonic() - began)))


if __name__ == "__main__":
    main()
