"""Tuning of the eight sphere shells, forward and backward, on a GPU: what it takes, and what it brings.

One process records the calls of eight layers, another tunes them, a third is to find everything stored. Then the layers
are timed with the declared defaults and with what was chosen. Claims, exit status 1 where one does not hold: under
120 s, and nothing measured by the second process. Run: ``python benchmarks/sparse3d_tune_gpu.py --json ...``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from _record import record, write
from sparse3d_gpu import SHELLS, device_name, in_turns, no_grad, shell

import shiplap_sparse3d as sparse3d

SOURCES = [
    "benchmarks/sparse3d_tune_gpu.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/cuda/conv.py",
    "packages/shiplap-sparse3d/src/shiplap_sparse3d/cuda/*.triton.jinja",
    "packages/shiplap/src/shiplap/tuning/search.py",
    "packages/shiplap/src/shiplap/tuning/bench.py",
]
BARS = {"seconds": 120.0}


def layers(rounds: int) -> list[dict[str, float]]:
    """Forward, and forward and backward, of a layer of each shell: milliseconds, or nothing timed for no rounds."""
    results = []
    for res, channels in SHELLS:
        coords = shell(res)
        plan = sparse3d.Geometry(coords, (res,) * 3, 1).subm(3)
        feats = torch.randn(len(coords), channels, device="cuda").half().requires_grad_()
        weight = (torch.randn(channels, 27, channels, device="cuda") / (13 * channels) ** 0.5).half().requires_grad_()
        grad = torch.randn_like(feats)

        def forward(plan: Any = plan, feats: Any = feats, weight: Any = weight) -> Any:
            return plan.conv(feats, weight)

        def train(forward: Any = forward, feats: Any = feats, weight: Any = weight, grad: Any = grad) -> None:
            feats.grad = weight.grad = None
            forward().backward(grad)

        train()
        results.append(in_turns({"forward": no_grad(forward), "train": train}, rounds) if rounds else {})
        del coords, plan, feats, weight, grad, forward, train
        torch.cuda.empty_cache()
    return results


def apart(folder: Path, cache: str, *command: str, **environment: str) -> tuple[float, str]:
    """Seconds and output of a Python process with a cache of its own."""
    (folder / cache).mkdir(mode=0o700, exist_ok=True)
    env = os.environ | {"SHIPLAP_CACHE_DIR": str(folder / cache)} | environment
    started = time.monotonic()
    done = subprocess.run([sys.executable, *command], env=env, stdout=subprocess.PIPE, text=True, check=True)
    return time.monotonic() - started, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--budget", default="100s", help="of the tuning")
    parser.add_argument("--layers", type=int, metavar="ROUNDS", help="time the layers in this process, and print that")
    options = parser.parse_args()
    if options.layers is not None:
        print(json.dumps(layers(options.layers)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        calls = str(folder / "calls.jsonl")
        apart(folder, "default", __file__, "--layers", "0", SHIPLAP_RECORD=calls)
        tune = ["-m", "shiplap.cli", "tune", "shiplap_sparse3d.ops", "--profile", calls, "--device", "cuda"]
        runs = [apart(folder, "tuned", *tune, "--budget", options.budget, "--json") for _ in range(2)]
        first, second = (json.loads(text)["choices"] for _, text in runs)
        times = {
            cache: json.loads(apart(folder, cache, __file__, "--layers", "7")[1]) for cache in ("default", "tuned")
        }
    measured = {
        "seconds": runs[0][0],
        "seconds of a second process": runs[1][0],
        "measured by a second process": sum(c["origin"] == "measured" for c in second),
        "choices": [
            {k: c[k] for k in ("op", "bucket", "kernel", "config", "time", "default_time", "tried", "reason")}
            for c in first
        ],
        "layers": [
            {"res": res, "channels": channels, "default": a, "tuned": b}
            for (res, channels), a, b in zip(SHELLS, times["default"], times["tuned"], strict=True)
        ],
    }
    for layer in measured["layers"]:
        print(layer, flush=True)
    print({k: v for k, v in measured.items() if k not in ("choices", "layers")}, flush=True)
    if options.json:
        write(options.json, record(SOURCES, ["triton"], device_name(), **measured))
    if measured["seconds"] > BARS["seconds"] or measured["measured by a second process"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
