"""torch.vmap over ops with lists, numbers and arguments that are written to: right, or refused by name."""

import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad, vmap

import shiplap as sl
from shiplap_testing.support import fails

V = Float[Tensor, "n"]


@pytest.fixture
def joined(ns):
    @sl.op(f"{ns}::joined")
    def joined(x: V, ts: list[V]) -> V:
        return x * sum(ts)

    @joined.backward(saves=("x", "ts"))
    def _(g, saved, needs):
        return {"x": g * sum(saved.ts), "ts": [g * saved.x for _ in saved.ts]}

    return joined


def test_a_list_of_tensors_is_mapped_as_the_tensors_are(joined):
    x, a, b = torch.randn(3, 4), torch.randn(3, 4), torch.randn(4)
    assert torch.equal(vmap(lambda x, a: joined(x, [a, b]))(x, a), x * (a + b))
    assert torch.equal(vmap(lambda a: joined(x[0], [a, b]), in_dims=1, out_dims=1)(a.t()), (x[0] * (a + b)).t())
    nested = vmap(vmap(lambda x, a: joined(x, [a, b])))(x[None].repeat(2, 1, 1), a[None].repeat(2, 1, 1))
    assert torch.equal(nested, (x * (a + b)).expand(2, 3, 4))


def test_its_gradient_is_mapped_too(joined):
    x, a = torch.randn(3, 4), torch.randn(3, 4)
    gradients = vmap(grad(lambda x, a: joined(x, [a, a]).sum(), argnums=(0, 1)))(x, a)
    assert torch.equal(gradients[0], 2 * a)
    assert torch.equal(gradients[1], 2 * x)
    x.requires_grad_()
    vmap(lambda x, a: joined(x, [a]))(x, a).sum().backward()
    assert torch.equal(x.grad, a)


def test_lists_of_results_are_stacked_one_by_one(ns):
    @sl.op(f"{ns}::parts")
    def parts(x: V) -> list[V]:
        return [x + 1, x * 2]

    x = torch.randn(3, 4)
    first, second = vmap(lambda x: parts(x))(x)
    assert torch.equal(first, x + 1)
    assert torch.equal(second, x * 2)


def test_samples_write_to_memory_of_their_own(ns):
    @sl.op(f"{ns}::add_", mutates="acc")
    def add_(acc: V, x: V) -> None:
        acc.add_(x)

    def called(acc, x):
        add_(acc, x)
        return acc * 1

    acc, x = torch.zeros(3, 4), torch.randn(3, 4)
    assert torch.equal(vmap(called)(acc, x), x)
    assert torch.equal(acc, x)
    with fails("SL138", "'acc', which all samples would write to"):
        vmap(lambda x: called(acc[0], x))(x)
    with fails("SL138", "an op that returns nothing"):
        vmap(add_)(acc, x)
    assert vmap(add_, out_dims=None)(acc, x) is None
    assert torch.equal(acc, 2 * x)


def test_results_that_are_no_one_tensor_are_refused(ns):
    @sl.op(f"{ns}::positive", bounds={"m": "n"})
    def positive(x: V) -> Float[Tensor, "m"]:
        return x[x > 0]

    @sl.op(f"{ns}::count")
    def count(x: V) -> int:
        return int((x > 0).sum())

    x = torch.tensor([[1.0, 2.0], [1.0, -1.0]])
    with fails("SL138", "results whose sizes depend on data"):
        vmap(positive)(x)
    with fails("SL138", "the numbers 2, 1"):
        vmap(lambda x: x * count(x))(x)
    assert torch.equal(vmap(lambda x: x * count(x))(x.abs()), 2 * x.abs())


def test_random_numbers_differ_from_sample_to_sample_or_are_refused(ns):
    @sl.op(f"{ns}::noisy", random="global")
    def noisy(x: V) -> V:
        return x + torch.rand_like(x)

    x = torch.zeros(3, 8)
    for mapped in (noisy, lambda row: row + noisy(x[0])):  # of a mapped tensor, and of one that all samples share
        for kept in ("error", "same"):
            with fails("SL138", got=f"random numbers, and randomness={kept!r}"):
                vmap(mapped, randomness=kept)(x)
        drawn = vmap(mapped, randomness="different")(x)
        assert drawn.unique().numel() == 24
    assert vmap(vmap(noisy, randomness="different"), randomness="different")(x[None]).unique().numel() == 24
