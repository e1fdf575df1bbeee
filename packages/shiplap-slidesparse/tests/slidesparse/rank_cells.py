"""Slidesparse layers on several ranks against the same layers in one process (``shiplap_testing.ranks``)."""

from __future__ import annotations

import copy
import os
import tempfile
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import shiplap_slidesparse as slidesparse
from shiplap_slidesparse import layers, linear, sharded
from shiplap_slidesparse.convert import layers_of
from shiplap_slidesparse.tensor_parallel import Colwise, Rowwise
from shiplap_testing.ranks import cell, device, main
from tests.slidesparse.models import TOKENS, llama

PLAN = {"0": "colwise", "1": "rowwise"}


def pair(mode: str = "int8", seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 24), nn.Linear(24, 8))
    slidesparse.convert(model.to(device()), "6:8", mode, skip=("2",))
    return model


def packs() -> bool:
    """Whether weights are packed on this device: on a GPU that takes a library."""
    return device().type == "cpu" or slidesparse.lt.available(device()) is True


def halves(whole: nn.Sequential, x: Tensor, world: int) -> Tensor:
    """What ranks compute: the second layer in parts, whose products are summed."""
    hidden, last = whole[0](x), whole[1]
    step = hidden.shape[1] // world
    parts = [
        layers.linear_int8(
            hidden[:, at : at + step].contiguous(),
            last.weight_scale[:, 0],
            last.weight[:, at : at + step].contiguous(),
            None,
            None if at else last.bias,
        )
        for at in range(0, hidden.shape[1], step)
    ]
    return whole[2](sum(parts[1:], parts[0]))


def run_cut(rank: int, world: int, *, by_torch: bool) -> str:
    """The bits of the sum of the parts, and their gradients with regard to the input."""
    model, whole = pair(), pair()
    if by_torch:
        mesh = init_device_mesh(device().type, (world,))
        parallelize_module(model, mesh, {"0": Colwise(), "1": Rowwise()})
    else:
        assert slidesparse.shard(model, PLAN) == ["0", "1"]
    assert all(layer.fresh == packs() for layer in layers_of(model).values())
    inputs = [torch.manual_seed(1) and torch.randn(5, 32).to(device()).requires_grad_() for _ in range(2)]
    got, wanted = model(inputs[0]), halves(whole, inputs[1], world)
    assert torch.equal(got, wanted)
    grads = [
        torch.autograd.grad(out.square().sum(), x)[0] for out, x in ((got, inputs[0]), (whole(inputs[1]), inputs[1]))
    ]
    torch.testing.assert_close(grads[0], grads[1], rtol=5e-2, atol=5e-2)
    return "same bits"


cell("shard")(partial(run_cut, by_torch=False))
cell("parallelize_module")(partial(run_cut, by_torch=True))
cell("tensor parallel")(partial(run_cut, by_torch=True))


@cell("shard, a Llama")
def near_logits(rank: int, world: int) -> str:
    whole = llama(hidden_size=64, intermediate_size=96).to(device())
    slidesparse.convert(whole, "6:8", "int8")
    model = copy.deepcopy(whole)
    assert len(slidesparse.shard(model)) == len(layers_of(model)) == 14
    with torch.no_grad():
        tokens = TOKENS.to(device())
        want, got = whole(tokens).logits, model(tokens).logits
    assert (got - want).norm() < 0.02 * want.norm()
    return "2e-2"


def _folder() -> str:
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    return names[0]


def saved(model: nn.Module) -> str:
    folder = os.path.join(_folder(), "saved")
    dcp.save(model.state_dict(), checkpoint_id=folder)
    return folder


def load(model: nn.Module, folder: str, **options) -> None:
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder, **options)
    model.load_state_dict(state)


def whole_bits(model: nn.Module) -> dict[str, Tensor]:
    return {n: sharded.gather_whole(p).detach() for n, p in model.state_dict().items()}


def assert_bits(got: nn.Module, wanted: nn.Module) -> None:
    mine, theirs = whole_bits(got), whole_bits(wanted)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(mine[name].view(torch.uint8), value.contiguous().view(torch.uint8)), name


@cell("checkpoint saved sharded, loaded sharded")
def same_ranks(rank: int, world: int) -> str:
    for mode in ("int8", "bf16"):
        model, other = pair(mode), pair(mode, seed=5)
        slidesparse.shard(model, PLAN)
        slidesparse.shard(other, PLAN)
        load(other, saved(model))
        assert all(layer.fresh == packs() for layer in layers_of(other).values())
        assert_bits(other, pair(mode))
    return "same bits"


@cell("checkpoint saved sharded, loaded by one process")
def one_process(rank: int, world: int) -> str:
    for mode in ("int8", "bf16"):
        model = pair(mode)
        slidesparse.shard(model, PLAN)
        alone = pair(mode, seed=5)
        load(alone, saved(model), no_dist=True)
        assert all(layer.fresh == packs() for layer in layers_of(alone).values())
        assert_bits(alone, pair(mode))
    return "same bits"


