"""Mistakes of declarations that authors make: each is refused with its cause, and what the fix says can be done."""

import enum
from typing import Literal

import numpy as np
import pytest
import torch
from jaxtyping import Float, Int64
from torch import Tensor

import shiplap as sl
from shiplap_testing.support import fails


class Mode(enum.Flag):
    FAST = 1
    EXACT = 2


class Mixed(enum.Enum):
    A = "a"
    B = 1


ARGUMENTS = {
    "array": (Float[np.ndarray, "n c"], 'write Tensor for the array type: Float[Tensor, "n c"], and pass torch.from_'),
    "integers": (Int64[np.ndarray, "k"], 'write Tensor for the array type: Int64[Tensor, "k"]'),
    "bare array": (np.ndarray, 'annotate Float[Tensor, "n c"] and pass tensors'),
    "flags": (Mode, "annotate int and pass member.value; the reference may make Mode of it"),
    "mixed values": (Mixed, "give all members of Mixed values of one type, str or int"),
    "mixed literal": (Literal[1, "a"], "list texts only, or ints only, in the Literal"),
    "literal of bools": (Literal[True, False], "annotate bool"),
    "list of literals": (list[Literal[1, 2]], "as an argument of its own, or annotate list[str] or list[int]"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_annotations_that_no_schema_has(ns, name):
    annotation, fix = ARGUMENTS[name]

    def f(x: Float[Tensor, "n"], other):
        return x

    f.__annotations__ |= {"other": annotation, "return": Float[Tensor, "n"]}
    with fails("SL103", fix, where=f"{ns}::f, argument 'other'"):
        sl.op(f"{ns}::f")(f)


DIMS = {
    "n + 1": "write each dim without blanks, such as 'n+1' for one dim",
    "n +1": "write each dim without blanks, such as 'n+1' for one dim",
    "2* n": "write each dim without blanks, such as '2*n' for one dim",
    "max(n, 2)": "write each dim without blanks, such as 'max(n,2)' for one dim",
    "n/2": "write // for /, without blanks, or (n+1)//2 to round n/2 up: a size is a whole number",
}


@pytest.mark.parametrize("dims", DIMS)
def test_dim_expressions_that_cannot_be_read(ns, dims):
    def f(x: Float[Tensor, "n"]):
        return x

    f.__annotations__["return"] = Float[Tensor, dims]
    with fails("SL105", where=f"{ns}::f, return", fix=DIMS[dims]):
        sl.op(f"{ns}::f")(f)
    f.__annotations__["return"] = Float[Tensor, dims.replace(" ", "").replace("n/2", "n//2")]
    assert sl.op(f"{ns}::f")(f).spec.outputs


@pytest.mark.parametrize("dims", ["...", "*rows c", "_ c", "#n c", "n 2*c", "rows=4 c", "n+1 c", "max(n,c) c"])
def test_dims_with_blanks_between_them(ns, dims):
    def f(like: Float[Tensor, "n c"], x) -> None:
        x.zero_()

    f.__annotations__["x"] = Float[Tensor, dims]
    assert sl.op(f"{ns}::f", mutates="x")(f).spec.args


def test_a_default_of_none_needs_an_optional_argument(ns):
    for kind, fix in ((Float[Tensor, "n"], 'annotate b: Float[Tensor, "n"] | None'), (int, "annotate b: int | None")):

        def f(x: Float[Tensor, "n"], b=None):
            return x

        f.__annotations__ |= {"b": kind, "return": Float[Tensor, "n"]}
        with fails("SL103", where=f"{ns}::f, argument 'b'", fix=fix):
            sl.op(f"{ns}::f")(f)


def test_memory_that_a_compiled_graph_shares(ns):
    """A fix is no fix where the caller has done already what it says."""

    @sl.op(f"{ns}::turn", mutates="to")
    def turn(x: Float[Tensor, "n"], to: Float[Tensor, "n"]) -> None:
        to.copy_(x.flip(0))

    x = torch.arange(4.0)
    fix = "pass memory of its own: a .clone(), or torch.empty_like where a compiled graph shares that of the copy"
    with fails("SL210", fix=fix):
        turn(x, x)

    def own(x):
        to = torch.empty_like(x)
        turn(x, to)
        return to

    assert torch.compile(own, backend="aot_eager", fullgraph=True)(x).tolist() == [3, 2, 1, 0]
