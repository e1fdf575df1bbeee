"""The catalogue of a program that uses the backend, and of one that does not."""

from __future__ import annotations

from shiplap_testing.forked import python


def test_errors_of_the_backend_come_with_the_backend() -> None:
    """A program without it has no entry that speaks of it."""
    program = (
        "from shiplap.errors import CATALOGUE; before = 'SL901' in CATALOGUE\n"
        "import shiplap_backend; print(before, 'SL901' in CATALOGUE, any(id >= 'SL9' for id in CATALOGUE))"
    )
    done = python("-c", program)
    assert done.stdout == "False True True\n", done.stderr
