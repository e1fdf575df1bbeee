"""What a winner is looked at with can be drawn ahead, and then nothing of it is drawn twice or shown to two."""

import pytest
import torch
from jaxtyping import Float, Int64
from torch import Tensor

import shiplap as sl
from shiplap.sampling.samples import Samples
from shiplap.tuning.engine import make_requests
from shiplap.tuning.inputs import draw_inputs
from shiplap.tuning.sandboxed.fresh_inputs import AHEAD, LARGE, MOST, ConfirmationInputs


@sl.op("drawn_test::pick")
def pick(x: Float[Tensor, "n c"], rows: Int64[Tensor, "m"]) -> Float[Tensor, "m c"]:
    raise RuntimeError("the reference is not for this process yet")


@pick.samples
def _(rng, sizes, dtype, device):
    x = torch.randn(sizes["n"], sizes["c"], generator=rng, dtype=dtype)
    return x, torch.randint(sizes["n"], (sizes["m"],), generator=rng)


def drawn_for(**sizes):
    ((op, recipe, device),) = make_requests(pick, [sizes], "cpu")
    return ConfirmationInputs(op, draw_inputs(op, recipe, device))


def values(drawn):
    return [case.args[0] for chunk in drawn.batches_of_others() for case in chunk]


def test_all_of_it_can_be_drawn_ahead_without_the_reference(monkeypatch):
    drawn = drawn_for(n=40, c=8, m=30)
    drawn.draw_ahead(lambda: False)

    def build(*_):
        raise AssertionError("something is drawn later")

    monkeypatch.setattr(Samples, "build", build)
    cases = drawn.fresh.cases(AHEAD) + drawn.small.cases(2 * MOST)
    assert len(values(drawn)) > 10
    flat = [case.args[0] for case in cases]
    assert len({x.double().sum().item() for x in flat}) == len(flat), "none is given twice"
    with pytest.raises(AssertionError, match="later"):
        drawn.fresh.cases(1)


def test_it_is_drawn_for_as_long_as_there_is_nothing_else_to_do():
    drawn, steps = drawn_for(n=40, c=8, m=30), []

    def over():
        steps.append(len(drawn._made))
        return len(steps) == AHEAD + 3

    drawn.draw_ahead(over)
    assert steps[-1] == 3
    assert drawn._made[0] is not drawn._made[1]
    ahead = [case.args for case in drawn._made if case]
    everything = [case.args for chunk in drawn.batches_of_others() for case in chunk]
    # The samples are new ones, of the same tensors: contiguous memory has no gaps to change.
    assert all(t is u for one, other in zip(ahead, everything, strict=False) for t, u in zip(one, other, strict=True))
    assert len(everything) > len(ahead)


def test_of_large_values_nothing_is_drawn_ahead():
    """They would lie there while candidates are verified, and take the memory of that."""
    drawn = drawn_for(n=LARGE // 32 + 1, c=8, m=3)
    drawn.draw_ahead(lambda: False)
    assert "fresh" not in vars(drawn)
    assert not drawn._made


def test_two_candidates_share_nothing_that_was_drawn():
    one, other = drawn_for(n=40, c=8, m=30), drawn_for(n=40, c=8, m=30)
    assert not any(x.shape == y.shape and x.numel() > 8 and x.equal(y) for x in values(one) for y in values(other))
