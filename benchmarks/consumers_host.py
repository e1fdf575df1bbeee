"""What whole networks of spconv's users cost the host, without a GPU: ``python benchmarks/consumers_host.py``.

The networks of ``_networks.py`` run through the facade as on a GPU - layers, tables, plans, checks, autograd - with
launches that do nothing (``sparse3d_host.py``). What generated C++ does on a GPU from the 32nd call on does nothing
either. So nothing is computed, a strided layer has half of the voxels, and what is counted is ours: calls of Python and
C functions in one call of a network, which do not vary, and milliseconds of processor time, which do. PyTorch's own
layers compute on the CPU and count in the milliseconds.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import sparse3d_host as host
from _networks import NETWORKS
from _record import record, write

SOURCES = [
    "benchmarks/consumers_host.py",
    "benchmarks/_networks.py",
    "packages/shiplap/src/shiplap/declare/*.py",
    "packages/shiplap/src/shiplap/plan/*.py",
    "packages/shiplap/src/shiplap/dispatch/*.py",
    "packages/shiplap/src/shiplap/kernels/triton/template_kernel.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/*.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/spconv/*.py",
]
VOXELS, GRID = 2000, 32
MODES = ("inference", "training")


def silence() -> None:
    """Ops of sparse3d take CPU tensors as those of a GPU, and launch nothing."""
    host.silence()
    from shiplap.kernels.triton.kernel import LaunchedKernel
    from shiplap_sparse3d import bounded, norms, ops, plan, planning
    from shiplap_sparse3d.cuda import cells
    from shiplap_sparse3d.spconv import pairs

    host.on_cpu(
        [
            *(ops.conv, ops.conv_weight_grad, ops.tap_blocks, ops.out_coords, planning.subm_plan, planning.conv_plan),
            *(bounded.out_coords_bounded, bounded.first_voxels, norms.norm_relu),
        ]
    )
    pairs._on_gpu.__code__ = (lambda tensor: True).__code__
    plan.wants_sorted.__code__ = (lambda tensor: True).__code__
    plan.Plan.unsorted = lambda self: plan.Plan(self.table, self.rows)  # type: ignore[method-assign]
    LaunchedKernel.invoke_function = lambda self, call, tensors, extents, scratch: None  # type: ignore[method-assign]
    cells.out_coords = half


def half(cells: Tensor, shape: list[int], *window: list[int]) -> Tensor:
    """As ``out_coords`` of CUDA, which reads a number back: half as many voxels as there were."""
    from shiplap_sparse3d import bounded

    voxels, count = bounded.first_voxels(cells, shape, *window, max(1024, cells.shape[0]), 1)
    int(count)
    return voxels[: max(64, cells.shape[0] // 2)]


def runs(name: str, mode: str) -> Callable[[], Any]:
    import shiplap_sparse3d.spconv as facade

    torch.manual_seed(0)
    cells = torch.arange(VOXELS)
    coords = torch.stack([cells * 0, cells % GRID, cells // GRID % GRID, cells // GRID**2], 1).int()
    net, feats = NETWORKS[name](facade).train(mode == "training"), torch.randn(VOXELS, 4)

    def inference() -> Any:
        with torch.no_grad():
            return net(feats, coords, [GRID] * 3)

    def training() -> Any:
        net.zero_grad(set_to_none=True)
        net(feats, coords, [GRID] * 3).square().mean().backward()

    return training if mode == "training" else inference


def measured(run: Callable[[], Any], rounds: int, show: bool) -> dict[str, float]:
    for _ in range(3):
        run()
    best = float("inf")
    for _ in range(rounds):
        began = time.thread_time()
        run()
        best = min(best, time.thread_time() - began)
    with torch.autograd.set_multithreading_enabled(False):  # backwards run in this thread, where they are seen
        profiler = cProfile.Profile()
        profiler.enable()
        run()
        profiler.disable()
    stats: Any = pstats.Stats(profiler)
    if show:
        stats.sort_stats("tottime").print_stats(40)
    return {"calls": stats.total_calls, "ms": round(best * 1e3, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record there")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--profile", action="store_true", help="say where the time goes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    silence()
    rows = []
    for name in sorted(NETWORKS):
        for mode in MODES:
            rows.append({"network": name, "mode": mode, **measured(runs(name, mode), given.rounds, given.profile)})
            print(json.dumps(rows[-1]), flush=True)
    if given.json:
        write(given.json, record(SOURCES, ["triton"], rows=rows))


if __name__ == "__main__":
    main()
