"""Tests that judge a kernel: SL312."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register


class JudgeError(ShiplapError, ValueError):
    """A test does not say what to judge (SL312)."""


register(
    JudgeError,
    [
        (
            "SL312",
            "the test does not say what to judge",
            "The marker 'judge' names a reference and candidates, and the fixture 'judged' needs that marker.",
            "write @pytest.mark.judge(reference, candidate) above the test",
        ),
    ],
)
