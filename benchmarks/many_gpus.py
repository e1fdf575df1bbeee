"""The same work on 1, 2, 4 ... GPUs of one host: training, inference on tiles, tensor parallelism, tuning for all.

Usage: ``python benchmarks/many_gpus.py [--gpus 2] [--parts train,infer,tensor,tune] [--json]``. One group of processes,
one a GPU, does everything, and the numbers of GPUs alternate round by round, so that all of them see the same machine.
``--device cpu`` tries the script with gloo and small sizes. Exit status 1 if values of several ranks are not those of
one, or a rank did not receive what rank 0 tuned. docs/many-devices.md shows the record.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from _record import ROOT, record, write
from jaxtyping import Float
from torch import Tensor, nn

SOURCES = [
    "packages/shiplap-sparse3d/src/**/*.py",
    "packages/shiplap-slidesparse/src/**/*.py",
    "benchmarks/many_gpus.py",
]
PARTS = ("train", "infer", "tensor", "tune")


class Scale:
    """How much work, by device."""

    def __init__(self, device: str) -> None:
        gpu = device == "cuda"
        self.edge, self.steps, self.times = (216, 12, 5) if gpu else (24, 1, 1)
        self.points, self.area = (1_000_000, (512, 256)) if gpu else (20_000, (64, 32))
        self.tile = 64 if gpu else 16
        self.hidden, self.inner, self.tokens = (4096, 14336, 16384) if gpu else (64, 128, 16)


class Ranks:
    """This process among all, and the first ``k`` of them as a group."""

    def __init__(self, device: str) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if device == "cuda":
            torch.cuda.set_device(self.rank)
        self.device = torch.device("cuda", self.rank) if device == "cuda" else torch.device("cpu")
        dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=300))
        self.quiet = dist.new_group(backend="gloo")  # whoever waits in it keeps its GPU idle
        self.sizes = [k for k in (1, 2, 4, 8, 16) if k <= self.world]
        self.groups = {k: dist.new_group(list(range(k))) for k in self.sizes}
        self.scale = Scale(device)

    def wait(self) -> None:
        """Until all are here, the GPUs idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier(self.quiet)

    def timed(self, k: int, work: Callable[[], object]) -> float:
        """Seconds in which the first ``k`` ranks do ``work``: of the slowest."""
        self.wait()
        spent = torch.zeros(1, dtype=torch.float64)
        if self.rank < k:
            started = time.perf_counter()
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            spent[0] = time.perf_counter() - started
        dist.all_reduce(spent, dist.ReduceOp.MAX, group=self.quiet)
        return float(spent)

    def rounds(self, works: dict[str, tuple[int, Callable[[], object]]], warm: int = 3) -> dict[str, list[float]]:
        """Seconds of each of ``works`` (name → ranks, work), in turn, again and again; first ``warm`` times untimed."""
        for k, work in works.values():
            for _ in range(warm):
                self.timed(k, work)
        seconds: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(self.scale.times):
            for name, (k, work) in works.items():
                seconds[name].append(self.timed(k, work))
        return seconds


def terrain(edge: int, seed: int) -> Tensor:
    """``int32 [edge * edge, 4]``: the voxels of a hilly surface, one for each column."""
    draw = torch.Generator().manual_seed(seed)
    phase = torch.rand(4, generator=draw) * 6
    x, y = torch.meshgrid(torch.arange(edge), torch.arange(edge), indexing="ij")
    wave = torch.sin(x / 19 + phase[0]) + torch.cos(y / 23 + phase[1]) + torch.sin((x + y) / 7 + phase[2]) / 3
    z = ((wave - wave.min()) * 10).int()
    return torch.stack([torch.zeros_like(z).flatten(), x.flatten(), y.flatten(), z.flatten()], 1).int()


