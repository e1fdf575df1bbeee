"""The same work on 1, 2, 4 ... GPUs of one host: training, inference on tiles, tensor parallelism, tuning for all.

Usage: ``python benchmarks/many_gpus.py [--gpus 2] [--parts train,infer,...] [--times 5]
[--limit 240] [--json]``. One group of processes, one a GPU, does everything, and the numbers of GPUs alternate round by
round, so that all of them see the same machine. A part that fails or takes too long is named, and the parts after it
are done by new processes. ``--device cpu`` tries the script with gloo and small sizes. Exit status 1 if values of
several ranks are not those of one, or a rank did not receive what rank 0 tuned, or a part is missing.
docs/many-devices.md shows the record.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from _many_infer import infer
from _many_ranks import Ranks, build_bindings, middle
from _many_train import gradients_of, large, strong, train
from _record import ROOT, record, write
from jaxtyping import Float
from torch import Tensor, nn

SOURCES = [
    "packages/shiplap-sparse3d/src/**/*.py",
    "packages/shiplap-slidesparse/src/**/*.py",
    "benchmarks/many_gpus.py",
    "benchmarks/_many_*.py",
]
SETTINGS = ("SHIPLAP_NATIVE", "SHIPLAP_REPLAY")  # that a record names if they are set
# Seconds after which the processes that do a part are ended; four times as many without GPUs.
LIMITS = {"train": 130, "infer": 200, "tensor": 60, "tune": 40, "strong": 90, "large": 90, "gradients": 90}


def tensor(ranks: Ranks) -> dict[str, Any]:
    """A gated MLP on all ranks: slidesparse and dense, on one rank and divided among all."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    import shiplap_slidesparse as slidesparse

    scale, dtype = ranks.scale, torch.bfloat16 if ranks.device.type == "cuda" else torch.float32

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = (nn.Linear(scale.hidden, scale.inner, bias=False) for _ in range(2))
            self.down = nn.Linear(scale.inner, scale.hidden, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
            return out

    def made() -> nn.Module:
        torch.manual_seed(3)
        return Mlp().to(ranks.device, dtype).eval()

    def converted() -> nn.Module:
        model = made()
        slidesparse.convert(model, "2:4", "int8")
        return model

    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    names = {"gate": "colwise", "up": "colwise", "down": "rowwise"}
    models = {"dense 1": (1, made()), "slidesparse 1": (1, converted()), "dense 1 again": (1, made())}
    for k in ranks.sizes[1:]:
        divided, cut = made(), converted()
        if ranks.rank < k:
            mesh = DeviceMesh.from_group(ranks.groups[k], ranks.device.type)
            parallelize_module(divided, mesh, plan)
            slidesparse.shard(cut, names, mesh)
        models |= {f"dense {k}": (k, divided), f"slidesparse {k}": (k, cut)}
    torch.manual_seed(4)
    x = torch.randn(scale.tokens, scale.hidden).to(ranks.device, dtype)

    def steps(model: nn.Module) -> None:
        with torch.no_grad():
            for _ in range(20):
                model(x)

    with torch.no_grad():
        outs = {name: model(x).float() for name, (k, model) in models.items() if ranks.rank < k}
    apart = {
        name: float((out - outs[f"{name.split()[0]} 1"]).norm() / outs[f"{name.split()[0]} 1"].norm())
        for name, out in outs.items()
        if f"{name.split()[0]} 1" in outs
    }
    seconds = ranks.rounds({name: (k, lambda m=model: steps(m)) for name, (k, model) in models.items()}, 20)
    ms = {name: value / 20 * 1e3 for name, value in middle(seconds).items()}
    whole = scale.tokens * scale.hidden * x.element_size()
    return {
        "mlp": [scale.tokens, scale.hidden, scale.inner],
        "cuSPARSELt": str(slidesparse.lt.available(ranks.device)),
        "ms": {name: [round(max(each) / 20 * 1e3, 3) for each in of] for name, of in seconds.items()},
        "speed": {name: round(ms[f"{name.split()[0]} 1"] / value, 3) for name, value in ms.items()},
        "over dense": {k: round(ms[f"dense {k}"] / ms[f"slidesparse {k}"], 3) for k in ranks.sizes},
        "apart": {name: round(value, 5) for name, value in apart.items()},
        "equal": max(apart.values(), default=0.0),
        "sent_mb": {k: round(2 * whole * (k - 1) / k / 1e6, 2) for k in ranks.sizes},
    }


def tune(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Rank 0 tunes and all run its choice."""
    os.environ["SHIPLAP_CACHE_DIR"] = str(folder / f"rank{ranks.rank}")

    import shiplap as sl
    from shiplap.tuning import measure

    @sl.op("many_gpus::twice")
    def twice(x: Float[Tensor, "n m"]) -> Float[Tensor, "n m"]:
        return x * 2

    @twice.kernel(ranks.device.type, name="thrice_as_long")
    def _(x: Tensor, *, out: Tensor) -> None:
        for _ in range(3):
            torch.mul(x, 2, out=out)

    @twice.kernel(ranks.device.type, name="once")
    def _(x: Tensor, *, out: Tensor) -> None:
        torch.mul(x, 2, out=out)

    x = torch.randn(1 << 12, 1 << 10).to(ranks.device)
    (choice,) = sl.tune(twice, [(x,)], budget=30, isolate=False, progress=False)
    said: list[Any] = [None] * ranks.world
    mine = (
        choice.label,
        choice.origin,
        measure.benchmarks > 0,
        getattr(twice.pick_kernel(twice.bind((x,))), "name", "reference"),
    )
    dist.all_gather_object(said, mine, group=ranks.quiet)
    right = all(label == said[0][0] == picked and (r == 0) == timed for r, (label, _, timed, picked) in enumerate(said))
    return {"said": said, "equal": right}


WORK = {
    "train": train,
    "infer": infer,
    "tensor": tensor,
    "tune": tune,
    "strong": strong,
    "large": large,
    "gradients": gradients_of,
}


def worker(asked: argparse.Namespace, parts: list[str]) -> None:
    """One rank."""
    import shiplap_sparse3d  # noqa: F401 - its ops, whose bindings are built

    started = time.perf_counter()
    ranks, folder = Ranks(asked.device, asked.times, asked.scenes, asked.until), asked.folder
    failed = build_bindings(ranks)
    if ranks.rank == 0:
        print(f"ranks and bindings in {time.perf_counter() - started:.1f} s; not built: {failed}", flush=True)
    for part in parts:
        if ranks.rank == 0:
            print(json.dumps({"began": part}), flush=True)
        given: Any = {"infer": (ranks, folder, asked.surveys), "tune": (ranks, folder)}.get(part, (ranks,))
        started = time.perf_counter()
        result = WORK[part](*given)
        result["part_seconds"] = round(time.perf_counter() - started, 1)
        if ranks.rank == 0:
            print(json.dumps({part: result}), flush=True)
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()
        ranks.wait()
    dist.destroy_process_group()


def close_enough(result: dict[str, Any]) -> bool:
    """Whether several ranks computed what one does."""
    limits = {"gradients": 1e-3, "tensor": 5e-2}  # of 8 bits; ranks that divide a row scale their parts of it apart
    told = {name: part["equal"] for name, part in result.items() if "equal" in part}
    return all(value < limits[name] if name in limits else value is True for name, value in told.items())


def driver() -> str:
    """Its version."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()


def launched(
    command: list[str], environment: dict[str, str], until: float, patience: int
) -> tuple[dict[str, Any], str]:
    """Run ranks; what rank 0 said of each part, and the part at which they ended or were too slow, or empty."""
    result, now, lines = {}, "start", queue.Queue[str]()
    ends = time.monotonic() + 120
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    ) as process:

        def read() -> None:
            for line in process.stdout or ():
                lines.put(line)
            lines.put("")

        threading.Thread(target=read, daemon=True).start()
        while True:
            try:
                line = lines.get(timeout=max(0.0, min(ends, until) - time.monotonic()))
            except queue.Empty:
                os.killpg(process.pid, signal.SIGTERM)  # the launcher ends its ranks
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                return result, now
            print(line, end="", flush=True)
            if not line:
                return result, now if process.wait() else ""
            if line.startswith("{"):
                told = json.loads(line)
                if "began" in told:
                    now = told["began"]
                    ends = time.monotonic() + patience * LIMITS[now]
                else:
                    result |= told


def measured(asked: argparse.Namespace, parts: list[str], gpus: int) -> dict[str, Any]:
    """All parts, by as many launches as it takes."""
    threads = str(max(1, (os.cpu_count() or 1) // (2 * gpus)))  # what the system calls a core may be half of one
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "NCCL_NVLS_ENABLE": "0"}
    until, result = time.monotonic() + asked.limit, {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        maker = [sys.executable, str(Path(__file__).with_name("_many_infer.py")), name, asked.device]
        maker += asked.surveys
        surveys = subprocess.Popen(maker, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}) if "infer" in parts else None
        while parts and time.monotonic() < until - 20:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
            command += [__file__, "--device", asked.device, "--parts", ",".join(parts), "--times", str(asked.times)]
            command += ["--surveys", *asked.surveys, "--scenes", *map(str, asked.scenes), "--until", str(until)]
            told, failed = launched(
                [*command, "--folder", name], environment, until, 1 if asked.device == "cuda" else 4
            )
            result |= told
            if failed:
                print(f"{failed} did not end as it should", file=sys.stderr, flush=True)
            parts = [part for part in parts if part not in result and part != failed] if failed != "start" else []
        if surveys is not None:
            surveys.kill()
            surveys.wait()
    return result


def main() -> int:
    """Start the ranks, collect what rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=0, help="ranks, by default all GPUs of the host")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", default=",".join(WORK))
    parser.add_argument("--surveys", nargs="*", default=[], help="those of the part infer, by default all")
    parser.add_argument("--scenes", nargs="*", type=int, default=[], help="on a rank in the part train: 16, 1 or both")
    parser.add_argument("--times", type=int, default=5, help="rounds that are timed")
    parser.add_argument(
        "--limit", type=float, default=900, help="seconds, after which the parts that are left are not done"
    )
    parser.add_argument("--until", type=float, default=math.inf, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=Path(), help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/many_gpus.json")
    asked = parser.parse_args()
    parts = asked.parts.split(",")
    if unknown := set(parts) - set(WORK):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; parts are {', '.join(WORK)}")
    if "RANK" in os.environ:
        worker(asked, parts)
        return 0
    gpus = asked.gpus or torch.cuda.device_count() or 2
    if asked.device == "cuda" and torch.cuda.device_count() < gpus:
        print(f"{gpus} GPUs are needed, and {torch.cuda.device_count()} are here", file=sys.stderr)
        return 2
    result = measured(asked, parts, gpus)
    if asked.json:
        name = torch.cuda.get_device_name() if asked.device == "cuda" else ""
        device = f"{gpus} x {name}, driver {driver()}" if name else ""
        versions = {"cuda": torch.version.cuda, "nccl": list(torch.cuda.nccl.version())} if name else {}
        settings = {name: value for name, value in os.environ.items() if name in SETTINGS}
        kept = record(SOURCES, ["triton"], device, gpus=gpus, settings=settings, **versions, parts=result)
        write(ROOT / "benchmarks" / "results" / "many_gpus.json", kept)
    return int(not close_enough(result) or set(result) != set(parts))


if __name__ == "__main__":
    sys.exit(main())
