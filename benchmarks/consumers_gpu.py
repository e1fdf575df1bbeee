"""Networks of spconv's users on a GPU: the first compiled call, and the time of whole calls beside spconv's packages.

SpUNet and VoxelBackBone8x (``_networks.py``, fp16) on the voxels of sphere shells, some 47,000 and 193,000. A call
makes its ``SparseConvTensor`` and so all of its tables. ``inference`` is in eval, ``training`` forward and backward.
Each cell is the median of calls between two CUDA events, from an idle GPU, the packages taking turns. Bindings in C++,
which a program has from its 32nd call on or finds in its cache, are built before. ``host`` is the time until a call
returns, in a row of calls; ``syncs`` are the times that PyTorch waits for the device in a call; ``busy`` is how long
the GPU works for a call, in which kernels; ``profile`` what the host does meanwhile. Networks and modes have a process
each, which are timed one after the other: first eager, then, when all have compiled side by side, compiled. A peer
that compiles for minutes does so beside them in a process of its own, which stands still while another is timed.

``first`` is the seconds of the first call of ``torch.compile(network)`` on voxels whose number is marked as dynamic, in
a process with empty caches and in the process after it. ``behind`` is that call in a process that has called thin
layers on the same voxels eagerly before, with empty caches, and in the two processes after it; ``again`` is a process
that finds what the parts before it have left in the caches. Where Python may not write bytecode, processes share a
folder of it, as ``pip`` leaves it beside the sources of an installation. ``dynamic=True`` would make numbers of the
model dynamic, too, which Dynamo takes back by tracing once more.

Each part runs in a process of its own with a limit of time, and prints what it has as it goes:
``python benchmarks/consumers_gpu.py [--json] [--parts first,behind,cells,again] [--slow PEER:NETWORK:MODE,...]``.
The record has ``cells`` of all networks; those of ``--eager``, which takes a minute and a half, and first calls alone
are parts of it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import mark_dynamic
from torch._dynamo.utils import counters

sys.path.insert(0, str(Path(__file__).parent))
from _networks import NETWORKS, shell
from _record import record, write
from _sampled import kernels, sampled
from _turns import DONE, READY, in_process, in_turn
from sparse3d_gpu import once

import shiplap_sparse3d.spconv as facade
from shiplap.kernels.native import binding
from shiplap.kernels.native.build_plan import make_plan
from shiplap.kernels.triton import replay
from shiplap_sparse3d import bounded, norms, ops, planning

SOURCES = [
    "benchmarks/consumers_gpu.py",
    "benchmarks/_networks.py",
    "benchmarks/_sampled.py",
    "benchmarks/_turns.py",
    "packages/shiplap/src/shiplap/kernels/*/*.py",
    "packages/shiplap/src/shiplap/inductor/*.py",
    "packages/shiplap/src/shiplap/declare/*.py",
    "packages/shiplap/src/shiplap/plan/*.py",
    "packages/shiplap/src/shiplap/dispatch/*.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/spconv/*.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/cuda/*.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/cuda/*.triton.jinja",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/plan.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/geometry.py",
]
SHELLS = (111, 224)  # 47,354 and 193,976 voxels
PEERS = (("spconv.pytorch", "spconv"), ("spconv_triton.pytorch", "spconv-triton"))
CHANNELS = 4
LAUNCHED = [planning.subm_plan, planning.conv_plan, bounded.first_voxels, bounded.reached_keys]
LAUNCHED += [bounded.voxels_of_keys, ops.tap_blocks, norms.norm_relu]
Run = Callable[[], Any]
Row = dict[str, Any]


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


def peers(wanted: list[str]) -> Iterator[tuple[Any, str]]:
    for module, name in PEERS:
        if name not in wanted:
            continue
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
    return {name: round(median(each), 3) for name, each in times.items()}


def host(run: Run, calls: int = 10) -> float:
    """Milliseconds until a call returns, in a row of them."""
    run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        run()
    spent = time.perf_counter() - began
    torch.cuda.synchronize()
    return round(spent / calls * 1e3, 3)


def syncs(run: Run) -> int:
    """How often PyTorch waits for the device. What a package waits for by itself is not seen."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run()
    torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(w.message) for w in seen)


