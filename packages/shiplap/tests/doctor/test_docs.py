"""The page lists every cause and every kind of recompile, in the words that the program uses."""

import pytest

from shiplap.doctor.causes import CAUSES
from shiplap.doctor.fix import FIXES
from shiplap.doctor.recompiles import VARIED
from shiplap_testing.paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "doctor.md").read_text()


@pytest.mark.parametrize("id", CAUSES)
def test_causes(id: str) -> None:
    cause = CAUSES[id]
    assert f"| **{id}**: {cause.title} | {cause.why} | {FIXES[id]} |" in PAGE


@pytest.mark.parametrize("id", VARIED)
def test_recompiles(id: str) -> None:
    assert f"| {VARIED[id].title} | {VARIED[id].fix} |" in PAGE