@cell("checkpoint saved sharded, loaded into a dense model")
def dense_model(rank: int, world: int) -> str:
    model, whole = pair("bf16"), pair("bf16")
    slidesparse.shard(model, PLAN)
    dense = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 24), nn.Linear(24, 8)).bfloat16().to(device())
    load(dense, saved(model), no_dist=True)
    assert torch.equal(dense[0].weight, whole[0].weight)
    assert torch.equal(dense[1].weight, whole[1].weight)
    return "same bits"


def _other_ranks(rank: int, world: int) -> str:
    """On every rank of four: what two others saved under ``SAVED``."""
    for mode in ("int8", "bf16"):
        model = pair(mode, seed=5)
        slidesparse.shard(model, PLAN)
        load(model, os.path.join(os.environ["SAVED"], mode))
        assert_bits(model, pair(mode))
    return "same bits"


def _for_others(rank: int, world: int) -> str:
    for mode in ("int8", "bf16"):
        model = pair(mode)
        slidesparse.shard(model, PLAN)
        dcp.save(model.state_dict(), checkpoint_id=os.path.join(os.environ["SAVED"], mode))
    return "saved"


if "SAVED" in os.environ:
    cell("save for others")(_for_others)
    cell("load from others")(_other_ranks)


class Adapted(nn.Module):
    """A frozen converted layer between two trained ones: its gradient with regard to the input counts, too."""

    def __init__(self, mode: str = "int8", around: Callable[..., Tensor] | None = None, unused: bool = False) -> None:
        super().__init__()
        self.first, self.base, self.head = nn.Linear(32, 32), pair(mode)[0], nn.Linear(64, 8)
        self.around, self.unused = around, nn.Linear(8, 8) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        return self.head(self.around(self.base, hidden) if self.around else self.base(hidden))


class Packed:
    """While it is entered, a product whose weight is packed gets that form alone, and is counted.

    On a GPU the other form is another library's kernel, whose sums of 16 bits are rounded differently.
    """

    def __enter__(self) -> Packed:
        self.products, self.sparse, self.multiply = 0, 0, linear.multiply_fields

        def multiply(x, mode, n, scale, dense, packed, *rest):
            self.products, self.sparse = self.products + 1, self.sparse + (packed is not None)
            return self.multiply(x, mode, n, scale, dense if packed is None else None, packed, *rest)

        linear.multiply_fields = multiply
        return self

    def __exit__(self, *raised: object) -> None:
        linear.multiply_fields = self.multiply


