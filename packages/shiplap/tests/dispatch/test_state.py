"""The order in which kernels are tried, those among which native code picks, and conditions that are asked again."""

from types import SimpleNamespace

import pytest
import torch
from jaxtyping import Float32
from torch import Tensor

from shiplap.declare.signature import read_spec
from shiplap.dispatch import fast_paths
from shiplap.dispatch.autograd import _detach_arguments
from shiplap.dispatch.state import OpState

X = Float32[Tensor, "n"]


def kernel(name, template=None, native=None, supports=None, device="cpu"):
    return SimpleNamespace(name=name, template=template, native=native, supports=supports, device=device)


def template(default=True):
    return SimpleNamespace(default=default)


def form(shared="one", generated=False):
    return SimpleNamespace(**{"library": shared, "generated": generated})


@pytest.fixture
def state():
    def f(x: X) -> X:
        return x.clone()

    return OpState(read_spec("demo::f", f), f)


def names(kernels):
    return [k.name for k in kernels]


def test_kernels_are_tried_in_this_order(state):
    for each in (kernel("a"), kernel("t", template()), kernel("b"), kernel("u", template(default=False))):
        state.attach_kernel(each)
    assert names(state.kernels["cpu"]) == ["b", "a", "t", "u"]
    state.attach_kernel(kernel("a"))  # again, so that it is the last that was bound
    assert names(state.kernels["cpu"]) == ["a", "b", "t", "u"]
    state.attach_kernel(kernel("b", template()))  # the author's own of this name keeps its place
    assert names(state.kernels["cpu"]) == ["a", "b", "t", "u"]
    assert names(state.native_kernels("cpu")) == ["a", "b"]
    assert names(state.eager_kernels("cpu")) == ["a", "b", "t"]
    assert state.eager_kernels("cpu") is state.eager_kernels("cpu")
    state.attach_kernel(kernel("c"))
    assert names(state.eager_kernels("cpu")) == ["c", "a", "b", "t"]
    assert state.eager_kernels("cuda") == state.native_kernels("cuda") == state.native_choices("cuda") == []


def test_a_fast_reference_is_tried_before_templates(state):
    for device in ("cpu", "cuda"):
        state.attach_kernel(kernel("t", template(), device=device))
    state.spec = SimpleNamespace(reference_is_fast_on=("cpu",))
    assert names(state.eager_kernels("cpu")) == []
    assert names(state.eager_kernels("cuda")) == ["t"]


@pytest.mark.parametrize(
    ("kernels", "chosen"),
    [
        ([kernel("a", native=form()), kernel("b", native=form())], ["a", "b"]),
        ([kernel("a", native=form()), kernel("b"), kernel("c", native=form())], ["a"]),
        ([kernel("a", native=form()), kernel("b", native=form(), supports=len), kernel("c", native=form())], ["a"]),
        ([kernel("a", native=form()), kernel("b", native=form("two")), kernel("c", native=form())], ["a"]),
        ([kernel("a", native=form(generated=True))], ["a"]),
        ([kernel("a", native=form(generated=True)), kernel("b", native=form())], []),
        ([kernel("a", template(), form()), kernel("b", native=form())], ["b"]),
    ],
)
def test_the_kernels_among_which_native_code_picks(state, kernels, chosen):
    state.kernels["cpu"] = kernels
    assert names(state.native_choices("cpu")) == chosen


def test_conditions_up_to_the_kernel_that_was_picked():
    def even(n):
        return n % 2 == 0

    def truthy(n):
        return n  # not True itself

    kernels = [SimpleNamespace(name=n, condition=c) for n, c in zip("abcd", (even, None, truthy, even), strict=True)]
    op, call = SimpleNamespace(eager_kernels=lambda device: kernels), SimpleNamespace(args=(4,))

    def asked(name):
        picked = SimpleNamespace(name=name, device="cpu")
        return fast_paths.supports_answers(op, picked, call)

    assert asked("a") == asked("b") == [(even, True)]
    assert asked("c") == [(even, True), (truthy, False)]
    checked = fast_paths._recheck_supports(asked("c"), lambda args: ("again", args), lambda *args: ("anew", args))
    assert checked((6,)) == ("again", (6,))
    assert checked((3,)) == ("anew", (3,))


def test_arguments_without_a_gradient_are_detached_however_they_are_passed():
    def spec(detached, mutated=()):
        x, k, y = (SimpleNamespace(name=name) for name in ("x", "k", "y"))
        return SimpleNamespace(results=("out",), detached=detached, mutated=mutated, tensors=[x, y], args=[x, k, y])

    def carried(declared, *args, **kwargs):
        given = {}
        _detach_arguments(declared, lambda keys, *values, **named: given.update(values=values, **named))(
            None, *args, **kwargs
        )
        return [v.requires_grad for v in (*given.pop("values"), *given.values()) if isinstance(v, Tensor)]

    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    assert carried(spec(("y",)), x, 1, y) == [True, False]
    assert carried(spec(("y",)), x, 1, y=y) == [True, False]
    assert carried(spec(("y",)), x, 1) == [True]
    assert carried(spec(("x",)), x, 1, y=y) == [False, True]
    assert carried(spec(("out",)), x, 1, y) == [False, False]
    assert carried(spec(("out",), mutated=("x",)), x, 1, y) == [True, True]
