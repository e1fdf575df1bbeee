"""Maps and layers of sparse3d on a GPU, launched by the C++ of this checkout and as another checkout launches them.

Each checkout runs in a process of its own, over the same shells, timed as ``sparse3d_gpu.py`` times a cell. The host's
time of a map, ``map_host``, is that of twenty in a row. Bindings that are not in the cache have to be built before
(``shiplap.kernels.native.binding.build``). The record also has cells with peers, of ``sparse3d_gpu.py`` in the same
run.
Run: ``python benchmarks/sparse3d_native_gpu.py --before /path/of/another/checkout --json FILE``.

``--maps`` calls what builds a map in each library, for no backward and with nothing around it, until a product can
start: the difference of a layer that builds its map and one that has it, as in ``sparse3d_gpu.py``, hides what
overlaps, and is noise where a map is short. FlexGEMM's map is its neighbour cache and the lists of taps of its blocks,
which it makes before its first product; ``flexgemm_cache`` is the former alone. ``host`` is the time of the host for
a map, of twenty in a row.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shiplap_sparse3d as sparse3d
from shiplap.kernels.native import binding
from shiplap_sparse3d import planning

sys.path.insert(0, str(Path(__file__).parent))
from _record import ROOT, record, write
from sparse3d_gpu import SHELLS, SOURCES, Ours, device_name, in_turns, no_grad, shell, training

CUDA = "packages/shiplap-sparse3d/src/shiplap_sparse3d/cuda"
MAP_SOURCES = [
    "benchmarks/sparse3d_native_gpu.py",
    *(f"benchmarks/sparse3d_gpu.py::{name}" for name in ("shell", "in_turns")),
    *(f"{CUDA}/{name}.py" for name in ("bricks", "brick_plan", "digits", "hash", "lookup", "lookup_kernels", "sort")),
    f"{CUDA}/tables.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/planning.py",
]
WARM = 35  # calls after which native code has been attached


def cell(res: int, channels: int, rounds: int) -> dict[str, float]:
    """Milliseconds of this process at one shell."""
    coords = shell(res)
    weight = (torch.randn(channels, 3, 3, 3, channels, device="cuda") / (13 * channels) ** 0.5).half()
    bias = torch.randn(channels, device="cuda").half().requires_grad_()
    feats = torch.randn(len(coords), channels, device="cuda").half().requires_grad_()
    ours = Ours(coords, res, weight, bias, feats)
    runs = {
        "map": no_grad(ours.map),
        "strided": no_grad(ours.strided),
        "forward": no_grad(ours.forward),
        "train": training(ours, torch.randn_like(feats)),
    }
    for _ in range(WARM):
        runs["map"]()
        runs["strided"]()
    times = in_turns(runs, rounds)
    return {**times, "map_host": of_host(runs["map"])}


def measured(checkout: Path, rounds: int) -> dict[str, dict[str, float]]:
    """What a process with the packages of ``checkout`` measures, by shell."""
    paths = [str(path) for path in sorted(checkout.glob("packages/*/src"))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, __file__, "--here", "--rounds", str(rounds)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    times: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return times


def spconv_map(module: Any, coords: Tensor, res: int) -> Callable[[], Any]:
    """As its layer calls it where it does not train."""
    layer = module.SubMConv3d(16, 16, 3).cuda().half()
    alloc = module.SparseConvTensor(torch.empty(len(coords), 16, device="cuda").half(), coords, [res] * 3, 1)
    window = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.output_padding)
    build = module.ops.get_indice_pairs_implicit_gemm
    options = {"subm": True, "is_train": False, "alloc": alloc.thrust_allocator}
    return lambda: build(coords, 1, [res] * 3, layer.algo, *window, **options)


def flexgemm_cache(module: Any, coords: Tensor, res: int) -> Callable[[], Any]:
    place = coords, torch.Size((1, 16, res, res, res))
    build = module.SubMConv3dFunction._compute_neighbor_cache
    return lambda: build(*place, (3, 3, 3), (1, 1, 1), False)


def flexgemm_map(module: Any, coords: Tensor, res: int) -> Callable[[], Any]:
    """With what its masked product reads for blocks of 256 rows: the largest, and so the fewest, of its tiles."""
    cache = flexgemm_cache(module, coords, res)
    return lambda: cache().compute_kernel_idx(256)


def ours_map(coords: Tensor, res: int) -> Callable[[], Any]:
    return lambda: sparse3d.Geometry(coords, res, 1).subm(3)


PEERS = (
    ("spconv", "spconv.pytorch", spconv_map),
    ("spconv-triton", "spconv_triton.pytorch", spconv_map),
    ("flexgemm", "flex_gemm.ops.spconv", flexgemm_map),
    ("flexgemm_cache", "flex_gemm.ops.spconv", flexgemm_cache),
)


def of_host(run: Callable[[], Any]) -> float:
    """Milliseconds of the host for one of twenty calls in a row."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        run()
    return (time.perf_counter() - began) / 20 * 1e3


def maps(rounds: int) -> Iterator[dict[str, Any]]:
    """Milliseconds of the functions that build a map, by shell and library."""
    binding.build(planning.subm_plan)
    for res, _ in SHELLS:
        coords = shell(res)
        runs: dict[str, Callable[[], Any]] = {"shiplap": ours_map(coords, res)}
        for name, path, made in PEERS:
            try:
                __import__(path)
                runs[name] = made(sys.modules[path], coords, res)
            except Exception as e:
                print(f"{name} is not here: {type(e).__name__}: {e}", file=sys.stderr)
        for _ in range(WARM):
            runs["shiplap"]()
        times = in_turns({name: no_grad(run) for name, run in runs.items()}, rounds)
        yield {"res": res, "n": len(coords), **times, "host": {name: of_host(no_grad(runs[name])) for name in times}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--here", action="store_true", help="measure in this process")
    parser.add_argument("--maps", action="store_true", help="what builds a map in each library, and nothing else")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.maps:
        rows = []
        for row in maps(options.rounds):
            rows.append(row)
            print(json.dumps(row), flush=True)
        if options.json:
            write(options.json, record(MAP_SOURCES, ["triton"], device_name(), cells=rows, rounds=options.rounds))
        return
    if options.here:
        print(json.dumps({res: cell(res, channels, options.rounds) for res, channels in SHELLS[:6]}))
        return
    turns = {"after": measured(ROOT, options.rounds)}
    if options.before:
        turns["before"] = measured(options.before, options.rounds)
    for name, cells in turns.items():
        for res, times in cells.items():
            print(name, res, " ".join(f"{k}={v:.3f}" for k, v in times.items()))
    if options.json:
        write(options.json, record(SOURCES, ["triton"], device_name(), turns=turns))


if __name__ == "__main__":
    main()
