"""What an op returned, as values: none, one, several or a list; and kernels that fill their outputs, repeatedly."""

from types import SimpleNamespace

import pytest
import torch
from jaxtyping import Float32
from torch import Tensor

import shiplap as sl
from shiplap.dispatch.outputs import (
    _ExpectedAxis,
    _ExpectedOutput,
    _is_same_argument,
    _with_own_memory,
    fresh_results,
    outputs_as_expected,
    result_values,
)
from shiplap.dispatch.second_derivative import _detach_nested
from shiplap.plan.outputs import address_ranges_meet

X = Float32[Tensor, "n"]
ONE, OTHER = torch.zeros(1), torch.zeros(1)


@pytest.mark.parametrize(
    ("result", "count", "values"),
    [
        (None, 0, []),
        (ONE, 1, [ONE]),
        ([ONE], 1, [[ONE]]),
        ((ONE,), 1, [ONE]),
        ((ONE, OTHER), 2, [ONE, OTHER]),
        (ONE, 2, [ONE]),
    ],
)
def test_results_are_values(result, count, values):
    made = result_values(result, count)
    assert len(made) == len(values)
    assert all(a is b or a == b for a, b in zip(made, values, strict=True))


def test_a_list_of_the_same_members_is_the_argument():
    assert _is_same_argument([ONE, OTHER], (ONE, OTHER)) is True
    assert not _is_same_argument([ONE], [ONE, OTHER])
    assert not _is_same_argument([OTHER, ONE], [ONE, OTHER])
    assert _is_same_argument(ONE, ONE)
    assert not _is_same_argument(ONE, OTHER)


@pytest.mark.parametrize(
    ("begin", "size", "device", "meets"),
    [(4, 4, 0, True), (0, 4, 0, False), (0, 5, 0, True), (8, 4, 0, False), (7, 4, 0, True), (4, 4, 1, False)],
)
def test_ranges_of_memory_meet_if_they_share_a_byte(begin, size, device, meets):
    def memory(begin, size, device):
        place = {"device": torch.device("cuda", device), "data_ptr": lambda: begin, "itemsize": 1}
        return SimpleNamespace(shape=(size,), stride=lambda: (1,), numel=lambda: size, **place)

    one, other = memory(4, 4, 0), memory(begin, size, device)
    assert address_ranges_meet(one, other) is address_ranges_meet(other, one) is meets


def test_repeated_results_are_as_expected_or_are_checked_again():
    some, fixed = _ExpectedAxis(4, "k"), _ExpectedAxis(2)
    expected = [_ExpectedOutput(torch.float32, (some, fixed)), _ExpectedOutput(torch.float32, (some,))]

    def fit(one, other, *args):
        return outputs_as_expected(args, (one, other), expected, torch.device("cpu"))

    one, other = torch.zeros(3, 2), torch.zeros(3)
    assert fit(one, other, torch.zeros(3))
    assert not fit(one, torch.zeros(2)), "a dim of two sizes"
    assert not fit(torch.zeros(5, 2), torch.zeros(5)), "beyond the bound"
    assert not fit(torch.zeros(3, 1), other)
    assert not fit(torch.zeros(2, 3).t(), other), "not contiguous"
    assert not fit(one.double(), other)
    assert not fit(one.to("meta"), other)
    assert not fit(one, one.flatten()[:3]), "memory of another result"
    assert not fit(one, other, other[1:]), "memory of an argument"
    assert not outputs_as_expected((), (one,), expected, torch.device("cpu"))


def test_a_kernel_with_two_outputs_fills_them_in_each_call(ns):
    @sl.op(f"{ns}::both", outputs=("a", "b"))
    def both(x: X) -> tuple[X, X]:
        return x + 1, x + 2

    @both.kernel("cpu")
    def fill(x, a, b):
        torch.add(x, 10, out=a)
        torch.add(x, 20, out=b)

    for value in range(4):
        a, b = both(torch.full((3,), float(value)))
        assert (a[0], b[0]) == (value + 10, value + 20)
    (kernel,) = both.kernels["cpu"]
    _, repeated = kernel.run_first_call(both.bind(both.spec.complete((torch.zeros(3),), {})))
    assert [t.tolist() for t in repeated((torch.ones(3),))] == [[11.0] * 3, [21.0] * 3]


