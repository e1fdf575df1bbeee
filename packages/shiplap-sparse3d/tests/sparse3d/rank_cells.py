"""Training sparse networks on several ranks against the same training in one process (``shiplap_testing.ranks``)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import shiplap_sparse3d as sparse3d
from shiplap_sparse3d import pipeline, spconv
from shiplap_testing.ranks import cell, device, main
from tests.sparse3d.scenes import scene

STEPS, RATE = 3, 0.1


class Encoder(nn.Module):
    """Returns a ``SparseTensor`` that knows the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = sparse3d.Sequential(
            sparse3d.SubMConv3d(4, 8, 3), sparse3d.BatchNorm(8), nn.ReLU(), sparse3d.SparseConv3d(8, 8, 2, 2)
        )

    def forward(self, x: sparse3d.SparseTensor) -> sparse3d.SparseTensor:
        return self.layers(x)


class Net(nn.Module):
    """An encoder, a decoder that goes the way back, and a skip connection: all of them hand ``SparseTensor`` on."""

    def __init__(self, unused: bool = False, wrap: Callable[..., object] | None = None) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(), sparse3d.SparseInverseConv3d(8, 6, 2)
        self.skip, self.head = sparse3d.SubMConv3d(4, 6, 1), sparse3d.SubMConv3d(6, 3, 3)
        self.unused = nn.Linear(3, 3) if unused else None
        self.wrap = wrap

    def forward(self, x: sparse3d.SparseTensor) -> sparse3d.SparseTensor:
        coarse = self.wrap(self.encoder, x) if self.wrap else self.encoder(x)
        return self.head(self.decoder(coarse) + self.skip(x))


def scenes(world: int, dtype: torch.dtype = torch.float64) -> list[sparse3d.SparseTensor]:
    return [scene(60 + 30 * rank, (8, 8, 8), 4, seed=rank, dtype=dtype).to(device()) for rank in range(world)]


def loss(out: sparse3d.SparseTensor | Tensor) -> Tensor:
    return (out if isinstance(out, Tensor) else out.feats).square().mean()


def train_alone(net: nn.Module, inputs: list) -> dict[str, Tensor]:
    """The weights after steps along the mean of the gradients of all inputs."""
    params = [p for n, p in net.named_parameters() if "unused" not in n]
    for _ in range(STEPS):
        grads = [torch.autograd.grad(loss(net(x)), params) for x in inputs]
        with torch.no_grad():
            for p, *parts in zip(params, *grads, strict=True):
                p.sub_(RATE * sum(parts) / len(inputs))
    return {n: p.detach() for n, p in net.named_parameters()}


def train(net: nn.Module, x: object) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(net(x)).backward()
        optimizer.step()


def same(net: nn.Module, wanted: dict[str, Tensor], tolerance: float) -> str:
    """The weights of ``net``, gathered from the ranks where they are sharded."""
    for name, p in net.named_parameters():
        got = p.full_tensor() if hasattr(p, "full_tensor") else p
        torch.testing.assert_close(got.detach(), wanted[name], rtol=tolerance, atol=tolerance)
        if not hasattr(p, "full_tensor"):
            others = [torch.empty_like(got) for _ in range(dist.get_world_size())]
            dist.all_gather(others, got.detach())
            assert all(torch.equal(other, others[0]) for other in others), name
    return f"{tolerance:.0e}".replace("e-0", "e-")


def compiled(net: nn.Module) -> nn.Module:
    return torch.compile(net, backend="aot_eager", dynamic=False)


def run_ddp(rank: int, world: int, *, unused: bool = False, wrap: object = None, jit: bool = False, **options) -> str:
    net, inputs = Net(unused, wrap).double().to(device()), scenes(world)
    wanted = train_alone(copy.deepcopy(net), inputs)
    parallel = DistributedDataParallel(net, **options)
    train(compiled(parallel) if jit else parallel, inputs[rank])
    return same(net, wanted, 1e-10)


cell("DDP")(run_ddp)
cell("DDP, find_unused_parameters")(partial(run_ddp, unused=True, find_unused_parameters=True))
cell("DDP, static_graph")(partial(run_ddp, static_graph=True))
cell("DDP, gradient_as_bucket_view")(partial(run_ddp, gradient_as_bucket_view=True))
cell("DDP, compiled")(partial(run_ddp, jit=True))


def run_fsdp(
    rank: int, world: int, *, stages: bool, jit: bool = False, narrow: bool = False, wrap: object = None
) -> str:
    dtype = torch.float32 if narrow else torch.float64
    net, inputs = Net(wrap=wrap).to(device(), dtype), scenes(world, dtype)
    wanted = train_alone(copy.deepcopy(net), inputs)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if narrow else None
    shard = partial(fully_shard, mp_policy=policy) if policy else fully_shard
    if stages:
        for stage in (net.encoder, net.decoder, net.skip, net.head):
            shard(stage)
    shard(net)
    train(compiled(net) if jit else net, inputs[rank])
    return same(net, wanted, 3e-2 if narrow else 1e-10)


