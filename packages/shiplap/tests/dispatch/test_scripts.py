"""TorchScript: a scripted function or module calls an op, and ``torch.jit.script`` of an op itself is refused."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

import shiplap as sl
from shiplap.torch_private.dispatcher_transforms import show_to_scripts
from shiplap_testing.support import fails

V = Float[Tensor, "n"]


@sl.op("scripts::axpy")
def axpy(x: V, y: V, a: float = 2.0) -> V:
    return a * x + y


@axpy.backward
def _(grad, saved, needs):
    return {"x": grad * saved.a, "y": grad}


class Layer(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return axpy(x, y) + 1


def called(x: Tensor, y: Tensor) -> Tensor:
    return axpy(x, y, 3.0)


def test_a_scripted_module_and_function_have_the_op_as_a_node():
    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    module, function = torch.jit.script(Layer()), torch.jit.script(called)
    assert "scripts::axpy(" in str(module.graph)
    torch.testing.assert_close(module(x, y), 2 * x + y + 1)
    (grad,) = torch.autograd.grad(function(x, y).sum(), x)
    assert grad.tolist() == [3.0] * 3


def test_the_op_itself_is_refused():
    with fails("SL139", "a function or a module that calls the op", where="scripts::axpy"):
        torch.jit.script(axpy)


def test_the_schema_that_was_declared_last_is_called(ns):
    def declare(take):
        def f(x: V, a: float = 1.0) -> V:
            return x * a

        def g(x: V, b: float = 2.0) -> V:
            return x * b

        g.__qualname__ = f.__qualname__
        return sl.op(f"{ns}::f")(take(f, g))

    op = [declare(lambda f, g: f), declare(lambda f, g: g)][1]

    def called(x: Tensor) -> Tensor:
        return op(x)

    assert torch.jit.script(called)(torch.ones(2)).tolist() == [2.0, 2.0]


def test_ops_are_unknown_that_would_give_something_else(ns):
    """TorchScript takes the first overload of a name that fits, and takes a tensor apart where a tuple is declared."""

    def f(x: V) -> V:
        return x * 1

    def g(x: V) -> V:
        return x * 2

    def h(x: V) -> tuple[V]:
        return (x * 3,)

    find = torch.jit._builtins._find_builtin
    alone, single = sl.op(f"{ns}::f")(f), sl.op(f"{ns}::h")(h)
    assert (find(alone), find(single)) == (f"{ns}::f", None)
    overloaded = sl.op(f"{ns}::f.g")(g)
    assert (find(alone), find(overloaded)) == (None, None)


def test_an_op_that_scripts_do_not_know_is_called_by_its_name_in_torch():
    """This is the repair that the explanation of SL139 gives."""
    assert torch.jit._builtins._find_builtin(single) is None
    assert torch.equal(torch.jit.script(calls_single)(torch.ones(2)), single(torch.ones(2))[0])


@sl.op("scripts::single")
def single(x: V) -> tuple[V]:
    return (x * 3,)


def calls_single(x: Tensor) -> Tensor:
    return torch.ops.scripts.single(x)


def test_each_declaration_of_one_op_is_known_and_one_that_is_gone_is_not(ns):
    """TorchScript would take another object with the same id for the op."""

    def declare(name):
        def f(x: V) -> V:
            return x * 2

        return sl.op(f"{ns}::{name}")(f)

    for _ in range(2):
        assert torch.jit._builtins._find_builtin(declare("f")) == f"{ns}::f"
    passing = type("Passing", (), {})()
    number, table = id(passing), torch.jit._builtins._get_builtin_table()
    show_to_scripts(passing, "scripts::axpy")
    assert table[number] == "scripts::axpy"
    del passing
    assert number not in table