def train(net: nn.Module, inputs: list[Tensor], step: Callable[[list[Tensor]], None] | None = None) -> list[Tensor]:
    """Outputs of three steps of SGD, along the mean of the gradients of ``inputs``."""
    params = [p for p in net.parameters() if p.requires_grad]
    optimizer, outs = torch.optim.SGD(params, lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        made = [net(x) for x in inputs]
        sum(out.float().square().mean() for out in made).div(len(inputs)).backward()
        optimizer.step()
        outs.append(torch.stack([out.detach() for out in made]))
    return outs


def run_wrapped(rank: int, world: int, *, wrap, around=None, mode="int8", unused=False, tolerance=1e-5) -> str:
    """Three steps: outputs, the weights after them, and that each product was one with the packed form."""
    torch.manual_seed(2)
    net = Adapted(mode, around, unused).to(device())
    alone, inputs = copy.deepcopy(net), [torch.randn(6, 32).to(device()) for _ in range(world)]
    with Packed():
        wanted = train(alone, inputs)
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    with Packed() as seen:
        for got, want in zip(train(wrap(net), inputs[rank : rank + 1]), wanted, strict=True):
            close(got[0].float(), want[rank])
    for (name, p), want in zip(net.named_parameters(), alone.parameters(), strict=True):
        if p.requires_grad and "unused" not in name:
            close(p.full_tensor() if isinstance(p, DTensor) else p, want, msg=lambda m, name=name: name + m)
    assert seen.products >= 3
    assert seen.sparse == (seen.products if packs() else 0)
    return f"{tolerance:.0e}".replace("e-0", "e-")


def ddp(net: nn.Module, **options) -> nn.Module:
    return DistributedDataParallel(net, **options)


def compiled(net: nn.Module, wrap) -> nn.Module:
    return torch.compile(wrap(net), backend="aot_eager")


def fsdp(net: Adapted, *, stages: bool = False, keep: bool = False, policy=None, own_policy: bool = False) -> nn.Module:
    options = {"mp_policy": policy} if policy else {}
    if own_policy:
        fully_shard(net.base)
    for stage in (net.first, net.base, net.head) if stages else ():
        fully_shard(stage, **options)
    return fully_shard(net, ignored_params=set(net.base.parameters()) if keep else None, **options)


def _save_products(ctx, op, *args, **kwargs):
    ours = getattr(op, "namespace", "") == "slidesparse"
    return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE


plain, reentrant = partial(checkpoint, use_reentrant=False), partial(checkpoint, use_reentrant=True)
selective = partial(plain, context_fn=partial(create_selective_checkpoint_contexts, _save_products))
stages, narrow = partial(fsdp, stages=True), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
# Torch 2.11 cannot shard parameters of integers.
mode = "int8" if torch.__version__ >= (2, 13) else "bf16"

cell("DDP")(partial(run_wrapped, wrap=ddp))
cell("DDP, find_unused_parameters")(partial(run_wrapped, wrap=partial(ddp, find_unused_parameters=True), unused=True))
cell("DDP, static_graph")(partial(run_wrapped, wrap=partial(ddp, static_graph=True)))
cell("DDP, gradient_as_bucket_view")(partial(run_wrapped, wrap=partial(ddp, gradient_as_bucket_view=True)))
cell("DDP, compiled", long=True)(partial(run_wrapped, wrap=partial(compiled, wrap=ddp)))
cell("FSDP2, root")(partial(run_wrapped, wrap=fsdp, mode=mode))
cell("FSDP2, each stage")(partial(run_wrapped, wrap=stages, mode=mode))
cell("FSDP2, bfloat16 policy")(partial(run_wrapped, wrap=partial(fsdp, policy=narrow), mode="fp8"))
cell("FSDP2, bfloat16 policy for the other layers")(
    partial(run_wrapped, wrap=partial(fsdp, policy=narrow, own_policy=True), mode=mode, tolerance=3e-2)
)
cell("FSDP2, compiled", long=True)(partial(run_wrapped, wrap=partial(compiled, wrap=stages), mode=mode))
cell("FSDP2, converted layers ignored")(partial(run_wrapped, wrap=partial(fsdp, keep=True)))
cell("checkpoint, non-reentrant")(partial(run_wrapped, wrap=ddp, around=plain))
cell("checkpoint, selective")(partial(run_wrapped, wrap=ddp, around=selective))
cell("checkpoint, reentrant")(partial(run_wrapped, wrap=ddp, around=reentrant))
cell("checkpoint in FSDP2")(partial(run_wrapped, wrap=stages, around=plain, mode=mode))


def negated(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the same layer makes of ``x`` with the opposite weights: dense, while they are not packed, and packed."""
    made = copy.deepcopy(layer)
    with torch.no_grad(), warnings.catch_warnings(), Packed():
        warnings.simplefilter("ignore")
        made.weight.copy_(-made.weight)
        dense = made(x)
        made.pack()
        return dense, made(x)


@cell("FSDP2, weights that are loaded or written to")
def repacked(rank: int, world: int) -> str:
    """What is packed follows a checkpoint that is loaded; a weight that is written to runs dense, until ``pack()``."""
    net, other = Adapted(mode).to(device()), Adapted(mode).to(device())
    other.base = pair(mode, seed=5)[0]
    x = torch.randn(6, 32).to(device())
    with Packed():
        wanted = other.base(net.first(x))
    dense, opposite = negated(other.base, net.first(x))
    fully_shard(net.base)
    fully_shard(other.base)
    net.base.load_state_dict(other.base.state_dict())
    with Packed() as seen:
        torch.testing.assert_close(net.base(net.first(x)), wanted)
        assert seen.sparse == packs()
        for sharded in (False, True):
            if sharded:
                net.base.reshard()
            with torch.no_grad():
                net.base.weight.copy_(-net.base.weight)
            assert not net.base.fresh
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.testing.assert_close(net.base(net.first(x)), dense)
            assert seen.sparse == packs()
        net.base.reshard()
        net.base.pack()
        torch.testing.assert_close(net.base(net.first(x)), opposite)
        assert seen.sparse == 2 * packs()
    return "1e-5"


@cell("pipeline")
def pipeline(rank: int, world: int) -> str:
    """A converted layer and a trained one on each rank, two micro-batches."""
    parts = [nn.Sequential(pair(seed=r)[0], nn.Linear(64, 32).to(device())) for r in range(world)]
    x = torch.randn(8, 32).to(device())
    wanted = torch.autograd.grad(
        nn.Sequential(*parts)(x).square().mean(), [p for p in parts[rank].parameters() if p.requires_grad]
    )
    stage = PipelineStage(parts[rank], rank, world, device())
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: out.square().mean())
    with Packed() as seen:
        schedule.step(*((x,) if rank == 0 else ()), target=x)
        assert seen.products == seen.sparse + seen.products * (not packs())
    for p, want in zip(parts[rank][1].parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, want, rtol=1e-5, atol=1e-6)
    return "1e-5"


if __name__ == "__main__":
    main()
