"""Patterns as people write them: any rank, several results, arguments in either order, slices, views, modes."""

import threading

import pytest
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch._dynamo.convert_frame import compile_lock

import shiplap as sl
from shiplap.rewrite import Match, rewrite
from shiplap.torch_private.inductor_passes import capture_graph
from tests.rewrite.specimens import linear_gelu, near, outcomes

X, Y = torch.randn(3, 4), torch.randn(3, 4)


def fires(made, fn, *args):
    (outcome,) = outcomes(made, fn, *args)
    return isinstance(outcome, Match)


def soft(x: Float[Tensor, "*b k"]):
    return torch.softmax(x, -1) * 2


def test_a_dim_from_the_end_is_one_at_every_rank():
    made = rewrite(soft, lambda x: torch.softmax(x, -1) + torch.softmax(x, -1), name="soft")
    assert {f.verdict for f in made.findings} == {"ok"}  # on several ranks
    for shape in ((4,), (3, 4), (2, 3, 4, 5)):
        assert fires(made, lambda x: F.softmax(x, dim=x.dim() - 1) * 2, torch.randn(shape))
    assert near(made, lambda x: F.softmax(x, 1) * 2, torch.randn(2, 3, 4)).obstacle == "constant"


def test_a_new_dim_is_counted_in_the_result():
    def column(x, y):
        return (x.cos().unsqueeze(1) * y).sum()

    args = torch.randn(3, 3), torch.randn(3, 3, 3)
    made = rewrite(column, column, samples=lambda: [args])
    assert fires(made, lambda x, y: (x.cos().unsqueeze(-2) * y).sum(), *args)
    miss = near(made, lambda x, y: (x.cos().unsqueeze(-1) * y).sum(), *args)
    assert miss.reason == ".unsqueeze has dim=2, the pattern 1"


@pytest.mark.parametrize(
    ("pattern", "fn"),
    [
        (lambda x: F.silu(x).chunk(2, -1), lambda x: (lambda a, b: a * b)(*F.silu(x).chunk(2, 1))),
        (lambda x: F.silu(x).split(2, 1), lambda x: (lambda a, b: b - a)(*torch.split(F.silu(x), 2, dim=-1))),
        (lambda x: tuple(F.silu(x).max(-1)), lambda x: F.silu(x).max(dim=1)),
    ],
    ids=["chunk", "split", "max"],
)
def test_several_results_of_one_call(pattern, fn):
    made = rewrite(pattern, pattern, name="parts", samples=lambda: [(X,)])
    assert fires(made, fn, X)