class Nets:
    """The packages' networks of one kind in one mode, with the same weights. They serve scenes of every size."""

    def __init__(self, name: str, mode: str, wanted: list[str]) -> None:
        self.name, self.mode, self.first = name, mode, dict[str, float]()
        ours = network(name, facade).train(mode == "training")
        self.state = {key: value.float() for key, value in ours.state_dict().items()}
        self.nets: dict[str, Any] = {"shiplap": ours}
        self.nets |= {who: network(name, module, self.state).train(ours.training) for module, who in peers(wanted)}

    def compile(self) -> None:
        """Put the compiled network beside them, and leave out who is not needed to compare it with."""
        net = network(self.name, facade, self.state).train(self.mode == "training")
        self.nets["shiplap compiled"] = torch.compile(net)

    def warm(self) -> None:
        """Call each for voxels of every size; who fails is left out from then on."""
        for res in SHELLS:
            inputs = scene(res)
            for who, net in list(self.nets.items()):
                run, began = MODES[self.mode](net, inputs), time.perf_counter()
                try:
                    run()
                    torch.cuda.synchronize()
                    self.first.setdefault(who, round(time.perf_counter() - began, 2))
                    run()
                except Exception as e:
                    print(f"{who} fails: {type(e).__name__}: {str(e)[:300]}", file=sys.stderr)
                    del self.nets[who]

    def compared(self, res: int, rounds: int) -> Row:
        """Milliseconds of each package, and how far the results of others are from ours."""
        inputs = scene(res)
        runs = {who: MODES[self.mode](net, inputs) for who, net in self.nets.items()}
        results = {who: _sums(run().detach().float()) for who, run in runs.items()}  # rows may be in another order
        want, times = results["shiplap"], in_turns(runs, rounds)
        return {
            "network": self.name,
            "voxels": len(inputs[1]),
            "mode": self.mode,
            "ms": times,
            "host": {who: host(run) for who, run in runs.items()},
            "syncs": {who: syncs(run) for who, run in runs.items()},
            "first": self.first,
            "errors": {who: round(float((got - want).norm() / want.norm()), 6) for who, got in results.items()},
        }

    def profiled(self, res: int) -> Row:
        """What the GPU does in a call, and what the host does; of the compiled network alone, if it is there."""
        wanted = {who: net for who, net in self.nets.items() if "compiled" in who} or self.nets
        runs = {who: MODES[self.mode](net, scene(res)) for who, net in wanted.items()}
        return {
            "busy": {who: kernels(run) for who, run in runs.items()},
            "profile": {who: sampled(run) for who, run in runs.items()},
        }


def _sums(out: Tensor) -> Tensor:
    """Of each channel the values in ascending order: the same whatever the order of rows."""
    return out.sort(0).values


def build_bindings() -> None:
    """The C++ that launches what layers launch, compiled side by side."""
    launched = [op for op in LAUNCHED if binding.state(op, "cuda")[0] != "native" or op.native is None]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda op: binding.compile_plan(make_plan(op), op), launched))
    for op in launched:
        binding.build(op)
    if replay.is_replay_wanted():
        replay.build_replay_library(ops.conv)


def cells(name: str, given: argparse.Namespace) -> Iterator[Row]:
    """A mode of a network at every size, as the process that started this one asks for it (``_turns.py``)."""
    build_bindings()
    nets, compiled = Nets(name, given.mode, given.peers.split(",")), False
    nets.warm()
    print(READY, flush=True)
    for asked in map(str.strip, sys.stdin):
        if asked == "compile":
            nets.compile()
            nets.warm()
            compiled = True
            print(READY, flush=True)
            continue
        rows = [{**nets.compared(res, given.rounds), "compiled": compiled} for res in SHELLS]
        yield from rows
        for row, res in zip(rows, SHELLS, strict=True):
            yield {**row, **nets.profiled(res)}
        print(DONE, flush=True)


def behind_eager(name: str, given: argparse.Namespace) -> Iterator[Row]:
    """The same in a process that has launched kernels of tables and layers before."""
    inputs = scene(SHELLS[0])
    layers = [facade.SubMConv3d(CHANNELS, 16, 3, indice_key="s0")]
    for level in range(4):
        layers += [
            facade.SparseConv3d(16, 16, 2, 2, indice_key=f"d{level}"),
            facade.SubMConv3d(16, 16, 3, indice_key=f"s{level + 1}"),
        ]
    layers += [facade.SparseInverseConv3d(16, 16, 2, indice_key=f"d{level}") for level in reversed(range(4))]
    thin = facade.SparseSequential(*layers).cuda().half().eval()
    with torch.no_grad():
        thin(facade.SparseConvTensor(*inputs, 1))
    yield from first_call(name, given)


