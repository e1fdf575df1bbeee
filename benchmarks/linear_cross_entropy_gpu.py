"""``dense.linear_cross_entropy`` on a GPU, beside Liger's kernel and beside torch with all logits.

Each row is a forward and a backward of one loss, in bfloat16: the largest memory that the step allocated beyond its
arguments, the median and the least time of rounds in which the variants take turns, and the relative errors (norms) of
the loss and of both gradients against the same loss in float32. ``wide`` variants add up the gradient of the weights in
float32. ``torch`` is ``F.cross_entropy(F.linear(hidden, weight).float(), target)``. ``halved`` rows have a loss that is
multiplied by .5, as by gradient accumulation.

    python benchmarks/linear_cross_entropy_gpu.py [--json benchmarks/results/linear_cross_entropy_gpu.json]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from _record import record, write
from torch import Tensor
from torch.nn import functional as F

import shiplap_dense as dense

SOURCES = (
    "benchmarks/linear_cross_entropy_gpu.py",
    "packages/shiplap-dense/src/shiplap_dense/losses.py",
    "packages/shiplap-dense/src/shiplap_dense/loss_rows.py",
)
WIDTH = 4096
SIZES = ((4096, 32000), (16384, 32000), (4096, 128256), (8192, 128256), (16384, 128256))  # rows, classes
MEMORY_OF_LOGITS = 48 << 30  # torch is left out where its logits and their gradients need more

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_torch(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def by_shiplap(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return dense.linear_cross_entropy(hidden, weight, target)


def by_shiplap_wide(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return dense.linear_cross_entropy(hidden, weight, target, accum_dtype=torch.float32)


def liger_losses() -> dict[str, Loss]:
    """Return Liger's loss, with its gradient of the weights in bfloat16 and in float32; none where it is missing."""
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger
    except ImportError as e:
        print(f"# Liger is left out: {e}", file=sys.stderr)
        return {}

    def loss_of(accum_dtype: torch.dtype | None) -> Loss:
        def loss_by_liger(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            options = (None, None, -100, 0.0, 0.0, "mean", None, False, accum_dtype)
            made: Any = Liger.apply(hidden, weight, target, *options)
            loss: Tensor = made[0] if isinstance(made, tuple) else made
            return loss

        return loss_by_liger

    return {"liger": loss_of(None), "liger wide": loss_of(torch.float32)}


def step(loss: Loss, leaves: tuple[Tensor, Tensor, Tensor], factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and both gradients of one step."""
    hidden, weight, target = leaves
    hidden.grad = weight.grad = None
    made = loss(hidden, weight, target)
    (made if factor == 1 else made * factor).backward()
    gradients: list[Any] = [hidden.grad, weight.grad]
    return made.detach(), gradients[0], gradients[1]


def in_float32(hidden: Tensor, weight: Tensor, target: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss and both gradients in float32, over chunks of rows."""
    wide, of_weight, of_hidden = weight.float(), torch.zeros_like(weight, dtype=torch.float32), []
    total, count = torch.zeros((), device=hidden.device), (target != -100).sum()
    for x, t in zip(hidden.detach().split(1024), target.split(1024), strict=True):
        rows = x.float()
        logits = rows @ wide.t()
        total += F.cross_entropy(logits, t, reduction="sum")
        slope = logits.softmax(1)
        kept = t != -100
        slope[torch.arange(len(t), device=t.device), t.where(kept, 0)] -= 1
        slope *= (factor * kept / count)[:, None]
        of_hidden.append(slope @ wide)
        of_weight += slope.t() @ rows
    return total / count, torch.cat(of_hidden), of_weight


def error_of(got: Tensor, wanted: Tensor) -> float:
    """Return the relative error in norms."""
    return float((got.float() - wanted).norm() / wanted.norm())


def measure_size(rows: int, classes: int, factor: float, rounds: int, losses: dict[str, Loss]) -> list[dict[str, Any]]:
    """Return a row for each variant at one size."""
    rng = torch.Generator(device="cuda").manual_seed(0)

    def drawn(*shape: int, by: float) -> Tensor:
        values = torch.randn(shape, generator=rng, device="cuda", dtype=torch.bfloat16)
        return (values * by).requires_grad_()

    hidden, weight = drawn(rows, WIDTH, by=1.0), drawn(classes, WIDTH, by=WIDTH**-0.5)
    target = torch.randint(0, classes, (rows,), generator=rng, device="cuda")
    target[::7] = -100
    leaves = (hidden, weight, target)
    wanted = in_float32(hidden, weight, target, factor)
    made: dict[str, dict[str, Any]] = {}
    for name, loss in losses.items():
        if name == "torch" and rows * classes * 12 > MEMORY_OF_LOGITS:
            continue
        got = step(loss, leaves, factor)  # compiles kernels and takes workspaces of libraries
        errors = dict(zip(("loss", "hidden", "weight"), map(error_of, got, wanted), strict=True))
        del got
        hidden.grad = weight.grad = None
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(loss, leaves, factor)
        torch.cuda.synchronize()
        made[name] = {"memory_mb": (torch.cuda.max_memory_allocated() - before) / 1e6, "errors": errors}
        hidden.grad = weight.grad = None
    del wanted
    times: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(rounds):
        for name in list(made) if turn % 2 else list(made)[::-1]:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step(losses[name], leaves, factor)
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end))
    common = {"rows": rows, "classes": classes, "width": WIDTH, "factor": factor}
    return [
        {**common, "variant": name, "ms": statistics.median(times[name]), "least_ms": min(times[name]), **row}
        for name, row in made.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record to this file")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=60, help="begin no further size after this time")
    options = parser.parse_args()
    losses: dict[str, Loss] = {"shiplap": by_shiplap, "shiplap wide": by_shiplap_wide, **liger_losses()}
    losses["torch"] = by_torch
    began, rows = time.monotonic(), list[dict[str, Any]]()
    for count, classes, factor in (*((n, v, 1.0) for n, v in SIZES), (8192, 128256, 0.5)):
        if time.monotonic() - began > options.seconds:
            print(f"# no time for {count} x {classes}, factor {factor}", file=sys.stderr)
            continue
        for row in measure_size(count, classes, factor, options.rounds, losses):
            rows.append(row)
            print({**row, "errors": {k: f"{v:.1e}" for k, v in row["errors"].items()}}, flush=True)
        if options.json:
            device = torch.cuda.get_device_name()
            write(options.json, record(SOURCES, ("triton", "liger_kernel"), device, rows=rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
