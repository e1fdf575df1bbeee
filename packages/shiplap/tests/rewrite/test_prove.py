"""The proof: what changes anything that a caller could see is refused, with a finding that says what."""

import pytest
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.rewrite import Rewrite, rewrite, rewrites
from shiplap.rewrite.prove import PROOF_CHECKS
from shiplap_testing.effort import sampled
from tests.rewrite.specimens import linear_gelu, replacement


def refusal(made: Rewrite) -> tuple[str, str]:
    bad = [f for f in made.findings if f.verdict == "fail"]
    with pytest.raises(sl.ShiplapError, match=f"SL801: the rewrite failed its proof\n  where    rewrite '{made.name}'"):
        rewrites(made)
    return bad[0].check, bad[0].evidence


@pytest.mark.parametrize("level", sampled(["pre-grad", "joint", "post-grad"], long=["joint"]))
def test_a_right_one_is_proven(level):
    made = linear_gelu(level=level)
    assert [f.check for f in made.findings] == list(PROOF_CHECKS)
    skipped = [f.check for f in made.findings if f.verdict != "ok"]
    assert skipped == (["gradients"] if level == "post-grad" else [])
    assert rewrites(made).rewrites == (made,)


@pytest.mark.parametrize("level", sampled(["pre-grad", "joint", "post-grad"], long=["joint"]))
def test_a_flipped_sign(level):
    check, evidence = refusal(linear_gelu(lambda x, w, b: -replacement(x, w, b), level=level))
    assert check == "outputs"
    assert "expected" in evidence


@pytest.mark.parametrize("level", sampled(["pre-grad", "joint"], long=["pre-grad"]))
def test_a_missing_gradient(level):
    check, evidence = refusal(linear_gelu(lambda x, w, b: replacement(x, w.detach(), b), level=level))
    assert check == "gradients"
    assert "no gradient" in evidence


@pytest.mark.parametrize("most", sampled(["code", "guard"], 1))
def test_a_replacement_that_is_right_up_to_a_size(most):
    """The usual samples are smaller than the number in the code, or in the guard, behind which it is wrong."""

    def pattern(x: Float[Tensor, "*b k"]) -> Tensor:
        return x.square().sum(-1)

    def first_columns(x):
        return x[..., :128].square().sum(-1)

    def first_part(x):
        return x[..., : x.new_ones(8, 16).numel()].square().sum(-1)

    made = {
        "code": rewrite(pattern, first_columns, name="columns"),
        "guard": rewrite(pattern, first_part, name="part", where="k <= 200"),
    }[most]
    check, evidence = refusal(made)
    assert check == "outputs"
    assert "expected" in evidence
    if most == "code":
        assert rewrites(rewrite(pattern, first_columns, name="columns", where="k <= 128"))


def test_a_wrong_gradient(ns):
    @torch.library.custom_op(f"{ns}::gelu", mutates_args=())
    def gelu(x: Tensor) -> Tensor:
        return F.gelu(x)

    gelu.register_fake(torch.empty_like)
    gelu.register_autograd(lambda ctx, grad: grad)
    made = linear_gelu(lambda x, w, b: gelu(F.linear(x, w, b)))
    check, evidence = refusal(made)
    assert (check, evidence.partition(":")[0]) == ("gradients", "of argument 0")


@pytest.mark.parametrize("level", sampled(["pre-grad", "post-grad"], 1))
def test_other_strides_are_put_right(level):
    """A replacement may lie in memory as it likes: what leaves the graph lies as before."""
    made = linear_gelu(lambda x, w, b: replacement(x, w, b).t().contiguous().t(), level=level)
    assert {f.check: f.verdict for f in made.findings}["strides"] == "ok"
    assert rewrites(made).rewrites == (made,)


def test_strides_that_no_order_of_dims_gives():
    """A view into something larger cannot be made of a result that is not."""
    made = rewrite(
        lambda x: (x * 2)[:, ::2],
        lambda x: x[:, ::2] * 2,
        name="half",
        samples=lambda: [(torch.randn(4, 6),)],
    )
    check, evidence = refusal(made)
    assert (check, evidence) == ("strides", "the replacement has strides [3, 1], the graph has [6, 2]")


def test_an_alias_instead_of_a_copy():
    made = rewrite(lambda x: x.clone(), lambda x: x.view_as(x), name="same", samples=lambda: [(torch.randn(3, 4),)])
    assert refusal(made) == ("aliasing", "result 0 is a view of argument 0; before it was not so")


def test_a_copy_instead_of_an_alias():
    made = rewrite(lambda x: x.t(), lambda x: x.t().clone(), name="same", samples=lambda: [(torch.randn(4, 4),)])
    check, _ = refusal(made)
    assert check in ("aliasing", "strides")


def test_results_that_share_memory():
    def shared(x):
        y = x * 2
        return y, y

    made = rewrite(lambda x: (x * 2, x + x), shared, name="pair", samples=lambda: [(torch.randn(3, 4),)])
    assert refusal(made)[0] == "aliasing"


