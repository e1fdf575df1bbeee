"""The quick bind agrees with the checker: same bindings for good calls, silence for bad ones."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import Float, Int32
from torch import Tensor

from shiplap.op.check import Checker
from shiplap.op.declare import read_spec
from shiplap.op.fast import compile_bind, source
from shiplap.op.spec import OpSpec


def spec_of(fn, **declaration) -> OpSpec:
    none = {"dims": {}, "bounds": {}, "requires": (), "mutates": (), "contiguous": (), "outputs": (), "autocast": None}
    return read_spec("fast::op", fn, **{**none, **declaration})


def conv(
    feats: Float[Tensor, "n ci"],
    weight: Float[Tensor, "co k ci"],
    table: Int32[Tensor, "n k"],
    bias: Float[Tensor, "co"] | None = None,
    taps: list[int] = (3,),
    scale: float = 1.0,
) -> Float[Tensor, "n co"]: ...


SPEC = spec_of(conv, dims={"k": "prod(taps)"}, requires=("min(taps) >= 1",), contiguous=("table",))
GOOD = (torch.randn(5, 2), torch.randn(4, 3, 2), torch.zeros(5, 3, dtype=torch.int32))


def test_a_good_call_binds_what_the_checker_binds():
    for args in (GOOD, (*GOOD, torch.randn(4)), (*GOOD, None, [3]), (*GOOD, torch.randn(4), [1, 3], 0.5)):
        quick, slow = compile_bind(SPEC)(*args), Checker(SPEC).bind(args)
        assert quick is not None
        assert all(a is b or a == b for a, b in zip(quick.args, slow.args, strict=True))
        assert quick.env == slow.env
        assert (quick.dtypes, quick.device) == (slow.dtypes, slow.device)


BAD = {
    "rank": (torch.randn(5, 2, 1), *GOOD[1:]),
    "dim": (torch.randn(5, 3), *GOOD[1:]),
    "dtype": (GOOD[0].double(), *GOOD[1:]),
    "integer dtype": (*GOOD[:2], GOOD[2].long()),
    "device": (GOOD[0], GOOD[1].to("meta"), GOOD[2]),
    "optional dim": (*GOOD, torch.randn(5)),
    "optional dtype": (*GOOD, torch.randn(4).half()),
    "relation": (*GOOD, None, [2]),
    "requires": (*GOOD, None, [-1, -3]),
    "layout": (*GOOD[:2], torch.zeros(3, 5, dtype=torch.int32).T),
    "not accepted": (GOOD[2], *GOOD[1:]),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_call_is_left_to_the_checker(case):
    assert compile_bind(SPEC)(*BAD[case]) is None
    with pytest.raises(Exception, match=r"SL2\d\d"):
        Checker(SPEC).bind(BAD[case])


def test_declarations_without_a_straight_line_have_none():
    def variadic(x: Float[Tensor, "*b n"]) -> Float[Tensor, "n"]: ...
    def many(x: list[Float[Tensor, "n"]]) -> Float[Tensor, "3"]: ...
    def keyword_dim(x: Float[Tensor, "in out"]) -> Float[Tensor, "out"]: ...
    def forward(x: Float[Tensor, "2*n"], y: Float[Tensor, "n"]) -> Float[Tensor, "n"]: ...

    for fn in (variadic, many, keyword_dim, forward):
        assert compile_bind(spec_of(fn)) is None


def test_dims_of_optional_arguments_alone():
    def masked(
        x: Float[Tensor, "n"],
        order: Int32[Tensor, "parts n"] | None = None,
        masks: Int32[Tensor, "parts b"] | None = None,
    ) -> Float[Tensor, "n"]: ...

    spec, x = spec_of(masked), torch.zeros(4)
    order, masks = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 5, dtype=torch.int32)
    bind = compile_bind(spec)
    for args in ((x,), (x, order), (x, None, masks), (x, order, masks)):
        assert bind(*args).env == Checker(spec).bind(args).env
    assert bind(x).env == {"n": 4}
    assert bind(x, order, masks[:1]) is None
    assert bind(x, order[:, :3]) is None
    with pytest.raises(Exception, match=r"SL202"):
        Checker(spec).bind((x, order, masks[:1]))
    with pytest.raises(Exception, match=r"SL105"):
        spec_of(masked, requires=("parts >= 1",))


def test_source_is_readable():
    assert source(SPEC).splitlines()[0] == (
        "def bind(t_feats, t_weight, t_table, t_bias=_defaults[3], taps=_defaults[4], scale=_defaults[5]):"
    )


def test_an_optional_argument_binds_nothing_for_the_others():
    def dim(x: Float[Tensor, "n"], bias: Float[Tensor, "c"] | None, w: Float[Tensor, "c"]) -> Float[Tensor, "c"]: ...
    def dtype(x: Int32[Tensor, "n"], y: Float[Tensor, "n"] | None, w: Float[Tensor, "n"]) -> Float[Tensor, "n"]: ...

    assert compile_bind(spec_of(dim)) is None
    assert compile_bind(spec_of(dtype)) is None


def test_names_that_would_hide_something():
    def function(x: Float[Tensor, "n"], max: int) -> Float[Tensor, "n"]: ...
    def module(x: Float[Tensor, "torch"]) -> Float[Tensor, "torch"]: ...
    def prefixed(x: Float[Tensor, "n"], t_x: int) -> Float[Tensor, "n"]: ...

    for fn in (function, module, prefixed):
        assert compile_bind(spec_of(fn)) is None


def test_a_default_before_a_keyword_without_one():
    def fn(x: Float[Tensor, "n"], k: int = 3, *, eps: float) -> Float[Tensor, "n"]: ...

    assert compile_bind(spec_of(fn))(torch.zeros(2), 3, 0.5).env == {"n": 2, "k": 3, "eps": 0.5}


def test_what_only_the_checker_can_judge():
    def mutating(x: Float[Tensor, "n c"], k: int) -> None: ...

    bind = compile_bind(spec_of(mutating, mutates=("x",), requires=("n // k >= 0",)))
    assert bind(torch.zeros(3, 4), 1) is not None
    assert bind(torch.zeros(3, 4), 0) is None
    assert bind(torch.zeros(6).unfold(0, 4, 1), 1) is None
    assert bind(torch.zeros(3, 4, requires_grad=True), 1) is None
    assert bind(torch.zeros(3, 4).to_sparse(), 1) is None
    assert bind("no tensor", 1) is None
