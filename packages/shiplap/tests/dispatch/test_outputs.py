"""What an op returned, as values: none, one, several or a list; and kernels that fill their outputs, repeatedly."""

from types import SimpleNamespace

import pytest
import torch
from jaxtyping import Float32, Int32, Int64, Shaped
from torch import Tensor

import shiplap as sl
from shiplap.declare.binding import Binding
from shiplap.declare.dim_expression import Expr
from shiplap.dispatch.launch import add_poison_listener, allocate_bytes, is_current_device, poisoned_workspace
from shiplap.dispatch.launch import workspace_size as size_of_workspace
from shiplap.dispatch.outputs import (
    _ExpectedAxis,
    _ExpectedOutput,
    _is_same_argument,
    _with_own_memory,
    all_results,
    can_refit_outputs,
    check_outputs,
    check_view_results,
    flatten_op_results,
    fresh_results,
    make_output_refit,
    outputs_as_expected,
    result_of_outputs,
    result_values,
    tensors_in_arguments,
    with_own_memory,
)
from shiplap.dispatch.second_derivative import _detach_nested
from shiplap.plan.outputs import address_ranges_meet, bytes_spanned, requires_grad
from shiplap_testing.support import fails
from tests.test_plan import spec_of

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


def test_a_given_output_is_filled_once_in_each_call(ns):
    @sl.op(f"{ns}::f")
    def f(x: X) -> X:
        return x + 1

    calls = []

    def fill(x, out):
        calls.append(1)
        torch.add(x, 1, out=out)

    assert f.kernel("cpu", fill) is fill
    for count in range(1, 5):
        f.out(torch.ones(3), out=torch.empty(3))
        assert len(calls) == count


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


# --- by declarations alone --------------------------------------------------------------------------------------------

N = Int64[Tensor, "n"]


def test_tensors_of_results_and_arguments():
    number = torch.zeros(2)
    flat = flatten_op_results((number, [number, [number]], None, True, 2, 0.5, 1j, "text"))
    assert [t.dtype for t in flat] == [torch.float32] * 3 + [torch.bool, torch.int64, torch.float64, torch.complex64]
    assert [t.item() for t in flat[3:]] == [True, 2, 0.5, 1j]
    assert [len(flatten_op_results(r)) for r in (None, number, [number], ())] == [0, 1, 1, 0]
    assert len(list(tensors_in_arguments((number, [number, None, 3], (number,), 3, None)))) == 3
    assert [result_of_outputs(outs) for outs in ((), (number,))] == [None, number]
    assert result_of_outputs((number, number)) == (number, number)
    copied = with_own_memory([number, (number, 3)])
    assert (type(copied), type(copied[1]), copied[1][1]) == (list, tuple, 3)
    assert copied[0].data_ptr() != number.data_ptr()
    graded = torch.ones(1, requires_grad=True)
    assert [requires_grad(v) for v in ((number, 3), (graded,), (number, [number, graded]), ([number],))] == [
        *(False, True, True, False)
    ]
    assert [bytes_spanned(t) for t in (torch.zeros(3, 2), torch.zeros(3, 2).t(), torch.zeros(4)[::2])] == [24, 24, 12]


def test_results_that_are_arguments_are_joined_with_those_that_are_made():
    def f(x: X, y: X) -> tuple[X, X, X]: ...
    def one(x: X) -> X: ...

    spec = spec_of(f, mutates=("x", "y"), aliases=("x", None, "y"))
    x, y, made = ONE, OTHER, torch.ones(1)
    assert all(a is b for a, b in zip(all_results(spec, (x, y), made), (x, made, y), strict=True))
    assert fresh_results(spec, (x, y), (x, made, y)) is made
    assert fresh_results(spec, (x, y), made) is made
    with fails(
        "SL301", where="plan::op, return", got="another tensor", expected="argument 'y' itself, written to in place"
    ):
        fresh_results(spec, (x, y), (x, made, made))
    single = spec_of(one, mutates=("x",), aliases="x")
    assert all_results(single, (x,), None) is x
    assert fresh_results(single, (x,), x) is None


