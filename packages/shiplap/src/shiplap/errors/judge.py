"""Verdicts on kernels that nobody trusts: SL311 and SL312."""

from __future__ import annotations

from shiplap.errors.base import ShiplapError, register

__all__ = ["JudgeError"]


class JudgeError(ShiplapError, ValueError):
    """A verdict that cannot be believed, or a test that does not say what to judge (SL311 and SL312)."""


register(
    JudgeError,
    [
        (
            "SL311",
            "the file is no verdict that can be believed",
            "A verdict is the file that 'shiplap judge --write' made, and its signature lies beside it.",
            "judge again, or ask for the public key of whoever judged",
        ),
        (
            "SL312",
            "the test does not say what to judge",
            "The marker 'judge' names a reference and candidates, and the fixture 'judged' needs that marker.",
            "write @pytest.mark.judge(reference, candidate) above the test",
        ),
    ],
)
