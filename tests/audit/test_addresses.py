"""addresses: what a plan keeps of one call, and what it promises about the next."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from tests.audit.common import look
from tests.audit.test_memory import double
from tests.zoo import bad, good

# --8<-- [start:addresses]
_plans: dict[torch.Size, Tensor] = {}


@sl.op("audit_addresses::add_bias")
def add_bias(x: Float[Tensor, "n c"], bias: Float[Tensor, "c"]) -> Float[Tensor, "n c"]:
    return x + bias


@add_bias.kernel("cpu")
def _(x, bias, *, out):
    kept = _plans.setdefault(x.shape, bias)  # the descriptor of a shape has the first caller's bias
    torch.add(x, kept, out=out)


# --8<-- [end:addresses]


def test_addresses_fires():
    found = look(add_bias, "addresses")
    assert found.verdict == "fail"
    assert "another bias, same size: result 0" in found.evidence
    assert "keep no pointer in a plan" in found.fix


def test_addresses_tells_a_promise_of_alignment_from_a_baked_pointer():
    found = look(bad.addresses.aligned, "addresses")
    assert found.verdict == "fail"
    assert "x at an address aligned to one element" in found.evidence
    assert "promise no more alignment" in found.fix


@pytest.mark.parametrize(
    "op", [good.affine, good.update_, good.gather, good.stack, good.saxpy], ids=lambda o: o.__name__
)
def test_addresses_is_silent(op):
    found = look(op, "addresses")
    assert found.verdict == "ok"
    assert "moves" in found.evidence


def test_integers_move_only_together():
    """Row numbers of one sample need not fit the tensors of another."""
    assert "4 moves" in look(good.gather, "addresses").evidence  # x alone twice, all twice; never the index alone
    assert "2 moves" in look(good.histogram, "addresses").evidence
    assert "4 moves" in look(double, "addresses").evidence