cell("FSDP2, root")(partial(run_fsdp, stages=False))
cell("FSDP2, each stage")(partial(run_fsdp, stages=True))
cell("FSDP2, bfloat16 policy")(partial(run_fsdp, stages=True, narrow=True))
cell("FSDP2, compiled", long=True)(partial(run_fsdp, stages=True, jit=True))


def _save_products(ctx, op, *args, **kwargs):
    ours = getattr(op, "namespace", "") == "sparse3d" and "conv" in str(op)
    return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE


selective = partial(
    checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, _save_products)
)
reentrant, plain = partial(checkpoint, use_reentrant=True), partial(checkpoint, use_reentrant=False)

cell("checkpoint, non-reentrant")(partial(run_ddp, wrap=plain))
cell("checkpoint, selective")(partial(run_ddp, wrap=selective))
cell("checkpoint, reentrant")(partial(run_ddp, wrap=reentrant))
cell("checkpoint in FSDP2")(partial(run_fsdp, stages=True, wrap=plain))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = sparse3d.Sequential(
            sparse3d.SubMConv3d(4, 8, 3), sparse3d.BatchNorm(8), sparse3d.SubMConv3d(8, 3, 3)
        )

    def forward(self, x: sparse3d.SparseTensor) -> sparse3d.SparseTensor:
        return self.layers(x)


def _sum(out: sparse3d.SparseTensor) -> Tensor:
    return (out.feats * out.is_voxel).square().sum()


def run_norm(rank: int, world: int, convert: Callable[[nn.Module], nn.Module], *, empty: bool, padded: bool) -> str:
    """All scenes in one batch of one process, against a scene a rank; the last one may have no voxel at all."""
    inputs = scenes(world)
    if empty:
        last = inputs[-1]
        inputs[-1] = sparse3d.SparseTensor(last.feats[:0], last.coords[:0], last.spatial_shape, last.batch_size)
    net = Normed().double().to(device())
    alone, whole = copy.deepcopy(net), sparse3d.cat(inputs, 0)
    parallel = convert(net)  # without DDP, which takes torch's own class on GPUs only
    mine = inputs[rank].pad(128) if padded else inputs[rank]
    for _ in range(2):
        alone.zero_grad()
        _sum(alone(whole)).backward()
        parallel.zero_grad()
        _sum(parallel(mine)).backward()
    for (name, p), other in zip(alone.named_parameters(), parallel.parameters(), strict=True):
        dist.all_reduce(other.grad)
        torch.testing.assert_close(other.grad, p.grad, rtol=1e-9, atol=1e-9, msg=lambda m, name=name: name + m)
    for name, buffer in alone.named_buffers():
        torch.testing.assert_close(parallel.get_buffer(name), buffer, rtol=1e-9, atol=1e-9)
    return "1e-9"


ours, torchs = sparse3d.SyncBatchNorm.convert_sync_batchnorm, nn.SyncBatchNorm.convert_sync_batchnorm
cell("SyncBatchNorm")(partial(run_norm, convert=ours, empty=False, padded=False))
cell("SyncBatchNorm, a rank without voxels")(partial(run_norm, convert=ours, empty=True, padded=False))
cell("SyncBatchNorm, padded")(partial(run_norm, convert=ours, empty=True, padded=True))
cell("SyncBatchNorm, converted by torch")(partial(run_norm, convert=torchs, empty=True, padded=False))


