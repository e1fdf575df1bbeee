"""Data-parallel training of a sparse U-Net on one, two, four ... ranks: the part ``train`` of ``many_gpus.py``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _many_ranks import Ranks, Works, middle
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

__all__ = ["gradients_of", "large", "network", "strong", "train"]


@functools.cache
def terrain(edge: int, seed: int, device: torch.device) -> Tensor:
    """``int32 [edge * edge, 4]``: the voxels of a hilly surface, one for each column. Nobody writes to them."""
    draw = torch.Generator().manual_seed(seed)
    phase = (torch.rand(4, generator=draw) * 6).tolist()
    x, y = torch.meshgrid(*[torch.arange(edge, device=device)] * 2, indexing="ij")
    wave = torch.sin(x / 19 + phase[0]) + torch.cos(y / 23 + phase[1]) + torch.sin((x + y) / 7 + phase[2]) / 3
    z = ((wave - wave.min()) * 10).int()
    return torch.stack([torch.zeros_like(z).flatten(), x.flatten(), y.flatten(), z.flatten()], 1).int()


def side_by_side(edge: int, seeds: range, device: torch.device) -> Tensor:
    """The voxels of as many scenes."""
    coords = torch.cat([terrain(edge, seed, device) for seed in seeds])
    coords[:, 0] = torch.arange(len(seeds), device=device).repeat_interleave(edge * edge)
    return coords


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

    def __init__(
        self, ranks: Ranks, k: int, scenes: int, count: int, *, joined: bool = True, ahead: bool = True
    ) -> None:
        import shiplap_sparse3d as sparse3d

        self.ranks, self.scenes, self.count = ranks, scenes, count
        torch.manual_seed(0)
        self.net = network().to(ranks.device)
        self.run: nn.Module = self.net
        if joined and ranks.rank < k:
            self.run = nn.parallel.DistributedDataParallel(
                self.net, process_group=ranks.groups[k], static_graph=True, gradient_as_bucket_view=True
            )
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)
        self.make = sparse3d.SparseTensor
        edge = ranks.scale.edge
        self.coords, self.feats = [], []
        for number in range(4):  # other scenes for each rank, and for each step
            seeds = range(1000 * ranks.rank + 100 * number, 1000 * ranks.rank + 100 * number + scenes)
            self.coords.append(side_by_side(edge, seeds, ranks.device))
            self.feats.append(torch.randn(len(self.coords[-1]), 4, device=ranks.device))
        self.batches = sparse3d.ahead(self._batches()) if ahead else self._batches()
        self.marks: list[list[torch.cuda.Event]] | None = None  # around the backward pass of each step, if asked for

    def _batches(self) -> Iterator[Any]:
        edge = self.ranks.scale.edge
        for feats, coords in itertools.cycle(zip(self.feats, self.coords, strict=True)):
            yield self.make(feats, coords, (edge, edge, 64), self.scenes)

    def step(self) -> None:
        """One step."""
        x = next(self.batches)
        with torch.autocast(self.ranks.device.type, torch.bfloat16):
            out = self.run(x)
        self.optimizer.zero_grad()
        loss = out.feats.float().square().mean()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.marks is not None else []
        for mark in marks[:1]:
            mark.record()
        loss.backward()
        for mark in marks[1:]:
            mark.record()
        if self.marks is not None:
            self.marks.append(marks)
        self.optimizer.step()

    def steps(self) -> None:
        """As many as are timed together."""
        for _ in range(self.count):
            self.step()


def inside(ranks: Ranks, alone: Trainer, joined: Trainer) -> dict[str, float]:
    """Milliseconds a step of the backward pass on one rank, and on all of NCCL's kernels, and of those beside no other.

    A kernel of NCCL waits for the ranks that come later; the last of them shows how long the communication takes.
    """
    if ranks.device.type != "cuda":
        return {}
    alone.marks = []
    alone.steps()
    torch.cuda.synchronize()
    backward = sum(a.elapsed_time(b) for a, b in alone.marks) / len(alone.marks)
    alone.marks = None
    ranks.wait()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        joined.steps()
        torch.cuda.synchronize()
    spans = [
        (e.time_range.start, e.time_range.end, "nccl" in e.name.lower())
        for e in profile.events()
        if e.device_type == torch.autograd.DeviceType.CUDA
    ]
    busy = sorted((a, b) for a, b, ours in spans if not ours)
    total = alone_for = 0.0
    for a, b, ours in spans:
        if ours:
            total += b - a
            alone_for += max(0.0, b - a - sum(max(0.0, min(b, d) - max(a, c)) for c, d in busy))
    steps = 1e3 * joined.count
    least = ranks.least({"nccl_ms": total / steps, "nccl_alone_ms": alone_for / steps}, ranks.world)
    return {name: round(value, 3) for name, value in (least | {"backward_ms": backward}).items()}


def link(ranks: Ranks) -> dict[str, Any]:
    """For each number of ranks: microseconds of a small all-reduce, and GB a rank sends in a second of a large one."""
    many = 1 << (26 if ranks.device.type == "cuda" else 16)
    small, large = (torch.zeros(n, device=ranks.device) for n in (256, many))

    def reduced(k: int, tensor: Tensor) -> None:
        for _ in range(20):
            dist.all_reduce(tensor, group=ranks.groups[k])

    works: Works = {}
    for k in ranks.sizes[1:]:
        works[f"small {k}"] = k, partial(reduced, k, small)
        works[f"large {k}"] = k, partial(reduced, k, large)
    taken = {name: seconds / 20 for name, seconds in middle(ranks.rounds(works, 5)).items()}
    sent = {k: 2 * large.numel() * large.element_size() * (k - 1) / k for k in ranks.sizes[1:]}
    return {
        "us": {k: round(taken[f"small {k}"] * 1e6, 1) for k in sent},
        "gb_s": {k: round(sent[k] / taken[f"large {k}"] / 1e9, 1) for k in sent},
    }


def train(ranks: Ranks) -> dict[str, Any]:
    """Weak scaling with one scene and with many a rank."""
    links = link(ranks)
    parts = {str(scenes): scaling(ranks, scenes, links, 15) for scenes in ranks.scale.scenes}
    return {"link": links, "scenes": parts}


def large(ranks: Ranks) -> dict[str, Any]:
    """Weak scaling with more scenes a rank than :func:`train` has."""
    return scaling(ranks, ranks.scale.most, link(ranks), 10)


def strong(ranks: Ranks) -> dict[str, Any]:
    """The same scenes on one rank, and divided among two, four ..."""
    total, steps = ranks.scale.divided
    trainers = {k: Trainer(ranks, k, total // k, steps, joined=k > 1) for k in ranks.sizes if total >= k}
    works: Works = {f"{k}": (k, t.steps) for k, t in trainers.items()}
    works["1 again"] = 1, trainers[1].steps
    seconds = ranks.rounds(works, 12, warm=2)
    ms = {name: value / steps * 1e3 for name, value in middle(seconds).items()}
    return {
        "scenes": total,
        "voxels": len(trainers[1].coords[0]),
        "ms": {name: [[round(s / steps * 1e3, 3) for s in each] for each in of] for name, of in seconds.items()},
        "speed": {k: round(ms["1"] / ms[f"{k}"], 3) for k in trainers},
        "control": round(ms["1"] / ms["1 again"], 3),
    }


def scaling(ranks: Ranks, scenes: int, links: dict[str, Any], limit: float) -> dict[str, Any]:
    """``scenes`` on each rank."""
    top, steps = ranks.world, ranks.scale.scenes.get(scenes, 6)
    weak = {k: Trainer(ranks, k, scenes, steps, joined=k > 1) for k in ranks.sizes}
    works: Works = {f"weak {k}": (k, t.steps) for k, t in weak.items()}
    works["weak 1 again"] = 1, weak[1].steps
    works["1 in DDP"] = 1, Trainer(ranks, 1, scenes, steps).steps
    works[f"{top} apart"] = top, Trainer(ranks, top, scenes, steps, joined=False).steps
    for k in (1, top):
        works[f"{k} not ahead"] = k, Trainer(ranks, k, scenes, steps, joined=k > 1, ahead=False).steps
    seconds = ranks.rounds(works, limit)
    ms = {name: value / steps * 1e3 for name, value in middle(seconds).items()}
    parameters = sum(p.numel() * p.element_size() for p in weak[1].net.parameters())
    sent = {k: 2 * parameters * (k - 1) / k for k in ranks.sizes}
    spent = inside(ranks, weak[1], weak[top])
    hidden = spent.get("backward_ms", 0.0)
    model = {k: ms["weak 1"] + max(0, sent[k] / max(0.1, links["gb_s"][k]) / 1e6 - hidden) for k in ranks.sizes[1:]}
    return {
        "voxels": len(weak[1].coords[0]),
        "ms": {name: [[round(s / steps * 1e3, 3) for s in each] for each in of] for name, of in seconds.items()},
        "weak": {k: round(k * ms["weak 1"] / ms[f"weak {k}"], 3) for k in ranks.sizes},
        "control": round(ms["weak 1"] / ms["weak 1 again"], 3),
        "in DDP": round(ms["weak 1"] / ms["1 in DDP"], 3),
        "without communication": round(top * ms["weak 1"] / ms[f"{top} apart"], 3),
        "not ahead": {k: round(k * ms["1 not ahead"] / ms[f"{k} not ahead"], 3) for k in (1, top)},
        "gained by being ahead": {k: round(ms[f"{k} not ahead"] / ms[f"weak {k}"], 3) for k in (1, top)},
        "model": {k: round(k * ms["weak 1"] / model[k], 3) for k in model},
        "gradient_mb": round(parameters / 1e6, 2),
        "sent_mb": {k: round(sent[k] / 1e6, 2) for k in ranks.sizes},
        **spent,
    }


def gradients_of(ranks: Ranks) -> dict[str, Any]:
    """Training on all ranks and on one gives the same gradients."""
    by_way = _same_gradients(ranks)
    return {"apart": {way: float(f"{value:.1e}") for way, value in by_way.items()}, "equal": max(by_way.values())}


def _same_gradients(ranks: Ranks) -> dict[str, float]:
    """How far gradients of all ranks are from those of one process with all scenes: relatively, in float32, by way."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    import shiplap_sparse3d as sparse3d

    def made(*, training: bool) -> nn.Module:
        torch.manual_seed(1)
        return network(channels=(8, 16)).to(ranks.device).train(training)

    def scenes(of: range) -> sparse3d.SparseTensor:
        coords = side_by_side(24, of, ranks.device)
        feats = [torch.randn(24 * 24, 4, generator=torch.Generator().manual_seed(r)) for r in of]
        return sparse3d.SparseTensor(torch.cat(feats).to(ranks.device), coords, (24, 24, 64), len(of))

    def gradients(net: nn.Module, of: range) -> list[Tensor]:
        net(scenes(of)).feats.square().mean().backward()
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        return [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]

    def apart(got: list[Tensor], wanted: list[Tensor]) -> float:
        far, whole = (
            torch.stack([t.norm() for t in of]).norm()
            for of in ([g - w for g, w in zip(got, wanted, strict=True)], wanted)
        )
        return float(far / whole)

    one, mine = range(ranks.world), range(ranks.rank, ranks.rank + 1)
    wanted = {training: gradients(made(training=training), one) for training in (False, True)}
    result = {
        "DDP": apart(
            gradients(nn.parallel.DistributedDataParallel(made(training=False), static_graph=True), mine), wanted[False]
        )
    }
    mesh = DeviceMesh.from_group(ranks.groups[ranks.world], ranks.device.type)
    sharded = made(training=False)
    for part in sharded.children():
        if not isinstance(part, nn.ModuleList):
            fully_shard(part, mesh=mesh)
    result["FSDP2"] = apart(gradients(fully_shard(sharded, mesh=mesh), mine), wanted[False])
    synced = sparse3d.SyncBatchNorm.convert_sync_batchnorm(made(training=True))
    result["SyncBatchNorm"] = apart(gradients(nn.parallel.DistributedDataParallel(synced), mine), wanted[True])
    return result
