"""A sparse U-Net trains on the CPU beside spconv's CPU build, and what of its time any program would need.

One class is the network of both: it gets the module whose layers it uses. A round times one forward and one training
step (forward and backward) of each, in turns, as processor time of one thread. Then one training step of ours is
taken apart: for each kind of op its time, multiply-adds and bytes. The *bound* of an op is the longer of two times:
its multiply-adds at the rate of torch's best square product here, and its bytes (arguments and results, once each) at
the rate of torch's best sum of two large vectors. No kernel is faster than its bound unless a result stays in a cache
from one op to the next. ``products_ms`` is a second limit: torch's own products of the sizes that occur, of rows that
are gathered already, with the bounds of all other ops. spconv's time divided by a limit is the most that is attainable.

Ops of ours are called as a built package calls them, through bindings in C++.

    python benchmarks/sparse3d_unet_cpu.py [--json benchmarks/results/sparse3d_unet_cpu.json] [--rounds 15]

The peer is installed as for ``sparse3d_cpu.py``. Without it the ratios are left out.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parent))

import sparse3d_cpu
from _record import record, write

from shiplap_sparse3d import ops

SOURCES = [
    "benchmarks/sparse3d_unet_cpu.py",
    *(source for source in sparse3d_cpu.SOURCES if source.startswith("packages/")),
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/norms.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/spconv/conv.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/spconv/modules.py",
]
NETWORKS = (("shell", 64, (32, 64, 96)), ("shell", 128, (16, 32, 48)), ("LiDAR", 0.5, (16, 32, 48)))
CALLED = (ops.conv, ops.conv_weight_grad, ops.subm_table, ops.conv_table, ops.transpose_table, ops.out_coords)
CONVOLUTIONS = ("sparse3d::conv", "sparse3d::conv_weight_grad")
Run = Callable[[], Any]


class UNet(nn.Module):
    """Two layers a level, strided layers down, inverse layers up, and the sum of both ways, from layers of ``sp``."""

    def __init__(self, sp: Any, widths: tuple[int, ...]) -> None:
        super().__init__()
        levels = range(len(widths))

        def block(channels: int, key: str) -> nn.Module:
            layers = []
            for _ in range(2):
                layers += [sp.SubMConv3d(channels, channels, 3, bias=False, indice_key=key)]
                layers += [nn.BatchNorm1d(channels), nn.ReLU()]
            return sp.SparseSequential(*layers)

        self.enter = sp.SubMConv3d(4, widths[0], 3, indice_key="l0")
        self.down = nn.ModuleList(block(widths[i], f"l{i}") for i in levels)
        pairs = list(itertools.pairwise(widths))
        self.coarser = nn.ModuleList(sp.SparseConv3d(a, b, 2, 2, indice_key=f"d{i}") for i, (a, b) in enumerate(pairs))
        self.finer = nn.ModuleList(
            sp.SparseInverseConv3d(b, a, 2, indice_key=f"d{i}") for i, (a, b) in enumerate(pairs)
        )
        self.up = nn.ModuleList(block(widths[i], f"l{i}") for i in levels[:-1])

    def forward(self, x: Any) -> Tensor:
        """Return the features ``[n, widths[0]]`` of the voxels of ``x``."""
        skips, x = [], self.enter(x)
        for level, stage in enumerate(self.down):
            x = stage(x)
            if level < len(self.coarser):
                skips.append(x)
                x = self.coarser[level](x)
        for level in reversed(range(len(self.up))):
            x = self.finer[level](x)
            x = self.up[level](x.replace_feature(x.features + skips[level].features))
        return x.features


class Side:
    """A network of one library over a scene."""

    def __init__(self, sp: Any, work: sparse3d_cpu.Workload, widths: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        self.sp, self.net = sp, UNet(sp, widths)
        self.place = torch.from_numpy(work.coords), list(work.shape), 1
        self.feats = torch.randn(len(work.coords), 4)
        self.grad = torch.randn(len(work.coords), widths[0])

    def forward(self) -> Tensor:
        """Return the network's result for a new tensor, so the tables are built."""
        with torch.no_grad():
            return self.net(self.sp.SparseConvTensor(self.feats, *self.place))

    def train(self) -> None:
        """Do the forward and the backward of one training step."""
        self.net.zero_grad()
        self.net(self.sp.SparseConvTensor(self.feats, *self.place)).backward(self.grad)