class Classic(nn.Module):
    """A network of the spconv facade that returns its tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.down = spconv.SparseSequential(
            spconv.SubMConv3d(4, 8, 3, indice_key="a"), nn.ReLU(), spconv.SparseConv3d(8, 8, 2, 2, indice_key="down")
        )
        self.up = spconv.SparseInverseConv3d(8, 3, 2, indice_key="down")

    def forward(self, x: spconv.SparseConvTensor) -> spconv.SparseConvTensor:
        return self.up(self.down(x))


def run_classic(rank: int, world: int, parallel: Callable[[nn.Module], nn.Module]) -> str:
    def make(x: sparse3d.SparseTensor) -> spconv.SparseConvTensor:
        return spconv.SparseConvTensor(x.feats, x.coords, [8, 8, 8], 2)

    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Classic()

        def forward(self, x: sparse3d.SparseTensor) -> spconv.SparseConvTensor:
            return self.net(make(x))

    net, inputs = Features().double().to(device()), scenes(world)

    def alone(x):
        return reference(x).features

    reference = copy.deepcopy(net)
    params = list(reference.parameters())
    for _ in range(STEPS):
        grads = [torch.autograd.grad(loss(alone(x)), params) for x in inputs]
        with torch.no_grad():
            for p, *parts in zip(params, *grads, strict=True):
                p.sub_(RATE * sum(parts) / len(inputs))
    wrapped = parallel(net)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss(wrapped(inputs[rank]).features).backward()
        optimizer.step()
    return same(net, {n: p.detach() for n, p in reference.named_parameters()}, 1e-10)


def _by_stage(net: nn.Module) -> nn.Module:
    fully_shard(net.net.down)
    fully_shard(net.net.up)
    return fully_shard(net)


cell("spconv facade, DDP static_graph")(
    partial(run_classic, parallel=partial(DistributedDataParallel, static_graph=True))
)
cell("spconv facade, FSDP2 each stage")(partial(run_classic, parallel=_by_stage))


@cell("tensor parallel")
@cell("DTensor among tensors")
def mixed(rank: int, world: int) -> str:
    """Weights that a style of tensor parallelism would distribute, and a plain SparseTensor."""
    layer = sparse3d.SubMConv3d(4, 8, 3).double().to(device())
    distribute_module(layer, init_device_mesh(device().type, (world,)))
    layer(scenes(world)[0])
    raise AssertionError("nothing was refused")


class Lower(nn.Module):
    """Down and up again, with a skip connection, on one rank; and the skip connection for the next."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = sparse3d.SubMConv3d(4, 6, 3), sparse3d.SparseConv3d(6, 8, 2, 2)
        self.norm, self.up = sparse3d.BatchNorm(8), sparse3d.SparseInverseConv3d(8, 6, 2)

    def forward(self, x: sparse3d.SparseTensor) -> tuple[sparse3d.SparseTensor, sparse3d.SparseTensor]:
        fine = self.stem(x)
        coarse = self.norm(self.down(fine))
        return self.up(coarse) + fine, coarse


class Upper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = sparse3d.SubMConv3d(6, 3, 3), sparse3d.SubMConv3d(8, 3, 3)

    def forward(self, fine: sparse3d.SparseTensor, coarse: sparse3d.SparseTensor) -> Tensor:
        return torch.stack([self.fine(fine).dense().square().sum(), self.coarse(coarse).dense().square().sum()])[None]


def run_pipeline(rank: int, world: int, schedule) -> str:
    """Four micro-batches of a scene each, of different numbers of voxels, through two stages; two steps."""
    takes = pipeline.Voxels(80, 4, (8, 8, 8), dtype=torch.float64)
    torch.manual_seed(3)
    parts = [Lower().double().to(device()), Upper().double().to(device())]
    x = scene(160, (8, 8, 8), 4, batch_size=4, seed=0).to(device())
    assert len({len(x[i].feats) for i in range(4)}) > 1
    alone = copy.deepcopy(parts)
    for _ in range(2):
        grads = [
            torch.autograd.grad(alone[1](*alone[0](x[i])).sum(), [p for m in alone for p in m.parameters()])
            for i in range(4)
        ]
        with torch.no_grad():
            for p, *each in zip([p for m in alone for p in m.parameters()], *grads, strict=True):
                p.sub_(1e-3 * sum(each) / 4)
    stage = pipeline.stage(parts[rank], rank, world, device(), takes)
    steps = torch.optim.SGD(parts[rank].parameters(), lr=1e-3)
    runner = schedule(stage, 4, loss_fn=lambda out, target: out.sum())
    for _ in range(2):
        steps.zero_grad()
        runner.step(*(pipeline.split(x, 4, 80) if rank == 0 else ()), target=torch.zeros(4, 2))
        steps.step()
    for (name, got), want in zip(parts[rank].state_dict().items(), alone[rank].state_dict().values(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: name + m)
    return "1e-10"


cell("pipeline")(partial(run_pipeline, schedule=ScheduleGPipe))
cell("pipeline, one forward one backward")(partial(run_pipeline, schedule=Schedule1F1B))


@cell("pipeline, a stage of torch")
def torn(rank: int, world: int) -> str:
    """Micro-batches are cut along the rows of tensors, which would tear scenes apart."""
    alone = [dist.new_group([r]) for r in range(world)][rank]  # a pipeline of one stage, so that no rank waits
    stage = PipelineStage(Encoder().double().to(device()), 0, 1, device(), group=alone)
    ScheduleGPipe(stage, 2).step(scenes(world)[0])
    raise AssertionError("nothing was refused")


if __name__ == "__main__":
    main()