def turned(q, c, s):
    return q * c + torch.cat((-q[..., q.shape[-1] // 2 :], q[..., : q.shape[-1] // 2]), dim=-1) * s


@pytest.mark.parametrize(
    "fn",
    [turned, lambda q, c, s: torch.cat((-q[..., 4:], q[..., :4]), -1).mul(s) + c * q],
    ids=["as written", "in other orders"],
)
def test_arguments_commute_whatever_is_known_of_them_by_then(fn):
    """Which of two factors is ``q`` only the other summand tells, and halves of a size are slices."""
    args = torch.randn(2, 3, 5, 8), torch.randn(5, 8), torch.randn(5, 8)
    made = rewrite(turned, turned, samples=lambda: [args])
    (outcome,) = outcomes(made, fn, *args)
    assert isinstance(outcome, Match), outcome
    assert [bound.split()[-1] for _, bound in outcome.args] == ["l_tensors_0_", "l_tensors_1_", "l_tensors_2_"]


def scaled(x: Float[Tensor, "b k"], w: Float[Tensor, "k"]):
    return (x * w + 1).relu()


def test_shapes_tell_which_factor_is_meant():
    assert fires(rewrite(scaled, scaled), lambda x, w: (1 + w * x).relu(), X, X[0])


def heads(x: Float[Tensor, "b s h"]):
    return F.relu(x).view(x.shape[0], x.shape[1], 2, x.shape[2] // 2).transpose(1, 2)


def test_sizes_of_a_view_given_one_by_one():
    made = rewrite(heads, heads, where="h % 2 == 0")
    assert {f.verdict for f in made.findings} == {"ok"}
    assert fires(made, lambda x: F.relu(x).reshape((3, 5, 2, -1)).transpose(-3, 2), torch.randn(3, 5, 8))
    assert not outcomes(made, lambda x, y: F.relu(x).view(3, 5, 4, 2).sigmoid(), torch.randn(3, 5, 8), X)


def test_zero_has_a_sign_and_nan_is_itself():
    def masked(x, value):
        return torch.where(x > 1, value, F.relu(x)).cos()

    for value, others in ((0.0, [(0.0, True), (-0.0, False)]), (float("nan"), [(float("nan"), True)])):
        made = rewrite(
            lambda x, v=value: masked(x, v),
            lambda x, v=value: masked(x, v),
            name="masked",
            samples=lambda v=value: [(X, v)],
        )
        for other, same in others:
            assert fires(made, lambda x, o=other: masked(x, o), X) == same


def test_a_replacement_that_writes_once_more_is_refused():
    """The pattern's own write stays in the graph, and what is returned does not show it."""

    def counted(x: Int[Tensor, "n"], y: Int[Tensor, "n"]):
        return x.add_(y).mul(0)

    with pytest.raises(sl.ShiplapError, match=r"SL801(.|\n)*mutation: what is written to argument 0: "):
        sl.rewrites(rewrite(counted, lambda x, y: x.add_(y) * 0, name="twice"))


def test_a_tensor_made_of_constants_has_no_place_in_a_graph():
    made = rewrite(soft, lambda x: torch.softmax(x, -1) * torch.tensor(2.0), name="constant")
    with pytest.raises(sl.ShiplapError, match=r"SL801(.|\n)*makes a tensor of constants, _tensor_constant0: torch"):
        sl.rewrites(made)


def test_inside_of_autocast():
    def narrow(x, w, b):
        with torch.autocast("cpu", torch.bfloat16):
            return F.gelu(F.linear(x, w, b))

    args = X, torch.randn(8, 4), torch.randn(8)
    (outcome,) = outcomes(linear_gelu(), narrow, *args)
    assert isinstance(outcome, Match), outcome
    assert "bfloat16" not in dict(outcome.args)["x"]


@pytest.mark.long
def test_a_proof_and_forms_of_a_pattern_are_not_those_of_another_mode():
    def product(x: Float[Tensor, "b k"], w: Float[Tensor, "n k"]):
        return F.linear(x, w).neg()

    made = rewrite(product, lambda x, w: F.linear(x, -w), name="product", level="post-grad")
    w = torch.randn(8, 4)
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert {f.verdict for f in made.findings} == {"ok", "skip"}
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert fires(made, lambda x, w: product(x, w), X, w)
    assert fires(made, lambda x, w: product(x, w), X, w)


def by_helper():
    """A rewrite whose replacement calls a function that it closes over, and what holds that."""
    helper = torch.relu

    def doubled(x):
        return torch.relu(x * 2)

    def replacement(x):
        return helper(x + x)

    made = rewrite(doubled, replacement, samples=lambda: [(torch.tensor([-1.0, 2.0]),)])
    return made, replacement.__closure__[0]


def test_what_became_something_else_is_proven_again():
    """A cell of a notebook is run again: same rewrite, other helper."""
    made, cell = by_helper()
    scope, before = sl.rewrites(made), made.digest
    cell.cell_contents = torch.sigmoid
    assert made.digest != before
    graph = capture_graph(made.pattern, [X], "pre-grad", dynamic=False).graph
    with pytest.raises(sl.ShiplapError, match=r"SL801(.|\n)*outputs"):
        scope.run("pre-grad", graph)


def test_a_proof_does_not_wait_for_a_compilation_that_waits_for_a_proof():
    """Torch holds a lock while it compiles, and a backend may have something to prove."""
    proved = []
    with compile_lock:
        other = threading.Thread(target=lambda: proved.append(linear_gelu().findings))
        other.start()
        proved.append(linear_gelu().findings)  # the other one, which waits, holds nothing that this needs
    other.join()
    assert len(proved) == 2


@pytest.mark.parametrize("pays", [lambda x, w, b: x.shape[9] > 1, lambda x, w, b: x.rows, lambda x, w, b: 1 / 0])
def test_what_raises_does_not_pay(pays):
    args = X, torch.randn(8, 4), torch.randn(8)
    miss = near(linear_gelu(pays=pays), lambda x, w, b: F.gelu(F.linear(x, w, b)), *args)
    assert miss.obstacle == "cost"
    assert miss.reason.startswith("pays= raises ")