class Account(TorchDispatchMode):
    """Counts time, multiply-adds and bytes of each op that runs under it, by the op's name.

    ``products`` has the sizes (rows, inner, columns) of the products that the convolutions consist of.
    """

    def __init__(self, rates: tuple[float, float]) -> None:
        super().__init__()
        self.kinds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.products: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        self.rates = rates

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op and count it."""
        began = time.thread_time()
        result = func(*args, **(kwargs or {}))
        took = time.thread_time() - began
        name = func._schema.name
        kind = self.kinds[name]
        given, made = ([t for t in tree_leaves(v) if isinstance(t, Tensor)] for v in ((args, kwargs), result))
        fresh = {t.untyped_storage().data_ptr() for t in made} - {t.untyped_storage().data_ptr() for t in given}
        views = not fresh and not func._schema.is_mutable
        moved = 0 if views else sum(t.numel() * t.element_size() for t in given + made)
        products = products_of(name, args)
        adds = sum(a * b * c for a, b, c in products)
        self.products[name] += products
        kind["calls"] += 1
        kind["ms"] += took * 1e3
        kind["multiply_adds"] += adds
        kind["bytes"] += moved
        kind["bound_ms"] += max(adds / self.rates[0], moved / self.rates[1]) * 1e3
        return result


def products_of(name: str, args: tuple[Any, ...]) -> list[tuple[int, int, int]]:
    """Return the sizes of the products of a convolution, one for each tap that has hits, and none of other ops."""
    if name not in CONVOLUTIONS:
        return []
    table = args[2]
    hits = [count for count in (table >= 0).sum(0).tolist() if count]
    if name == "sparse3d::conv":
        return [(count, args[1].shape[2], args[1].shape[0]) for count in hits]
    return [(args[0].shape[1], count, args[1].shape[1]) for count in hits]


def products_ms(sizes: list[tuple[int, int, int]]) -> float:
    """Return the time of torch's products of these sizes alone, each the best of three."""
    total = 0.0
    for rows, inner, columns in sizes:
        a, b, out = torch.randn(rows, inner), torch.randn(inner, columns), torch.empty(rows, columns)
        total += best(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), 3)
    return total * 1e3


def imported_peer() -> Any:
    """Return spconv's module of layers. Its backward reads CUDA's current stream for tensors of the CPU, too."""
    import spconv.pytorch
    import spconv.pytorch.ops

    if not torch.cuda.is_available():
        spconv.pytorch.ops.get_current_stream = lambda: 0
    return spconv.pytorch


def best(run: Run, tries: int = 9) -> float:
    """Return the processor time in seconds of the quickest of some calls."""
    times = []
    for _ in range(tries):
        began = time.thread_time()
        run()
        times.append(time.thread_time() - began)
    return min(times)


