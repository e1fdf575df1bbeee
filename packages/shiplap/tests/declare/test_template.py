"""Templates as data: what may be one, and what makes it another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from jaxtyping import Float, Int32
from torch import Tensor

import shiplap as sl
from shiplap.declare.template import read_template

M = Float[Tensor, "n c"]


def twice(x: M) -> M:
    """A result of fixed size."""
    return x * 2


@pytest.fixture
def op(ns: str) -> sl.Op:
    return sl.op(f"{ns}::twice")(twice)


def grid(sizes, config, cdiv):
    return cdiv(sizes["n"], config["BLOCK"]), 1, 1


REFUSED = {
    "a suffix that means nothing": ({"source": "kernel.cu"}, r"expected \*\.triton\.jinja or \*\.cpp\.jinja"),
    "no file": ({"source": "missing.cpp.jinja"}, "no such file"),
    "no grid": ({"source": "k.triton.jinja"}, "no grid"),
    "a grid as text": (
        {"source": "k.triton.jinja", "grid": "n"},
        r"grid= 'n'(.|\n)*function of \(sizes, config, cdiv\)",
    ),
    "a table that is none": ({"source": "k.cpp.jinja", "tables": {"t": 3}}, r"tables\['t'\] 3"),
    "an index that Inductor takes for a size": ({"source": "s.triton.jinja", "grid": grid}, "the name 'source'"),
    "a variable of Inductor's epilogue": ({"source": "t.triton.jinja", "grid": grid}, "the name 'tmp0'"),
    "a function of something else": ({"source": lambda y: y}, "a function of y(.|\n)*expected a function of x"),
    "a function with a grid": ({"source": lambda x: x, "grid": grid}, "grid= of a function"),
    "no configs": ({"source": "k.cpp.jinja", "configs": []}, "no configs"),
    "a dim of nobody": ({"source": "k.cpp.jinja", "innermost": {"x": "m"}}, r"innermost=\{'x': 'm'\}"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_one_is_refused(op, tmp_path, case):
    for name in ("k.cpp.jinja", "k.triton.jinja", "kernel.cu"):
        (tmp_path / name).write_text("source")
    (tmp_path / "s.triton.jinja").write_text('{{load_input("x", "x", ("row", "source"), mask="m")}}')
    (tmp_path / "t.triton.jinja").write_text('tmp0 = 1\n{{store_output(("row",), "tmp0", "m")}}')
    declaration, messages = REFUSED[case]
    with pytest.raises(sl.ShiplapError, match=rf"SL114(.|\n)*{messages}"):
        read_template(op.spec, str(tmp_path / "ops.py"), "cpu", **declaration)


def test_the_code_of_a_function_is_part_of_what_a_template_is(op):
    made = [read_template(op.spec, __file__, "cpu", fn, name="f") for fn in (lambda x: x + x, lambda x: x * 2)]
    assert [t.language for t in made] == ["torch", "torch"]
    assert made[0].identity != made[1].identity


def test_ops_of_several_or_data_dependent_outputs_have_none(ns, tmp_path):
    @sl.op(f"{ns}::found", bounds={"m": "n"})
    def dynamic(x: Int32[Tensor, "n"]) -> Int32[Tensor, "m"]:
        return torch.unique(x)

    (tmp_path / "k.cpp.jinja").write_text("source")
    with pytest.raises(sl.ShiplapError, match=r"SL114(.|\n)*one output of fixed size"):
        read_template(dynamic.spec, str(tmp_path / "ops.py"), "cpu", "k.cpp.jinja")


def test_source_configs_and_functions_are_its_identity(op, tmp_path: Path):
    def made(text: str = "source", **declaration):
        (tmp_path / "k.triton.jinja").write_text(text)
        keywords = {"grid": grid, "configs": [{"BLOCK": 16}], **declaration}
        return read_template(op.spec, str(tmp_path / "ops.py"), "cuda", "k.triton.jinja", **keywords)

    plain = made()
    assert plain.identity == made().identity
    assert plain.candidates({}) == ({"BLOCK": 16},)
    others = [
        made("other source"),
        made(configs=[{"BLOCK": 32}]),
        made(configs=lambda sizes: [{"BLOCK": 16}]),
        made(grid=lambda sizes, config, cdiv: (1, 1, 1)),
        made(innermost={"x": "c"}),
        made(supports=lambda sizes, dtypes, config: True),
        made(tables={"t": lambda sizes: torch.zeros(1)}),
    ]
    assert len({plain.identity, *(o.identity for o in others)}) == 1 + len(others)