def first_call(name: str, given: argparse.Namespace) -> Iterator[Row]:
    """Seconds of the first call of the network in this process, which is a compiled one."""
    inputs, net = scene(SHELLS[0]), network(name, facade).eval()
    with torch.no_grad():
        torch.cuda.synchronize()
        began = time.perf_counter()
        got = torch.compile(net)(*inputs)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        want = net(*inputs)
    error = float((got - want).float().norm() / want.float().norm())
    kinds = counters["inductor"] + counters["aot_autograd"]
    found = {what: count for what, count in kinds.items() if "cache" in what}
    yield {"network": name, "voxels": len(inputs[1]), "seconds": seconds, "error": error, "cache": found}


PARTS: dict[str, Callable[[str, argparse.Namespace], Iterator[Row]]] = {
    "first": first_call,
    "behind": behind_eager,
    "cells": cells,
    "again": first_call,
}


def in_processes(name: str, given: argparse.Namespace, parts: list[str]) -> list[Row]:
    """The rows of a process each, with caches that are empty for the first of them."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as home:
        variables = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "SHIPLAP_CACHE_DIR"
        for part in parts:
            rows += in_process(__file__, part, name, given, {v: f"{home}/{v.lower()}" for v in variables})
    return rows


def with_bytecode() -> None:
    """Let processes leave the bytecode of what they import to later ones, where it may not lie beside the sources."""
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        os.environ.setdefault("PYTHONPYCACHEPREFIX", tempfile.mkdtemp(prefix="bytecode-"))


def measured(given: argparse.Namespace, names: list[str]) -> dict[str, list[Row]]:
    """All parts. The first calls are made with empty caches, then in other processes."""
    done: dict[str, list[Row]] = {part: [] for part in given.parts.split(",")}
    with_bytecode()

    def again() -> None:
        for name in names if "again" in done and not done["again"] else []:
            done["again"] += in_process(__file__, "again", name, given, {})

    for name in names:
        if "first" in done:
            done["first"] += in_processes(name, given, ["first", "first"])
        if "behind" in done:
            done["behind"] += in_processes(name, given, ["behind", "first", "first"])
    if "cells" in done:
        build_bindings()
        done["cells"] += in_turn(__file__, list(product(names, MODES)), given, again)
    again()
    return done


def ratios(rows: list[Row]) -> dict[str, float]:
    """Geometric means of each peer's time over ours, eager and compiled."""
    means = {}
    for ours in ("shiplap", "shiplap compiled"):
        for _, peer in PEERS:
            of = [r["ms"] for r in rows if r["compiled"] is ("compiled" in ours)]
            each = [ms[peer] / ms[ours] for ms in of if peer in ms and ours in ms]
            if each:
                means[f"{peer} / {ours}"] = round(prod(each) ** (1 / len(each)), 3)
    return means


def keep(path: Path, part: str, made: dict[str, Any]) -> None:
    """Write what was measured, or one part of it beside what the file has."""
    old = json.loads(path.read_text()) if path.is_file() else {}
    parts = {name: value for name, value in old.items() if isinstance(value, dict) and "digest" in value}
    write(path, {**old, part: made} if part else {**made, **parts})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/consumers_gpu.json")
    parser.add_argument("--parts", default="first,cells", help="some of first,behind,cells,again; else: %(default)s")
    parser.add_argument("--peers", default=PEERS[0][1], help="of spconv,spconv-triton; else: %(default)s")
    parser.add_argument("--slow", default="", help="PEER:NETWORK:MODE, ... of peers that compile for minutes")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--limit", type=float, default=400.0, help="seconds for a process")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds to compile in")
    parser.add_argument("--early", type=float, default=60.0, help="after which those that are compiled are timed")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--network", choices=sorted(NETWORKS), help="only this one")
    parser.add_argument("--here", choices=sorted(PARTS), help="one part, in this process")
    parser.add_argument("--mode", choices=sorted(MODES), help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = [given.network] if given.network else sorted(NETWORKS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # processes of parts are ended, too
    if given.here:
        for row in PARTS[given.here](names[0], given):
            print(json.dumps(row), flush=True)
        return
    done = measured(given, names)
    means = ratios(done.get("cells", []))
    print(json.dumps(means))
    if given.json:
        packages, device = ["triton", "spconv-cu126", "spconv-triton"], torch.cuda.get_device_name()
        found = {**done, "means": means} if "cells" in done else done
        part = "eager" if given.eager else "" if "cells" in done else "first calls"  # what is compiled takes minutes
        keep(Path(__file__).parent / "results" / "consumers_gpu.json", part, record(SOURCES, packages, device, **found))


if __name__ == "__main__":
    main()
