"""The property that separates failing samples from passing ones, and the advice that follows from it."""

from __future__ import annotations

from functools import partial

import pytest
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.audit.causes import AXIS_FIXES, SIZE_FIXES, THRESHOLD_FIX, fix_of
from shiplap.audit.separation import Separation, _ranges, separate
from shiplap.sampling.ledger import varied_axes
from shiplap.sampling.samples import Samples
from tests.audit.common import look

VALUE_SIZE = ("value", "size")
M = Float[Tensor, "n c"]


@sl.op("audit_separation::scaled")
def scaled(x: M, by: float = 1.0, turned: bool = False, bias: Float[Tensor, "c"] | None = None) -> M:
    return x * by


@pytest.fixture(scope="module")
def cases():
    samples = Samples(scaled, 1)
    base = samples.base
    recipes = [
        base,
        *(base.but(sizes={name: size}) for name in ("n", "c") for size in (1, 3, 5, 8, 16, 17, 64, 256, 257)),
        *(base.but(values=kind) for kind in ("ties", "nan", "zeros")),
        *(base.but(scalars={"by": by}) for by in (0.5, 2.0)),
        base.but(scalars={"turned": True}),
        *(base.but(layouts={"x": kind}) for kind in ("transposed", "padded")),
        base.but(dtypes={"Float": "float16"}),
        base.but(absent=("bias",)),
        base.but(sizes={"c": 257}, values="ties"),
    ]
    made = [samples.make(recipe) for recipe in recipes]
    assert None not in made
    return made


@pytest.mark.parametrize(
    ("fails", "text", "axes"),
    [
        (lambda e, r: e["c"] >= 257, "exactly those with c >= 257", ("size",)),
        (lambda e, r: e["c"] == 1, "exactly those with c == 1", ("size",)),
        (
            lambda e, r: e["n"] % 8 and e["n"] > 16,
            "exactly those with n >= 17 and n no multiple of 8",
            ("size", "size"),
        ),
        (lambda e, r: e["n"] == e["c"], "exactly those with n == c", ("size",)),
        (lambda e, r: r.values == "ties", "exactly those with values ties", ("value",)),
        (lambda e, r: e["by"] != 1, "exactly those with another by than 1.0", ("scalar",)),
        (lambda e, r: e["turned"], "exactly those with turned = True", ("scalar",)),
        (lambda e, r: bool(r.layouts), "exactly those with padded x or transposed x", ("layout",)),
        (lambda e, r: bool(r.absent), "exactly those with no bias", ("absence",)),
        (lambda e, r: "float16" in dict(r.dtypes).values(), "exactly those with float16", ("dtype",)),
        (
            lambda e, r: e["c"] == 257 and r.values == "ties",
            "exactly those with values ties and c >= 257",
            ("value", "size"),
        ),
        (lambda e, r: e["n"] > 1, "all but those with n == 1", ()),
        (lambda e, r: True, "", ()),
    ],
)
def test_the_property_of_all_failing_samples_is_named(cases, fails, text, axes):
    failed = [case for case in cases if fails(case.env, case.recipe)]
    passed = [case for case in cases if not fails(case.env, case.recipe)]
    found = separate(failed, passed, cases[0], partial(varied_axes, base=cases[0]))
    assert (found and (found.text, found.axes)) == ((text, axes) if text else None)


def test_a_property_that_some_passing_samples_have_is_counted(cases):
    failed = [case for case in cases if case.env["c"] in (16, 257) and case.recipe.values == "normal"]
    passed = [case for case in cases if case not in failed]
    found = separate(failed, passed, cases[0], partial(varied_axes, base=cases[0]))
    assert found is not None
    assert found.text == "2 of the 6 with c >= 16, and no other"


def test_a_property_of_the_base_sample_is_not_why_others_fail():
    """All scalars are tried with the usual values, and few samples beside them have these."""
    samples = Samples(scaled, 1)
    base = samples.make(samples.base)
    other = [
        samples.make(samples.base.but(values=kind)) for kind in ("ties", "nan", "zeros", "tiny", "large", "constant")
    ]
    *right, small, large = [samples.make(samples.base.but(scalars={"by": by})) for by in (0.5, 2.0, 3.0, 0.25, 4.0)]
    found = separate([small, large], [*other, *right], base, partial(varied_axes, base=base))
    assert found is not None
    assert (found.text, found.axes) == ("2 of the 5 with another by than 1.0, and no other", ("scalar",))


def test_a_large_tensor_is_named_by_its_elements():
    samples = Samples(scaled, 1)
    base = samples.make(samples.base)
    (large,) = samples.grains("c")
    other = samples.make(samples.base.but(layouts={"x": "transposed"}))
    found = separate([large], [base, other], base, partial(varied_axes, base=base))
    assert found is not None
    assert found.text == "exactly those with a tensor of more than 65,536 elements"


def test_no_range_is_named_for_nan():
    failed, passed = [float("nan"), 2.0], [1.0]
    assert list(_ranges("scalar", "by", failed, passed)) == []


def _failing_where(ns, condition):
    @sl.op(f"{ns}::doubled")
    def doubled(x: M) -> M:
        return x * 2

    @doubled.kernel("cpu")
    def _(x):
        return x * 2 + (1 if condition(x) else 0)

    return doubled


@pytest.mark.parametrize(
    ("condition", "says", "fix"),
    [
        (lambda x: x.shape[1] == 1, "exactly those with c == 1", "handle a dim of size 1"),
        (lambda x: x.shape[1] > 32, "exactly those with c >= 33", "loop over all tiles"),
    ],
)
def test_the_advice_follows_what_separates_failing_samples(ns, condition, says, fix):
    finding = look(_failing_where(ns, condition), "edges")
    assert finding.verdict == "fail"
    assert says in finding.evidence
    assert "each is off by 1" in finding.evidence
    assert finding.fix.startswith(fix)


@pytest.mark.parametrize("kind", [*SIZE_FIXES, ""])
def test_the_advice_fits_the_kind_of_sizes(cases, kind):
    advice = fix_of(scaled, "edges", "", cases[1], ("size",), Separation(("size",), "", kind))
    assert advice == SIZE_FIXES.get(kind, AXIS_FIXES["size"])


def test_the_advice_on_values_near_a_number_in_the_code_is_to_branch_there():
    samples = Samples(scaled, 1)
    near = samples.make(samples.base.but(values="around 20", scalars={"by": 0.25}))
    assert near is not None
    both = Separation(("value", "scalar"), "exactly those with values around 20 and by == 0.25")
    assert fix_of(scaled, "special", "usual", near, ("scalar", "value"), both) == THRESHOLD_FIX


def test_the_advice_on_large_sizes_is_given_for_large_samples_alone():
    samples = Samples(scaled, 1)
    (large,) = samples.grains("c")
    small = samples.build(samples.base)
    found = Separation(("size",), "")
    assert fix_of(scaled, "sizes", "", large, ("large size", "size"), found) == AXIS_FIXES["large size"]
    assert fix_of(scaled, "sizes", "", small, ("size",), found) == AXIS_FIXES["size"]
