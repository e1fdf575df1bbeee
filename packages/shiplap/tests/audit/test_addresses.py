"""addresses: what a plan keeps of one call, and what it promises about the next."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float, Float8e4m3fn
from torch import Tensor

import shiplap as sl
from shiplap_testing.effort import sampled
from shiplap_testing.zoo import bad, good
from tests.audit.common import look
from tests.audit.test_memory import double

# --8<-- [start:addresses]
_plans: dict[torch.Size, Tensor] = {}


@sl.op("audit_addresses::add_bias")
def add_bias(x: Float[Tensor, "n c"], bias: Float[Tensor, "c"]) -> Float[Tensor, "n c"]:
    return x + bias


@add_bias.kernel("cpu")
def _(x, bias, *, out):
    # the descriptor of a shape has the first caller's bias
    kept = _plans.setdefault(x.shape, bias)
    torch.add(x, kept, out=out)


# --8<-- [end:addresses]


def test_addresses_fires():
    finding = look(add_bias, "addresses")
    assert finding.verdict == "fail"
    assert "another bias, same size: result 0" in finding.evidence
    assert "keep no pointer in a plan" in finding.fix


def test_addresses_tells_a_promise_of_alignment_from_a_baked_pointer():
    finding = look(bad.addresses.aligned, "addresses")
    assert finding.verdict == "fail"
    assert "x at an address aligned to one element" in finding.evidence
    assert "promise no more alignment" in finding.fix


@pytest.mark.parametrize(
    "op", sampled([good.affine, good.update_, good.gather, good.stack, good.saxpy], 2), ids=lambda o: o.__name__
)
def test_addresses_is_silent(op):
    finding = look(op, "addresses")
    assert finding.verdict == "ok"
    assert "moves" in finding.evidence


def test_integers_move_only_together():
    """Row numbers of one sample need not fit the tensors of another."""
    assert "4 moves" in look(good.gather, "addresses").evidence  # x alone twice, all twice; never the index alone
    assert "2 moves" in look(good.histogram, "addresses").evidence
    assert "4 moves" in look(double, "addresses").evidence


@sl.op("audit_addresses::twice")
def twice(
    codes: Float8e4m3fn[Tensor, "n"], repeated: Float8e4m3fn[Tensor, "n"], scale: Float[Tensor, "n"]
) -> Float[Tensor, "n"]:
    """``repeated`` holds the same codes, for kernels that want them elsewhere."""
    return codes.to(scale.dtype) * scale


@twice.kernel("cpu")
def _(codes, repeated, scale, *, out):
    torch.mul(repeated.to(scale.dtype), scale, out=out)


@twice.samples
def _(rng, sizes, dtype, device):
    codes = torch.randn(sizes["n"], generator=rng).to(device, torch.float8_e4m3fn)
    return codes, codes.clone(), torch.rand(sizes["n"], generator=rng).to(device, dtype)


@pytest.mark.parametrize("check", ["addresses", "edges"])
def test_codes_of_eight_bits_change_only_together(check):
    """Two forms of one quantised weight, and a scale that belongs to it: neither form changes alone."""
    finding = look(twice, check)
    assert finding.verdict == "ok", finding.evidence
    assert check == "edges" or "4 moves" in finding.evidence
