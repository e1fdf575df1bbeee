"""Slidesparse layers on several ranks against the same layers in one process (``shiplap_testing.ranks``)."""

from __future__ import annotations

import copy
import os
import tempfile
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

import shiplap_slidesparse as slidesparse
from shiplap_slidesparse import layers
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
    return {n: p.full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in model.state_dict().items()}


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
    """A frozen converted layer under a trained one."""

    def __init__(self, mode: str = "int8") -> None:
        super().__init__()
        self.base, self.head = pair(mode)[0], nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x))


def trained(net: nn.Module, inputs: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
    grads = [torch.autograd.grad(net(x).square().mean(), parameters) for x in inputs]
    return [sum(g) / len(inputs) for g in zip(*grads, strict=True)]


def run_wrapped(rank: int, world: int, *, wrap, packed: bool, mode: str = "int8") -> str:
    torch.manual_seed(2)
    net = Adapted(mode).to(device())
    inputs = [torch.randn(6, 32).to(device()) for _ in range(world)]
    wanted = trained(net, inputs, list(net.head.parameters()))
    wrapped = wrap(net)
    wrapped(inputs[rank]).square().mean().backward()
    for p, w in zip(net.head.parameters(), wanted, strict=True):
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(grad, w, rtol=1e-5, atol=1e-6)
    assert net.base.fresh == (packed and packs())
    return "1e-5"


def fsdp(net: Adapted, *, keep: bool) -> nn.Module:
    options = {"ignored_params": set(net.base.parameters())} if keep else {}
    if not keep:
        fully_shard(net.base)
    return fully_shard(net, **options)


cell("DDP")(partial(run_wrapped, wrap=DistributedDataParallel, packed=True))
cell("DDP, static_graph")(partial(run_wrapped, wrap=partial(DistributedDataParallel, static_graph=True), packed=True))
cell("FSDP2, converted layers ignored")(partial(run_wrapped, wrap=partial(fsdp, keep=True), packed=True))
# Torch 2.11 cannot shard parameters of integers.
narrow = "int8" if torch.__version__ >= (2, 13) else "bf16"
cell("FSDP2, converted layers sharded")(partial(run_wrapped, wrap=partial(fsdp, keep=False), packed=False, mode=narrow))


if __name__ == "__main__":
    main()
