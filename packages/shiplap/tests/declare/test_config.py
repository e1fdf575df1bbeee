"""Configs of kernels: how they are declared, which one runs, and that they are part of the kernel's identity."""

from types import SimpleNamespace

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.declare.config import NO_CONFIG, Config, read_space
from shiplap.errors import ShiplapError
from shiplap_testing.support import fails


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


def space_of(configs, default=None, prior=None, **more):
    return read_space(SimpleNamespace(name="demo::f"), "k", configs, default, prior, **more)


A, B, C = {"N": 1}, {"N": 2}, {"N": 3}
ONE, TWO, THREE = map(Config.of, (A, B, C))


def test_a_config_in_words():
    assert Config.of({"B": 1, "A": 2}).label("tiled") == "tiled(A=2, B=1)"
    assert NO_CONFIG.label("tiled") == "tiled"
    assert Config.of({"B": 1, "A": 2}).as_dict() == {"A": 2, "B": 1}


def test_what_a_list_of_configs_determines():
    plain, chosen, computed = space_of([A, B, A]), space_of([A, B], B), space_of([A, B], lambda sizes: C)
    assert [s.fixed for s in (plain, chosen, computed)] == [(ONE, TWO)] * 3
    assert [s.static for s in (plain, chosen, computed)] == [ONE, TWO, None]
    assert [s.depends for s in (plain, chosen, computed)] == [False, False, True]
    assert [s.default({}) for s in (plain, chosen, computed)] == [ONE, TWO, THREE]
    assert [s.configs({}) for s in (plain, chosen, computed)] == [(ONE, TWO), (TWO, ONE), (THREE, ONE, TWO)]
    assert [s.names for s in (plain, space_of(lambda sizes: [A]))] == [("N",), ()]
    beyond = space_of([A], C)
    assert (beyond.configs({}), beyond.declared(THREE), beyond.declared(TWO)) == ((THREE, ONE), THREE, None)
    same = plain.declared(Config.of({"N": True}))
    assert type(same.items[0][1]) is int


def test_what_a_function_of_configs_determines():
    derived = space_of(lambda sizes: [{"N": sizes["n"]}, A, A])
    assert (derived.fixed, derived.static, derived.depends) == ((), None, True)
    assert derived.configs({"n": 2}) == (TWO, ONE)
    assert derived.default({"n": 3}) == THREE
    chosen = space_of(lambda sizes: [A], B)
    assert (chosen.static, chosen.default({}), chosen.configs({})) == (None, TWO, (TWO, ONE))
    with pytest.raises(ShiplapError, match=r"SL116(?s:.*)demo::f, kernel k(?s:.*)no config for \{'n': 3\}"):
        space_of(lambda sizes: []).configs({"n": 3})


def test_the_identity_of_configs_is_what_runs():
    def default(sizes): ...
    def prior(sizes, config): ...

    texts, values = zip(*space_of([A, B], B, prior).code_parts(), strict=True)
    assert texts == ("[N=1]|[N=2]|default N=2", "configs")
    assert values == (None, (None, None, prior))
    assert [*space_of([A], default).code_parts()] == [("[N=1]|", None), ("configs", (None, default, None))]
    assert [*space_of(default).code_parts()] == [("default None", None), ("configs", (default, None, None))]


@pytest.mark.parametrize(
    ("given", "got", "expected"),
    [
        ((None, A), "default= or prior= alone", "configs="),
        ((None, None, len), "default= or prior= alone", "configs="),
        (([], A), "an empty list", "at least one config"),
        (([A], {"M": 1}), "M=1", "a keyword 'M' of the kernel"),
        (([{"N": 1, "a b": 1}],), "a b=1", "an int, float, bool or str"),
        (([{"N": None}],), "N=None", "an int, float, bool or str"),
        (([{1: 2}],), "{1: 2}", "a dict of names and values"),
    ],
)
def test_configs_that_are_refused(given, got, expected):
    with fails("SL116", where="demo::f, kernel k", got=got, expected=expected):
        space_of(*given, keywords=frozenset({"N"}))


@pytest.mark.parametrize(
    ("given", "got"),
    [
        ((lambda sizes: [A],), "a function"),
        (([{"N": 1, "M": 2}, A],), "N=1"),
        (([A], {"M": 1}), "M=1"),
        (([A, {"N": 1.5}],), "N=1.5"),
        (([A], {"N": "x"}), "N=x"),
    ],
)
def test_configs_that_c_cannot_read(given, got):
    with fails("SL116", where="demo::f, kernel k", got=got):
        space_of(*given, native=True)
    assert space_of(*given) is not None
    assert space_of([A, B], lambda sizes: {"M": 1.5}, native=True).native


def test_no_configs_are_no_space():
    assert space_of(None) is None
