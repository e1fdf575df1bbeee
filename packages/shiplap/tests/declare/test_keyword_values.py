"""Keywords of another type are refused with SL140, by ``sl.op``, ``op.kernel`` and the functions that bind kernels."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

import numpy
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.declare.kernel import KernelKeywords
from shiplap.declare.keyword_values import annotations_of, check_value
from shiplap.declare.signature import DeclarationKeywords
from shiplap.declare.template import TemplateKeywords
from shiplap.dispatch.op import BackwardKeywords
from shiplap.sampling.builder import build_arguments
from shiplap.sampling.recipe import SampleRecipe
from shiplap_testing.support import fails

V = Float[Tensor, "n"]


@pytest.fixture
def twice(ns):
    @sl.op(f"{ns}::twice")
    def twice(x: V) -> V:
        return x * 2

    return twice


@pytest.mark.parametrize(
    ("given", "expected", "fix"),
    [
        ({"requires": lambda n: n > 0}, "a text or a list of texts", 'write requires="n > 0", in this form'),
        ({"mutates": 3}, "a text or a list of texts", 'write mutates=("...",), in this form'),
        ({"outputs": [1]}, "a text or a list of texts", 'write outputs=("...",), in this form'),
        ({"dims": ["m"]}, "a dict from texts to texts", 'write dims={"m": "2 * n"}, in this form'),
        ({"bounds": {"m": 3}}, "a dict from texts to texts", 'write bounds={"m": "n"}, in this form'),
        ({"fake": 1}, "a text", 'write fake="reference", in this form'),
    ],
)
def test_keywords_of_a_declaration(ns, given, expected, fix):
    (keyword,) = given
    with fails("SL140", f"{keyword}=", where=f"{ns}::f", expected=expected, fix=fix):
        sl.op(f"{ns}::f", **given)


def test_keywords_of_a_kernel(twice):
    where = f"{twice.spec.name}, kernel"
    with fails("SL140", where=where, got="workspace=1.5", expected="a text"):
        twice.kernel("cpu", lambda x: x * 2, workspace=1.5)
    with fails("SL140", where=where, got="strided=1", expected="True or False or a text or a list of texts"):
        twice.kernel("cpu", lambda x: x * 2, strided=1)
    assert not twice.kernels


@pytest.mark.parametrize(
    ("name", "fix"), [("fp32", "float32"), ("bf16", "bfloat16"), ("half", "float16"), ("Float32", "float32")]
)
def test_a_kernel_for_a_dtype_that_does_not_exist(twice, name, fix):
    with fails("SL122", got=f"dtypes= with {name!r}", fix=f"write {fix!r} in dtypes="):
        twice.kernel("cpu", lambda x: x * 2, dtypes=("float64", name))
    with fails("SL122", fix="write names of dtypes of torch in dtypes="):
        twice.kernel("cpu", lambda x: x * 2, dtypes="nn")


def test_functions_that_bind_kernels():
    with fails("SL140", where="sl.source(...)", got="flag=", fix="write flags="):
        sl.source(symbol="f", code="", flag=["-O2"])
    with fails("SL140", where="sl.source(...)", got="files=3", expected="a text or a path or a list of paths"):
        sl.source(3, "f")
    with fails("SL140", where="sl.cabi(...)", got="stride=", fix="write strided="):
        sl.cabi("libf.so", "f", stride=["x"])
    with fails("SL140", where="sl.cabi(...)", got="missing a required argument: 'symbol'"):
        sl.cabi("libf.so")
    with fails("SL140", "grid, arguments, constants", where="sl.triton(...)", got="blocks="):
        sl.triton(test_functions_that_bind_kernels, grid="n", blocks=3)
    assert sl.cabi(Path("libf.so"), "f", strided=iter(["x"])).strided == frozenset({"x"})


class Names(StrEnum):
    X = "x"


def test_whatever_has_only_texts_is_a_list_of_texts():
    table = {"x": "y"}
    given = ["x", ["x"], ("x",), {"x"}, table, table.keys(), table.values(), iter(["x"]), Names, numpy.array(["x"])]
    for value in given:
        check_value("here", "mutates", value, Iterable[str])
    for wrong in (None, b"x", [b"x"], table.items(), numpy.ones(2), torch.ones(2), torch.ones(())):
        with fails("SL140", "mutates=", expected="a text or a list of texts"):
            check_value("here", "mutates", wrong, Iterable[str])


def test_every_keyword_has_a_type_that_can_be_read():
    """A name that only type checkers import would leave all keywords of its class unchecked."""
    for keywords in (DeclarationKeywords, KernelKeywords, TemplateKeywords, BackwardKeywords):
        assert annotations_of(keywords).keys() == keywords.__annotations__.keys()
        assert not keywords.__required_keys__
    check_value("here", "supports", 3, annotations_of(KernelKeywords)["supports"])  # its own reader looks at it


@pytest.mark.parametrize(
    ("made", "got"), [(torch.ones(4), "Tensor"), ((), "0 values"), ((torch.ones(4), 1), "2 values"), (3, "int")]
)
def test_a_builder_that_returns_other_values(twice, made, got):
    twice.samples(lambda rng, sizes, dtype, device: made)
    recipe, rng = SampleRecipe(sizes=(("n", 4),), dtypes=(("Float", "float32"),)), torch.Generator()
    with fails(
        "SL123", where=f"{twice.spec.name}, samples", got=got, expected="a tuple of x", fix="return a tuple: return x,"
    ):
        build_arguments(twice, recipe, {"n": 4}, rng, torch.device("cpu"))
