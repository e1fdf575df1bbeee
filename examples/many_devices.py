"""Each row of the table in docs/many-devices.md, on two ranks.

Run: torchrun --nproc-per-node 2 examples/many_devices.py
One row by its name: the same with "FSDP2, each stage" at the end.

The ranks are processes on the CPU that speak gloo. Each row trains a small
module and compares the weights of the ranks, or shows the error by which Shiplap
refuses the combination.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import shiplap as sl
import shiplap_slidesparse as slidesparse
import shiplap_sparse3d as sparse3d
from shiplap_slidesparse.tensor_parallel import Colwise, Rowwise
from shiplap_sparse3d import spconv
from shiplap_sparse3d.pipeline import Voxels, split
from shiplap_sparse3d.pipeline import stage as sparse_stage

ROWS: dict[str, Callable[[], str]] = {}


def row(
    name: str, *values: Any, **options: Any
) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Make a function with these arguments a row."""

    def add(function: Callable[..., str]) -> Callable[..., str]:
        ROWS[name] = partial(function, *values, **options)
        return function

    return add


# --8<-- [start:net]
class Net(nn.Module):
    """Takes and returns a ``SparseTensor``."""

    def __init__(self, around: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.encoder = sparse3d.Sequential(
            sparse3d.SubMConv3d(4, 8, 3), sparse3d.BatchNorm(8), nn.ReLU()
        )
        self.head, self.around = sparse3d.SubMConv3d(8, 2, 1), around

    def forward(self, x: sparse3d.SparseTensor) -> sparse3d.SparseTensor:
        return self.head(
            self.around(self.encoder, x) if self.around else self.encoder(x)
        )


def scene(voxels: int = 60, seed: int | None = None) -> sparse3d.SparseTensor:
    """Another scene on each rank."""
    rng = torch.Generator().manual_seed(dist.get_rank() if seed is None else seed)
    cells = torch.randperm(512, generator=rng)[:voxels]
    coords = torch.stack(
        [torch.zeros_like(cells), cells // 64, cells // 8 % 8, cells % 8], 1
    ).int()
    return sparse3d.SparseTensor(
        torch.randn(voxels, 4, generator=rng), coords, (8, 8, 8)
    )


def train(net: nn.Module, x: Any) -> str:
    """Two steps; then the weights of all ranks are the same."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        out = net(x)
        feats = getattr(out, "feats", getattr(out, "features", out))
        feats.float().square().mean().backward()
        optimizer.step()
    return same_weights(net)


# --8<-- [end:net]


def same_weights(net: nn.Module) -> str:
    for name, p in net.named_parameters():
        mine = p.full_tensor() if isinstance(p, DTensor) else p.detach()
        theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(theirs, mine.contiguous())
        assert all(torch.equal(t, mine) for t in theirs), name
    size = sum(p.numel() * p.element_size() for p in net.parameters())
    return f"{size} bytes of gradients, the same weights"


def refused(function: Callable[[], object]) -> str:
    """The error that Shiplap raises."""
    try:
        function()
    except sl.ShiplapError as e:
        return f"refused: {e.id} {e.what}"
    raise AssertionError("nothing was refused")


def mesh() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


# --8<-- [start:ddp]
@row("DDP")
@row("DDP, find_unused_parameters", find_unused_parameters=True)
@row("DDP, static_graph", static_graph=True)
@row("DDP, gradient_as_bucket_view", gradient_as_bucket_view=True)
def ddp(**options: bool) -> str:
    return train(DistributedDataParallel(Net(), **options), scene())


@row("DDP, compiled")
def ddp_compiled() -> str:
    return train(
        torch.compile(DistributedDataParallel(Net()), backend="aot_eager"), scene()
    )


# --8<-- [end:ddp]


# --8<-- [start:fsdp]
@row("FSDP2, root", stages=False)
@row("FSDP2, each stage", stages=True)
@row("FSDP2, compiled", stages=True, compiled=True)
@row(
    "checkpoint in FSDP2", stages=True, around=partial(checkpoint, use_reentrant=False)
)
def fsdp(
    stages: bool, compiled: bool = False, around: Callable[..., Any] | None = None
) -> str:
    net = Net(around)
    if stages:
        fully_shard(net.encoder)
        fully_shard(net.head)
    fully_shard(net)
    return train(torch.compile(net, backend="aot_eager") if compiled else net, scene())


BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@row("FSDP2, bfloat16 policy")
def fsdp_bfloat16() -> str:
    told = train(fully_shard(Net(), mp_policy=BFLOAT16), scene())
    # would cast the weights, and the scales of 8 bits
    model = fully_shard(converted("fp8"), mp_policy=BFLOAT16)
    return f"{told}; converted layers " + refused(lambda: model(torch.randn(6, 32)))


@row("FSDP2, bfloat16 policy for the other layers")
def fsdp_bfloat16_for_others() -> str:
    if torch.__version__ < (2, 13):
        return "not run: torch before 2.13 does not shard integers"
    model = converted()
    for layer in model[:2]:
        fully_shard(layer)  # first, each without a policy
    fully_shard(model, mp_policy=BFLOAT16)
    model(torch.randn(6, 32)).float().square().mean().backward()
    return near(model)


# --8<-- [end:fsdp]


# --8<-- [start:checkpoint]
def save_convolutions(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    ours = getattr(op, "namespace", "") == "sparse3d" and "conv" in str(op)
    return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE


selective = partial(create_selective_checkpoint_contexts, save_convolutions)


@row("checkpoint, non-reentrant", use_reentrant=False)
@row("checkpoint, selective", use_reentrant=False, context_fn=selective)
def recompute(**options: Any) -> str:
    return train(DistributedDataParallel(Net(partial(checkpoint, **options))), scene())


@row("checkpoint, reentrant")
def reentrant() -> str:
    net = Net(partial(checkpoint, use_reentrant=True))
    return refused(lambda: train(net, scene()))


# --8<-- [end:checkpoint]


# --8<-- [start:norm]
def with_norm(
    convert: Callable[[nn.Module], nn.Module], x: sparse3d.SparseTensor
) -> str:
    net = convert(Net())
    net(x).feats.square().sum().backward()
    norm = net.encoder[1]
    theirs = [torch.empty_like(norm.running_mean) for _ in range(dist.get_world_size())]
    dist.all_gather(theirs, norm.running_mean)
    assert all(torch.equal(t, norm.running_mean) for t in theirs)
    return "statistics over the voxels of all ranks"


ours, torchs = (
    sparse3d.SyncBatchNorm.convert_sync_batchnorm,
    nn.SyncBatchNorm.convert_sync_batchnorm,
)
row("SyncBatchNorm")(lambda: with_norm(ours, scene()))
row("SyncBatchNorm, converted by torch")(lambda: with_norm(torchs, scene()))
row("SyncBatchNorm, a rank without voxels")(
    lambda: with_norm(ours, scene(60 * dist.get_rank()))
)
row("SyncBatchNorm, padded")(lambda: with_norm(ours, scene().pad(128)))
# --8<-- [end:norm]


# --8<-- [start:slidesparse]
PLAN = {"0": "colwise", "1": "rowwise"}


def converted(mode: str = "int8", seed: int = 0) -> nn.Sequential:
    """The same on each rank: 8-bit weights, of which 6 of 8 are kept."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 24), nn.Linear(24, 8))
    slidesparse.convert(model, "6:8", mode, skip=("2",))
    return model


def near(model: nn.Module) -> str:
    """Against one process. Each rank scales its part of a row apart, so sharded layers
    round differently."""
    torch.manual_seed(1)
    x = torch.randn(5, 32)
    with torch.no_grad():
        got, wanted = model(x).float(), converted()(x)
    error = float((got - wanted).norm() / wanted.norm())
    assert error < 0.03, error
    return "within 3 % of one process"


@row("shard")
def shard() -> str:
    model = converted()
    assert slidesparse.shard(model, PLAN) == ["0", "1"]
    return near(model)


@row("shard, a Llama")
def shard_llama() -> str:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return "not run: transformers is not installed"
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, num_key_value_heads=4, **sizes)
    ).eval()
    slidesparse.convert(model, "6:8", "int8")
    sharded = slidesparse.shard(model)
    logits = model(torch.arange(6)[None]).logits
    return f"{len(sharded)} layers, logits {tuple(logits.shape)}"


