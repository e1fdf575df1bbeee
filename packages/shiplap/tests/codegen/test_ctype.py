"""The C prototype of a declaration."""

import jinja2
import pytest
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.codegen import c_prototype, render_source


def test_parameters_name_what_they_stand_for(ns):
    @sl.op(f"{ns}::f", bounds={"m": "n"}, mutates="x")
    def f(k: int, x: Float[Tensor, "n"], ks: list[int], flag: bool, int_: str = "") -> Float[Tensor, "m"]: ...

    assert [(str(p), p.role, p.source) for p in c_prototype(f.spec)] == [
        ("DLTensor* x", "input", "x"),
        ("DLTensor* out", "output", "out"),
        ("int64_t k", "scalar", "k"),
        ("const int64_t* ks", "list", "ks"),
        ("int64_t ks_len", "length", "ks"),
        ("int32_t flag", "scalar", "flag"),
        ("const char* int_", "scalar", "int_"),
        ("int64_t* m", "extent", "m"),
    ]


def test_a_name_missing_from_the_context_is_an_error():
    with pytest.raises(jinja2.UndefinedError):
        render_source("kernels.h.jinja", target="x")
