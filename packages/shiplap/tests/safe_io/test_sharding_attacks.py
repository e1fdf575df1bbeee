"""Attacks on sharding: rules that are none, and calls whose scalars choose what is made to derive a rule."""

from __future__ import annotations

import math
import resource
import time

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.sharding import derive
from shiplap.sharding.derive import known_rules
from shiplap_testing.support import fails

MIB = 512


@sl.op("shard_attack::pad")
def pad(x: Float[Tensor, "n c"], k: int = 1) -> Float[Tensor, "n+k c"]:
    return torch.cat([x, x.new_zeros(k, x.shape[1])])


@sl.op("shard_attack::soft")
def soft(x: Float[Tensor, "*s"], dim: int = 0) -> Float[Tensor, "*s"]:
    return x.softmax(dim)


@sl.op("shard_attack::scale")
def scale(x: Float[Tensor, "n c"], by: float = 1.0, of: list[int] = [1]) -> Float[Tensor, "n c"]:  # noqa: B006
    return x * by * sum(of)


@sl.op("shard_attack::plus")
def plus(x: Float[Tensor, "a b c d e f g h"], y: Float[Tensor, "a b c d e f g h"]) -> Float[Tensor, "a b c d e f g h"]:
    return x + y


def grown(before: int) -> int:
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10


@pytest.mark.parametrize("k", [10**7, 10**8, 2**31, 2**40, 2**62, 2**63 - 1, -1, -(2**63)])
def test_a_scalar_that_is_a_size_makes_no_sample_of_that_size(k):
    """A call with k = 10**8 took 20 s and 10 GiB, and a greater one ended with torch's error about memory."""
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    assert known_rules(pad, (torch.empty(4, 3), k)) == ()
    assert grown(before) < MIB
    assert time.process_time() - started < 10
    assert [r.name for r in known_rules(pad, (torch.empty(4, 3), 2))] == ["c"]


def test_many_dims_make_no_sample_that_fills_the_memory():
    """The greater sample of eight dims had 52 million elements, those of forty dims 2**40."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert [r.name for r in known_rules(plus, (torch.empty([1] * 8),) * 2)] == list("abcdefgh")
    assert known_rules(soft, (torch.empty([1] * 40), 0)) == ()
    assert grown(before) < MIB


@pytest.mark.parametrize("dim", [3, -4, 2**62])
def test_a_call_that_the_reference_refuses_has_no_rule(dim):
    """Its IndexError came out of the derivation; the call itself says what is wrong with it."""
    assert known_rules(soft, (torch.empty(2, 2, 2), dim)) == ()


def test_scalars_of_any_form_are_looked_up():
    for by, of in ((math.nan, [1]), (math.inf, [1, 2]), (1.0, [[1], [2]]), (1.0, [2**62, 2**62])):
        known_rules(scale, (torch.empty(4, 3), by, of))
    count = len(derive._known)
    for _ in range(3):
        known_rules(scale, (torch.empty(4, 3), float("nan"), [1]))
    assert len(derive._known) == count, "a NaN is looked up as itself"


def test_rules_of_another_number_in_each_call_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(derive, "KEPT", 5)
    monkeypatch.setattr(derive, "_known", {})
    for step in range(12):
        known_rules(scale, (torch.empty(4, 3), float(step), [1]))
        assert len(derive._known) <= 5


PARTS = [True, False, -1, 2, 2**70, 1.0, math.nan, None, "x", "", b"sum", object(), torch.tensor(0), {}, iter([0])]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: type(part).__name__ + repr(part)[:12])
def test_a_part_that_is_none_is_refused(part, ns):
    """True was an axis; 1.0 and None ended in "object is not iterable"."""

    @sl.op(f"{ns}::twice")
    def twice(x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
        return 2 * x

    for inputs, outputs in (({"x": part}, 0), ({"x": 0}, part), ({"x": 0}, [part])):
        with fails("SL218"):
            twice.sharding(inputs, outputs)
    for inputs in ([], "x", {"y": 0}, {None: 0}, 5):
        with fails("SL218"):
            twice.sharding(inputs, 0)
    assert twice.shardings is None
