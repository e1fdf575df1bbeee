"""Each entry of the error catalogue has a title, a reason that is a sentence, and a fix."""

from __future__ import annotations

import pytest

from shiplap.cli.families import installed_verbs, load_families
from shiplap.errors import CATALOGUE


def entries() -> list[str]:
    load_families()  # a family's errors are in the catalogue once the family is imported
    installed_verbs()
    return sorted(CATALOGUE)


@pytest.mark.parametrize("id", entries())
def test_an_entry_has_a_title_a_reason_and_a_fix(id: str) -> None:
    entry = CATALOGUE[id]
    assert len(entry.title.split()) > 1
    assert entry.why.endswith(".")
    assert len(entry.why.split()) > 4
    assert len(entry.fix.split()) > 1
