"""The same work on 1, 2, 4 ... GPUs of one host: training, inference on tiles, tensor parallelism, tuning for all.

Usage: ``python benchmarks/many_gpus.py [--gpus 2] [--parts train,infer,tensor,tune] [--times 5] [--json]``. One group
of processes, one a GPU, does everything, and the numbers of GPUs alternate round by round, so that all of them see the
same machine. ``--device cpu`` tries the script with gloo and small sizes. Exit status 1 if values of several ranks are
not those of one, or a rank did not receive what rank 0 tuned. docs/many-devices.md shows the record.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from _many_ranks import Ranks, Works, middle
from _many_train import network, train
from _record import ROOT, record, write
from jaxtyping import Float
from torch import Tensor, nn

if TYPE_CHECKING:
    from shiplap_sparse3d.survey import Manifest

SOURCES = [
    "packages/shiplap-sparse3d/src/**/*.py",
    "packages/shiplap-slidesparse/src/**/*.py",
    "benchmarks/many_gpus.py",
    "benchmarks/_many_*.py",
]
SETTINGS = ("SHIPLAP_NATIVE", "SHIPLAP_REPLAY")  # that a record names if they are set


def survey_of(ranks: Ranks, folder: Path) -> Manifest:
    """Rank 0 makes a survey, and sorts its points into tiles."""
    import laspy
    import numpy as np

    from shiplap_sparse3d.survey import SurveyModel, prepare

    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            import shiplap_sparse3d as sparse3d

            self.first, self.net = sparse3d.SubMConv3d(5, 4, 1), network(3, (32, 64, 128))

        def forward(self, x: Any) -> Any:
            return self.net(self.first(x))

    torch.manual_seed(2)
    model = SurveyModel(Seen().to(ranks.device).eval(), (1.0, 1.0, 1.0), (1, 2, 5))
    source, scale = folder / "in.las", ranks.scale
    if ranks.rank == 0:
        draw, (width, depth) = np.random.default_rng(0), scale.area
        cloud = laspy.create(point_format=1, file_version="1.2")
        cloud.header.scales, cloud.header.offsets = (0.01,) * 3, (0.0,) * 3
        cloud.x, cloud.y = draw.uniform(0, width - 0.1, scale.points), draw.uniform(0, depth - 0.1, scale.points)
        cloud.z = 8 * np.sin(cloud.x / 31) + 6 * np.cos(cloud.y / 17) + draw.exponential(1.5, scale.points)
        cloud.intensity = draw.integers(0, 4000, scale.points)
        cloud.classification = np.full(scale.points, 1, np.uint8)
        cloud.write(source)
        prepare(source, folder / "tiles", model, tile=scale.tile)
    ranks.wait()
    return prepare(source, folder / "tiles", model, tile=scale.tile)


def infer(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Tiles of a survey folder by ``k`` workers, as ``shiplap survey`` does it: read, predict, write the classes."""
    from shiplap_sparse3d.survey.predict import predicted, read_tile
    from shiplap_sparse3d.survey.shares import predict_tiles, shares
    from shiplap_sparse3d.survey.tiles import tiling

    manifest = survey_of(ranks, folder)
    model, place, buckets = manifest.model, manifest.folder, manifest.buckets
    tiles = tiling(model.field, ranks.scale.tile, None)
    given, results = (model, place, buckets, manifest.grid, tiles), {}

    def forget() -> None:
        """What the run before has written, kept to be compared."""
        if (place.path / "classes").exists():
            results[len(results)] = {tile: place.result(tile).read_bytes() for tile in buckets.tiles}
        for part in ("classes", "done"):
            shutil.rmtree(place.path / part, ignore_errors=True)

    def run(k: int, ahead: bool) -> None:
        for _ in predict_tiles(*given, shares(buckets, tiles, k)[ranks.rank], ahead=ahead):
            pass

    works: Works = {f"{k}": (k, partial(run, k, True)) for k in ranks.sizes}
    works |= {"1 again": (1, partial(run, 1, True)), "1 in turn": (1, partial(run, 1, False))}
    works[f"{ranks.world} in turn"] = ranks.world, partial(run, ranks.world, False)
    seconds = ranks.rounds(works, warm=1, before=forget)
    some = buckets.tiles[:: max(1, len(buckets.tiles) // 32)]
    spent = {"read": 0.0, "predict": 0.0}
    for tile in some:
        times = [time.perf_counter()]
        question = read_tile(*given, tile)
        times.append(time.perf_counter())
        predicted(model, question)  # its classes are copied to the host
        times.append(time.perf_counter())
        spent["read"] += times[1] - times[0]
        spent["predict"] += times[2] - times[1]
    taken = middle(seconds)
    mean = {name: statistics.mean(sum(each) / len(each) for each in of) for name, of in seconds.items()}
    return {
        "tiles": len(buckets.tiles),
        "points": ranks.scale.points,
        "seconds": {name: [[round(s, 4) for s in each] for each in of] for name, of in seconds.items()},
        "speed": {k: round(taken["1"] / taken[f"{k}"], 3) for k in ranks.sizes},
        "in turn": round(taken["1 in turn"] / taken[f"{ranks.world} in turn"], 3),
        "gained by reading ahead": round(taken["1 in turn"] / taken["1"], 3),
        "slowest rank over the mean": round(taken[f"{ranks.world}"] / mean[f"{ranks.world}"], 3),
        "control": round(taken["1"] / taken["1 again"], 3),
        "ms of a tile": {name: round(s / len(some) * 1e3, 2) for name, s in spent.items()},
        "equal": ranks.rank != 0 or (len(results) > 1 and all(each == results[0] for each in results.values())),
    }


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
    seconds = ranks.rounds({name: (k, lambda m=model: steps(m)) for name, (k, model) in models.items()})
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
    from shiplap.selection import measure

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
        getattr(twice.pick(twice.bind((x,))), "name", "reference"),
    )
    dist.all_gather_object(said, mine, group=ranks.quiet)
    right = all(label == said[0][0] == picked and (r == 0) == timed for r, (label, _, timed, picked) in enumerate(said))
    return {"said": said, "equal": right}


WORK = {"train": train, "infer": infer, "tensor": tensor, "tune": tune}


def worker(device: str, parts: list[str], times: int) -> None:
    """One rank."""
    ranks, result = Ranks(device, times), {}
    with tempfile.TemporaryDirectory() as name:
        shared = [name]
        dist.broadcast_object_list(shared, group=ranks.quiet)
        folder = Path(shared[0])
        for part in parts:
            given: Any = (ranks, folder) if part in ("infer", "tune") else (ranks,)
            started = time.perf_counter()
            result[part] = WORK[part](*given)
            result[part]["part_seconds"] = round(time.perf_counter() - started, 1)
            if ranks.rank == 0:
                print(json.dumps({part: result[part]}), flush=True)
            ranks.wait()
    dist.destroy_process_group()


def close_enough(result: dict[str, Any]) -> bool:
    """Whether several ranks computed what one does."""
    limits = {"train": 1e-3, "tensor": 4e-2}  # of 8 bits; ranks that divide a row scale their parts of it apart
    return all(
        part["equal"] < limits[name] if name in limits else part["equal"] is True for name, part in result.items()
    )


def driver() -> str:
    """Its version."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()


def main() -> int:
    """Start the ranks, collect what rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=0, help="ranks, by default all GPUs of the host")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", default=",".join(WORK))
    parser.add_argument("--times", type=int, default=5, help="rounds that are timed")
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/many_gpus.json")
    asked = parser.parse_args()
    parts = asked.parts.split(",")
    if unknown := set(parts) - set(WORK):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; parts are {', '.join(WORK)}")
    if "RANK" in os.environ:
        worker(asked.device, parts, asked.times)
        return 0
    gpus = asked.gpus or torch.cuda.device_count() or 2
    if asked.device == "cuda" and torch.cuda.device_count() < gpus:
        print(f"{gpus} GPUs are needed, and {torch.cuda.device_count()} are here", file=sys.stderr)
        return 2
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus), __file__]
    command += ["--device", asked.device, "--parts", asked.parts, "--times", str(asked.times)]
    threads = str(max(1, (os.cpu_count() or 1) // (2 * gpus)))  # what the system calls a core may be half of one
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "NCCL_NVLS_ENABLE": "0"}
    result: dict[str, Any] = {}
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, env=environment) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if line.startswith("{"):
                result |= json.loads(line)
    if process.returncode:
        return process.returncode
    if asked.json:
        name = torch.cuda.get_device_name() if asked.device == "cuda" else ""
        device = f"{gpus} x {name}, driver {driver()}" if name else ""
        versions = {"cuda": torch.version.cuda, "nccl": list(torch.cuda.nccl.version())} if name else {}
        settings = {name: value for name, value in os.environ.items() if name in SETTINGS}
        kept = record(
            SOURCES, ["triton"], device, gpus=gpus, threads=threads, settings=settings, **versions, parts=result
        )
        write(ROOT / "benchmarks" / "results" / "many_gpus.json", kept)
    return int(not close_enough(result))


if __name__ == "__main__":
    sys.exit(main())