def test_a_write_to_an_argument():
    made = rewrite(lambda x: x + 1, lambda x: x.add_(1).clone(), name="plus", samples=lambda: [(torch.randn(3, 4),)])
    assert "in-place" in refusal(made)[1]  # autograd says so first
    assert (
        refusal(
            rewrite(
                lambda x: x + 1,
                lambda x: x.add_(1).clone(),
                name="plus",
                level="post-grad",
                samples=lambda: [(torch.randn(3, 4),)],
            )
        )[0]
        == "mutation"
    )


def test_another_dtype():
    check, evidence = refusal(linear_gelu(lambda x, w, b: replacement(x, w, b).float()))
    assert (check, evidence) == ("outputs", "the replacement is float32, the graph has float64")


def test_wrong_where_values_are_special():
    """Right for the usual draws: softmax without the maximum overflows."""

    def naive(x):
        return x.exp() / x.exp().sum(-1, keepdim=True)

    def pattern(x: Float[Tensor, "b k"]):
        return torch.softmax(x, -1)

    assert refusal(rewrite(pattern, naive))[0] == "outputs"


def test_randomness_cannot_be_proven():
    made = rewrite(lambda x: F.dropout(x, 0.5, True), lambda x: x, name="drop", samples=lambda: [(torch.ones(64),)])
    assert refusal(made)[0] == "deterministic"


def test_without_samples_there_is_no_proof():
    with pytest.raises(sl.ShiplapError, match=r"SL805(.|\n)*neither annotations nor samples"):
        rewrites(rewrite(lambda x: x + 1, lambda x: 1 + x, name="plus"))
    with pytest.raises(sl.ShiplapError, match=r"SL805(.|\n)*no program in which it fires"):
        rewrites(rewrite(lambda x: x + 1, lambda x: 1 + x, name="plus", samples=lambda: []))


def test_a_pattern_that_never_fires_is_refused():
    def pattern(x: Float[Tensor, "b k"]):
        return torch.relu(x)

    made = rewrite(pattern, lambda x: x.clamp_min(0), name="never", where="x.dtype == float64", level="post-grad")
    made._drawn.guards = ()  # samples ignore the guard
    check, evidence = refusal(made) if made.findings[0].verdict == "fail" else ("", "")
    assert (check, evidence) == ("fires", "x.dtype == float64 does not hold: x.dtype is float32")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (lambda x: x + torch.ones(3), "SL80[14]"),
        (lambda x: x if x.sum() > 0 else -x, "SL804"),
        (lambda x: 3, "SL80[45]"),
    ],
)
def test_patterns_that_are_no_graph(pattern, expected):
    held = torch.ones(3)
    with pytest.raises(sl.ShiplapError, match="SL804"):
        rewrites(rewrite(lambda x: x + held, lambda x: x, name="held", samples=lambda: [(torch.randn(3),)]))
    with pytest.raises(sl.ShiplapError, match=expected):
        rewrites(rewrite(pattern, lambda x: x - 1, name="odd", samples=lambda: [(torch.randn(3),)]))


def test_a_proof_runs_once():
    calls = []

    def samples():
        calls.append(1)
        return [(torch.randn(3),)]

    made = rewrite(lambda x: x + 1, lambda x: 1 + x, name="plus", samples=samples)
    rewrites(made)
    before = len(calls)
    rewrites(made)
    assert len(calls) == before


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: rewrites(replacement), r"SL802(.|\n)*sl.rewrite\(pattern, replacement\) for functions"),
        (lambda: rewrites([]), r"SL802(.|\n)*got +\[\]"),
        (lambda: rewrite("relu", replacement), r"SL802(.|\n)*sl.rewrite\(pattern=...\)"),
        (lambda: rewrite(replacement, replacement, pays=3), r"SL802(.|\n)*sl.rewrite\(pays=...\)"),
        (
            lambda: rewrite(replacement, replacement, where=[replacement]),
            "SL140(.|\n)*expected a text or a list of texts\n",
        ),
        (
            lambda: rewrites(rewrite(lambda x: x, lambda x: x * 1, name="same", samples=lambda: [(torch.ones(3),)])),
            "SL804(.|\n)*it computes nothing",
        ),
        (
            lambda: rewrites(rewrite(lambda x: -x, lambda x: x.neg(), name="one", samples=lambda: torch.ones(()))),
            "SL802(.|\n)*samples of rewrite 'one'(.|\n)*got +Tensor(.|\n)*expected 1 arguments",
        ),
    ],
)
def test_what_is_no_rewrite(call, text):
    with pytest.raises(sl.ShiplapError, match=text):
        call()


def test_a_constant_of_a_sample_reaches_the_replacement():
    """As it would with an annotation: here it is part of the pattern."""
    made = rewrite(
        lambda x, eps=0.5: F.relu(x) + eps,
        lambda x, eps=0.5: eps + F.relu(x),
        name="shifted",
        samples=lambda: [(torch.randn(3, 4), 0.5)],
    )
    assert rewrites(made).rewrites == (made,)


@pytest.mark.long
def test_constants_of_another_dtype_in_the_joint_graph():
    """The backward of relu holds a zero of the dtype at hand; proofs are in float64."""
    made = rewrite(summed, lambda x, y: F.relu(y + x), name="summed", level="joint")
    assert [f.verdict for f in made.findings if f.check in ("fires", "gradients")] == ["ok", "ok"]


def summed(x: Float[Tensor, "n d"], y: Float[Tensor, "n d"]):
    return F.relu(x + y)
