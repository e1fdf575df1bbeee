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


@sl.op("refused::scaled")
def scaled(x: Float[Tensor, "n"], by: list[Float[Tensor, "n"]]) -> Float[Tensor, "n"]:
    return x * by[0]


@sl.op("refused::write", mutates="x", aliases="x")
def write(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x.zero_()


@sl.op("refused::positive", bounds={"m": "n"})
def positive(x: Float[Tensor, "n"]) -> Float[Tensor, "m"]:
    return x[x > 0]


@sl.op("refused::copies")
def copies(x: Float[Tensor, "n"]) -> list[Float[Tensor, "n"]]:
    return [x + 0, x + 1]


@sl.op("refused::halved")
def halved(x: Float[Tensor, "n"], total: bool = False) -> tuple[Float[Tensor, "n"], Float[Tensor, ""] | None]:
    return x / 2, x.sum() if total else None


@sl.op("refused::twice")
def twice(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return 2 * x


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
refused("SL217", "DTensors beside a list", lambda: scaled(row, [torch.ones(4)]))
refused("SL217", "plain tensors: it returns an argument that it writes to", lambda: write(row))
refused("SL217", "plain tensors: its sizes depend on data", lambda: positive(row))
refused("SL217", "plain tensors: it returns a list", lambda: copies(row))
refused("SL217", "DTensors in a call of op.out", lambda: running.out(row, out=row + 0))
whole = row.redistribute(placements=[Replicate()])  # which SL217 advises
half, absent = halved(whole)
assert absent is None and torch.equal(half.full_tensor(), row.full_tensor() / 2)
for call in (torch.compile(lambda x: twice(x), fullgraph=True, backend="eager"), twice):  # a trace comes first
    assert torch.equal(call(row).full_tensor(), 2 * row.full_tensor())
dist.destroy_process_group()
"""


def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path) -> None:
    done = python("-c", PROGRAM, str(tmp_path / "store"), imported=WITH_VERBS)
    assert done.returncode == 0, done.stderr