@row("parallelize_module")
def by_style() -> str:
    return near(
        parallelize_module(converted(), mesh(), {"0": Colwise(), "1": Rowwise()})
    )


@row("FSDP2, converted layers ignored")
def fsdp_ignored() -> str:
    model = converted()
    layers = [m for m in model.modules() if isinstance(m, slidesparse.Linear)]
    fully_shard(
        model, ignored_params={p for layer in layers for p in layer.parameters()}
    )
    model(torch.randn(6, 32)).square().mean().backward()
    return near(model)


@row("FSDP2, weights that are loaded or written to")
def fsdp_written() -> str:
    if torch.__version__ < (2, 13):
        return "not run: torch before 2.13 does not shard integers"
    model = converted(seed=5)
    for layer in model:
        fully_shard(layer)
    for layer, other in zip(model, converted(), strict=True):
        with torch.no_grad():
            for p, value in zip(layer.parameters(), other.parameters(), strict=True):
                p.copy_(distribute_tensor(value, mesh(), [Shard(0)]))
    for layer in model[:2]:
        layer.pack()  # on every rank; a state dict that is loaded does so
    told = near(model)
    assert all(layer.fresh for layer in model[:2])
    return told + ", packed anew"


# --8<-- [end:slidesparse]


# --8<-- [start:saved]
@row("checkpoint saved sharded, loaded sharded", sharded=True)
@row("checkpoint saved sharded, loaded by one process", sharded=False)
def saved(sharded: bool) -> str:
    folders = [os.path.join(tempfile.mkdtemp(), "saved")]
    dist.broadcast_object_list(folders)
    model, other = converted(), converted(seed=5)
    slidesparse.shard(model, PLAN)
    dcp.save(model.state_dict(), checkpoint_id=folders[0])
    if sharded:
        slidesparse.shard(other, PLAN)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=folders[0], no_dist=not sharded)
    other.load_state_dict(state)
    x = torch.ones(2, 32)
    assert torch.equal(other(x), (model if sharded else converted())(x))
    return "the same bits"


