"""The two functions of a plan agree: same bindings for good calls, the same words for bad ones."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float, Int32
from torch import Tensor

import shiplap as sl
from shiplap.declare.signature import read_spec
from shiplap.declare.spec import OpSpec
from shiplap.plan import CallPlan


def spec_of(fn, **declaration) -> OpSpec:
    none = {"dims": {}, "bounds": {}, "requires": (), "mutates": (), "contiguous": (), "outputs": (), "autocast": None}
    return read_spec("plan::op", fn, **{**none, **declaration})


def plan_of(fn, **declaration) -> CallPlan:
    return CallPlan(spec_of(fn, **declaration))


def refused(plan: CallPlan, args) -> str:
    """What both functions say of a wrong call."""
    messages = []
    for bind in (plan.quick, plan.careful):
        with pytest.raises(sl.ShiplapError) as caught:
            bind(*args)
        messages.append((type(caught.value), str(caught.value)))
    assert messages[0] == messages[1]
    return messages[0][1]


def bound(plan: CallPlan, args):
    """What both functions bind."""
    quick, careful = plan.quick(*args), plan.careful(*args)
    assert all(a is b or a == b for a, b in zip(quick.args, careful.args, strict=True))
    assert list(quick.env.items()) == list(careful.env.items()), "also in the same order, which is part of keys"
    assert (quick.dtypes, quick.device) == (careful.dtypes, careful.device)
    return quick


def conv(
    feats: Float[Tensor, "n ci"],
    weight: Float[Tensor, "co k ci"],
    table: Int32[Tensor, "n k"],
    bias: Float[Tensor, "co"] | None = None,
    taps: list[int] = (3,),
    scale: float = 1.0,
) -> Float[Tensor, "n co"]: ...


PLAN = plan_of(conv, dims={"k": "prod(taps)"}, requires=("min(taps) >= 1",), contiguous=("table",))
GOOD = (torch.randn(5, 2), torch.randn(4, 3, 2), torch.zeros(5, 3, dtype=torch.int32))


def test_a_good_call_binds_names():
    for args in (GOOD, (*GOOD, torch.randn(4)), (*GOOD, None, [3]), (*GOOD, torch.randn(4), [1, 3], 0.5)):
        call = bound(PLAN, args)
        assert {n: call.env[n] for n in ("n", "ci", "co", "k")} == {"n": 5, "ci": 2, "co": 4, "k": 3}
        assert len(call.args) == 6


BAD = {
    "rank": ((torch.randn(5, 2, 1), *GOOD[1:]), "SL201"),
    "dim": ((torch.randn(5, 3), *GOOD[1:]), "SL202"),
    "dtype": ((GOOD[0].double(), *GOOD[1:]), "SL205"),
    "integer dtype": ((*GOOD[:2], GOOD[2].long()), "SL204"),
    "device": ((GOOD[0], GOOD[1].to("meta"), GOOD[2]), "SL206"),
    "optional dim": ((*GOOD, torch.randn(5)), "SL202"),
    "optional dtype": ((*GOOD, torch.randn(4).half()), "SL205"),
    "relation": ((*GOOD, None, [2]), "SL202"),
    "requires": ((*GOOD, None, [-1, -3]), "SL208"),
    "no value": ((GOOD[0], GOOD[1][:, :1], GOOD[2][:, :1].contiguous(), None, []), "SL208"),
    "layout": ((*GOOD[:2], torch.zeros(3, 5, dtype=torch.int32).T), "SL207"),
    "not dense": ((GOOD[0].to_sparse(), *GOOD[1:]), "SL207"),
    "not accepted": ((GOOD[2], *GOOD[1:]), "SL204"),
    "no tensor": ((GOOD[0], None, GOOD[2]), "SL209"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_call_is_refused(case):
    args, id = BAD[case]
    assert refused(PLAN, args).startswith(id)


def test_lists_and_variadic_dims():
    def many(xs: list[Float[Tensor, "*b n"]], y: Float[Tensor, "2*n *b"]) -> Float[Tensor, "n *b"]: ...

    plan, x = plan_of(many), torch.zeros(2, 3, 4)
    assert bound(plan, ([x, x], torch.zeros(8, 2, 3))).env == {"b": (2, 3), "n": 4}
    assert "'xs[1]'\n  got      b = (1, 3)\n  expected (2, 3)" in refused(plan, ([x, x[:1]], torch.zeros(8, 2, 3)))
    assert "size 7 in axis 0\n  expected 2*n = 8" in refused(plan, ([x], torch.zeros(7, 2, 3)))
    assert "an empty list of tensors" in refused(plan, ([], torch.zeros(8, 2, 3)))


def test_sizes_that_a_later_argument_gives():
    def forward(x: Float[Tensor, "2*n"], y: Float[Tensor, "n"]) -> Float[Tensor, "n"]: ...

    plan = plan_of(forward)
    assert bound(plan, (torch.zeros(6), torch.zeros(3))).env == {"n": 3}
    assert "size 5 in axis 0\n  expected 2*n = 6" in refused(plan, (torch.zeros(5), torch.zeros(3)))


def test_a_size_that_a_later_argument_gives_is_compared_with_each_member_of_a_list():
    def forward(xs: list[Float[Tensor, "2*n"]], y: Float[Tensor, "n"]) -> Float[Tensor, "n"]: ...

    plan, fits = plan_of(forward), torch.zeros(6)
    assert bound(plan, ([fits, fits], torch.zeros(3))).env == {"n": 3}
    for xs, at in (([torch.zeros(5), fits], 0), ([fits, torch.zeros(5)], 1)):
        assert f"argument 'xs[{at}]'" in (text := refused(plan, (xs, torch.zeros(3))))
        assert "size 5 in axis 0\n  expected 2*n = 6" in text


def test_names_hide_nothing():
    def keyword(x: Float[Tensor, "in out"]) -> Float[Tensor, "out"]: ...
    def function(x: Float[Tensor, "n"], max: int) -> Float[Tensor, "n"]: ...
    def module(x: Float[Tensor, "torch"]) -> Float[Tensor, "torch"]: ...
    def prefixed(x: Float[Tensor, "n"], t_x: int) -> Float[Tensor, "n"]: ...

    assert bound(plan_of(keyword), (torch.zeros(2, 3),)).env == {"in": 2, "out": 3}
    call = bound(plan_of(function, requires=("max(max, n) == max",)), (torch.zeros(2), 3))
    assert call.env == {"n": 2, "max": 3}
    assert bound(plan_of(module), (torch.zeros(2),)).env == {"torch": 2}
    assert bound(plan_of(prefixed), (torch.zeros(2), 4)).env == {"n": 2, "t_x": 4}


def test_dims_of_optional_arguments_alone():
    def masked(
        x: Float[Tensor, "n"],
        order: Int32[Tensor, "parts n"] | None = None,
        masks: Int32[Tensor, "parts b"] | None = None,
    ) -> Float[Tensor, "n"]: ...

    plan, x = plan_of(masked), torch.zeros(4)
    order, masks = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 5, dtype=torch.int32)
    assert bound(plan, (x,)).env == {"n": 4}
    assert bound(plan, (x, order)).env == {"n": 4, "parts": 2}
    assert bound(plan, (x, None, masks)).env == {"n": 4, "parts": 2, "b": 5}
    assert bound(plan, (x, order, masks)).env == {"n": 4, "parts": 2, "b": 5}
    assert "parts = 1\n  expected parts = 2, in 'order'" in refused(plan, (x, order, masks[:1]))
    assert "SL202" in refused(plan, (x, order[:, :3]))
    with pytest.raises(Exception, match=r"SL105"):
        spec_of(masked, requires=("parts >= 1",))


def test_source_is_readable():
    lines = PLAN.source().splitlines()
    assert (
        lines[0] == "def bind(t_feats, t_weight, t_table, t_bias=defaults[3], a_taps=defaults[4], a_scale=defaults[5]):"
    )
    number = next(line for line in lines if line.startswith("    if not (shape_table[1] == d_k): refuse("))
    assert number.endswith("'k = {}'.format(shape_table[1]), \"k = {}, in 'weight'\".format(d_k))")
    careful = PLAN.source(careful=True).splitlines()
    assert any(line.startswith("    expect(shape_table[1] == d_k, ") for line in careful)


def test_an_optional_argument_binds_for_the_others():
    def dim(x: Float[Tensor, "n"], bias: Float[Tensor, "c"] | None, w: Float[Tensor, "c"]) -> Float[Tensor, "c"]: ...
    def dtype(x: Int32[Tensor, "n"], y: Float[Tensor, "n"] | None, w: Float[Tensor, "n"]) -> Float[Tensor, "n"]: ...
    def device(x: Float[Tensor, "n"] | None, y: Float[Tensor, "n"]) -> Float[Tensor, "n"]: ...

    x, w = torch.zeros(2), torch.zeros(3)
    assert bound(plan_of(dim), (x, None, w)).env == bound(plan_of(dim), (x, w, w)).env == {"n": 2, "c": 3}
    assert "c = 3\n  expected c = 2, in 'bias'" in refused(plan_of(dim), (x, x, w))
    assert "torch.float32, as 'y' (Float)" in refused(plan_of(dtype), (x.int(), x, x.double()))
    assert "cpu, as 'x'" in refused(plan_of(device), (x, x.to("meta")))


def test_a_default_before_a_keyword_without_one():
    def fn(x: Float[Tensor, "n"], k: int = 3, *, eps: float) -> Float[Tensor, "n"]: ...

    assert bound(plan_of(fn), (torch.zeros(2), 3, 0.5)).env == {"n": 2, "k": 3, "eps": 0.5}


def test_what_is_written_to():
    def mutating(x: Float[Tensor, "n c"], k: int) -> None: ...

    plan = plan_of(mutating, mutates=("x",), requires=("n // k >= 0",))
    assert bound(plan, (torch.zeros(3, 4), 1)).env == {"n": 3, "c": 4, "k": 1}
    assert "n = 3: division by zero\n  expected a value of n // k >= 0" in refused(plan, (torch.zeros(3, 4), 0))
    assert "SL210" in refused(plan, (torch.zeros(6).unfold(0, 4, 1), 1))
    assert "SL304" in refused(plan, (torch.zeros(3, 4, requires_grad=True), 1))
    assert "SL207" in refused(plan, (torch.zeros(3, 4).to_sparse(), 1))
    assert "SL209" in refused(plan, ("no tensor", 1))
