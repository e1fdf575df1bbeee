"""Faults beyond one tile in two dims at once, beyond two leading dims, and what each call does to the process."""

import warnings

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap_testing.effort import sampled

both = pytest.mark.parametrize("wrong", sampled([True, False], long=["False"]))


def failed(op, *checks):
    return [f.check for f in sl.audit(op, checks=checks, budget=600) if f.verdict == "fail"]


@pytest.mark.long
@both
def test_tiles_that_are_added_where_they_are_multiplied(ns, wrong):
    """A grid of (tiles down + tiles across) is large enough until both dims have several tiles; each step is slow."""

    @sl.op(f"{ns}::doubled")
    def doubled(x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
        return x * 2

    @doubled.kernel("cpu")
    def _(x, *, out):
        down, across = -(-x.shape[0] // 32), -(-x.shape[1] // 32)
        for tile in range(down + across if wrong else down * across):
            rows = slice(32 * (tile // across), 32 * (tile // across) + 32) if across else slice(0)
            columns = slice(32 * (tile % across), 32 * (tile % across) + 32) if across else slice(0)
            out[rows, columns] = x[rows, columns] * 2
        if wrong and down * across <= down + across:
            out.copy_(x * 2)

    assert failed(doubled, "sizes") == ["sizes"] * wrong


@both
def test_three_leading_dims(ns, wrong):
    @sl.op(f"{ns}::scaled", requires="c >= 1")
    def scaled(x: Float[Tensor, "*b c"]) -> Float[Tensor, "*b c"]:
        return x / (1 + x.abs().amax(-1, keepdim=True))

    @scaled.kernel("cpu")
    def _(x, *, out):
        dims = (-1, -2) if wrong and x.dim() > 3 and x.shape[-2] else -1
        out.copy_(x / (1 + x.abs().amax(dims, keepdim=True)))

    assert failed(scaled, "sizes") == ["sizes"] * wrong


@pytest.mark.parametrize("how", sampled(["prints", "filters warnings", "leaves both alone"], 1))
def test_what_each_call_does_to_the_process(ns, how):
    @sl.op(f"{ns}::more")
    def more(x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
        return x + 1

    @more.kernel("cpu")
    def _(x, *, out):
        if how == "prints":
            print("called")
        if how == "filters warnings":
            warnings.simplefilter("ignore")
        torch.add(x, 1, out=out)

    assert failed(more, "process") == ["process"] * (how != "leaves both alone")