def network(classes: int = 8, channels: tuple[int, ...] = (64, 128, 256)) -> nn.Module:
    """A residual sparse U-Net from 4 features to ``classes``."""
    import shiplap_sparse3d as sparse3d

    class Block(nn.Module):
        def __init__(self, c: int) -> None:
            super().__init__()
            conv = sparse3d.SubMConv3d
            self.body = sparse3d.Sequential(
                conv(c, c, 3), sparse3d.BatchNorm(c), nn.ReLU(), conv(c, c, 3), sparse3d.BatchNorm(c)
            )

        def forward(self, x: sparse3d.SparseTensor) -> sparse3d.SparseTensor:
            return self.body(x) + x

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            pairs = list(itertools.pairwise(channels))
            self.stem = sparse3d.SubMConv3d(4, channels[0], 3)
            self.encoder = nn.ModuleList(nn.Sequential(Block(c), Block(c)) for c in channels)
            self.down = nn.ModuleList(sparse3d.SparseConv3d(a, b, 2, 2) for a, b in pairs)
            self.up = nn.ModuleList(sparse3d.SparseInverseConv3d(b, a, 2) for a, b in pairs)
            self.decoder = nn.ModuleList(Block(a) for a, _ in pairs)
            self.head = sparse3d.SubMConv3d(channels[0], classes, 1)

        def forward(self, x: sparse3d.SparseTensor) -> sparse3d.SparseTensor:
            skips, x = [], self.encoder[0](self.stem(x))
            for down, encode in zip(self.down, self.encoder[1:], strict=True):
                skips.append(x)
                x = encode(down(x))
            for up, decode in reversed(list(zip(self.up, self.decoder, strict=True))):
                x = decode(up(x) + skips.pop())
            return self.head(x)

    return UNet()


class Trainer:
    """Steps of data-parallel training on the first ``k`` ranks; every step builds the tables of its scenes."""

    def __init__(self, ranks: Ranks, k: int, scenes: int, *, joined: bool = True) -> None:
        import shiplap_sparse3d as sparse3d

        self.ranks, self.scenes = ranks, scenes
        torch.manual_seed(0)
        self.net = network().to(ranks.device)
        self.run: nn.Module = self.net
        if k > 1 and joined and ranks.rank < k:
            self.run = nn.parallel.DistributedDataParallel(self.net, process_group=ranks.groups[k], static_graph=True)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)
        self.make = sparse3d.SparseTensor
        edge = ranks.scale.edge
        self.coords, self.feats = [], []
        for number in range(4):  # other scenes for each rank, and for each step
            parts = [terrain(edge, 100 * ranks.rank + 10 * number + i) for i in range(scenes)]
            for i, part in enumerate(parts):
                part[:, 0] = i
            self.coords.append(torch.cat(parts).to(ranks.device))
            self.feats.append(torch.randn(len(self.coords[-1]), 4).to(ranks.device))
        self.number = 0

    def step(self) -> None:
        """One step."""
        self.number += 1
        coords, feats = self.coords[self.number % 4], self.feats[self.number % 4]
        x = self.make(feats, coords, (self.ranks.scale.edge, self.ranks.scale.edge, 64), self.scenes)
        with torch.autocast(self.ranks.device.type, torch.bfloat16):
            out = self.run(x)
        self.optimizer.zero_grad()
        out.feats.float().square().mean().backward()
        self.optimizer.step()

    def steps(self) -> None:
        """As many as are timed together."""
        for _ in range(self.ranks.scale.steps):
            self.step()


def nccl_share(ranks: Ranks, trainer: Trainer) -> dict[str, float]:
    """Of a few steps on all ranks: milliseconds a step of NCCL's kernels, and of those beside no other kernel."""
    if ranks.device.type != "cuda":
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        trainer.steps()
        torch.cuda.synchronize()
    spans = [
        (e.time_range.start, e.time_range.end, "nccl" in e.name.lower())
        for e in profile.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    ]
    busy = sorted((a, b) for a, b, ours in spans if not ours)
    total = alone = 0.0
    for a, b, ours in spans:
        if ours:
            total += b - a
            alone += b - a - sum(max(0.0, min(b, d) - max(a, c)) for c, d in busy)
    steps = ranks.scale.steps
    return {"nccl_ms": total / 1e3 / steps, "nccl_alone_ms": max(0.0, alone) / 1e3 / steps}


def train(ranks: Ranks) -> dict[str, Any]:
    """Weak scaling with small and large batches a rank, and strong scaling of the large batch, divided."""
    few, many = 1, max(ranks.world, 8 if ranks.device.type == "cuda" else 2)
    small, large = scaling(ranks, few, divided=False), scaling(ranks, many, divided=True)
    return {f"{few} scene a rank": small, f"{many} scenes a rank": large, "equal": _same_gradients(ranks)}


