"""Near misses: each names the node and the true reason; what is merely spelled differently matches."""

import pytest
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32
from torch import Tensor

import shiplap as sl
from shiplap.rewrite import Match, rewrite
from shiplap_testing.effort import sampled
from tests.rewrite.specimens import linear_gelu, near, outcomes

X, W, B = torch.randn(4, 6), torch.randn(8, 6), torch.randn(8)
REWRITE = linear_gelu()


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w, b: F.gelu(F.linear(x, w, b)),
        lambda x, w, b: F.gelu(input=F.linear(bias=b, weight=w, input=x)),  # by keyword, in another order
        lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="none"),  # the default, spelled out
        lambda x, w, b: torch.ops.aten.gelu(torch.ops.aten.linear.default(x, w, b)),
    ],
)
def test_other_spellings_match(fn):
    (outcome,) = outcomes(REWRITE, fn, X, W, B)
    assert isinstance(outcome, Match)
    assert len(outcome.nodes) == 2
    assert outcome.args[0][1].startswith("float32[4, 6] of ")


def dropped(x: Float[Tensor, "b k"], p: float):
    return F.dropout(x.sin(), p).cos()


def normed(x: Float[Tensor, "b k"], g: Float[Tensor, "k"], eps: float):
    return F.layer_norm(x, (x.shape[-1],), g, eps=eps).relu()


DROPPED = rewrite(dropped, dropped)
NORMED = rewrite(normed, normed)


@pytest.mark.parametrize(
    ("made", "fn", "bound"),
    [
        (DROPPED, lambda x, g: dropped(x, 0.3), 0.3),
        (DROPPED, lambda x, g: dropped(x, 0.5), 0.5),  # the default, written
        (DROPPED, lambda x, g: F.dropout(x.sin()).cos(), 0.5),  # and left out
        (DROPPED, lambda x, g: F.dropout(x.sin(), training=True, p=0.5).cos(), 0.5),
        (NORMED, lambda x, g: F.layer_norm(x, (6,), g).relu(), 1e-5),
        (NORMED, lambda x, g: F.layer_norm(x, [6], g, None, 1e-5).relu(), 1e-5),
        (NORMED, lambda x, g: torch.layer_norm(x, (6,), g, eps=1e-6, cudnn_enable=True).relu(), 1e-6),
    ],
)
def test_a_float_that_has_its_default_is_bound_like_any_other(made, fn, bound):
    (outcome,) = outcomes(made, fn, X, torch.randn(6))
    assert isinstance(outcome, Match), outcome
    assert outcome.args[-1][1] == repr(bound)


def convolved(x, w):
    return torch.add(F.conv2d(x, w).relu(), 1, alpha=2)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: torch.add(F.conv2d(x, w, None, (1, 1), 0).relu(), 1, alpha=2.0),
        lambda x, w: torch.add(F.conv2d(x, w, stride=[1, 1], padding=(0, 0), groups=1).relu(), 1, alpha=2),
        lambda x, w: F.conv2d(x, w, bias=None, dilation=1).relu().add(1, alpha=2),
    ],
)
def test_defaults_and_numbers_that_stand_for_lists_may_be_spelled_any_way(fn):
    x, w = torch.randn(2, 4, 8, 9), torch.randn(7, 4, 3, 5)
    made = rewrite(convolved, convolved, samples=lambda: [(x, w)])
    (outcome,) = outcomes(made, fn, x, w)
    assert isinstance(outcome, Match), outcome
    miss = near(made, lambda x, w: torch.add(F.conv2d(x, w, stride=2).relu(), 1, alpha=2), x, w)
    assert (miss.obstacle, miss.reason) == (
        "argument",
        "conv2d is also given stride=[2, 2]; the pattern leaves that out",
    )


def test_a_view_as_another_dtype_is_not_one_as_another_shape():
    made = rewrite(lambda x: x.view(torch.int32).sign().cos(), lambda x: x * 1, name="bits", samples=lambda: [(X,)])
    assert isinstance(outcomes(made, lambda x: x.view(torch.int32).sign().cos(), X)[0], Match)
    miss = near(made, lambda x: x.view(torch.uint32).sign().cos(), X)
    assert miss.reason == ".view has dtype=torch.uint32, the pattern torch.int32"


