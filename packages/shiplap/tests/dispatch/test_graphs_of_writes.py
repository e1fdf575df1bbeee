"""Ops that write to arguments in a graph: what torch cannot replace there is refused by name, and runs eagerly."""

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl

V = Float[Tensor, "n"]
pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture
def ops(ns):
    @sl.op(f"{ns}::named", mutates="acc", aliases="acc")
    def named(acc: V, x: V, mode: str = "plain") -> V:
        return acc.add_(x if mode == "plain" else -x)

    @sl.op(f"{ns}::counting", mutates="acc")
    def counting(acc: V, x: V) -> int:
        acc.add_(x)
        return x.shape[0]

    @sl.op(f"{ns}::listing", mutates="acc")
    def listing(acc: V, x: V) -> list[V]:
        acc.add_(x)
        return [x * 2]

    @sl.op(f"{ns}::perhaps", mutates="acc")
    def perhaps(acc: V, x: V) -> V | None:
        acc.add_(x)
        return x * 2 if x.shape[0] > 1 else None

    return {op.spec.opname: op for op in (named, counting, listing, perhaps)}


@pytest.mark.parametrize(
    ("name", "got"),
    [("named", "an argument called mode"), *((n, "no single tensor") for n in ("counting", "listing", "perhaps"))],
)
def test_a_graph_says_what_it_cannot_hold_and_breaks_there(ops, name, got):
    op, x = ops[name], torch.ones(3)

    def function(acc, x):
        op(acc, x)
        return acc * 2

    with pytest.raises(Exception, match=rf"SL137(.|\n)*{got}"):
        torch.compile(function, fullgraph=True, backend="aot_eager")(torch.ones(3), x)
    torch.compiler.reset()
    assert torch.compile(function, backend="aot_eager")(torch.ones(3), x).tolist() == [4, 4, 4]


def test_without_a_graph_they_run(ops):
    for op in ops.values():
        acc = torch.ones(3)
        op(acc, torch.ones(3))
        assert acc.tolist() == [2, 2, 2]
