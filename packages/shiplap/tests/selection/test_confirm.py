"""Kernels that win a race by other means than speed do not win ``sl.tune``, and harm nobody but themselves."""

from pathlib import Path

import pytest

import shiplap as sl
from shiplap.selection.measure import Timing
from shiplap.selection.search import Ranking
from tests.selection import cheating_ops

SIZES = {"n": 64, "k": 256, "m": 64}
RIGHT = {"honest", "content", "hash of content", "the reference again", "the reference in disguise"}  # and no gain
TAKEN = {name: {k.name for k in op.kernels["cpu"]} for name, op in ((o.spec.name, o) for o in cheating_ops.OPS)}


def tuned(op):
    """The choice among the kernels of an op, and the names of those that were refused."""
    (choice,) = sl.tune(op, [SIZES], budget=600)
    return choice, {f.evidence.partition(":")[0] for f in choice.findings if f.verdict == "fail"}


def test_a_cheat_is_named_and_the_honest_kernel_wins_beside_it():
    """Also beside one that changes the clock of its process."""
    choice, refused = tuned(cheating_ops.few)
    assert choice.kernel == "honest", choice
    assert refused >= {"pointers, shapes and versions", "answers"}, choice.findings
    assert refused <= {"pointers, shapes and versions", "answers", "clock", "after some calls"}


@pytest.mark.long
@pytest.mark.parametrize("op", cheating_ops.OPS, ids=lambda op: op.spec.name)
def test_no_cheat_wins_beside_an_honest_kernel(op):
    choice, refused = tuned(op)
    assert choice.kernel == "honest", choice
    assert not refused & RIGHT, choice.findings
    assert len(refused) >= 0.4 * len(TAKEN[op.spec.name]), choice.findings
    assert not Path(cheating_ops.__file__).with_name("tuned.json").exists()


def test_a_kernel_that_gains_nothing_does_not_replace_the_reference():
    ranking = Ranking({0: Timing(1.0, 1.0, 1.0, 5, True), 1: Timing(0.995, 0.995, 0.995, 5, True)})
    assert ranking.order == [0, 1]
    ranking.timings[1] = Timing(0.9, 0.9, 0.9, 5, True)
    assert ranking.order == [1, 0]