def test_dims_count_from_either_end():
    made = rewrite(lambda x: torch.softmax(x, -1).sum(1), lambda x: torch.ones_like(x[:, 0]), name="rows")
    actual = near_or_match(made, lambda x: F.softmax(x, dim=1).sum(-1))
    assert isinstance(actual, Match)
    assert not isinstance(near_or_match(made, lambda x: x.softmax(0).sum(-1)), Match)


def near_or_match(made, fn):
    made._drawn.given = lambda: [(torch.randn(3, 4),)]
    (outcome,) = outcomes(made, fn, X)
    return outcome


def constant(x, w, b):
    with torch.no_grad():
        return F.linear(x, w, b)


def test_a_block_without_gradients_is_rewritten_inside():
    (outcome,) = outcomes(REWRITE, torch.no_grad()(lambda x, w, b: F.gelu(F.linear(x, w, b)) * x.sum()), X, W, B)
    assert isinstance(outcome, Match), outcome


@pytest.mark.parametrize(
    ("fn", "obstacle", "node", "reason"),
    [
        (
            lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"),
            "argument",
            "gelu",
            "gelu is also given approximate='tanh'; the pattern leaves that out",
        ),
        (
            lambda x, w, b: F.gelu(F.linear(x, w)) + b[0],
            "argument",
            "linear",
            "linear is not given bias=l_tensors_2_, which the pattern has",
        ),
        (
            lambda x, w, b: F.gelu(x @ w.view(6, 8) + b),
            "operator",
            "add",
            "add is a call of add; the pattern has linear there: matmul multiplies by the weight as it is, linear by "
            "its transpose",
        ),
        (
            lambda x, w, b: F.gelu(x @ w.t() + b),
            "operator",
            "add",
            "add is a call of add; the pattern has linear there: matmul says the same in other words, which is another "
            "pattern",
        ),
        (
            lambda x, w, b: (lambda y: F.gelu(y) + y.sum())(F.linear(x, w, b)),
            "user",
            "linear",
            "linear (linear) would no longer be computed, but sum_1 reads it, too",
        ),
        (
            lambda x, w, b: (lambda y: (F.gelu(y), y))(F.linear(x, w, b)),
            "user",
            "linear",
            "linear (linear) would no longer be computed, but the graph returns it",
        ),
        (
            lambda x, w, b: (lambda y: (x.add_(1), F.gelu(y)))(F.linear(x, w, b)),
            "mutation",
            "gelu",
            "add_ (.add_) writes to a tensor in between",
        ),
        (
            lambda x, w, b: F.gelu(constant(x, w, b)),
            "mode",
            "gelu",
            "_set_grad_enabled_1 (_set_grad_enabled) switches gradients, autocast or a transform in between",
        ),
        (
            lambda x, w, b: F.gelu(F.linear(x.view(2, 2, 6), w, b)),
            "shape",
            "gelu",
            "x is float32[2, 2, 6] of view: 3 dims, the pattern has 2",
        ),
    ],
)
def test_the_reason(fn, obstacle, node, reason):
    miss = near(REWRITE, fn, X, W, B)
    assert (miss.obstacle, miss.node, miss.reason) == (obstacle, node, reason)


def annotated(x: Float[Tensor, "*b k"], w: Float[Tensor, "n k"]):
    return torch.relu(F.linear(x, w))


def by_hand(x, w):
    return F.linear(x, w).clamp_min(0)


TYPED = rewrite(annotated, by_hand, where=["x.shape[-1] % 16 == 0", "n >= 8", "x.dtype != float64"])


@pytest.mark.parametrize(
    ("x", "w", "obstacle", "reason"),
    [
        (torch.randn(4, 100), torch.randn(8, 100), "guard", "x.shape[-1] % 16 == 0 does not hold: x.shape[-1] is 100"),
        (torch.randn(4, 16), torch.randn(7, 16), "guard", "n >= 8 does not hold: n is 7"),
        (
            torch.randn(4, 16).double(),
            torch.randn(8, 16).double(),
            "guard",
            "x.dtype != float64 does not hold: x.dtype is float64",
        ),
    ],
)
def test_guards(x, w, obstacle, reason):
    miss = near(TYPED, annotated, x, w)
    assert (miss.obstacle, miss.reason) == (obstacle, reason)


