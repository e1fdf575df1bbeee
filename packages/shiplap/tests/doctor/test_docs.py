"""The page lists every cause and every kind of recompile, in the words that the program uses."""

import pytest

from shiplap.doctor.causes import BREAK_CAUSES
from shiplap.doctor.recompiles import VARIATION_KINDS
from shiplap_testing.paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "doctor.md").read_text()


@pytest.mark.parametrize("id", BREAK_CAUSES)
def test_causes(id: str) -> None:
    cause = BREAK_CAUSES[id]
    assert f"| **{id}**: {cause.title} | {cause.why} | {cause.fix} |" in PAGE


@pytest.mark.parametrize("id", VARIATION_KINDS)
def test_recompiles(id: str) -> None:
    assert f"| {VARIATION_KINDS[id].title} | {VARIATION_KINDS[id].fix} |" in PAGE
