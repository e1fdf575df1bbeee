"""Ops that write to arguments in a graph: what torch cannot replace there is refused by name, and runs eagerly."""

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap_testing import private

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
    [
        ("named", "an argument called mode"),
        *(
            pytest.param(name, "no single tensor", marks=[pytest.mark.long] * (name != "counting"))
            for name in ("counting", "listing", "perhaps")
        ),
    ],
)
def test_a_graph_says_what_it_cannot_hold_and_breaks_there(ops, name, got):
    op, x = ops[name], torch.ones(3)

    def function(acc, x):
        op(acc, x)
        return acc * 2

    with pytest.raises(Exception, match=rf"SL137(.|\n)*{got}"):
        torch.compile(function, fullgraph=True, backend="aot_eager")(torch.ones(3), x)
    torch.compiler.reset()
    private.counters().clear()
    assert torch.compile(function, backend="aot_eager")(torch.ones(3), x).tolist() == [4, 4, 4]
    assert private.counters()["frames"]["total"] < 8, "of what the op calls, Dynamo compiles nothing"


def test_without_a_graph_they_run(ops):
    for op in ops.values():
        acc = torch.ones(3)
        op(acc, torch.ones(3))
        assert acc.tolist() == [2, 2, 2]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_an_argument_that_would_be_written_to_may_be_absent(ns, backend):
    """Nothing is left to write to: torch keeps an index on the one result."""

    @sl.op(f"{ns}::adding", mutates="acc")
    def adding(x: V, acc: V | None = None) -> V:
        if acc is not None:
            acc.add_(x)
        return x * 2

    x, acc = torch.ones(3), torch.zeros(3)
    compiled = torch.compile(lambda x, acc: (adding(adding(x)), adding(x, acc)), backend=backend, fullgraph=True)
    absent, given = compiled(x, acc)
    assert absent.eq(4).all()
    assert given.eq(2).all()
    assert acc.eq(1).all()


def test_a_functionalized_write_is_refused_by_name(ns):
    @sl.op(f"{ns}::plus_", mutates="acc")
    def plus_(acc: V, x: V) -> None:
        acc.add_(x)

    with pytest.raises(sl.ShiplapError, match=r"SL137(.|\n)*torch.func.functionalize"):
        torch.func.functionalize(lambda acc, x: (plus_(acc, x), acc * 1)[1])(torch.zeros(2), torch.ones(2))
    acc = torch.zeros(2)
    torch.compile(plus_, backend="aot_eager", fullgraph=True)(acc, torch.ones(2))
    assert acc.tolist() == [1, 1]
