"""Memory against time: a submanifold convolution over tables sorted in 1 to 9 parts (CUDA, fp16, map cached).

For each shell: milliseconds of a forward (median of 50) and its peak in MiB, inputs and result aside. ``default`` is
what ``parts_for`` takes, ``fills`` what ``parts_that_fill`` would. Run: ``python benchmarks/sparse3d_memory_gpu.py``.
"""

from __future__ import annotations

import statistics

import torch

from shiplap_sparse3d.plan import Plan, parts_for, parts_that_fill
from shiplap_sparse3d.steps import submanifold

CASES = ((8, 1024), (16, 1024), (32, 1024), (64, 1024), (128, 512), (256, 256))
MIB = 1 << 20


def shell(edge: int) -> torch.Tensor:
    """``int32 [n, 4]``: the cells of a sphere's surface in a grid of ``edge`` cells along each axis."""
    at = torch.arange(edge, device="cuda") - (edge - 1) / 2
    inside = (at[:, None, None] ** 2 + at[None, :, None] ** 2 + at[None, None, :] ** 2).sqrt()
    cells = ((inside < edge / 2) & (inside > edge / 2 - 1.25)).nonzero().int()
    return torch.nn.functional.pad(cells, (1, 0))


def measured(plan: Plan, feats: torch.Tensor, weight: torch.Tensor) -> tuple[float, float]:
    """Milliseconds and MiB."""
    for _ in range(10):
        plan.conv(feats, weight)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = plan.conv(feats, weight)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()
    times = []
    for _ in range(50):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        plan.conv(feats, weight)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times), peak / MIB


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("shell   C      n  parts      ms  partial sums, MiB  result, MiB")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for edge, channels in CASES:
        coords = shell(edge)
        n = coords.shape[0]
        feats = torch.randn(n, channels, device="cuda", dtype=torch.float16)
        weight = torch.randn(channels, 27, channels, device="cuda", dtype=torch.float16) / (27 * channels) ** 0.5
        plain = submanifold(coords, (edge, edge, edge), (3, 3, 3), (1, 1, 1)).unsorted()
        default, fills = parts_for(n, 27), parts_that_fill(n, channels, 27, multiprocessors=processors)
        for parts in sorted({1, 2, 3, 9, default, fills}):
            ms, mib = measured(plain.sorted(parts), feats, weight)
            note = " default" * (parts == default) + " fills" * (parts == fills)
            print(f"{edge:5} {channels:4} {n:6} {parts:6} {ms:7.3f} {mib:18.1f} {n * channels * 2 / MIB:12.1f}{note}")


if __name__ == "__main__":
    main()
