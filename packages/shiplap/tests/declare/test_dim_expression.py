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


@pytest.mark.parametrize("source", ["cdiv(n, 4)", "max(n, 3) * 2", "n // 2 + 1", "prod(n, n)", "n % 5"])
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