def scaling(ranks: Ranks, scenes: int, *, divided: bool) -> dict[str, Any]:
    """``scenes`` on each rank; with ``divided`` also as many on all ranks together."""
    top = ranks.world
    weak = {k: Trainer(ranks, k, scenes) for k in ranks.sizes}
    apart = Trainer(ranks, top, scenes, joined=False)
    works: dict[str, tuple[int, Callable[[], object]]] = {f"weak {k}": (k, t.steps) for k, t in weak.items()}
    works |= {"weak 1 again": (1, weak[1].steps), f"apart {top}": (top, apart.steps)}
    if divided:
        works |= {f"strong {k}": (k, Trainer(ranks, k, scenes // k).steps) for k in ranks.sizes}
    seconds = ranks.rounds(works)
    steps, middle = ranks.scale.steps, {name: statistics.median(s) for name, s in seconds.items()}
    bytes_of = sum(p.numel() * p.element_size() for p in weak[1].net.parameters())
    return {
        "voxels": len(weak[1].coords[0]),
        "ms": {name: [round(s / steps * 1e3, 3) for s in each] for name, each in seconds.items()},
        "weak": {k: round(k * middle["weak 1"] / middle[f"weak {k}"], 3) for k in ranks.sizes},
        "strong": {k: round(middle["strong 1"] / middle[f"strong {k}"], 3) for k in ranks.sizes if divided},
        "control": round(middle["weak 1"] / middle["weak 1 again"], 3),
        "without communication": round(top * middle["weak 1"] / middle[f"apart {top}"], 3),
        "gradient_mb": round(bytes_of / 1e6, 2),
        "sent_mb": {k: round(2 * bytes_of * (k - 1) / k / 1e6, 2) for k in ranks.sizes},
        **nccl_share(ranks, weak[top]),
    }


def _same_gradients(ranks: Ranks) -> float:
    """How far the gradients of all ranks are from those of one process that sees all scenes, relatively, in float32."""
    import shiplap_sparse3d as sparse3d

    def loss(net: nn.Module, rank: int) -> Tensor:
        coords = terrain(24, rank).to(ranks.device)
        feats = torch.randn(len(coords), 4, generator=torch.Generator().manual_seed(rank)).to(ranks.device)
        out: Tensor = net(sparse3d.SparseTensor(feats, coords, (24, 24, 64), 1)).feats.square().mean()
        return out

    torch.manual_seed(1)
    net = network(channels=(8, 16)).to(ranks.device).eval()  # statistics of a batch are each rank's own
    wanted = torch.autograd.grad(sum(loss(net, r) for r in range(ranks.world)) / ranks.world, list(net.parameters()))
    parallel = nn.parallel.DistributedDataParallel(net, static_graph=True)
    loss(parallel, ranks.rank).backward()
    pairs = list(zip(net.parameters(), wanted, strict=True))
    return max(float((p.grad - w).norm() / w.norm().clamp_min(1e-12)) for p, w in pairs if p.grad is not None)


def infer(ranks: Ranks, folder: Path) -> dict[str, Any]:
    """Tiles of a survey folder by ``k`` workers, features and results included."""
    import laspy
    import numpy as np

    from shiplap_sparse3d.survey import SurveyModel, prepare
    from shiplap_sparse3d.survey.predict import predict_tile
    from shiplap_sparse3d.survey.tiles import tiling

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
        cloud.x, cloud.y = draw.uniform(0, width, scale.points), draw.uniform(0, depth, scale.points)
        cloud.z = 8 * np.sin(cloud.x / 31) + 6 * np.cos(cloud.y / 17) + draw.exponential(1.5, scale.points)
        cloud.intensity = draw.integers(0, 4000, scale.points)
        cloud.classification = np.full(scale.points, 1, np.uint8)
        cloud.write(source)
        prepare(source, folder / "tiles", model, tile=scale.tile)
    ranks.wait()
    manifest = prepare(source, folder / "tiles", model, tile=scale.tile)
    tiles = tiling(model.field, scale.tile, None)
    given = model, manifest.folder, manifest.buckets, manifest.grid, tiles
    results: dict[int, dict[Any, bytes]] = {k: {} for k in ranks.sizes}

    def run(k: int) -> None:
        with torch.no_grad():
            for tile in manifest.buckets.tiles[ranks.rank :: k]:
                results[k][tile] = predict_tile(*given, tile).tobytes()

    works = {f"{k}": (k, lambda k=k: run(k)) for k in ranks.sizes}
    works["1 again"] = (1, lambda: run(1))
    seconds = ranks.rounds(works, warm=1)
    equal: list[Any] = [None] * ranks.world
    dist.all_gather_object(equal, results[ranks.world], group=ranks.quiet)
    whole = {t: b for part in equal for t, b in part.items()}
    middle = {name: statistics.median(s) for name, s in seconds.items()}
    return {
        "tiles": len(manifest.buckets.tiles),
        "points": scale.points,
        "seconds": {name: [round(s, 4) for s in each] for name, each in seconds.items()},
        "speed": {k: round(middle["1"] / middle[f"{k}"], 3) for k in ranks.sizes},
        "control": round(middle["1"] / middle["1 again"], 3),
        "equal": ranks.rank != 0 or whole == results[1],
    }


def tensor(ranks: Ranks) -> dict[str, Any]:
    """A gated MLP on all ranks: slidesparse and dense, on one rank and divided among all."""
    from torch.distributed.device_mesh import init_device_mesh
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

    mesh = init_device_mesh(ranks.device.type, (ranks.world,))
    dense, sparse, cut = made(), converted(), converted()
    divided = made()
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(divided, mesh, plan)
    slidesparse.shard(cut, {"gate": "colwise", "up": "colwise", "down": "rowwise"})
    torch.manual_seed(4)
    x = torch.randn(scale.tokens, scale.hidden).to(ranks.device, dtype)
    models = {"dense 1": (1, dense), f"dense {ranks.world}": (ranks.world, divided)}
    models |= {"slidesparse 1": (1, sparse), f"slidesparse {ranks.world}": (ranks.world, cut)}

    def steps(model: nn.Module) -> None:
        with torch.no_grad():
            for _ in range(20):
                model(x)

    with torch.no_grad():
        wanted, got = sparse(x).float(), cut(x).float()
    seconds = ranks.rounds({name: (k, lambda m=model: steps(m)) for name, (k, model) in models.items()})
    return {
        "mlp": [scale.tokens, scale.hidden, scale.inner],
        "ms": {name: [round(s / 20 * 1e3, 3) for s in each] for name, each in seconds.items()},
        "equal": float((got - wanted).norm() / wanted.norm()),
        "sent_mb": round(2 * scale.tokens * scale.hidden * x.element_size() * (ranks.world - 1) / ranks.world / 1e6, 2),
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


def worker(device: str, parts: list[str]) -> None:
    """One rank."""
    ranks, result = Ranks(device), {}
    with tempfile.TemporaryDirectory() as name:
        shared = [name]
        dist.broadcast_object_list(shared, group=ranks.quiet)
        folder = Path(shared[0])
        for part in parts:
            given = (ranks, folder) if part in ("infer", "tune") else (ranks,)
            started = time.perf_counter()
            result[part] = globals()[part](*given)
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


def main() -> int:
    """Start the ranks, collect what rank 0 prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=0, help="ranks, by default all GPUs of the host")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/many_gpus_N.json")
    asked = parser.parse_args()
    parts = asked.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    if "RANK" in os.environ:
        worker(asked.device, parts)
        return 0
    gpus = asked.gpus or torch.cuda.device_count() or 2
    if asked.device == "cuda" and torch.cuda.device_count() < gpus:
        print(f"{gpus} GPUs are needed, and {torch.cuda.device_count()} are here", file=sys.stderr)
        return 2
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus), __file__]
    command += ["--device", asked.device, "--parts", asked.parts]
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
        device = f"{gpus} x {name}" if name else ""
        versions = {"cuda": torch.version.cuda, "nccl": list(torch.cuda.nccl.version())} if name else {}
        kept = record(SOURCES, ["triton"], device, gpus=gpus, threads=threads, **versions, parts=result)
        write(ROOT / "benchmarks" / "results" / f"many_gpus_{gpus}.json", kept)
    return int(not close_enough(result))


if __name__ == "__main__":
    sys.exit(main())
