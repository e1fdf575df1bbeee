"""What a call must fulfil, and how each failure reads."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Float, Float32, Int32, Shaped
from torch import Tensor

import shiplap as sl
from shiplap.plan.values import has_own_memory
from shiplap_testing.support import fails

V = Float[Tensor, "n"]


@pytest.fixture
def conv(ns):
    @sl.op(f"{ns}::conv", dims={"k": "prod(kernel)"}, requires=("min(kernel) >= 1", "ci % groups == 0"))
    def conv(
        feats: Float[Tensor, "n ci"],
        weight: Float[Tensor, "co k ci"],
        table: Int32[Tensor, "n k"],
        bias: Float[Tensor, "co"] | None,
        kernel: list[int],
        groups: int = 1,
    ) -> Float[Tensor, "n co"]:
        return feats.new_zeros(len(feats), len(weight))

    return conv


def good():
    return [torch.zeros(5, 4), torch.zeros(6, 9, 4), torch.zeros(5, 9, dtype=torch.int32), None, [3, 3]]


def call(op, **changes):
    args = dict(zip(("feats", "weight", "table", "bias", "kernel"), good(), strict=True)) | changes
    return op(**args)


def test_a_good_call(conv):
    assert call(conv).shape == (5, 6)
    assert call(conv, bias=torch.zeros(6)).shape == (5, 6)


def test_rank(conv):
    with fails(
        "SL201",
        where=f"{conv.spec.name}, argument 'feats'",
        got="3 dims, shape (5, 4, 1)",
        expected='Float[Tensor, "n ci"]',
    ):
        call(conv, feats=torch.zeros(5, 4, 1))


def test_sizes(conv):
    where = f"{conv.spec.name}, argument 'table', dim 'n' (axis 0)"
    with fails("SL202", where=where, got="n = 7", expected="n = 5, in 'feats'"):
        call(conv, table=torch.zeros(7, 9, dtype=torch.int32))
    with fails("SL202", "argument 'bias', dim 'co' (axis 0)", got="co = 5", expected="co = 6, in 'weight'"):
        call(conv, bias=torch.zeros(5))
    with fails("SL202", where=conv.spec.name, got="k = 27", expected="k = 9, in 'weight'"):
        call(conv, kernel=[3, 3, 3])


def test_dtypes(conv):
    with fails("SL204", "argument 'table'", got="torch.int64", expected="Int32: int32"):
        call(conv, table=torch.zeros(5, 9, dtype=torch.int64))
    with fails("SL204", "argument 'feats'", "Float: ", "bfloat16", got="torch.int64"):
        call(conv, feats=torch.zeros(5, 4, dtype=torch.int64))
    with fails("SL205", "argument 'weight'", got="torch.float64", expected="torch.float32, as 'feats' (Float)"):
        call(conv, weight=torch.zeros(6, 9, 4, dtype=torch.float64))


def test_devices(conv):
    with fails("SL206", "argument 'weight'", got="meta", expected="cpu, as 'feats'"):
        call(conv, weight=torch.zeros(6, 9, 4, device="meta"))


def test_preconditions_show_the_values_they_speak_of(conv):
    with fails("SL208", where=conv.spec.name, got="ci = 4, groups = 3", expected="ci % groups == 0"):
        call(conv, groups=3)
    with fails("SL208", got="kernel = [-3, -3]", expected="min(kernel) >= 1"):
        call(conv, kernel=[-3, -3])


def test_an_expression_without_a_value_is_a_precondition(conv):
    with fails("SL208", got="ci = 4, groups = 0: division by zero", expected="a value of ci % groups == 0"):
        call(conv, groups=0)
    with fails("SL208", "a value of min(kernel) >= 1"):
        call(conv, kernel=[], weight=torch.zeros(6, 1, 4), table=torch.zeros(5, 1, dtype=torch.int32))


def test_a_negative_output_size(ns):
    @sl.op(f"{ns}::valid")
    def valid(x: V, k: int) -> Float[Tensor, "n-k+1"]:
        return x.unfold(0, k, 1).sum(1)

    assert valid(torch.ones(5), 3).tolist() == [3, 3, 3]
    for kernel in (False, True):
        if kernel:
            valid.kernel("cpu", lambda x, k, out: None)
        else:
            valid.kernels.clear()
        with fails("SL208", where=f"{valid.spec.name}, output 'out'", got="n-k+1 = -4", expected="a size"):
            valid(torch.ones(5), 10) if kernel else valid.overload(torch.ones(5, device="meta"), 10)


@pytest.mark.parametrize(
    ("changes", "where", "got", "expected"),
    [
        ({"feats": "x"}, "argument 'feats'", "str", 'Float[Tensor, "n ci"]'),
        ({"feats": None}, "argument 'feats'", "None", 'Float[Tensor, "n ci"]'),
        ({"feats": np.zeros((5, 4))}, "argument 'feats'", "ndarray", 'Float[Tensor, "n ci"]'),
        ({"bias": 3}, "argument 'bias'", "int", 'Float[Tensor, "co"] or None'),
        ({"kernel": 3}, "argument 'kernel'", "int", "list[int]"),
        ({"kernel": ["a"]}, "argument 'kernel'", "str in a list", "list[int]"),
        ({"groups": torch.zeros(2)}, "argument 'groups'", "a tensor of torch.float32", "int"),
        ({"groups": 1.5}, "argument 'groups'", "float", "int"),
        ({"groups": None}, "argument 'groups'", "None", "int"),
        ({"groups": 2**63}, "argument 'groups'", "int beyond 64 bits", "int"),
    ],
)
def test_python_types(conv, changes, where, got, expected):
    with fails("SL209", where=f"{conv.spec.name}, {where}", got=got, expected=expected):
        call(conv, **changes)


NOT_NUMBERS = {
    "real": [torch.ones(4), torch.tensor(1j), torch.tensor(1.0, device="meta"), np.zeros(3), np.str_("1.5")],
    "count": [torch.ones(3), torch.tensor(1j), torch.tensor(1, device="meta"), np.zeros(3), np.uint64(2**64 - 1)],
    "counts": [[torch.ones(3)], [np.zeros(3)], [2**63]],
    "mode": ["\ud800"],
}


@pytest.mark.parametrize("name", NOT_NUMBERS)
def test_what_has_the_methods_of_a_number_and_is_none(ns, name):
    """Arrays and tensors have __index__ and __float__ whatever they hold: the dispatcher tries, and so do we."""

    @sl.op(f"{ns}::scaled")
    def scaled(x: V, real: float = 1.0, count: int = 1, counts: list[int] = [1], mode: str = "a") -> V:  # noqa: B006
        return x * real

    for value in NOT_NUMBERS[name]:
        with fails("SL209", where=f"{ns}::scaled, argument '{name}'"):
            scaled(torch.ones(2), **{name: value})
    for value in (torch.tensor(2.0), np.float32(2), np.float64(2), torch.tensor(2), 2):
        assert scaled(torch.ones(1), value).tolist() == [2]


def test_number_of_arguments(conv):
    with fails(
        "SL209", "missing a required argument: 'kernel'", "Tensor feats, Tensor weight", fix="pass kernel as well"
    ):
        conv(*good()[:4])
    with fails("SL209", got="too many positional arguments"):
        conv(*good(), 1, 2)
    with fails("SL209", what="the arguments do not fit the signature", got="an unexpected keyword argument 'dilation'"):
        call(conv, dilation=2)
    with fails("SL209", fix="write groups= in place of group="):
        conv(*good(), group=2)


def test_numpy_integers_are_integers(conv):
    assert call(conv, groups=np.int64(2)).shape == (5, 6)


def test_other_failures_are_left_alone(ns):
    @sl.op(f"{ns}::boom")
    def boom(x: V) -> V:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match=r"^mine$"):
        boom(torch.zeros(3))


def test_fixed_sizes_and_computed_sizes(ns):
    @sl.op(f"{ns}::f")
    def f(pairs: Float[Tensor, "2*m 3"], x: Float[Tensor, "m"]) -> Float[Tensor, "m"]:
        return x.clone()

    assert f(torch.zeros(8, 3), torch.zeros(4)).shape == (4,)  # the expression waits for the argument that binds m
    with fails("SL203", "argument 'pairs'", got="size 2 in axis 1", expected="3"):
        f(torch.zeros(8, 2), torch.zeros(4))
    with fails("SL202", "argument 'pairs'", got="size 9 in axis 0", expected="2*m = 8"):
        f(torch.zeros(9, 3), torch.zeros(4))


def test_contiguous_and_dense(ns):
    @sl.op(f"{ns}::f", contiguous=["x"])
    def f(x: Float[Tensor, "n c"], y: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
        return x + y

    t = torch.ones(3, 4)
    assert f(t, torch.ones(4, 3).T).sum() == 24
    with fails("SL207", "argument 'x'", got="strides (1, 3)", expected="a contiguous tensor"):
        f(torch.ones(4, 3).T, t)
    with fails("SL207", got="torch.sparse_coo", expected="a dense tensor", fix="call .to_dense() first"):
        f.bind((t.to_sparse(), t))


def test_variadic_dims(ns):
    @sl.op(f"{ns}::f")
    def f(x: Float[Tensor, "*b n c"], y: Float[Tensor, "*b c"], z: Shaped[Tensor, "... 2"]) -> Float[Tensor, "c *b"]:
        return x.sum(-2).movedim(-1, 0)

    z = torch.zeros(7, 7, 2)
    assert f(torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 4), z).shape == (4, 2, 3)
    assert f(torch.zeros(5, 4), torch.zeros(4), torch.zeros(2)).shape == (4,)
    with fails("SL201", got="1 dims, shape (4)", expected='Float[Tensor, "*b n c"]'):
        f(torch.zeros(4), torch.zeros(4), z)
    with fails("SL201", "argument 'y'", got="0 dims, shape ()"):
        f(torch.zeros(5, 4), torch.zeros(()), z)
    with fails("SL201", "argument 'y'", got="b = (1, 2)", expected="b = (2)"):
        f(torch.zeros(2, 5, 4), torch.zeros(1, 2, 4), z)
    with fails("SL202", "argument 'y'", got="b = (3)", expected="(2)"):
        f(torch.zeros(2, 5, 4), torch.zeros(3, 4), z)


def test_zero_dim_tensors(ns):
    @sl.op(f"{ns}::scale")
    def scale(x: Float[Tensor, "..."], s: Float[Tensor, ""]) -> Float[Tensor, ""]:
        return x.sum() * s

    assert scale(torch.ones(2, 3), torch.tensor(2.0)) == 12
    assert scale(torch.tensor(5.0), torch.tensor(2.0)) == 10
    with fails("SL201", got="1 dims, shape (1)", expected='Float[Tensor, ""]'):
        scale(torch.ones(3), torch.ones(1))


def test_tensor_lists(ns):
    @sl.op(f"{ns}::cat")
    def cat(xs: list[Float[Tensor, "n _"]], y: Float32[Tensor, "..."]) -> Float[Tensor, "n"]:
        return sum(x.sum(1) for x in xs)

    assert cat([torch.ones(2, 3), torch.ones(2, 4)], torch.ones(1)).tolist() == [7, 7]
    with fails("SL202", "argument 'xs[1]', dim 'n' (axis 0)", got="n = 3", expected="n = 2, in 'xs[0]'"):
        cat([torch.ones(2, 3), torch.ones(3, 3)], torch.ones(1))
    with fails("SL205", "argument 'xs[1]'"):
        cat([torch.ones(2, 3), torch.ones(2, 3).double()], torch.ones(1))
    with fails("SL209", got="an empty list of tensors"):
        cat([], torch.ones(1))
    with fails("SL209", "argument 'xs'", got="int in a list"):
        cat([3], torch.ones(1))


def test_mutated_tensors_own_their_memory(ns):
    @sl.op(f"{ns}::add_", mutates=["x"])
    def add_(x: Float[Tensor, "n c"], y: Float[Tensor, "n c"]) -> None:
        x.add_(y)

    with fails("SL210", "argument 'x'", got="shape (3, 4), strides (1, 0)", expected="distinct memory"):
        add_(torch.zeros(3, 1).expand(3, 4), torch.ones(3, 4))
    with fails("SL210"):
        add_(torch.zeros(6).unfold(0, 4, 1), torch.ones(3, 4))
    x = torch.zeros(3, 4)
    with fails("SL210", "a mutated tensor is another argument too", got="memory of argument 'y'"):
        add_(x, x)
    packed = torch.zeros(3, 2, 4)
    add_(packed[:, 0], packed[:, 1] + 1)  # disjoint views of one buffer
    add_(packed[:, 1], packed[:, 0])
    assert packed.sum() == 24


def test_mutated_tensors_have_no_gradient_and_say_so(ns):
    @sl.op(f"{ns}::add_", mutates=["x"])
    def add_(x: V, y: V) -> None:
        x.add_(y)

    x, y = torch.zeros(3, requires_grad=True), torch.ones(3, requires_grad=True)
    with fails("SL304", "argument 'x'", got="a tensor that requires grad"):
        add_(x, y)
    with torch.no_grad():
        add_(x, y)
    add_(plain := torch.zeros(3), y)
    assert plain.tolist() == x.tolist() == [1, 1, 1]
    with fails("SL304"):  # and no silent zero
        plain.sum().backward()


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), max_size=4))
def test_overlap_is_exact(axes):
    sizes, strides = [s for s, _ in axes], [s for _, s in axes]
    t = torch.as_strided(torch.zeros(100), sizes, strides)
    cells = torch.as_strided(torch.arange(100), sizes, strides).flatten().tolist()
    assert has_own_memory(t) == (len(set(cells)) == len(cells))
