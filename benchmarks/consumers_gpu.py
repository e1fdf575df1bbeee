"""Networks of spconv's users on a GPU: the first compiled call, and the time of whole calls beside spconv's packages.

SpUNet and VoxelBackBone8x (``_networks.py``, fp16) on the voxels of sphere shells, some 47,000 and 193,000. A call
makes its ``SparseConvTensor`` and so all of its tables. ``inference`` is in eval, ``training`` forward and backward.
Each cell is the median of calls between two CUDA events, from an idle GPU, the packages taking turns.

``first`` is the seconds of the first call of ``torch.compile(network)`` on voxels whose number is marked as dynamic, in
a process with empty caches and in the process after it. ``dynamic=True`` would make numbers of the model dynamic, too,
which Dynamo takes back by tracing once more. Run: ``python benchmarks/consumers_gpu.py [--json]``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import mark_dynamic

sys.path.insert(0, str(Path(__file__).parent))
from _networks import NETWORKS, shell
from _record import record, write
from sparse3d_gpu import once

import shiplap_sparse3d.spconv as facade

SOURCES = [
    "benchmarks/consumers_gpu.py",
    "benchmarks/_networks.py",
    "packages/shiplap/src/shiplap/fuse/*.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/spconv/*.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/cuda/*.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/cuda/*.triton.jinja",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/plan.py",
]
SHELLS = (111, 224)  # 47,354 and 193,976 voxels
PEERS = (("spconv.pytorch", "spconv"), ("spconv_triton.pytorch", "spconv-triton"))
CHANNELS = 4
Run = Callable[[], Any]


def scene(res: int) -> tuple[Tensor, Tensor, list[int]]:
    """Features, indices and grid."""
    coords = shell(res, "cuda")
    rng = torch.Generator("cuda").manual_seed(res)
    feats = torch.randn(coords.shape[0], CHANNELS, device="cuda", generator=rng).half()
    for tensor in (feats, coords):
        mark_dynamic(tensor, 0)
    return feats, coords, [res] * 3


def network(name: str, module: Any, state: dict[str, Tensor] | None = None) -> nn.Module:
    """A network of the layers of ``module`` in half precision, with the weights of another one if given."""
    torch.manual_seed(0)
    net = NETWORKS[name](module)
    if state is not None:
        net.load_state_dict(state)
    return net.cuda().half()


def peers() -> Iterator[tuple[Any, str]]:
    for module, name in PEERS:
        try:
            __import__(module)
            yield sys.modules[module], name
        except Exception as e:
            print(f"{name} is not here: {type(e).__name__}: {e}", file=sys.stderr)


def inference(net: nn.Module, inputs: tuple[Any, ...]) -> Run:
    def run() -> Any:
        with torch.no_grad():
            return net(*inputs)

    return run


def training(net: nn.Module, inputs: tuple[Any, ...]) -> Run:
    def run() -> Any:
        net.zero_grad(set_to_none=True)
        out = net(*inputs)
        out.float().square().mean().backward()
        return out

    return run


MODES = {"inference": inference, "training": training}


def in_turns(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Medians; the first call of a turn, which finds others' code in the processor's caches, does not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, fn in runs.items():
            times[name] += [once(fn) for _ in range(3)][1:]
    return {name: median(each) for name, each in times.items()}


def compared(name: str, res: int, mode: str, rounds: int, *, compiled: bool) -> dict[str, Any]:
    """Milliseconds of each package, and how far the results of others are from ours."""
    inputs, runs, results = scene(res), dict[str, Run](), dict[str, Tensor]()
    ours = network(name, facade).train(mode == "training")
    state = {k: v.float() for k, v in ours.state_dict().items()}
    nets: dict[str, Any] = {
        "shiplap": ours,
        **{n: network(name, m, state).train(mode == "training") for m, n in peers()},
    }
    if compiled:
        nets["shiplap compiled"] = torch.compile(network(name, facade, state).train(mode == "training"))
    for who, net in nets.items():
        run, began = MODES[mode](net, inputs), time.perf_counter()
        try:
            results[who] = run().detach().float()
            run()
            torch.cuda.synchronize()
            runs[who] = run
        except Exception as e:
            print(f"{who} fails: {type(e).__name__}: {str(e)[:300]}", file=sys.stderr)
        print(f"# {name} {mode} {who}: first calls {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    times = in_turns(runs, rounds)
    want = results["shiplap"]
    order = {who: _sums(got) - _sums(want) for who, got in results.items()}  # rows may be in another order
    errors = {who: round(float(d.norm() / _sums(want).norm()), 6) for who, d in order.items() if who in times}
    return {"network": name, "voxels": len(inputs[1]), "mode": mode, "ms": times, "errors": errors}


def _sums(out: Tensor) -> Tensor:
    """Of each channel the values in ascending order: the same whatever the order of rows."""
    return out.sort(0).values


def first_call(name: str, res: int) -> dict[str, Any]:
    """Seconds of the first call in this process, which is a compiled one."""
    inputs, net = scene(res), network(name, facade).eval()
    with torch.no_grad():
        torch.cuda.synchronize()
        began = time.perf_counter()
        got = torch.compile(net)(*inputs)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        want = net(*inputs)
    error = float((got - want).float().norm() / want.float().norm())
    return {"network": name, "voxels": len(inputs[1]), "seconds": seconds, "error": error}


def first_calls(name: str, limit: float) -> list[dict[str, Any]]:
    """With empty caches, then in a second process."""
    done: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as home:
        caches = {n: f"{home}/{n}" for n in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "SHIPLAP_CACHE_DIR")}
        for _ in range(2):
            command = [sys.executable, __file__, "--first", name]
            try:
                told = subprocess.run(
                    command, env={**os.environ, **caches}, stdout=subprocess.PIPE, text=True, timeout=limit, check=True
                )
                done.append(json.loads(told.stdout.splitlines()[-1]))
            except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as e:
                done.append({"network": name, "seconds": None, "failed": str(e)[-300:]})
                break
    return done


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Geometric means of each peer's time over ours, eager and compiled."""
    means = {}
    for ours in ("shiplap", "shiplap compiled"):
        for _, peer in PEERS:
            each = [r["ms"][peer] / r["ms"][ours] for r in rows if peer in r["ms"] and ours in r["ms"]]
            if each:
                means[f"{peer} / {ours}"] = round(prod(each) ** (1 / len(each)), 3)
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/consumers_gpu.json")
    parser.add_argument("--first", choices=sorted(NETWORKS), help="only the first compiled call, in this process")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--limit", type=float, default=200.0, help="seconds for a process with a first call")
    parser.add_argument("--skip-first", action="store_true", help="no first calls")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--network", choices=sorted(NETWORKS), help="only this one")
    given = parser.parse_args()
    if given.first:
        print(json.dumps(first_call(given.first, SHELLS[0])))
        return
    names = [given.network] if given.network else sorted(NETWORKS)
    first = [] if given.eager or given.skip_first else [row for name in names for row in first_calls(name, given.limit)]
    for row in first:
        print(json.dumps(row), flush=True)
    rows = []
    for name in names:
        for mode in MODES:
            for res in SHELLS:
                rows.append(compared(name, res, mode, given.rounds, compiled=not given.eager))
                print(json.dumps(rows[-1]), flush=True)
    means = ratios(rows)
    print(json.dumps(means))
    if given.json:
        packages, device = ["triton", "spconv-cu126", "spconv-triton"], torch.cuda.get_device_name()
        measured = {"first": first, "rows": rows, "means": means}
        write(Path(__file__).parent / "results/consumers_gpu.json", record(SOURCES, packages, device, **measured))


if __name__ == "__main__":
    main()
