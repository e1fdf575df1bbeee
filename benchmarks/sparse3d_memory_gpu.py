"""Memory against time: a submanifold convolution over tables sorted in 1 to 9 parts (CUDA, fp16, map cached).

For each shell: milliseconds of a forward (median of 50, the numbers of parts taking turns) and the peak of a call in
MiB, result included, inputs not. ``default`` is what ``parts_for`` takes, ``fills`` what ``parts_that_fill`` would. The
leanest peers allocate the result alone (``peak_mib`` of ``sparse3d_gpu.json``), so a peak is also given in results.
Run: ``python benchmarks/sparse3d_memory_gpu.py [--json]``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from _record import record, write
from sparse3d_gpu import SOURCES, once, peak

from shiplap_sparse3d.plan import Plan, parts_for, parts_that_fill
from shiplap_sparse3d.steps import submanifold_plan

CASES = ((8, 1024), (16, 1024), (32, 1024), (64, 1024), (128, 512), (256, 256))
MIB = 1 << 20


def shell(edge: int) -> torch.Tensor:
    """``int32 [n, 4]``: the cells of a sphere's surface in a grid of ``edge`` cells along each axis."""
    at = torch.arange(edge, device="cuda") - (edge - 1) / 2
    inside = (at[:, None, None] ** 2 + at[None, :, None] ** 2 + at[None, None, :] ** 2).sqrt()
    cells = ((inside < edge / 2) & (inside > edge / 2 - 1.25)).nonzero().int()
    return torch.nn.functional.pad(cells, (1, 0))


def measured(plans: dict[int, Plan], feats: torch.Tensor, weight: torch.Tensor) -> dict[int, tuple[float, float]]:
    """Milliseconds and MiB of each plan."""
    runs = {parts: lambda plan=plan: plan.conv(feats, weight) for parts, plan in plans.items()}
    for run in runs.values():
        for _ in range(10):
            run()
    peaks = {parts: peak(run) for parts, run in runs.items()}
    times: dict[int, list[float]] = {parts: [] for parts in runs}
    for _ in range(10):
        for parts, run in runs.items():
            times[parts] += [once(run) for _ in range(7)][2:]
    return {parts: (statistics.median(times[parts]), peaks[parts]) for parts in runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/sparse3d_memory_gpu.json")
    asked, rows = parser.parse_args(), []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("shell    C      n  parts      ms  peak, MiB  results")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for edge, channels in CASES:
        coords = shell(edge)
        n = coords.shape[0]
        feats = torch.randn(n, channels, device="cuda", dtype=torch.float16)
        weight = torch.randn(channels, 27, channels, device="cuda", dtype=torch.float16) / (27 * channels) ** 0.5
        plain = submanifold_plan(coords, (edge, edge, edge), (3, 3, 3), (1, 1, 1)).unsorted()
        default, fills = parts_for(n, 27), parts_that_fill(n, channels, 27, multiprocessors=processors)
        plans = {parts: plain.sorted(parts) for parts in sorted({1, 2, 3, 9, default, fills})}
        with torch.no_grad():
            found = measured(plans, feats, weight)
        for parts, (ms, mib) in found.items():
            note = " default" * (parts == default) + " fills" * (parts == fills)
            results = mib / (n * channels * 2 / MIB)
            print(f"{edge:5} {channels:4} {n:6} {parts:6} {ms:7.3f} {mib:10.1f} {results:8.2f}{note}", flush=True)
            row = {"shell": edge, "channels": channels, "voxels": n, "parts": parts, "default": parts == default}
            rows.append({**row, "ms": round(ms, 4), "peak_mib": round(mib, 3), "results": round(results, 3)})
    if asked.json:
        sources = ["benchmarks/sparse3d_memory_gpu.py", *SOURCES]
        kept = record(sources, ["triton"], torch.cuda.get_device_name(), cells=rows)
        write(Path(__file__).parent / "results" / "sparse3d_memory_gpu.json", kept)


if __name__ == "__main__":
    main()