@pytest.mark.parametrize("room", ["4 * n", "4 * n + threads"])
def test_each_call_into_given_outputs_has_a_workspace(ns, room):
    @sl.op(f"{ns}::f")
    def f(x: X) -> X:
        return x.clone()

    sizes = []

    @f.kernel("cpu", workspace=room)
    def fill(x, out, workspace):
        sizes.append(workspace.numel())
        out.copy_(x)

    threads, expected = torch.get_num_threads(), []
    try:
        for count in (1, 1, 2):
            torch.set_num_threads(count)
            f.out(torch.ones(5), out=torch.empty(5))
            expected.append(20 + count * ("threads" in room))
    finally:
        torch.set_num_threads(threads)
    assert sizes == expected
    (kernel,), out = f.kernels["cpu"], torch.empty(5)
    assert (kernel.run_first_call(f.bind(f.spec.complete((torch.ones(5),), {})))[1] is None) == ("threads" in room)
    filled = kernel.fill_first_call(f.bind(f.spec.complete((torch.ones(5),), {})), (out,))
    assert (filled is None) is ("threads" in room)
    if filled is not None:
        filled((torch.full((5,), 2.0),), (out,))
        assert (out.tolist(), sizes[-1]) == ([2.0] * 5, 20)


def test_a_reference_needs_no_workspace(ns):
    @sl.op(f"{ns}::f")
    def f(x: X) -> X:
        return x + 1

    out = torch.empty(5)
    assert f.out(torch.ones(5), out=out, workspace=torch.empty(0, dtype=torch.uint8)) is out
    assert out.tolist() == [2.0] * 5


def test_a_call_that_writes_counts_as_a_write(ns):
    @sl.op(f"{ns}::add_", mutates="x")
    def add_(x: X, y: X) -> None:
        x.add_(y)

    x = torch.zeros(3)
    before = [x._version]
    for _ in range(3):
        add_(x, torch.ones(3))
        before.append(x._version)
    assert before == sorted(set(before))


def test_nested_tensors_are_detached():
    x = torch.ones(2, requires_grad=True)
    alone, (member, number), nothing = _detach_nested([x, (x * 2, 3), None])
    assert alone.tolist() == [1.0, 1.0]
    assert member.tolist() == [2.0, 2.0]
    assert not alone.requires_grad
    assert not member.requires_grad
    assert (number, nothing) == (3, None)


class NotComparable(Tensor):
    """A tensor that cannot be compared with None, as one that Dynamo of torch 2.11 traces."""

    def __eq__(self, other: object) -> bool:
        raise NotImplementedError("a tensor and None")

    __hash__ = Tensor.__hash__


def test_a_result_that_is_an_argument_is_compared_with_nothing(ns):
    @sl.op(f"{ns}::f", mutates=["x"], aliases="x")
    def f(x: X) -> X:
        return x.mul_(2)

    x = torch.ones(3).as_subclass(NotComparable)
    assert fresh_results(f.spec, (x,), x) is None
    assert fresh_results(f.spec, (x,), None) is None


def test_the_gradient_of_a_traced_op_is_not_held_to_the_device_of_its_result(ns):
    """The reference of such an op may move its results, here to a device without data."""

    @sl.op(f"{ns}::moved", fake="reference")
    def moved(x: X) -> X:
        return x.to("meta")

    moved.backward(lambda grad, saved, needs: {"x": torch.ones(3)})
    x = torch.ones(3, requires_grad=True)
    out = moved(x)
    assert out.device.type == "meta"
    (grad,) = torch.autograd.grad(out, x, torch.ones(3, device="meta"))
    assert grad.tolist() == [1.0] * 3


def test_results_get_contiguous_memory_of_their_own():
    whole, owned = torch.arange(6.0).view(2, 3), list[Tensor]()
    first, second, number = _with_own_memory([whole.t(), whole[0], 3], owned)
    assert (first.is_contiguous(), number) == (True, 3)
    assert torch.equal(first, whole.t())
    third, again = _with_own_memory([whole, whole], owned)
    assert len({t.data_ptr() for t in (first, second, third, again)}) == len(owned) == 4
