"""Every kind of sparse convolution, and pooling, on the CPU: against spconv 2.3.8's CPU build and a plain torch loop.

Tables (ours), pairs (spconv's) and hits (the loop's) are built beforehand, so it is the computation that is timed.
spconv's CPU build has no groups, and its backward of a convolution fails. Measured as ``sparse3d_cpu.py`` measures:
a ratio is taken inside a round, medians and quartiles over rounds; CPU time on one thread, and with ``--threads``,
which only a machine with nothing else to do can answer, wall time on more. *bound* is the ratio that a kernel would
have which did nothing but multiply, at the rate of MKL's best square product in the same run.

    python benchmarks/sparse3d_kinds_cpu.py [--json benchmarks/results/sparse3d_kinds_cpu.json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import _record
import sparse3d_cpu as base
import torch
from torch import Tensor

from shiplap_sparse3d import Geometry, Plan, pooling

OPS, POOLING = (
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/ops.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/pooling.py",
)
SOURCES = (*base.PRODUCTS, f"{base.CSRC}/pool.cpp", f"{POOLING}::max_pool_with_taps", f"{POOLING}::max_pool_grad")
BARS = {"forward": ("spconv", 2.0), "forward+backward": ("torch loop", 2.0)}
Run = Callable[[], object]


@dataclass(frozen=True)
class Kind:
    """One layer: what it computes on which tables, with inputs that require gradients, and spconv's pairs for it."""

    name: str
    plan: Plan
    channels: int
    peer: tuple | None = None  # coords, grid and window for spconv
    groups: int = 1
    pool: bool = False
    inverse: bool = False

    def leaves(self) -> list[Tensor]:
        torch.manual_seed(0)
        k, c = self.plan.table.shape[1], self.channels
        feats = torch.randn(self.plan.rows, c)  # positive ones are pooled: spconv's maxima start at zero
        made = (
            [feats.abs()]
            if self.pool
            else [feats, torch.randn(c, k, c // self.groups) / (k * c) ** 0.5, torch.randn(c)]
        )
        return [t.requires_grad_() for t in made]

    def ours(self, feats: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        if weight is None:
            return pooling.max_pool(feats, self.plan.table, self.plan.back[0])
        return self.plan.conv(feats, weight, bias, self.groups)


def kinds(work: base.Workload) -> list[Kind]:
    coords, grid, c = torch.from_numpy(work.coords), list(work.shape), work.channels
    geometry = Geometry(coords, work.shape, 1)
    down, pooled = geometry.strided(3, 2, 1), geometry.pooled(2, 2)
    small = down.geometry
    up = small.transposed(2, 2)
    three, two = ([3] * 3, [2] * 3, [1] * 3), ([2] * 3, [2] * 3, [0] * 3)
    return [
        Kind("submanifold 3", geometry.subm(3), c, (coords, grid, ([3] * 3, [1] * 3, [1] * 3))),
        Kind("strided 3/2", down.plan, c, (coords, grid, three)),
        Kind("inverse 3/2", down.plan.t, c, (coords, grid, three), inverse=True),
        Kind("transposed 2/2", up.plan, c, (small.coords, list(small.spatial_shape), two)),
        Kind("depthwise 3", geometry.subm(3), c, groups=c),
        Kind("4 groups, 3", geometry.subm(3), c, groups=4),
        Kind("max pool 2/2", pooled.plan, c, (coords, grid, two), pool=True),
    ]


# ---------------------------------------------------------------------------------------------- contestants


class Loop:
    """What one writes in plain torch: for each tap select the hits, multiply, add; or take the larger."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.rows, self.pairs = kind, kind.plan.table.shape[0], []
        for column in kind.plan.table.t():
            to = (column >= 0).nonzero()[:, 0]
            self.pairs.append((to, column[to].long()))

    def __call__(self, feats: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        if weight is None:
            out = feats.new_full((self.rows, feats.shape[1]), -torch.inf)
            for to, source in self.pairs:
                out = out.index_put((to,), torch.maximum(out[to], feats[source]))
            return out
        out = bias.repeat(self.rows, 1)
        for v, (to, source) in enumerate(self.pairs):
            out = out.index_add_(0, to, self.product(feats.index_select(0, source), weight[:, v]))
        return out

    def product(self, rows: Tensor, weight: Tensor) -> Tensor:
        if self.kind.groups == rows.shape[1]:
            return rows * weight[:, 0]
        split = rows.unflatten(1, (self.kind.groups, -1)).transpose(0, 1)
        each = split @ weight.unflatten(0, (self.kind.groups, -1)).mT
        return each.transpose(0, 1).flatten(1)


class Spconv:
    """The functions behind spconv's modules, on pairs that exist."""

    def __init__(self, kind: Kind, leaves: list[Tensor]) -> None:
        from spconv.core import ConvAlgo
        from spconv.pytorch import ops

        assert kind.peer is not None
        coords, grid, (kernel, stride, padding) = kind.peer
        transposed, subm = kind.name.startswith("transposed"), kind.name.startswith("subm")
        rest = [1] * 3, [0] * 3
        self.out, self.pairs, self.count = ops.get_indice_pairs(
            coords, 1, grid, ConvAlgo.Native, kernel, stride, padding, *rest, subm, transposed
        )
        self.kind, self.rows = kind, len(self.out if not kind.inverse else coords)
        self.feats = leaves[0].detach()
        order = None
        if kind.inverse:  # its input rows are in the order of spconv's outputs
            ours = Geometry(coords, grid, 1).strided(kernel, stride, padding).geometry.coords
            order = matched(self.out, ours)
            self.feats = self.feats[order].contiguous()
        if not kind.pool:
            self.weight = leaves[1].detach().reshape(len(leaves[1]), *kernel, -1).contiguous()
            self.bias = leaves[2].detach()
        self.options = {"inverse": kind.inverse, "subm": subm}
        self.ops = ops

    def __call__(self) -> Tensor:
        if self.kind.pool:
            return self.ops.indice_maxpool(self.feats, self.pairs, self.count, self.rows)
        out = self.ops.indice_conv(self.feats, self.weight, self.pairs, self.count, self.rows, **self.options)
        return out.add_(self.bias)


def matched(theirs: Tensor, ours: Tensor) -> Tensor:
    """The row of ``ours`` that is each row of ``theirs``."""
    rows = {tuple(c): i for i, c in enumerate(ours.tolist())}
    return torch.tensor([rows[tuple(c)] for c in theirs.tolist()])


def outputs(kind: Kind, work: base.Workload) -> Tensor:
    """Coordinates of the rows of our result."""
    geometry = Geometry(torch.from_numpy(work.coords), work.shape, 1)
    down = geometry.strided(3, 2, 1).geometry
    return {
        "strided 3/2": lambda: down.coords,
        "transposed 2/2": lambda: down.transposed(2, 2).geometry.coords,
        "max pool 2/2": lambda: geometry.pooled(2, 2).geometry.coords,
    }.get(kind.name, lambda: geometry.coords)()


def wrong_rows(kind: Kind, work: base.Workload, peer: Spconv, want: Tensor) -> int:
    """Rows of spconv's result that differ from ours; with OpenMP its scatter-add races (see ``sparse3d_cpu.py``)."""
    theirs, coords = peer(), outputs(kind, work)
    if not (kind.inverse or kind.name.startswith("subm")):
        want = want[matched(peer.out, coords)]
    return int(((theirs - want).abs() > 1e-3).any(1).sum())


def flops(kind: Kind) -> float:
    """Of the products of a forward pass."""
    return 0.0 if kind.pool else 2.0 * int((kind.plan.table >= 0).sum()) * kind.channels**2 / kind.groups


def best_rate(clock: Callable[[], float]) -> float:
    """Multiplications and additions a second of MKL's best square product."""
    best = 0.0
    for size in (512, 1024, 1536):
        a, b, out = (torch.randn(size, size) for _ in range(3))
        for _ in range(5):
            start = clock()
            torch.mm(a, b, out=out)
            best = max(best, 2.0 * size**3 / (clock() - start))
    return best


# ---------------------------------------------------------------------------------------------- the runs


def run(kind: Kind, work: base.Workload, rounds: int, clock: Callable[[], float]) -> dict:
    leaves = kind.leaves()
    plain, loop = [t.detach() for t in leaves], Loop(kind)
    grad = torch.randn(kind.plan.table.shape[0], kind.channels)

    def both(fn: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        out = fn(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    for mine, theirs in zip(both(kind.ours), both(loop), strict=True):  # a wrong kernel is not worth timing
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))

    forward: dict[str, Run] = {"ours": lambda: kind.ours(*plain), "torch loop": lambda: loop(*plain)}
    train: dict[str, Run] = {"ours": lambda: both(kind.ours), "torch loop": lambda: both(loop)}
    wrong = None
    if kind.peer is not None and (peer := spconv(kind, leaves)) is not None:
        wrong = wrong_rows(kind, work, peer, kind.ours(*plain))
        forward["spconv"] = peer
    sections = {"forward": forward, "forward+backward": train}
    return {
        "kind": kind.name,
        "rows": [kind.plan.rows, kind.plan.table.shape[0]],
        "hits": int((kind.plan.table >= 0).sum()),
        "forward_gflop": round(flops(kind) / 1e9, 3),
        "spconv_wrong_rows": wrong,
        "sections": {name: base.measure(who, rounds, clock) for name, who in sections.items()},
    }


def spconv(kind: Kind, leaves: list[Tensor]) -> Spconv | None:
    try:
        return Spconv(kind, leaves)
    except ImportError:
        return None


def show(report: dict, rate: float) -> None:
    print(f"  {report['kind']}: {report['rows'][0]} -> {report['rows'][1]} rows, {report['hits']} hits", end="")
    print(f", spconv has {report['spconv_wrong_rows']} wrong rows" if report["spconv_wrong_rows"] else "")
    for section, results in report["sections"].items():
        passes = 1 if section == "forward" else 3
        peer, bar = BARS[section]
        peer = peer if peer in results else "torch loop"
        met = "met" if results[peer]["ratio"] >= bar else "MISSED"
        if report["forward_gflop"]:
            results[peer]["bound"] = round(results[peer]["ms"] * rate / 1e12 / (passes * report["forward_gflop"]), 2)
            met += f", bound {results[peer]['bound']:.2f}x"
        times = ", ".join(f"{name} {r['ms']:.2f} ({r['ratio']:.2f}x)" for name, r in results.items())
        print(f"    {section}: {times}; bar {bar}x {peer}: {met}", flush=True)


def run_all(only: str, rounds: int, threads: int, clock: str) -> list[dict]:
    torch.set_num_threads(threads)
    timer = time.perf_counter if clock == "wall" else time.process_time
    rate, reports = best_rate(timer), []
    print(f"MKL's best square product: {rate / 1e9:.1f} GFLOP/s")
    for work in (base.sphere_shell(64, 64), base.sphere_shell(128, 32)):
        print(f"\n{work.name}, {len(work.coords)} voxels")
        rows = []
        for kind in kinds(work):
            if only in kind.name:
                rows.append(run(kind, work, rounds, timer))
                show(rows[-1], rate)
        reports.append(
            {"workload": work.name, "mkl_gflops": round(rate / 1e9, 1), "voxels": len(work.coords), "kinds": rows}
        )
    return reports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="run the kinds whose name contains this")
    parser.add_argument("--child", choices=("wall", "cpu"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        reports = run_all(arguments.only, arguments.rounds, arguments.threads, arguments.child)
        arguments.json.write_text(json.dumps(reports))
        return
    where = _record.record(SOURCES, ("spconv",), isa=base.best_isa())
    runs = []
    for threads, clock in ((1, "cpu"), *([(arguments.threads, "wall")] if arguments.threads > 1 else [])):
        print(f"\n=== {threads} thread(s), {clock} time", flush=True)
        with tempfile.TemporaryDirectory() as directory:  # spconv brings an OpenMP that only the environment reaches
            result = Path(directory) / "result.json"
            command = [sys.executable, __file__, "--child", clock, "--json", str(result), "--only", arguments.only]
            command += ["--rounds", str(arguments.rounds), "--threads", str(threads)]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": str(threads)})
            reports = json.loads(result.read_text())
        runs.append({"threads": threads, "clock": clock, "load": os.getloadavg()[0], "workloads": reports})
        if arguments.json:
            _record.write(arguments.json, where | {"runs": runs})


if __name__ == "__main__":
    main()