@row("checkpoint saved sharded, loaded into a dense model")
def saved_dense() -> str:
    folders = [os.path.join(tempfile.mkdtemp(), "saved")]
    dist.broadcast_object_list(folders)
    model = nn.Sequential(nn.Linear(32, 64))
    slidesparse.convert(model, "6:8", "bf16")
    whole = model[0].weight.detach().clone()
    slidesparse.shard(model, {"0": "colwise"})
    dcp.save(model.state_dict(), checkpoint_id=folders[0])
    dense = nn.Sequential(nn.Linear(32, 64)).bfloat16()
    state = dense.state_dict()
    dcp.load(state, checkpoint_id=folders[0], no_dist=True)
    dense.load_state_dict(state)
    dist.broadcast(whole, 0)
    assert torch.equal(dense[0].weight, whole)
    return "the same bits"


# --8<-- [end:saved]


# --8<-- [start:op]
@sl.op("many_devices::project")
def project(
    x: Float[Tensor, "rows features"], weight: Float[Tensor, "out features"]
) -> Float[Tensor, "rows out"]:
    return x @ weight.T


@sl.op("many_devices::running")
def running(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x.cumsum(0)


@row("DTensor, derived rules")
def derived() -> str:
    torch.manual_seed(0)
    x, weight = torch.randn(7, 6), torch.randn(5, 6)
    got = project(
        distribute_tensor(x, mesh(), [Shard(1)]),
        distribute_tensor(weight, mesh(), [Shard(1)]),
    )
    torch.testing.assert_close(got.full_tensor(), project(x, weight))
    return f"both cut along the features, the result is {got.placements[0]}"


@row("tensor parallel")
def tensor_parallel() -> str:
    """The two layers of an MLP, cut as Megatron cuts them."""
    torch.manual_seed(0)
    x, up, down = torch.randn(7, 6), torch.randn(8, 6), torch.randn(5, 8)
    cut = [
        distribute_tensor(t, mesh(), [p])
        for t, p in ((x, Replicate()), (up, Shard(0)), (down, Shard(1)))
    ]
    got = project(project(cut[0], cut[1]).relu(), cut[2])
    torch.testing.assert_close(got.full_tensor(), project(project(x, up).relu(), down))
    layer = distribute_module(sparse3d.SubMConv3d(4, 8, 3), mesh())
    return f"your op: equal; converted layers: {by_style()}; sparse layers " + refused(
        lambda: layer(scene())
    )


@row("DTensor, no rule")
def no_rule() -> str:
    return refused(
        lambda: running(distribute_tensor(torch.randn(8), mesh(), [Shard(0)]))
    )


@row("DTensor among tensors")
def among() -> str:
    return refused(
        lambda: project(
            distribute_tensor(torch.randn(8, 4), mesh(), [Replicate()]),
            torch.randn(3, 4),
        )
    )


# --8<-- [end:op]


# --8<-- [start:pipeline]
class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.weight.T)


