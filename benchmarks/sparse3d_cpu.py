"""sparse3d on the CPU against spconv 2.3.8's CPU build and a plain torch loop.

Every round times each contestant once, in turn, so that whatever else the machine does falls on all of them; a ratio
is taken inside a round, and the median and the quartiles of the rounds' ratios are reported. The control is our own
kernel with one thread or on the baseline instruction set.

Two runs, each in a process of its own: CPU time on one thread and, but for ``--threads 1``, wall time on all. On a
machine that is busy with something else only the first is fair: there OpenMP's spinning barriers make both peers many
times slower.

    python benchmarks/sparse3d_cpu.py [--json benchmarks/results/sparse3d_cpu.json] [--rounds 25] [--threads 2]

The peer needs Python 3.11 (no later wheel exists): pip install --no-deps spconv==2.3.8 cumm==0.7.11 pccm ccimport,
and pybind11 fire lark portalocker.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "packages" / "shiplap-sparse3d"), str(ROOT / "benchmarks")]

import _record  # noqa: E402

import shiplap_sparse3d as sparse3d  # noqa: E402
from tests.sparse3d.abi_harness import Sparse3d  # noqa: E402

CSRC = "packages/shiplap-sparse3d/src/shiplap_sparse3d/csrc"
OPS = "packages/shiplap-sparse3d/src/shiplap_sparse3d/ops.py"
PRODUCTS = (
    *(f"{CSRC}/{name}" for name in ("conv*.cpp", "gemm_kernels*", "row_kernels*", "h*t*.h", "simd.h", "number.h")),
    f"{OPS}::conv",
    f"{OPS}::conv_weight_grad",
)
SOURCES = (
    *PRODUCTS,
    *(f"{CSRC}/{name}" for name in ("tables.cpp", "transpose_table.cpp", "voxels.*", "radix_sort.*")),
    f"{OPS}::subm_table",
    f"{OPS}::transpose_table",
)
LIDAR = ROOT / "packages/shiplap-sparse3d/src/shiplap_sparse3d/demo/data/autzen_trim.laz"
KERNEL = (3, 3, 3)
MIN_ROUNDS, SECONDS = 5, 10.0  # of a section; a busy machine would take minutes for all rounds
BARS = {"map build": ("spconv", 2.0), "forward": ("spconv", 2.0), "forward+backward": ("torch loop", 2.0)}


# ---------------------------------------------------------------------------------------------- workloads


@dataclass(frozen=True)
class Workload:
    name: str
    coords: np.ndarray  # int32 [n, 4], (batch, x, y, z)
    shape: tuple[int, int, int]
    channels: int


def with_batch(voxels: np.ndarray) -> np.ndarray:
    rows = np.concatenate([np.zeros((len(voxels), 1), np.int32), voxels.astype(np.int32)], axis=1)
    return np.ascontiguousarray(rows)


def sphere_shell(res: int, channels: int) -> Workload:
    """FlexGEMM's benchmark: voxels at a distance of [res/2 - 1.25, res/2] from the centre, in row-major order."""
    axis = np.arange(res, dtype=np.float32) - np.float32(res / 2) + np.float32(0.5)
    distance = np.sqrt(axis[:, None, None] ** 2 + axis[:, None] ** 2 + axis**2)
    voxels = np.argwhere((distance >= res / 2 - 1.25) & (distance <= res / 2))
    return Workload(f"shell {res}, C {channels}", with_batch(voxels), (res, res, res), channels)


def lidar_scan(voxel: float, channels: int) -> Workload:
    """The airborne scan of Autzen Stadium, voxelised; a row for each voxel that holds a point."""
    import laspy

    scan = laspy.read(LIDAR)
    points = np.stack([scan.x, scan.y, scan.z], axis=1) * 0.3048
    voxels = np.unique(np.floor((points - points.min(0)) / voxel).astype(np.int32), axis=0)
    x, y, z = (int(v) + 1 for v in voxels.max(0))
    return Workload(f"LiDAR {voxel} m, C {channels}", with_batch(voxels), (x, y, z), channels)