def test_results_that_only_a_run_determines():
    def f(x: X, by: int) -> tuple[X, int, list[Shaped[Tensor, "m 2 *rest"]], Float32[Tensor, "by+1"] | None]: ...

    spec, x = spec_of(f), torch.zeros(3)
    call = Binding((x, 2), {"n": 3, "by": 2}, {}, torch.device("cpu"))
    rows = [torch.zeros(4, 2), torch.zeros(5, 2, 7)]
    made = check_outputs(spec, call, (x, 5, rows, torch.zeros(3)))
    assert (made[1], made[3].shape) == (5, (3,))
    assert made[0].data_ptr() != x.data_ptr()
    assert check_outputs(spec, call, (torch.ones(3), 5, [], None))[3] is None
    for result, words in (
        ((x, 5, rows), ("3 results", "4 results")),
        ((x, "a", rows, None), ("result 'out1'", "str", "int")),
        ((x, 5, rows[0], None), ("result 'out2'", "Tensor", "list of Shaped")),
        ((None, 5, rows, None), ("result 'out0'", "None", 'Float32[Tensor, "n"]')),
        ((x, 5, rows, 3), ("result 'out3'", "int", "or None")),
        ((x.double(), 5, rows, None), ("torch.float64", "Float32: float32")),
        ((torch.zeros(4), 5, rows, None), ("shape (4,)", "Float32[Tensor")),
        ((torch.zeros(3, 1), 5, rows, None), ("shape (3, 1)",)),
        ((x, 5, [torch.zeros(4)], None), ("shape (4,)",)),
        ((x, 5, [torch.zeros(4, 3)], None), ("shape (4, 3)",)),
        ((x, 5, rows, torch.zeros(2)), ("shape (2,)", "by+1")),
    ):
        with fails("SL301", *words):
            check_outputs(spec, call, result)


def test_dims_of_results_that_may_have_any_size():
    def f(x: X) -> tuple[Float32[Tensor, "_ 2"], Float32[Tensor, "m"]]: ...

    call = Binding((torch.zeros(3),), {"n": 3}, {}, torch.device("cpu"))
    made = check_outputs(spec_of(f, fake="reference"), call, (torch.zeros(5, 2), torch.zeros(4)))
    assert made[0].shape == (5, 2)
    with fails("SL301", got="shape (5, 3)"):
        check_outputs(spec_of(f, fake="reference"), call, (torch.zeros(5, 3), torch.zeros(4)))


def test_a_dim_of_the_results_alone_has_one_size():
    def f(x: X) -> tuple[Float32[Tensor, "m"], Float32[Tensor, "m"], Float32[Tensor, "2*m"]]: ...

    spec = spec_of(f, fake="reference")
    call = Binding((torch.zeros(3),), {"n": 3}, {}, torch.device("cpu"))
    assert len(check_outputs(spec, call, (torch.zeros(4), torch.ones(4), torch.zeros(8)))) == 3
    for sizes in ((4, 5, 8), (4, 4, 4)):
        with fails("SL301"):
            check_outputs(spec, call, tuple(map(torch.zeros, sizes)))
    assert call.env == {"n": 3}


def test_views_are_checked_and_returned_themselves():
    def f(x: X) -> Float32[Tensor, "m"]: ...

    spec, x = spec_of(f, aliases="x"), torch.zeros(4)
    call = Binding((x,), {"n": 4}, {}, torch.device("cpu"))
    view = x[1:]
    assert check_view_results(spec, call, view) is view
    with fails("SL301", got="shape (2, 2)"):
        check_view_results(spec, call, x.view(2, 2))


