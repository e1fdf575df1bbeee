"""Configs of kernels: how they are declared, which one runs, and that they are part of the kernel's identity."""

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.declare.config import Config
from shiplap.errors import ShiplapError


def declare(ns, configs, **keywords):
    used = []

    @sl.op(f"{ns}::scale")
    def scale(x: Float[Tensor, "n"], a: float = 2.0) -> Float[Tensor, "n"]:
        return x * a

    @scale.kernel("cpu", name="blocked", configs=configs, **keywords)
    def _(x, a, *, out, BLOCK, UNROLL=1):
        used.append((BLOCK, UNROLL))
        torch.mul(x, a, out=out)

    return scale, used


def test_the_first_config_is_the_default(ns):
    scale, used = declare(ns, [{"BLOCK": 8}, {"BLOCK": 4}])
    assert torch.equal(scale(torch.ones(3)), torch.full((3,), 2.0))
    assert used == [(8, 1)]


def test_a_default_may_be_named_or_follow_from_the_sizes(ns):
    scale, used = declare(ns, [{"BLOCK": 8}, {"BLOCK": 4}], default={"BLOCK": 4})
    scale(torch.ones(3))
    other, seen = declare(ns + "b", [{"BLOCK": 8}], default=lambda sizes: {"BLOCK": sizes["n"]})
    other(torch.ones(3))
    assert (used, seen) == ([(4, 1)], [(3, 1)])


def test_configs_may_follow_from_the_sizes(ns):
    scale, used = declare(ns, lambda sizes: [{"BLOCK": b} for b in (16, 32) if b <= sizes["n"]])
    scale(torch.ones(40))
    assert used == [(16, 1)]
    space = scale.kernels["cpu"][0].space
    assert [str(c) for c in space.configs({"n": 40})] == ["BLOCK=16", "BLOCK=32"]
    with pytest.raises(ShiplapError, match="no config for"):
        scale(torch.ones(3))


def test_equal_configs_are_one_however_written():
    assert Config.of({"B": 1, "A": 2}) == Config.of({"A": 2, "B": 1})
    assert str(Config.of({"B": 1, "A": 2})) == "A=2, B=1"


def test_configs_are_part_of_the_identity(ns):
    first, _ = declare(ns + "a", [{"BLOCK": 8}])
    kernels = [declare(ns + n, c)[0].kernels["cpu"][0] for n, c in (("b", [{"BLOCK": 8}]), ("c", [{"BLOCK": 16}]))]
    assert first.kernels["cpu"][0].identity == kernels[0].identity != kernels[1].identity
    scaled, _ = declare(ns + "d", lambda sizes: [{"BLOCK": 8}])
    other, _ = declare(ns + "e", lambda sizes: [{"BLOCK": 9}])
    assert scaled.kernels["cpu"][0].identity != other.kernels["cpu"][0].identity


@pytest.mark.parametrize(
    ("configs", "messages"),
    [
        ([], "an empty list"),
        ([{}], "{}"),
        ([{"BLOKC": 8}], "a keyword 'BLOKC' of the kernel"),
        ([{"x": 8}], "a keyword 'x' of the kernel"),  # an argument of the op
        ([{"out": 8}], "a keyword 'out' of the kernel"),
        ([{"BLOCK": [8]}], "an int, float, bool or str"),
        (["BLOCK"], "a dict of names and values"),
    ],
)
def test_what_is_no_config_is_refused(ns, configs, messages):
    with pytest.raises(ShiplapError) as caught:
        declare(ns, configs)
    assert caught.value.id == "SL116"
    assert messages in str(caught.value)


def test_a_default_needs_configs(ns):
    with pytest.raises(ShiplapError, match="SL116"):
        declare(ns, None, default={"BLOCK": 8})