# ---------------------------------------------------------------------------------------------- contestants


class Ours:
    """What a user calls: the public ops and autograd. The maps are built beforehand, as they are for the others."""

    def __init__(self, work: Workload, data: Data) -> None:
        self.geometry = torch.from_numpy(work.coords), list(work.shape), list(KERNEL), [1, 1, 1]
        self.table = sparse3d.subm_table(*self.geometry)
        self.leaves = [t.clone().requires_grad_() for t in (data.feats, data.weight, data.bias)]
        self.constants, self.grad = (data.feats, data.weight, self.table, data.bias), data.grad

    def map_build(self) -> None:
        sparse3d.subm_table(*self.geometry)

    def forward(self) -> torch.Tensor:
        return sparse3d.conv(*self.constants)

    def forward_backward(self) -> tuple[torch.Tensor, ...]:
        feats, weight, bias = self.leaves
        out = sparse3d.conv(feats, weight, self.table, bias, symmetric=True)
        return out.detach(), *torch.autograd.grad(out, self.leaves, self.grad)


class Kernels:
    """The controls: the same kernels through their C ABI, on fewer threads or on another instruction set."""

    def __init__(self, work: Workload, data: Data, threads: int, isa: str | None = None) -> None:
        self.work, self.data = work, data
        self.kernels = Sparse3d(threads=threads, isa=isa)
        self.table = self.kernels.subm_table(work.coords, work.shape, KERNEL)
        self.table_t = self.kernels.transpose_table(self.table, len(work.coords))
        self.feats, self.weight, self.grad = (t.numpy() for t in (data.feats, data.weight, data.grad))
        self.bias = data.bias.numpy()

    def map_build(self) -> None:
        self.kernels.subm_table(self.work.coords, self.work.shape, KERNEL)

    def forward(self) -> torch.Tensor:
        return torch.from_numpy(self.kernels.conv(self.feats, self.weight, self.table, self.bias))

    def forward_backward(self) -> tuple[torch.Tensor, ...]:
        out = self.forward()
        grad_feats = self.kernels.conv(self.grad, self.weight.transpose(2, 1, 0), self.table_t)
        grad_weight = self.kernels.conv_weight_grad(self.grad, self.feats, self.table)
        return out, torch.from_numpy(grad_feats), torch.from_numpy(grad_weight), self.data.grad.sum(0)


class TorchLoop:
    """What one writes in plain torch: for each tap select the hits, multiply, add; the hits are found beforehand."""

    def __init__(self, data: Data, table: np.ndarray) -> None:
        self.data = data
        self.weight = data.weight.transpose(0, 1).contiguous()  # [k, co, ci]: as good a layout as the loop can have
        self.pairs = []
        for tap in range(table.shape[1]):
            rows = np.nonzero(table[:, tap] >= 0)[0]
            self.pairs.append((torch.from_numpy(rows), torch.from_numpy(table[rows, tap].astype(np.int64))))

    def forward(self) -> torch.Tensor:
        out = self.data.bias.repeat(len(self.data.grad), 1)
        for (to, source), weight in zip(self.pairs, self.weight, strict=True):
            out.index_add_(0, to, self.data.feats.index_select(0, source) @ weight.T)
        return out

    def forward_backward(self) -> tuple[torch.Tensor, ...]:
        out = self.forward()
        feats, grad = self.data.feats, self.data.grad
        grad_feats, grad_weight = torch.zeros_like(feats), torch.empty_like(self.weight)
        for tap, (to, source) in enumerate(self.pairs):
            gathered = grad.index_select(0, to)
            grad_feats.index_add_(0, source, gathered @ self.weight[tap])
            torch.mm(gathered.T, feats.index_select(0, source), out=grad_weight[tap])
        return out, grad_feats, grad_weight.transpose(0, 1), grad.sum(0)


