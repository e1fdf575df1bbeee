"""A converted Llama on two ranks beside the whole one: torchrun --nproc-per-node 2 shard_step.py"""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn

import shiplap_slidesparse as slidesparse
from shiplap_slidesparse import layers
from shiplap_slidesparse.convert import layers_of
from tests.slidesparse.models import TOKENS, llama


def same_integers(rank: int, world: int) -> None:
    """colwise: the bits of the whole layer; rowwise: those of the sum of its parts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 24))
    slidesparse.convert(model, "6:8", "int8")
    x, whole = torch.randn(5, 32), copy.deepcopy(model)
    assert slidesparse.shard(model, {"0": "colwise", "1": "rowwise"}) == ["0", "1"]
    hidden, last = whole[0](x), whole[1]
    step = 48 // world
    assert torch.equal(model[0](x), hidden[:, rank * step : (rank + 1) * step])
    parts = [
        layers.linear_int8(
            hidden[:, at : at + step].contiguous(),
            last.weight_scale[:, 0],
            last.weight[:, at : at + step].contiguous(),
            None,
            None if at else last.bias,
        )
        for at in range(0, 48, step)
    ]
    assert torch.equal(model(x), sum(parts[1:], parts[0]))


def near_logits() -> None:
    whole = llama(hidden_size=64, intermediate_size=96)
    slidesparse.convert(whole, "6:8", "int8")
    model = copy.deepcopy(whole)
    assert len(slidesparse.shard(model)) == len(layers_of(model)) == 14
    want, got = whole(TOKENS).logits, model(TOKENS).logits
    assert (got - want).norm() < 0.02 * want.norm()


def main() -> None:
    dist.init_process_group("gloo")
    with torch.no_grad():
        same_integers(dist.get_rank(), dist.get_world_size())
        near_logits()
    print(f"rank {dist.get_rank()} agrees")
    dist.destroy_process_group()


main()