def test_any_rank_where_the_pattern_says_so():
    for shape in ((16,), (4, 16), (2, 3, 16)):
        (outcome,) = outcomes(TYPED, annotated, torch.randn(shape), torch.randn(8, 16))
        assert isinstance(outcome, Match)


def test_a_dtype_mismatch():
    def only(x: Float32[Tensor, "b k"], w: Float32[Tensor, "n k"]):
        return torch.relu(F.linear(x, w))

    miss = near(rewrite(only, by_hand), only, X.bfloat16(), W.bfloat16())
    assert miss.obstacle == "dtype"
    assert miss.reason == "x is bfloat16[4, 6] of l_tensors_0_, the pattern takes Float32"


def test_two_dtypes_where_one_is_meant():
    def mixed(x: Float[Tensor, "b k"], y: Float[Tensor, "b k"]):
        return torch.relu(x * y)

    miss = near(rewrite(mixed, lambda x, y: (x * y).clamp_min(0), name="mixed"), mixed, X, X.double())
    assert miss.reason == "y is float64[4, 6] of l_tensors_1_, x is float32: the pattern takes one dtype"


def test_a_renamed_argument(ns):
    """Two releases of an op, one of which calls its argument by another name."""
    library = torch.library.Library(ns, "DEF")
    library.define("scale(Tensor x, *, float by) -> Tensor")
    library.define("scale.v2(Tensor x, *, float factor) -> Tensor")
    for name in ("scale", "scale.v2"):
        library.impl(name, lambda x, *, by=1.0, factor=1.0: x * by * factor, "CompositeExplicitAutograd")
    op = getattr(torch.ops, ns).scale
    made = rewrite(lambda x: op(x, by=2.0), lambda x: x + x, name="double", samples=lambda: [(torch.randn(3, 4),)])
    assert isinstance(outcomes(made, lambda x: op.default(x, by=2.0), X)[0], Match)
    miss = near(made, lambda x: op.v2(x, factor=2.0), X)
    assert miss.obstacle == "argument"
    assert miss.reason == f"{ns}::scale is given factor=2.0; the pattern calls this argument by"


def test_an_argument_of_the_pattern_may_have_any_name():
    """Names that torch's own functions give a meaning to, too."""

    def pattern(out: Float[Tensor, "b k"], input: Float[Tensor, "b k"]):
        return torch.relu(out - input)

    (outcome,) = outcomes(
        rewrite(pattern, lambda out, input: (out - input).clamp_min(0), name="named"), pattern, X, X + 1
    )
    assert isinstance(outcome, Match)


def test_one_argument_used_twice_is_one_tensor():
    made = rewrite(lambda x: torch.relu(x) * x, lambda x: x * x, name="twice", samples=lambda: [(torch.randn(3, 4),)])
    assert isinstance(outcomes(made, lambda x, y: torch.relu(x) * x, X, X + 1)[0], Match)
    miss = near(made, lambda x, y: torch.relu(x) * y, X, X + 1)
    assert miss.obstacle == "argument"
    assert miss.reason.startswith("the pattern uses x more than once; here it would be both ")


def test_what_does_not_pay_says_so():
    made = linear_gelu(pays=lambda x, w, b: x.shape[0] >= 64 or f"only {x.shape[0]} rows, from 64 on it pays")
    miss = near(made, lambda x, w, b: F.gelu(F.linear(x, w, b)), X, W, B)
    assert (miss.obstacle, miss.reason) == ("cost", "only 4 rows, from 64 on it pays")
    assert {f.verdict for f in made.findings} == {"ok"}  # a proof does not ask


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"pays": lambda x, w, b: x.shape[0] <= 2}, "whether it pays depends on a size that only the data knows"),
        ({"where": "x.shape[0] <= 2"}, "x.shape[0] <= 2 does not hold: x.shape[0] is u0"),
    ],
    ids=["pays", "where"],
)
def test_a_size_that_only_the_data_knows_decides_nothing(options, reason):
    made = linear_gelu(**options)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        miss = near(made, lambda x, w, b: F.gelu(F.linear(x[x[:, 0] > 0], w, b)), X, W, B)
    assert miss.reason == reason
    assert isinstance(outcomes(made, lambda x, w, b: F.gelu(F.linear(x, w, b)), X[:2], W, B)[0], Match)


