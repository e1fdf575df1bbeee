"""Calls with DTensors that cannot be served are refused by name. One rank is enough to see that."""

from __future__ import annotations

from pathlib import Path

from shiplap_testing.forked import WITH_VERBS, python

PROGRAM = """
import sys

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shiplap as sl
from shiplap.errors import ShiplapError


@sl.op("refused::plus")
def plus(x: Float[Tensor, "n c"], y: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
    return x + y


@sl.op("refused::total")
def total(xs: list[Float[Tensor, "n"]]) -> Float[Tensor, "n"]:
    return torch.stack(xs).sum(0)


@sl.op("refused::running")
def running(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x.cumsum(0)


def refused(id, text, call):
    try:
        call()
    except ShiplapError as e:
        assert e.id == id and text in str(e), str(e)
        return
    raise AssertionError(f"no {id}")


dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
x = distribute_tensor(torch.randn(4, 3), mesh, [Replicate()])
torch.testing.assert_close(plus(x, x).full_tensor(), 2 * x.full_tensor())
refused("SL216", "plain tensors as y", lambda: plus(x, torch.randn(4, 3)))
row = distribute_tensor(torch.randn(4), mesh, [Shard(0)])
refused("SL217", "whole tensors", lambda: running(row))
refused("SL217", "DTensors in a list", lambda: total([row, row]))
dist.destroy_process_group()
"""


def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path) -> None:
    done = python("-c", PROGRAM, str(tmp_path / "store"), imported=WITH_VERBS)
    assert done.returncode == 0, done.stderr
