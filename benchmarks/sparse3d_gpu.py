"""Sparse convolution on a GPU over sphere shells: shiplap, spconv, spconv-triton and FlexGEMM in one process, in turns.

Each cell is the median of calls between two CUDA events, from an idle GPU, launch overhead included. A turn is five
calls; the first two, which find the processor's caches full of the others' code, do not count. ``forward`` and
``train`` (forward and backward of one 3x3x3 submanifold layer with bias, fp16) reuse the map; ``map`` builds it.
``strided`` is a layer of kernel 3 and stride 2 that builds its outputs and maps. Peers get their ``indice_key``.

Bars: the limit is ``2 * pairs * C**2`` at the rate of a dense product here. Run: ``python benchmarks/sparse3d_gpu.py``.

Most of a run is the compiling of spconv-triton's candidates. With ``--prepare N`` up to N processes do that beforehand,
one for each number of channels, into a Triton cache of this run. What their autotuners chose beside each other is
deleted, so the process that measures tunes each peer again on a quiet device. With ``--resume`` the shells that the
file of ``--json`` has from the same commit, device and versions are kept, and only the others are measured.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from _record import record, write

import shiplap_sparse3d as sparse3d
from shiplap.inductor import switches
from shiplap_sparse3d import bounded, ops, planning

SOURCES = [
    "benchmarks/sparse3d_gpu.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/cuda/conv.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/cuda/*.triton.jinja",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/cuda/hash.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/cuda/lookup.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/cuda/lookup_kernels.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/cuda/tables.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/cuda/sort.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/plan.py",
]
# Ops that the measured calls launch. Wheels bring them compiled, and without that Python launches them.
LAUNCHED = (
    ops.conv,
    ops.conv_weight_grad,
    ops.tap_blocks,
    ops.out_coords,
    bounded.first_voxels,
    bounded.reached_keys,
    bounded.voxels_of_keys,
    planning.subm_plan,
    planning.conv_plan,
)
SHELLS = ((8, 1024), (16, 1024), (32, 1024), (64, 1024), (128, 512), (256, 256), (512, 128), (1024, 64))
# A peer that is tuned once for a number of channels is tuned for the largest of its shells, where most is to be gained.
ORDER = (256, 128, 64, 32, 512, 16, 8, 1024)
PACKAGES = ("triton", "spconv-cu126", "cumm-cu126", "spconv-triton")
PREPARATION_LIMIT = 240  # seconds
Run = Callable[[], Any]


def shell(res: int) -> Tensor:
    """Voxels between two spheres, ``int32 [n, 4]``, in blocks of 256 cells an axis, row-major within."""
    shells = []
    for corner in torch.cartesian_prod(*[torch.arange(0, res, 256)] * 3).reshape(-1, 3).tolist():
        axes = [torch.arange(c, min(c + 256, res), dtype=torch.float32, device="cuda") - res / 2 + 0.5 for c in corner]
        x, y, z = torch.meshgrid(*axes, indexing="ij")
        radius = (x * x + y * y + z * z).sqrt()
        cells = ((radius <= res / 2) & (radius >= res / 2 - 1.25)).nonzero()
        shells.append(cells + torch.tensor(corner, device="cuda"))
    cells = torch.cat(shells)
    return torch.cat([torch.zeros_like(cells[:, :1]), cells], 1).int().contiguous()


class Ours:
    name = "shiplap"

    def __init__(self, coords: Tensor, res: int, weight: Tensor, bias: Tensor, feats: Tensor) -> None:
        self.coords, self.res, self.feats, self.bias = coords, (res,) * 3, feats, bias
        self.weight = weight.flatten(1, 3).detach().requires_grad_()
        self.down = weight.flatten(1, 3).detach()
        self.plan = self.map()

    def map(self) -> sparse3d.Plan:
        return sparse3d.Geometry(self.coords, self.res, 1).subm(3)

    def forward(self) -> Tensor:
        return self.plan.conv(self.feats, self.weight, self.bias)

    def strided(self) -> Tensor:
        step = sparse3d.Geometry(self.coords, self.res, 1).strided(3, 2, 1)
        return step.plan.conv(self.feats, self.down, self.bias)


class Peer:
    """A library with the interface of ``spconv.pytorch``."""

    def __init__(self, module: Any, name: str, *state: Any) -> None:
        coords, res, weight, bias, feats = state
        self.name, self.module, self.state, self.feats = name, module, (coords, [res] * 3), feats
        channels = feats.shape[1]
        self.subm = module.SubMConv3d(channels, channels, 3, indice_key="map").cuda().half()
        self.alone = module.SubMConv3d(channels, channels, 3).cuda().half()
        self.step = module.SparseConv3d(channels, channels, 3, 2, 1).cuda().half()
        with torch.no_grad():
            for layer in (self.subm, self.alone, self.step):
                layer.weight.copy_(weight.reshape(layer.weight.shape))
                layer.bias.copy_(bias)
        self.weight, self.bias = self.subm.weight, self.subm.bias
        self.x = self.tensor()
        self.x.indice_dict = self.subm(self.x).indice_dict

    def tensor(self) -> Any:
        coords, grid = self.state
        return self.module.SparseConvTensor(self.feats, coords, grid, 1)

    def forward(self) -> Tensor:
        return self.subm(self.x.replace_feature(self.feats)).features

    def map(self) -> Tensor:
        """A layer that builds its map: the forward with a cached one is taken off by the caller."""
        return self.alone(self.tensor()).features

    def strided(self) -> Tensor:
        return self.step(self.tensor()).features


class Functions:
    """A library with the functions of ``flex_gemm.ops.spconv``. A layer that builds its map takes no gradients."""

    def __init__(self, module: Any, name: str, *state: Any) -> None:
        coords, res, weight, bias, feats = state
        self.name, self.module, self.feats = name, module, feats
        self.place = coords, torch.Size((1, feats.shape[1], res, res, res))
        self.weight, self.bias = weight.detach().requires_grad_(), bias.detach().requires_grad_()
        self.frozen = feats.detach(), *self.place, weight.detach(), bias.detach()
        self.cache = module.sparse_submanifold_conv3d(feats, *self.place, self.weight, self.bias)[1]

    def forward(self) -> Tensor:
        return self.module.sparse_submanifold_conv3d(self.feats, *self.place, self.weight, self.bias, self.cache)[0]

    def map(self) -> Tensor:
        """A layer that builds its map: the forward with a cached one is taken off by the caller."""
        return self.module.sparse_submanifold_conv3d(*self.frozen)[0]

    def strided(self) -> Tensor:
        return self.module.sparse_conv3d(*self.frozen, stride=(2, 2, 2), padding=(1, 1, 1))[0]


PEERS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("spconv.pytorch", "spconv", Peer),
    ("spconv_triton.pytorch", "spconv-triton", Peer),
    ("flex_gemm.ops.spconv", "flexgemm", Functions),
)


def peers() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    for module, name, kind in PEERS:
        try:
            __import__(module)
            yield sys.modules[module], name, kind
        except Exception as e:
            print(f"{name} is not here: {type(e).__name__}: {e}", file=sys.stderr)


def once(fn: Run) -> float:
    """Milliseconds of one call from an idle GPU."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    fn()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def in_turns(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Medians, the runs taking turns; one that fails is left out and said."""
    alive = {}
    for name, fn in runs.items():
        try:
            for _ in range(3):
                fn()
            torch.cuda.synchronize()
            alive[name] = fn
        except Exception as e:
            print(f"  {name}: {type(e).__name__}: {str(e)[:200]}", file=sys.stderr)
            torch.cuda.synchronize()
    times: dict[str, list[float]] = {name: [] for name in alive}
    for _ in range(rounds):
        for name, fn in alive.items():
            times[name] += [once(fn) for _ in range(5)][2:]
    return {name: sorted(t)[len(t) // 2] for name, t in times.items()}


def no_grad(fn: Run) -> Run:
    return torch.no_grad()(fn)


def training(side: Any, grad: Tensor) -> Run:
    def run() -> None:
        side.feats.grad = side.weight.grad = side.bias.grad = None
        side.forward().backward(grad)

    return run


def peak(fn: Run) -> float:
    """MiB allocated at most during a call, beyond what was there."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fn()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def dense_rate() -> float:
    """Multiply-adds a second of a dense product, times two."""
    a = torch.randn(8192, 8192, device="cuda").bfloat16()
    b = torch.randn(8192, 8192, device="cuda").bfloat16()
    ms = in_turns({"mm": lambda: a @ b}, 15)["mm"]
    return 2 * 8192**3 / ms * 1e3


def row(res: int, channels: int, rate: float, rounds: int) -> dict[str, Any]:
    coords = shell(res)
    n = len(coords)
    weight = (torch.randn(channels, 3, 3, 3, channels, device="cuda") / (13 * channels) ** 0.5).half()
    bias = torch.randn(channels, device="cuda").half().requires_grad_()
    feats = torch.randn(n, channels, device="cuda").half().requires_grad_()
    grad = torch.randn(n, channels, device="cuda").half()
    state = (coords, res, weight, bias, feats)
    sides: list[Any] = [Ours(*state)]
    for module, name, kind in peers():
        try:
            sides.append(kind(module, name, *state))
        except Exception as e:
            print(f"  {name} at {res}: {type(e).__name__}: {str(e)[:200]}", file=sys.stderr)
    want = sides[0].forward()
    for side in sides[1:]:
        error = (side.forward().float() - want.float()).norm() / want.float().norm()
        assert error < 1e-2, f"{side.name} computes something else: {error}"
    pairs = int((sides[0].plan.table >= 0).sum())
    cell: dict[str, Any] = {"res": res, "channels": channels, "n": n, "pairs": pairs, "parts": _parts(sides[0].plan)}
    cell["limit_ms"] = 2 * pairs * channels**2 / rate * 1e3
    cell["forward"] = in_turns({s.name: no_grad(s.forward) for s in sides}, rounds)
    cell["train"] = in_turns({s.name: training(s, grad) for s in sides}, rounds)
    built = in_turns({s.name: no_grad(s.map) for s in sides}, rounds)
    ours = built.pop("shiplap")
    cell["map"] = {"shiplap": ours, **{k: v - cell["forward"][k] for k, v in built.items() if k in cell["forward"]}}
    cell["strided"] = in_turns({s.name: no_grad(s.strided) for s in sides}, rounds)
    cell["peak_mib"] = {s.name: peak(no_grad(s.forward)) for s in sides if s.name in cell["forward"]}
    cell["train_peak_mib"] = {s.name: peak(training(s, grad)) for s in sides if s.name in cell["train"]}
    captured = in_turns({f: _captured(no_grad(getattr(sides[0], f))) for f in ("forward", "map")}, rounds)
    cell["captured_ms"], cell["map_captured_ms"] = captured["forward"], captured["map"]
    cell["fraction"] = cell["limit_ms"] / cell["captured_ms"]
    return cell


def _parts(plan: sparse3d.Plan) -> int:
    return 1 if plan.order is None else plan.order.shape[0]


def fused(res: int, channels: int, rounds: int) -> dict[str, Any]:
    """``relu(bn(conv(x)) + residual)``: fused, the same template with fusion off, compiled behind an eager layer.

    That layer is ours, and a peer's.
    """
    coords = shell(res)
    plan = sparse3d.Geometry(coords, (res,) * 3, 1).subm(3)
    feats, residual = (torch.randn(len(coords), channels, device="cuda").half() for _ in range(2))
    weight = (torch.randn(channels, 27, channels, device="cuda") / (13 * channels) ** 0.5).half()
    norm = torch.nn.BatchNorm1d(channels).cuda().half().eval()

    def after(y: Tensor, r: Tensor) -> Tensor:
        return torch.relu(norm(y) + r)

    def block(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        return after(plan.conv(x, w), r)

    runs: dict[str, Run] = {}
    with torch.no_grad():
        for name, control in (("fused", {}), ("control", {"fusion": False})):
            torch._dynamo.reset()
            with switches(ops.conv, **control):
                compiled = torch.compile(block, fullgraph=True)
                compiled(feats, weight, residual)
                runs[name] = _captured(lambda f=compiled: f(feats, weight, residual))
        torch._dynamo.reset()
        pointwise = torch.compile(after)
        runs["shiplap, apart"] = _captured(lambda: pointwise(plan.conv(feats, weight), residual))
        bias = torch.zeros(channels, device="cuda").half()
        for module, name, _ in peers():
            if name == "spconv":  # the better one in all of these shells, and so the only ``side``
                side = Peer(module, name, coords, res, weight, bias, feats)
                runs[f"{name}, apart"] = lambda: pointwise(side.forward(), residual)  # noqa: B023
        times = in_turns(runs, rounds)
    return {"res": res, "channels": channels, "n": len(coords), **times}


def _captured(fn: Run) -> Run:
    for _ in range(2):
        fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = fn()
    return lambda _alive=kept: graph.replay()


def device_name() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def show(r: dict[str, Any]) -> None:
    cells = [
        f"{k} " + " ".join(f"{n}={v:.3f}" for n, v in r[k].items()) for k in ("forward", "train", "map", "strided")
    ]
    mib = " ".join(f"{n}={v:.0f}" for n, v in r["peak_mib"].items())
    print(
        f"{r['res']}/{r['channels']} n={r['n']} parts={r['parts']} fraction={r['fraction']:.3f} | "
        + " | ".join(cells)
        + f" | MiB {mib}",
        flush=True,
    )


def prepare(shells: list[int], workers: int) -> None:
    """Compile in up to ``workers`` processes what the shells need, one shell of each number of channels.

    The processes share the Triton cache of this run. One that fails or does not end within ``PREPARATION_LIMIT``
    seconds is reported, and what it leaves is compiled while measuring.
    """
    first: dict[int, int] = {}
    for res in shells:
        first.setdefault(dict(SHELLS)[res], res)

    def compile_shell(res: int) -> None:
        command = [sys.executable, __file__, "--compile-only", "--shells", str(res)]
        try:
            subprocess.run(command, check=True, timeout=PREPARATION_LIMIT)
        except subprocess.SubprocessError as e:
            print(f"  preparing shell {res}: {e}", file=sys.stderr)

    with ThreadPoolExecutor(workers) as pool:
        compiled = [pool.submit(compile_shell, res) for res in first.values()]
        build_bindings()
    for each in compiled:
        each.result()
    for choice in Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.autotune.json"):
        choice.unlink()


def build_bindings() -> None:
    """Build the bindings of the ops that are measured, or find them in the cache."""
    for op in LAUNCHED:
        op.build()


class Results:
    """What was measured so far, in a file after each shell, so that a run that is cut short loses one shell.

    Other parts of the file, such as results of earlier runs that a page refers to, stay in it.
    """

    def __init__(self, path: Path | None, resume: bool) -> None:
        self.path, self.rate = path, 0.0
        self.rows: list[dict[str, Any]] = []
        self.fused: list[dict[str, Any]] = []
        known = json.loads(path.read_text(encoding="utf-8")) if path and path.is_file() else {}
        now = self.record()
        if resume and all(known.get(field) == now[field] for field in ("device", "versions", "commit", "sources")):
            self.rows, self.fused, self.rate = known["shells"], known["fused"], known["dense_flops"]
        self.others = {name: part for name, part in known.items() if isinstance(part, dict) and name not in now}

    def record(self) -> dict[str, Any]:
        """Return the record of all rows."""
        shells = sorted(self.rows, key=lambda row: row["res"])
        measured = {"dense_flops": self.rate, "shells": shells, "fused": self.fused}
        return record(SOURCES, PACKAGES, device_name(), **measured)

    def missing(self, rows: list[dict[str, Any]], shells: Iterable[int]) -> list[int]:
        """Return those of ``shells`` that are not among ``rows``."""
        known = {each["res"] for each in rows}
        return [res for res in shells if res not in known]

    def keep(self) -> None:
        """Write the file, if there is one."""
        if self.path:
            write(self.path, self.record() | self.others)


def measure(results: Results, options: argparse.Namespace) -> None:
    """Measure what ``results`` lacks of the shells and of the fused blocks."""
    began, channels = time.monotonic(), dict(SHELLS)
    shells = results.missing(results.rows, options.shells)
    if options.prepare:
        prepare(shells, options.prepare)
    build_bindings()
    results.rate = results.rate or dense_rate()
    print(f"dense: {results.rate / 1e12:.0f} TFLOP/s, after {time.monotonic() - began:.0f} s", flush=True)
    for res in shells:
        results.rows.append(row(res, channels[res], results.rate, options.rounds))
        show(results.rows[-1])
        results.keep()
        print(f"{time.monotonic() - began:.0f} s", flush=True)
        torch.cuda.empty_cache()
    large = [res for res, _ in SHELLS[4:] if res in options.shells and not options.skip_fused]
    for res in results.missing(results.fused, large):
        results.fused.append(fused(res, channels[res], options.rounds))
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in results.fused[-1].items()}, flush=True)
        results.keep()
    print(f"{time.monotonic() - began:.0f} s")


def parsed_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--resume", action="store_true", help="keep the shells that this file has")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--shells", type=int, nargs="*", default=ORDER, help="in this order")
    parser.add_argument("--skip-fused", action="store_true")
    parser.add_argument("--prepare", type=int, default=0, metavar="N", help="compile in N processes beforehand")
    parser.add_argument("--compile-only", action="store_true", help="run each shell once, and report no times")
    return parser.parse_args()


def main() -> None:
    """Measure the shells that the command line names."""
    options = parsed_options()
    warnings.simplefilter("ignore")
    if options.compile_only:
        began = time.monotonic()
        for res in options.shells:
            row(res, dict(SHELLS)[res], 1.0, 1)
        print(f"shells {options.shells} compiled in {time.monotonic() - began:.0f} s", flush=True)
        return
    with tempfile.TemporaryDirectory(prefix="sparse3d_gpu_") as cache:
        if options.prepare:
            os.environ["TRITON_CACHE_DIR"] = cache
        measure(Results(options.json, options.resume), options)


if __name__ == "__main__":
    main()
