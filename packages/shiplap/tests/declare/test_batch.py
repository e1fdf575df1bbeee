"""``op.batches(dim)``: along which dims calls may be joined, and which dims are refused."""

import pytest
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.declare.batch import Batching


def test_a_dim_of_an_argument_and_every_output_is_one(ns):
    @sl.op(f"{ns}::mm")
    def mm(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
        return a @ b

    mm.batches("m", "n")
    assert mm.batching == (Batching("m", (("a", 0),), (0,)), Batching("n", (("b", 1),), (1,)))


@pytest.mark.parametrize(
    ("dim", "got"),
    [
        ("k", "missing in an output"),
        ("q", "missing in an output"),
        ("m", "once, as a plain dim"),
        ("n", "p follows from it"),
    ],
)
def test_other_dims_are_refused(ns, dim, got):
    @sl.op(f"{ns}::outer", dims={"p": "n + 1"})
    def outer(a: Float[Tensor, "m m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n p"]:
        return a.sum(0) @ b.new_zeros(1)

    with pytest.raises(sl.ShiplapError, match=rf"(?s)SL117: .*::outer, batches\('{dim}'\).*{got}"):
        outer.batches(dim)


def test_lists_and_mutations_are_refused(ns):
    @sl.op(f"{ns}::add_", mutates=("a",))
    def add_(a: Float[Tensor, "n"], b: Float[Tensor, "n"]) -> None:
        a.add_(b)

    @sl.op(f"{ns}::total")
    def total(parts: list[Float[Tensor, "n"]]) -> Float[Tensor, "n"]:
        return sum(parts)

    for op, got in ((add_, "writes to its arguments"), (total, "the list 'parts'")):
        with pytest.raises(sl.ShiplapError, match=f"(?s)SL117: .*{got}"):
            op.batches("n")