class Spconv:
    """spconv's CPU build; its map is built once and cached by indice_key for the forward."""

    def __init__(self, work: Workload, data: Data) -> None:
        import spconv.pytorch as spconv
        from spconv.core import ConvAlgo
        from spconv.pytorch.ops import get_indice_pairs

        self.coords, self.shape = torch.from_numpy(work.coords), list(work.shape)
        self.get_indice_pairs, self.native = get_indice_pairs, ConvAlgo.Native
        c = work.channels
        self.conv = spconv.SubMConv3d(c, c, 3, bias=True, indice_key="map", algo=ConvAlgo.Native)
        with torch.no_grad():
            self.conv.weight.copy_(data.weight.reshape(self.conv.weight.shape))
            self.conv.bias.copy_(data.bias)
            self.input = spconv.SparseConvTensor(data.feats, self.coords, self.shape, 1)
            self.input = self.input.replace_feature(data.feats)
            self.conv(self.input)

    def map_build(self) -> None:
        self.get_indice_pairs(
            self.coords, 1, self.shape, self.native, [3, 3, 3], [1, 1, 1], [1, 1, 1], [1, 1, 1], [0, 0, 0], subm=True
        )

    def forward(self) -> torch.Tensor:
        with torch.no_grad():
            return self.conv(self.input).features


@dataclass(frozen=True)
class Data:
    feats: torch.Tensor
    weight: torch.Tensor  # [co, k, ci]
    bias: torch.Tensor
    grad: torch.Tensor


def random_data(work: Workload) -> Data:
    torch.manual_seed(0)
    n, c = len(work.coords), work.channels
    return Data(torch.randn(n, c), torch.randn(c, 27, c) / (27 * c) ** 0.5, torch.randn(c), torch.randn(n, c))


# ---------------------------------------------------------------------------------------------- measuring