def measured_rates() -> tuple[float, float]:
    """Return the multiply-adds per second of a square product and the bytes per second of a sum of large vectors."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    x, y, z = torch.randn(3, 1 << 24).unbind()
    product = torch.empty_like(a)
    return 1024**3 / best(lambda: torch.mm(a, b, out=product)), 12 * len(x) / best(lambda: torch.add(x, y, out=z))


def in_turns(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Return the processor times in ms of each run, in turns."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            began = time.thread_time()
            run()
            times[name].append((time.thread_time() - began) * 1e3)
    return times


def account(side: Side, rates: tuple[float, float], steps: int = 7) -> dict[str, Any]:
    """Return what a training step of ours consists of, by kind of op: the least time of some steps, and its bounds.
    ``step_ms`` is the least time of whole steps in turns with those. Besides the ops, it has the tables, which are made
    outside of dispatch modes, and the host.
    """
    counts, whole = [], []
    for _ in range(steps):
        counts.append(Account(rates))
        with torch.autograd.set_multithreading_enabled(False), counts[-1]:
            side.train()
        whole.append(best(side.train, 1) * 1e3)
    rows = []
    for name, kind in counts[0].kinds.items():
        kind["ms"] = min(counted.kinds[name]["ms"] for counted in counts)
        if counts[0].products[name]:
            kind["products_ms"] = products_ms(counts[0].products[name])
        rows.append({"op": name, **{key: round(value, 3) for key, value in kind.items()}})
    rows.sort(key=lambda row: -row["ms"])
    bound = sum(row["bound_ms"] for row in rows)
    products = sum(row.get("products_ms", row["bound_ms"]) for row in rows)
    shown = [row for row in rows if row["ms"] > 0.1]
    return {
        "ops": shown,
        "step_ms": round(min(whole), 2),
        "bound_ms": round(bound, 2),
        "products_ms": round(products, 2),
    }


def case(kind: str, size: float, widths: tuple[int, ...], rounds: int, rates: tuple[float, float]) -> dict[str, Any]:
    """Return the times of one network over one scene, and the account of its training step."""
    work = sparse3d_cpu.sphere_shell(int(size), 0) if kind == "shell" else sparse3d_cpu.lidar_scan(size, 0)
    import shiplap_sparse3d.spconv as facade

    sides = {"ours": Side(facade, work, widths)}
    try:
        peer = imported_peer()
        sides["spconv"] = Side(peer, work, widths)
        sides["spconv"].net.load_state_dict(sides["ours"].net.state_dict())
        error = (sides["ours"].forward() - sides["spconv"].forward()).abs().max()
        assert error < 1e-3, f"the two networks differ by {error}"
    except ImportError as e:
        print(f"spconv is not here: {e}", file=sys.stderr)
    found: dict[str, Any] = {"scene": f"{kind} {size}", "voxels": len(work.coords), "widths": list(widths)}
    for phase in ("forward", "train"):
        times = in_turns({name: getattr(side, phase) for name, side in sides.items()}, rounds)
        found[phase] = {name: round(statistics.median(t), 2) for name, t in times.items()}
        found[phase] |= {f"{name}, best": round(min(t), 2) for name, t in times.items()}
        if "spconv" in times:
            ratios = [b / a for a, b in zip(times["ours"], times["spconv"], strict=True)]
            found[phase]["ratio"] = round(statistics.median(ratios), 3)
    found["account"] = account(sides["ours"], rates)
    for limit in ("bound_ms", "products_ms") if "spconv" in sides else ():
        found[f"ratio at {limit}"] = round(found["train"]["spconv, best"] / found["account"][limit], 2)
    return found


def show(found: dict[str, Any]) -> None:
    """Print a case."""
    print(f"{found['scene']}, {found['voxels']} voxels, widths {found['widths']}")
    for phase in ("forward", "train"):
        print(f"  {phase}: {found[phase]}")
    for limit in ("bound_ms", "products_ms"):
        print(f"  {limit} of a training step {found['account'][limit]}, {found.get(f'ratio at {limit}')} times spconv")
    for row in found["account"]["ops"][:10]:
        print(f"    {row}")


def main() -> None:
    """Run the networks that the command line names, and write the record if it names a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record there")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="a part of a scene's name")
    options = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":  # spconv brings an OpenMP of its own that only the environment reaches
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_NUM_THREADS": "1"})
    torch.set_num_threads(1)
    for op in CALLED:
        op.build()
    rates = measured_rates()
    print(f"{rates[0] / 1e9:.1f} thousand million multiply-adds and {rates[1] / 1e9:.1f} GB a second")
    cases = []
    for kind, size, widths in NETWORKS:
        if options.only in f"{kind} {size}":
            cases.append(case(kind, size, widths, options.rounds, rates))
            show(cases[-1])
    if options.json:
        measured = {"multiply_adds_per_s": round(rates[0]), "bytes_per_s": round(rates[1]), "cases": cases}
        write(options.json, record(SOURCES, ["spconv", "cumm"], **measured))


if __name__ == "__main__":
    main()
