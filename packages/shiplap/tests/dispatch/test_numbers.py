"""Results that are numbers: integers compile with every backend, others stop a graph with a reason."""

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl

V = Float[Tensor, "n"]
pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture
def ops(ns):
    @sl.op(f"{ns}::count")
    def count(x: V) -> int:
        return (x > 0).sum().item()

    @sl.op(f"{ns}::mean")
    def mean(x: V) -> float:
        return x.mean().item()

    @sl.op(f"{ns}::flag")
    def flag(x: V) -> bool:
        return bool((x > 0).any().item())

    @sl.op(f"{ns}::half")
    def half(x: V) -> float:
        return x.shape[0] / 2

    return count, mean, flag, half


@pytest.fixture
def x():
    return torch.tensor([1.0, 2.0, -1.0])


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_integers_are_sizes_and_numbers(ops, x, backend):
    count = ops[0]
    compiled = torch.compile(lambda x: (x * count(x), x.new_zeros(count(x)), count(x)), backend=backend, fullgraph=True)
    for value, wanted in ((x, 2), (x.abs(), 3), (torch.ones(7), 7)):
        scaled, zeros, number = compiled(value)
        assert (scaled.tolist(), zeros.shape, number) == ((value * wanted).tolist(), (wanted,), wanted)


def test_a_reference_that_reads_a_value_stops_a_graph_with_a_reason(ns):
    @sl.op(f"{ns}::head", fake="reference")
    def head(x: Float[Tensor, "n"]) -> Float[Tensor, "m"]:
        return x[: int(x.sum() > 0)]

    with pytest.raises(Exception, match=r"SL133(.|\n)*a branch or a size that depends on data(.|\n)*bounds="):
        torch.compile(head, fullgraph=True, backend="eager")(torch.ones(4))


@pytest.mark.parametrize(("at", "got"), [(1, "a float that depends on data"), (2, "a branch on data")])
def test_other_numbers_of_data_stop_a_graph_with_a_reason(ops, x, at, got):
    def function(x):
        return x + ops[at](x)

    with pytest.raises(Exception, match=rf"SL133(.|\n)*{got}(.|\n)*return a tensor without dims"):
        torch.compile(function, fullgraph=True)(x)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(function, backend="aot_eager")(x), function(x))  # the graph breaks there


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_number_that_follows_from_sizes_is_one_of_the_graph(ops, x, dynamic):
    half = ops[3]
    compiled = torch.compile(lambda x: x * half(x), fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for value in (x, torch.ones(4)):
        assert torch.equal(compiled(value), value * half(value))


@pytest.mark.parametrize("dynamic", [None, True])
def test_an_integer_of_sizes_alone_compiles(ns, x, dynamic):
    """It is a known number while the graph is traced: Dynamo takes none as the only result of an op."""

    @sl.op(f"{ns}::rows")
    def rows(x: V) -> int:
        return x.shape[0] + 1

    compiled = torch.compile(lambda x: (x * rows(x), rows(x)), fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for value in (x, torch.ones(4)):
        scaled, number = compiled(value)
        assert (scaled.tolist(), number) == ((value * (len(value) + 1)).tolist(), len(value) + 1)


def test_forward_mode_goes_through_lists_and_past_numbers(ns, x):
    @sl.op(f"{ns}::parts")
    def parts(x: V) -> tuple[list[V], int, V | None]:
        return [x * 2, x.square()], x.shape[0], None

    @parts.backward(saves=("x",))
    def _(grads, saved, needs):
        return {"x": grads[0][0] * 2 + grads[0][1] * 2 * saved.x}

    def sums(x):
        (first, second), count, absent = parts(x)
        assert absent is None
        return (first + second) * count

    value, tangent = torch.func.jvp(sums, (x,), (torch.ones(3),))
    assert torch.equal(value, (x * 2 + x * x) * 3)
    assert torch.equal(tangent, (2 + 2 * x) * 3)