def measure(contestants: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float]) -> dict:
    """Milliseconds and ratios to "ours" of every contestant, one call each a round."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for call in contestants.values():
        call()
    order = list(contestants)
    deadline = time.monotonic() + SECONDS
    for round_ in range(rounds):
        if round_ >= MIN_ROUNDS and time.monotonic() > deadline:
            break
        for name in order[round_ % len(order) :] + order[: round_ % len(order)]:
            start = clock()
            contestants[name]()
            times[name].append((clock() - start) * 1e3)
    result: dict[str, dict] = {}
    for name, values in times.items():
        ratios = sorted(v / ours for v, ours in zip(values, times["ours"], strict=True))
        quartiles = statistics.quantiles(ratios, n=4)
        result[name] = {
            "ms": round(statistics.median(values), 3),
            "best_ms": round(min(values), 3),
            "ratio": round(quartiles[1], 3),
            "ratio_quartiles": [round(quartiles[0], 3), round(quartiles[2], 3)],
        }
    return result


def check_agreement(ours: Ours | Kernels, loop: TorchLoop) -> None:
    """A wrong kernel is not worth timing."""
    for mine, theirs in zip(ours.forward_backward(), loop.forward_backward(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


def wrong_rows(peer: Spconv, expected: torch.Tensor, tries: int = 5) -> list[int]:
    """Rows of the peer's forward that are wrong, for each of a few calls.

    spconv 2.3.8's CPU scatter-add races when OpenMP gives it more than one thread: some calls get a few dozen rows
    wrong, others none (2026-11, 2 cores; none with OMP_NUM_THREADS=1). It is timed all the same.
    """
    calls = [peer.forward() for _ in range(tries)]
    return [int(((out - expected).abs() > 1e-3).any(1).sum()) for out in calls]


def run(work: Workload, rounds: int, threads: int, clock: Callable[[], float]) -> dict:
    data = random_data(work)
    ours = Ours(work, data)
    one_thread, baseline = Kernels(work, data, 1), Kernels(work, data, threads, "baseline")
    loop = TorchLoop(data, ours.table.numpy())
    try:
        peer = Spconv(work, data)
    except ImportError:
        peer = None
    check_agreement(ours, loop)
    sections: dict[str, dict[str, Callable[[], object]]] = {
        "map build": {"ours": ours.map_build, "1 thread": one_thread.map_build},
        "forward": {
            "ours": ours.forward,
            "torch loop": loop.forward,
            "1 thread": one_thread.forward,
            "baseline ISA": baseline.forward,
        },
        "forward+backward": {
            "ours": ours.forward_backward,
            "torch loop": loop.forward_backward,
            "1 thread": one_thread.forward_backward,
            "baseline ISA": baseline.forward_backward,
        },
    }
    if peer is not None:
        sections["map build"]["spconv"] = peer.map_build
        sections["forward"]["spconv"] = peer.forward
    hits = int((ours.table >= 0).sum())
    return {
        "workload": work.name,
        "voxels": len(work.coords),
        "hits_per_voxel": round(hits / len(work.coords), 2),
        "forward_gflop": round(2 * hits * work.channels**2 / 1e9, 3),
        "spconv_wrong_rows": wrong_rows(peer, ours.forward()) if peer else None,
        "sections": {name: measure(contestants, rounds, clock) for name, contestants in sections.items()},
    }


# ---------------------------------------------------------------------------------------------- reporting


def best_isa() -> str:
    return next(isa for isa in ("avx512bf16", "avx512", "avx2", "baseline") if Sparse3d(isa=isa).has_isa())


def verdict(section: str, results: dict) -> str:
    peer, bar = BARS[section]
    if peer not in results:
        return f"bar {bar}x {peer}: not measured"
    ratio = results[peer]["ratio"]
    return f"bar {bar}x {peer}: {'met' if ratio >= bar else 'MISSED'}, {ratio:.2f}x"


def show(report: dict) -> None:
    print(
        f"\n{report['workload']}: {report['voxels']} voxels, {report['hits_per_voxel']} hits each, "
        f"{report['forward_gflop']} GFLOP forward"
    )
    if any(report["spconv_wrong_rows"] or []):
        print(f"  spconv's forward has {report['spconv_wrong_rows']} wrong rows in five calls")
    for section, results in report["sections"].items():
        print(f"  {section}  ({verdict(section, results)})")
        for name, result in results.items():
            low, high = result["ratio_quartiles"]
            times = f"{result['ms']:9.2f} ms (best {result['best_ms']:.2f})"
            print(f"    {name:13} {times:32} {result['ratio']:6.2f}x ours  [{low:.2f}, {high:.2f}]")


# ---------------------------------------------------------------------------------------------- the runs


def run_all(only: str, rounds: int, threads: int, clock: str) -> list[dict]:
    torch.set_num_threads(threads)
    workloads = [sphere_shell(64, 64), sphere_shell(128, 32)]
    if LIDAR.exists():
        workloads += [lidar_scan(0.5, 32), lidar_scan(1.0, 32)]
    reports = []
    for work in workloads:
        if only in work.name:
            timer = time.perf_counter if clock == "wall" else time.process_time
            reports.append(run(work, rounds, threads, timer))
            show(reports[-1])
    return reports


def run_in_process(arguments: argparse.Namespace, threads: int, clock: str) -> list[dict]:
    """A fresh process, because spconv brings an OpenMP of its own that only the environment reaches."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        command = [sys.executable, __file__, "--child", clock, "--json", str(result), "--only", arguments.only]
        command += ["--rounds", str(arguments.rounds), "--threads", str(threads)]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": str(threads)})
        return json.loads(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default="", help="run the workloads whose name contains this")
    parser.add_argument("--child", choices=("wall", "cpu"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        reports = run_all(arguments.only, arguments.rounds, arguments.threads, arguments.child)
        arguments.json.write_text(json.dumps(reports))
        return
    where = _record.record(SOURCES, ("spconv",), isa=best_isa())
    for name, value in where.items():
        print(f"{name:12} {value}")
    runs = []
    for threads, clock in ((1, "cpu"), *([(arguments.threads, "wall")] if arguments.threads > 1 else [])):
        print(f"\n=== {threads} thread(s), {clock} time", flush=True)
        reports = run_in_process(arguments, threads, clock)
        runs.append({"threads": threads, "clock": clock, "load": os.getloadavg()[0], "workloads": reports})
        if arguments.json:
            _record.write(arguments.json, where | {"runs": runs})


if __name__ == "__main__":
    main()