def test_sizes_that_vary_become_guards_of_what_was_decided():
    made, guards = linear_gelu(pays=lambda x, w, b: x.shape[0] <= 8), []

    def backend(gm, _):
        guards.extend(made.apply(gm.graph))
        gm.recompile()
        return gm.forward

    compiled = torch.compile(lambda x: F.gelu(F.linear(x, W, B)), backend=backend, dynamic=True)
    for rows in (3, 4, 16, 20, 5):
        torch.testing.assert_close(compiled(x := torch.randn(rows, 6)), F.gelu(F.linear(x, W, B)))
    assert [type(f).__name__ for f in guards] == ["Match", "NearMiss"]
    assert guards[1].reason == "it does not pay here"


def test_a_float_of_the_pattern_is_any_constant():
    def norm(x: Float[Tensor, "b k"], eps: float):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    made = rewrite(norm, lambda x, eps: F.rms_norm(x, x.shape[-1:], eps=eps), name="rms", where="eps < 1e-3")
    (outcome,) = outcomes(made, lambda x: norm(x, 1e-6), X)
    assert isinstance(outcome, Match)
    assert outcome.args[1] == ("eps", "1e-06")
    assert near(made, lambda x: norm(x, 0.1), X).reason == "eps < 1e-3 does not hold: eps is 0.1"


@pytest.mark.parametrize("level", sampled(["joint", "post-grad"], 1))
def test_in_aten(level):
    made = linear_gelu(level=level)
    (outcome,) = outcomes(made, lambda x, w, b: F.gelu(F.linear(x, w, b)), X, W, B)
    assert isinstance(outcome, Match)
    outcome = near(made, lambda x, w, b: (lambda y: F.gelu(y) + y.sum())(F.linear(x, w, b)), X, W, B)
    assert outcome.reason == "addmm (aten.addmm) would no longer be computed, but sum_1 reads it, too"
    outcome = near(made, lambda x, w, b: F.gelu(torch.addmm(b, x, w.view(6, 8))), X, W, B)
    assert (outcome.obstacle, outcome.fitting) == ("operator", 6)
    assert outcome.reason.endswith("the pattern has aten.permute there: it is not transposed here")


def test_bfloat16_has_a_form_of_its_own_in_aten():
    made = rewrite(annotated, by_hand, level="post-grad")
    (outcome,) = outcomes(made, annotated, torch.randn(4, 16).bfloat16(), torch.randn(8, 16).bfloat16())
    assert isinstance(outcome, Match)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("x.__class__", "an expression without"),
        ("len(open('f'))", "an expression without"),
        ("z > 1", "names among"),
        ("x.is_contiguous", r"x\.is_contiguous\(\)"),
        ("x.shape[", "was never closed"),
        ("[n for n in x]", "an expression without"),
    ],
)
def test_guards_are_a_small_language(where, expected):
    with pytest.raises(sl.ShiplapError, match=f"SL803: the guard is not valid(.|\n)*{expected}"):
        rewrite(annotated, by_hand, where=where)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"replacement": lambda x, weight: x}, r"got      replacement\(x, weight\)\n  expected \(x, w\)"),
        (
            {"pattern": lambda x, *, w: x, "replacement": lambda x, *, w: x},
            r"w\n  expected arguments that may be passed",
        ),
        ({"name": "not a name"}, "an identifier"),
        ({"level": "post_grad"}, "pre-grad, joint, post-grad"),
    ],
)
def test_declarations(options, expected):
    with pytest.raises(sl.ShiplapError, match=f"SL802(.|\n)*{expected}"):
        rewrite(**{"pattern": annotated, "replacement": by_hand, "name": "r", **options})