@row("pipeline")
def pipeline() -> str:
    """A layer on each rank, two micro-batches of plain tensors; a ``SparseTensor`` is
    refused."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers, x = [Layer() for _ in range(world)], torch.randn(8, 6)
    stage = PipelineStage(layers[rank], rank, world, torch.device("cpu"))
    out = ScheduleGPipe(stage, 2).step(*((x,) if rank == 0 else ()))
    if rank == world - 1:
        torch.testing.assert_close(out, nn.Sequential(*layers)(x))
    return sparse_pipeline(ScheduleGPipe)


@row("pipeline, one forward one backward", Schedule1F1B)
def sparse_pipeline(schedule: Any) -> str:
    """A part of a sparse network on each rank, and a scene in each micro-batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    parts = [sparse3d.SubMConv3d(4, 4, 3) for _ in range(world)]
    batch = sparse3d.cat([scene(40 + 10 * seed, seed=seed) for seed in range(4)], 0)
    wanted = nn.Sequential(*parts)(batch).feats.square().sum() / 4
    stage = sparse_stage(
        parts[rank], rank, world, torch.device("cpu"), Voxels(80, 4, (8, 8, 8))
    )
    losses: list[Tensor] = []
    runner = schedule(
        stage, 4, loss_fn=lambda out, _: (out[0] * (out[1][:, :1] >= 0)).square().sum()
    )
    runner.step(
        *(split(batch, 4, rows=80) if rank == 0 else ()),
        target=torch.zeros(4),
        losses=losses,
    )
    if rank == world - 1:
        torch.testing.assert_close(torch.stack(losses).mean(), wanted)
    gradient = torch.autograd.grad(wanted, parts[rank].weight)[0]
    torch.testing.assert_close(parts[rank].weight.grad, gradient, rtol=1e-4, atol=1e-4)
    return "the losses and gradients of one process"


@row("pipeline, a stage of torch")
def torn() -> str:
    """Torch would cut the rows of a scene apart."""
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
    sparse = PipelineStage(Net(), 0, 1, torch.device("cpu"), group=alone)
    return refused(lambda: ScheduleGPipe(sparse, 2).step(scene()))


# --8<-- [end:pipeline]


# --8<-- [start:spconv]
class Classic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = spconv.SparseSequential(
            spconv.SubMConv3d(4, 8, 3, indice_key="a"),
            nn.ReLU(),
            spconv.SparseConv3d(8, 8, 2, 2, indice_key="down"),
        )
        self.up = spconv.SparseInverseConv3d(8, 3, 2, indice_key="down")

    def forward(self, x: sparse3d.SparseTensor) -> spconv.SparseConvTensor:
        return self.up(
            self.down(spconv.SparseConvTensor(x.feats, x.coords, [8, 8, 8], 1))
        )


@row("spconv facade, DDP static_graph")
def classic_ddp() -> str:
    return train(DistributedDataParallel(Classic(), static_graph=True), scene())


@row("spconv facade, FSDP2 each stage")
def classic_fsdp() -> str:
    net = Classic()
    fully_shard(net.down)
    fully_shard(net.up)
    return train(fully_shard(net), scene())


# --8<-- [end:spconv]


def main() -> None:
    dist.init_process_group("gloo")
    for name in sys.argv[1:] or ROWS:
        if name not in ROWS:
            raise SystemExit(f"no row {name!r}; the rows are: " + "; ".join(ROWS))
        torch.manual_seed(0)
        told = ROWS[name]()
        if dist.get_rank() == 0:
            print(f"{name}: {told}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
