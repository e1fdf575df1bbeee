"""Classes whose objects torch takes for constants."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from shiplap.torch_private.graph_objects import leaves, register_constant


def test_constants_are_no_leaves_until_that_is_undone():
    half = Fraction(1, 2)
    undo = register_constant(Fraction)
    assert leaves([half, 3]) == [3]
    repeated = register_constant(Fraction)
    repeated()
    assert leaves([half, 3]) == [3], "who registered first decides"
    undo()
    assert leaves([half, 3]) == [half, 3]
    undo()


TEXTS = {
    "str": lambda s: str(tuple(a * 2 for a in s)),
    "one": lambda s: repr((s[0] / 3,)),
    "list": lambda s: str([s[0] * 3, (s[1] - s[0],), 4, "a"]),
    "f-string": lambda s: f"{s[0] * 3} {[a // 2 for a in s]} {s}",
    "made here": lambda s: str((Fraction(3, 6),) * len(s)),
}


@pytest.mark.parametrize("case", TEXTS)
def test_the_text_of_computed_constants_is_part_of_a_graph(case):
    undo = register_constant(Fraction)
    try:
        run = torch.compile(lambda x, s: (x + 1, TEXTS[case](s)), fullgraph=True, backend="eager")
        scale = Fraction(1, 2), Fraction(3)
        assert run(torch.ones(2), scale)[1] == TEXTS[case](scale)
    finally:
        undo()