def test_results_of_which_repeated_calls_check_the_sizes_alone():
    def plain(x: N, k: int) -> tuple[Int32[Tensor, "n"], Int32[Tensor, "2*n"]]: ...
    def dynamic(x: N) -> Int32[Tensor, "m"]: ...
    def derived(x: N) -> tuple[Int32[Tensor, "m"], Int32[Tensor, "m+1"]]: ...
    def spread(x: Int64[Tensor, "*b"]) -> Int64[Tensor, "*b"]: ...
    def floating(x: X) -> N: ...
    def listed(xs: list[N], y: N) -> N: ...
    def traced(x: N) -> int: ...
    def written(x: N) -> None: ...

    bounds = {"bounds": {"m": "n"}}
    assert [can_refit_outputs(spec_of(f)) for f in (plain, spread, floating, listed, traced)] == [True] + [False] * 4
    assert [can_refit_outputs(spec_of(f, **bounds)) for f in (dynamic, derived)] == [True, False]
    assert not can_refit_outputs(spec_of(written, mutates=("x",)))


def test_a_repeated_call_is_checked_by_its_first_one():
    def f(x: N) -> tuple[Int32[Tensor, "m"], Int32[Tensor, "n"]]: ...

    spec = spec_of(f, bounds={"m": "n"})
    int32, x = torch.int32, torch.zeros(4, dtype=torch.int64)
    call = Binding((x,), {"n": 4}, {}, torch.device("cpu"))
    fit = make_output_refit(spec, call, (torch.zeros(2, dtype=int32), torch.zeros(4, dtype=int32)))
    first, second = torch.zeros(3, dtype=int32), torch.zeros(4, dtype=int32)
    assert all(a is b for a, b in zip(fit((x,), (first, second)), (first, second), strict=True))
    shared = fit((x,), (second[:3], second))
    assert shared[0].data_ptr() != shared[1].data_ptr()
    with fails("SL302"):
        fit((x,), (torch.zeros(5, dtype=int32), second))
    with fails("SL301", got="0 outputs: the function returned None", expected="2 outputs"):
        fit((x,), None)
    with fails("SL301", got="torch.int64 on cpu", expected="torch.int32 on cpu"):
        fit((x,), (first, x))
    with fails("SL301", got="shape (3,)"):
        fit((x,), (first, first.clone()))


def test_the_size_of_a_workspace():
    cpu = torch.device("cpu")
    call = Binding(
        (torch.zeros(2, dtype=torch.int16), None), {"n": 3}, {"Float": torch.float64, "Int": torch.int8}, cpu
    )
    assert size_of_workspace(None, call) == 0
    assert size_of_workspace(Expr("4 * n"), call) == 12
    assert size_of_workspace(Expr("itemsize"), call) == 8
    assert size_of_workspace(Expr("itemsize"), Binding(call.args, {}, {}, cpu)) == 2
    assert size_of_workspace(Expr("itemsize"), Binding((), {}, {}, cpu)) == 1
    assert size_of_workspace(Expr("threads + n"), call) == torch.get_num_threads() + 3
    assert call.env == {"n": 3}
    assert size_of_workspace(Expr("n - 3"), call) == 0
    with fails("SL208", where="workspace=", got="n - 4 = -1", expected="a number of bytes"):
        size_of_workspace(Expr("n - 4"), call)


def test_a_workspace_is_filled_while_it_is_poisoned():
    heard: list[int | None] = []
    add_poison_listener(heard.append)
    with poisoned_workspace(7):
        assert allocate_bytes(3, torch.device("cpu")).tolist() == [7] * 3
        with poisoned_workspace(0):
            assert allocate_bytes(2, torch.device("cpu")).tolist() == [0, 0]
    assert heard == [None, 7, 0, 7, None]
    assert allocate_bytes(5, torch.device("cpu")).dtype == torch.uint8


def test_the_current_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    devices = (torch.device("cpu"), torch.device("cuda", 1), torch.device("cuda", 0))
    assert [is_current_device(d) for d in devices] == [True, True, False]
