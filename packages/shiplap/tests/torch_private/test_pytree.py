"""Classes whose objects torch takes for constants."""

from __future__ import annotations

from fractions import Fraction

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
