"""Dim expressions: plain values, symbolic values, and nothing else."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap import torch_private
from shiplap.declare.dim_expression import FUNCTIONS, Expr

X = Float[Tensor, "n"]


@given(st.integers(0, 10**6), st.integers(1, 1000), st.lists(st.integers(1, 50), min_size=1, max_size=4))
def test_values(n, k, sizes):
    env = {"n": n, "k": k, "sizes": sizes}
    for source, want in (
        ("(n + 2*k - 1) // k % 7", (n + 2 * k - 1) // k % 7),
        ("cdiv(n, k)", math.ceil(n / k)),
        ("prod(sizes) + len(sizes) * sizes[0] - sizes[-1]", math.prod(sizes) + len(sizes) * sizes[0] - sizes[-1]),
        ("min(n, k) + max(sizes)", min(n, k) + max(sizes)),
        ("gcd(n, k)", math.gcd(n, k)),
        ("0 <= n and k != 0 and 1 <= min(sizes) <= max(sizes)", True),
        ("n < k", n < k),
    ):
        assert Expr.parse(source, "here")(env) == want


@given(st.integers(0, 2**40))
def test_pow2ceil(n):
    power = Expr.parse("pow2ceil(n)", "here")({"n": n})
    assert power == next(1 << i for i in range(42) if 1 << i >= n)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_an_argument_named_like_a_function_hides_nothing(name):
    assert Expr.parse("max(n, 2)", "here")({"n": 1, name: 0.5}) == 2


def test_names_are_free_names():
    assert Expr.parse("max(n, k[0]) + len(k)", "here").names == {"n", "k"}
    assert Expr.parse("mode == 'sum'", "here")({"mode": "sum"})


@pytest.mark.parametrize(
    "source", ["cdiv(n, 4)", "max(n, 3) * 2", "min(n, 9) + n", "broadcast(1, n)", "n // 2 + 1", "prod(n, n)", "n % 5"]
)
def test_symbolic_sizes_stay_symbolic(source):
    expr = Expr.parse(source, "here")
    real = torch.empty(7)
    with torch_private.fake_mode(symbolic=True) as mode:
        size = torch_private.make_fake_tensor(mode, real, dynamic=True).shape[0]
        value = expr({"n": size})
        assert isinstance(value, torch.SymInt)
        assert value == expr({"n": 7})


def test_pow2ceil_recompiles_by_bucket_not_by_size(ns, fresh_compiler):
    @sl.op(f"{ns}::pad", dims={"p": "pow2ceil(n)"})
    def pad(x: X) -> Float[Tensor, "p"]:
        return torch.nn.functional.pad(x, (0, (1 << max(0, x.shape[0] - 1).bit_length()) - x.shape[0]))

    f = torch.compile(lambda x: pad(x) + 1, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (5, 6, 7, 8, 9, 12, 16):
        assert f(torch.ones(n)).shape[0] == (8 if n <= 8 else 16)
    assert torch_private.compile_counts().recompiles == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((f"pow2({n})", 1 << n) for n in (0, 1, 62)),
        *((f"pow2({n})", ValueError) for n in (-1, 63)),
        *((f"pow2ceil({n})", power) for n, power in ((-3, 1), (0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8))),
        *((f"cdiv({a}, 4)", value) for a, value in ((0, 0), (1, 1), (4, 1), (5, 2), (8, 2))),
        *((f"where({n}, 5, 6)", value) for n, value in ((0, 6), (1, 5), (2, 5), (-1, 5))),
        *((f"broadcast({sizes})", v) for sizes, v in (("1", 1), ("1, 1", 1), ("1, 3", 3), ("0, 1", 0), ("3, 4", 3))),
        ("min(n)", 2),
        ("max(n)", 5),
        ("prod(n)", 30),
        ("broadcast(n)", 3),
        ("min(n, 1)", TypeError),
        ("prod(2, n)", TypeError),
        ("min(4, 3, 7)", 3),
        ("max(4, 3, 7)", 7),
        ("prod()", 1),
    ],
)
def test_functions_of_the_language(text, value):
    expression = Expr.parse(text, "here")
    if isinstance(value, type):
        with pytest.raises(value):
            expression({"n": [3, 2, 5]})
    else:
        assert expression({"n": [3, 2, 5]}) == value


@pytest.mark.parametrize(
    ("text", "lacks", "fix"),
    [
        ("n / 2", "Div", "write // for /"),
        ("n or m", "'n or m'", "write where(a, 1, b) in place of 'a or b'"),
        ("not n", "'not n'", "write the opposite comparison in place of 'not'"),
        ("n ** 2", "Pow", "write n*n in place of n**2"),
        ("1 if n else 2", "'1 if n else 2'", "write where(condition, a, b) in place of 'a if condition else b'"),
        ("n * 1.5", "'1.5'", ""),
        ("n == None", "'None'", ""),
        ("abs(n)", "'abs(n)'", ""),
        ("min(n, key=m)", "'min(n, key=m)'", ""),
        ("x.max()", "'x.max()'", "an expression sees sizes and int arguments"),
        ("x.shape", "'x.shape'", "an expression sees sizes and int arguments"),
        ("n << 1", "'n << 1'", ""),
        ("[n]", "'[n]'", ""),
    ],
)
def test_what_the_language_lacks(text, lacks, fix):
    with pytest.raises(sl.ShiplapError) as caught:
        Expr.parse(f" {text} ", "here")
    found = caught.value
    assert (found.id, found.where, found.got) == ("SL105", "here", f" {text} ")
    assert found.expected.startswith("an expression without ")
    if fix:
        assert found.fix.startswith(fix)


def test_a_text_that_is_no_expression():
    with pytest.raises(sl.ShiplapError) as caught:
        Expr.parse("n +", "here")
    assert (caught.value.got.startswith("'n +': "), caught.value.expected) == (True, "an expression, such as 2*n+1")
    assert str(Expr.parse("  n + 1 ", "here")) == "n + 1"
