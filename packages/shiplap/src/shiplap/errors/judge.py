"""Tests that judge a kernel: SL312."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register


class JudgeError(ShiplapError, ValueError):
    """The error for a test with the fixture ``judged`` and no marker that names two functions to compare (SL312)."""


register(
    JudgeError,
    [
        (
            "SL312",
            "the test does not say what to judge",
            (
                "The fixture judged compares candidates with a reference, which the marker judge names. The test "
                "lacks the marker, or the marker has fewer than two arguments."
            ),
            "write @pytest.mark.judge(reference, candidate) above the test",
        ),
    ],
)
