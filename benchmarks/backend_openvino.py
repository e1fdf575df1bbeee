"""Models on the generated OpenVINO device beside CPU eager and OpenVINO's own torch.compile backend.

Every round times each contestant once, in random order; medians are reported. Small ops show what a call costs, the
first call of a shape what compiling its graphs costs.

    python benchmarks/backend_openvino.py --project DIR [--json benchmarks/results/backend_openvino.json]

DIR is a project that ``shiplap backend new openvino --runtime openvino`` made and ``shiplap backend build`` built.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "packages" / "shiplap-backend"), str(ROOT / "benchmarks")]

import _record  # noqa: E402

from tests.backend.models import MODELS  # noqa: E402

RUNTIMES = "packages/shiplap-backend/src/shiplap_backend/runtimes"
SOURCES = (
    f"{RUNTIMES}/common/csrc/*.cpp",
    f"{RUNTIMES}/common/include/shiplap_backend/*.h",
    f"{RUNTIMES}/openvino/*.cpp",
    f"{RUNTIMES}/openvino/*.h",
    "packages/shiplap-backend/src/shiplap_backend/metadata/openvino.yaml",
    "packages/shiplap-backend/tests/backend/models.py",
)
Contestant = Callable[[], Any]


def timed(contestants: dict[str, Contestant], rounds: int, calls: int = 1) -> dict[str, float]:
    """Milliseconds of a call of each: the median over rounds, which visit them in random order."""
    seen: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name in random.sample(list(contestants), len(contestants)):
            start = time.perf_counter()
            for _ in range(calls):
                contestants[name]()
            seen[name].append((time.perf_counter() - start) / calls * 1e3)
    return {name: round(statistics.median(times), 4) for name, times in seen.items()}


def drop_failing(contestants: dict[str, Contestant]) -> dict[str, str]:
    """Call each once; those that raise are left out, with their reason."""
    failed = {}
    for name in list(contestants):
        try:
            contestants[name]()
        except Exception as e:  # a peer that cannot run the model: reported, not hidden
            failed[name] = f"{type(e).__name__}: {e}".splitlines()[0][:200]
            del contestants[name]
    return failed


def models(device: str, rounds: int, without: list[str]) -> dict[str, Any]:
    """Inference of each model, with what ran where, and the cost of its first call."""
    dev, results = getattr(torch, device), {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model, inputs, _ = make(False)
        model.eval()
        on, there = copy.deepcopy(model).to(device), {k: v.to(device) for k, v in inputs.items()}
        torch.compiler.reset()
        vendor = torch.compile(model, backend="openvino", dynamic=False)
        inductor = torch.compile(model, dynamic=False)
        compiled = torch.compile(on, dynamic=False, options={"fallback_by_default": True})  # every op on the device
        dev.cache_clear()
        start = time.perf_counter()
        got = on(**there).logits
        first = time.perf_counter() - start
        contestants: dict[str, Contestant] = {
            "cpu eager": lambda m=model, i=inputs: m(**i),
            "cpu inductor": lambda m=inductor, i=inputs: m(**i),
            "openvino's torch.compile backend": lambda m=vendor, i=inputs: m(**i),
            "device eager": lambda m=on, i=there: m(**i),
            "device inductor": lambda m=compiled, i=there: m(**i),
        }
        differences = {"device eager": float((got.cpu() - model(**inputs).logits).abs().max())}
        dev.reset_counters()
        on(**there)
        counts = dev.counters()
        contestants = {name: c for name, c in contestants.items() if name not in without}
        failed = drop_failing(contestants)
        results[name] = {
            "milliseconds": timed(contestants, rounds),
            "failed": failed,
            "first call of the device, seconds": round(first, 3),
            "graphs": dev.cache_info()["entries"],
            "largest difference from the CPU": differences,
            "native calls": sum(c["native"] for c in counts.values()),
            "fallback calls": {op: c["fallback"] for op, c in counts.items() if c["fallback"]},
        }
        print(json.dumps({name: results[name]}, indent=1), flush=True)
    return results


def calls(device: str, rounds: int) -> dict[str, Any]:
    """Microseconds of small and large calls, native and fallback."""
    results = {}
    for name, call in {
        "add 64x64": lambda a, b: torch.add(a[:64, :64], b[:64, :64]),
        "mm 64": lambda a, b: a[:64, :64] @ b[:64, :64],
        "mm 1024": lambda a, b: a @ b,
        "mm 1024, second transposed": lambda a, b: a @ b.t(),
        "erfinv 64x64 (fallback)": lambda a, b: torch.erfinv(a[:64, :64]),
    }.items():
        pairs = {where: [torch.rand(1024, 1024).to(where) for _ in "ab"] for where in ("cpu", device)}
        contestants: dict[str, Contestant] = {where: lambda p=p, f=call: f(*p) for where, p in pairs.items()}
        for contestant in contestants.values():
            contestant()
        times = timed(contestants, rounds, 5 if "1024" in name else 200)
        results[name] = {where: round(ms * 1e3, 1) for where, ms in times.items()}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--project", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--without", action="append", default=[], help="a contestant to leave out")
    parser.add_argument("--threads", type=int, default=1, help="of torch and of the graphs (default 1)")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(options.threads)
    sys.path.insert(0, str(options.project.resolve()))
    import torch_openvino
    from openvino.frontend.pytorch.torchdynamo import backend as _backend  # noqa: F401  registers "openvino"

    torch_openvino.autoload()
    with torch.no_grad():
        small, whole = calls("openvino", options.rounds), models("openvino", options.rounds, options.without)
    print(json.dumps(small, indent=1))
    result = _record.record(
        SOURCES, ["openvino", "transformers"], threads=torch.get_num_threads(), models=whole, microseconds=small
    )
    if options.json:
        _record.write(options.json, result)


if __name__ == "__main__":
    main()
