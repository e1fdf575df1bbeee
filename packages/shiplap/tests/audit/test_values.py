"""numerics, edges, bound, large: that the values are right, for every size and layout."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor

import shiplap as sl
from tests.audit.common import look, register


@sl.op("audit_values::row_sum")
def row_sum(x: Float[Tensor, "n c"], scale: float = 1.0) -> Float[Tensor, "n"]:
    return x.sum(1) * scale


@row_sum.kernel("cpu")
def _(x, scale, *, out):
    torch.sum(x, 1, out=out).mul_(scale)


# numerics


# --8<-- [start:numerics]
@sl.op("audit_values::slightly_off")
def slightly_off(x: Float[Tensor, "n c"]) -> Float[Tensor, "n"]:
    return x.sum(1)


@slightly_off.kernel("cpu")
def _(x):
    return x.sum(1) * (1 + 2e-4)


# --8<-- [end:numerics]


@sl.op("audit_values::wrong_when_scaled")
def wrong_when_scaled(x: Float[Tensor, "n"], scale: float = 1.0) -> Float[Tensor, "n"]:
    return x * scale


@wrong_when_scaled.kernel("cpu")
def _(x, scale):
    return x.clone()


@sl.op("audit_values::off_by_one")
def off_by_one(x: Float[Tensor, "n c"]) -> Int64[Tensor, "n"]:
    return (x > 0).sum(1)


@off_by_one.kernel("cpu")
def _(x):
    return (x >= 0).sum(1)


@sl.op("audit_values::loses_nan")
def loses_nan(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x / x


@loses_nan.kernel("cpu")
def _(x):
    return torch.ones_like(x)


def test_numerics_fires():
    assert "tolerances" in look(slightly_off, "numerics").evidence
    assert look(wrong_when_scaled, "numerics").verdict == "fail"
    assert look(off_by_one, "numerics").verdict == "fail"  # on ties only: zeros
    assert look(loses_nan, "numerics").verdict == "fail"  # on zeros only


def test_numerics_is_silent_and_states_the_largest_error():
    finding = look(row_sum, "numerics")
    assert finding.verdict == "ok"
    assert "largest error" in finding.evidence


# edges


@sl.op("audit_values::no_empty")
def no_empty(x: Float[Tensor, "n c"]) -> Float[Tensor, "n"]:
    return x.sum(1)


@no_empty.kernel("cpu")
def _(x):
    if not len(x):
        raise RuntimeError("invalid configuration argument")
    return x.sum(1)


# --8<-- [start:edges]
@sl.op("audit_values::forgets_the_tail")
def forgets_the_tail(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * 2


@forgets_the_tail.kernel("cpu")
def _(x):
    out = x.clone()
    full = len(x) if len(x) < 16 else len(x) // 16 * 16
    out[:full] *= 2
    return out


# --8<-- [end:edges]


@sl.op("audit_values::ignores_strides")
def ignores_strides(x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
    return x * 2


@ignores_strides.kernel("cpu", strided=True)
def _(x):
    flat = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return flat[x.storage_offset() :][: x.numel()].reshape(x.shape) * 2 if flat.numel() >= x.numel() else x * 2


def test_edges_fires():
    finding = look(no_empty, "edges")
    assert "invalid configuration argument" in finding.evidence
    assert "float32(0, " in finding.input
    assert "sizes(n=17)" in look(forgets_the_tail, "edges").input
    assert "strides" in look(ignores_strides, "edges").input


@pytest.mark.long
def test_edges_fires_on_a_declaration_that_is_too_wide():
    @sl.op("audit_values::peak")
    def peak(x: Float[Tensor, "n c"]) -> Float[Tensor, "n"]:
        return x.amax(1)

    finding = look(peak, "edges")
    assert finding.verdict == "fail"
    assert "requires" in finding.fix

    @sl.op("audit_values::peak_of_some", requires=("c >= 1",))
    def peak_of_some(x: Float[Tensor, "n c"]) -> Float[Tensor, "n"]:
        return x.amax(1)

    assert look(peak_of_some, "edges").verdict == "ok"


def test_edges_sets_aside_generated_row_numbers_that_mean_nothing():
    @sl.op("audit_values::take")
    def take(x: Float[Tensor, "n c"], rows: Int32[Tensor, "m"]) -> Float[Tensor, "m c"]:
        return x[rows]

    finding = look(take, "edges")
    assert finding.verdict == "ok"
    assert "@op.samples" in finding.evidence


def test_edges_is_silent():
    assert look(row_sum, "edges").verdict == "ok"


# bound


@sl.op("audit_values::positive", bounds={"m": "n"})
def positive(x: Float[Tensor, "n"]) -> Float[Tensor, "m"]:
    return x[x > 0]


# --8<-- [start:bound]
@sl.op("audit_values::twice", bounds={"m": "n"})
def twice(x: Float[Tensor, "n"]) -> Float[Tensor, "m"]:
    return torch.cat([x[x > 0], x[x >= 0]])


# --8<-- [end:bound]


def test_bound_fires():
    finding = look(twice, "bound")
    assert finding.verdict == "fail"
    assert "SL302" in finding.evidence


@pytest.mark.long
def test_bound_fires_on_what_a_fake_promises():
    def fake(x):
        return x.new_empty(torch.library.get_ctx().new_dynamic_size(max=4))

    register("audit_values::at_most_4", "(Tensor x) -> Tensor", lambda x: x[x > -9], fake)

    @sl.adopt("audit_values::at_most_4", bounds={"m": "n"})
    def at_most_4(x: Float[Tensor, "n"]) -> Float[Tensor, "m"]:
        return x[x > -9]

    assert "the fake promised" in look(at_most_4, "bound").evidence


def test_bound_is_silent_or_says_why_it_does_not_apply():
    finding = look(positive, "bound")
    assert finding.verdict == "ok"
    assert "% of the bound" in finding.evidence
    assert look(row_sum, "bound").verdict == "skip"


# large


# --8<-- [start:large]
@sl.op("audit_values::offsets_of_32_bits")
def offsets_of_32_bits(x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
    return x * 2


@offsets_of_32_bits.kernel("cpu", strided=True)
def _(x):
    step, start, rows = x.stride(0), x.storage_offset(), []
    for i in range(len(x)):
        at = int(torch.tensor(i * step).to(torch.int32)) % (step * len(x))
        rows.append(x.as_strided(x.shape[1:], x.stride()[1:], start + at))
    return torch.stack(rows) * 2


# --8<-- [end:large]


def test_large_fires_on_int32_offsets():
    finding = look(offsets_of_32_bits, "large")
    assert finding.verdict == "fail"
    assert "strides" in finding.evidence


def test_large_fires_on_a_fake_that_overflows():
    register(
        "audit_values::wraps",
        "(Tensor x) -> Tensor",
        lambda x: x.flatten() * 2,
        lambda x: x.new_empty(x.numel() if x.numel() < 2**31 else x.numel() - 2**31),
    )

    @sl.adopt("audit_values::wraps", dims={"m": "n * c"})
    def wraps(x: Float[Tensor, "n c"]) -> Float[Tensor, "m"]:
        return x.flatten() * 2

    finding = look(wraps, "large")
    assert finding.verdict == "fail"
    assert "fake with" in finding.evidence


def test_large_is_silent_or_says_why_it_does_not_apply():
    finding = look(row_sum, "large")
    assert finding.verdict == "ok"
    assert "every dim of x" in finding.evidence

    @sl.op("audit_values::fixed", contiguous=("x",))
    def fixed(x: Float[Tensor, "3"]) -> Float[Tensor, "3"]:
        return x * 2

    assert look(fixed, "large").verdict == "skip"


def test_strides_of_several_leading_dims_are_tried(ns):
    """One leading dim has one stride, and a kernel that multiplies it by the number of the row is right."""

    @sl.op(f"{ns}::largest")
    def largest(x: Float32[Tensor, "*b d"]) -> Float32[Tensor, "*b"]:
        return torch.nn.functional.pad(x.abs(), (0, 1)).amax(-1)

    @largest.kernel("cpu", strided=True)
    def _(x):
        if x.dim() > 2 and not x.is_contiguous():
            return torch.zeros(x.shape[:-1])
        return largest.reference(x)

    assert look(largest, "edges").verdict == "fail"


# special


@pytest.mark.parametrize("reads", [False, True])
def test_special_says_what_a_builder_draws(ns: str, reads: bool) -> None:
    """A builder that does not read the kind of values draws no NaN, and the evidence says so."""

    @sl.op(f"{ns}::doubled")
    def doubled(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return x * 2

    @doubled.kernel("cpu")
    def _(x):
        return x * 2

    if reads:

        @doubled.samples
        def _(rng, sizes, dtype, device):
            x = torch.randn(sizes["n"], generator=rng)
            return ((x * torch.nan if sizes.get("values") == "nan" else x).to(device),)

    else:

        @doubled.samples
        def _(rng, sizes, dtype, device):
            return (torch.randn(sizes["n"], generator=rng).to(device),)

    finding = look(doubled, "special")
    assert finding.verdict == "ok", finding.evidence
    assert ("only what the builder of samples draws" in finding.evidence) != reads
