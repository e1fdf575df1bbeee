"""A kernel that gives a mutated argument other memory has not written to the caller's: it is refused."""

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap_testing.support import fails

V = Float[Tensor, "n"]
MOVES = {
    "set_": lambda x: x.set_(torch.zeros(3)),
    "data": lambda x: setattr(x, "data", torch.zeros(3)),
    "resize_": lambda x: x.resize_(7),
    "smaller": lambda x: x.resize_(1),
    "storage": lambda x: x.untyped_storage().resize_(400),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "as_strided_": lambda x: x.as_strided_((3,), (0,)),
}


def declare(ns, move):
    @sl.op(f"{ns}::fill_", mutates="x")
    def fill_(x: V, y: V) -> None:
        x.copy_(y)

    @fill_.kernel("cpu")
    def _(x, y):
        move(x)

    return fill_


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_kernel_that_moves_a_mutated_argument_is_refused(ns, move, compiled, fresh_compiler):
    fill_ = declare(ns, move)
    run = torch.compile(fill_, backend="aot_eager", fullgraph=True) if compiled else fill_
    with pytest.raises(sl.ShiplapError, match=r"SL316: a mutated argument was given other memory or another shape"):
        run(torch.ones(3), torch.zeros(3))


def test_a_kernel_that_moves_an_argument_of_a_list_or_a_returned_one_is_refused(ns):
    @sl.op(f"{ns}::zero_", mutates=("xs", "y"), aliases="y")
    def zero_(xs: list[V], y: V) -> V:
        [x.zero_() for x in xs]
        return y.zero_()

    @zero_.kernel("cpu")
    def _(xs, y):
        xs[1].data = torch.zeros(3)
        return y

    with fails("SL316", "write the values into xs with copy_()", where=f"{zero_.spec.name}, kernel _"):
        zero_([torch.ones(3), torch.ones(3)], torch.ones(3))


def test_a_reference_that_moves_a_mutated_argument_is_refused(ns):
    @sl.op(f"{ns}::fill_", mutates="x")
    def fill_(x: V) -> V:
        x.data = torch.zeros(3)
        return x + 1

    with fails("SL316", where=f"{fill_.spec.name}, reference"):
        fill_(torch.ones(3))
    with fails("SL316", where=f"{fill_.spec.name}, reference"):
        fill_.out(torch.ones(3), out=torch.ones(3))


def test_a_kernel_that_writes_is_served(ns):
    fill_ = declare(ns, lambda x: x.zero_())
    x = torch.ones(4, 3).t()[0:1].reshape(-1)[:3]
    fill_(x, torch.ones(3))
    assert not x.any()


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_kernel_that_moves_the_copy_of_a_strided_argument_is_refused(ns, move):
    """What is written to the copy is copied back: a smaller one would be broadcast, other memory be lost."""
    fill_ = declare(ns, move)
    for _ in range(70):  # past the calls that are looked at more closely
        strided = torch.zeros(3, 2)[:, 0]
        with fails("SL316", where=f"{fill_.spec.name}, kernel _"):
            fill_(strided, torch.ones(3))
        assert not strided.any()


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("into", [False, True])
def test_a_kernel_that_moves_an_output_is_refused(ns, move, into):
    @sl.op(f"{ns}::same")
    def same(x: V) -> V:
        return x.clone()

    @same.kernel("cpu")
    def _(x, *, out):
        move(out)

    with pytest.raises(sl.ShiplapError, match="SL316: an output was given other memory or another shape"):
        same.out(torch.ones(3), out=torch.ones(3)) if into else same(torch.ones(3))
