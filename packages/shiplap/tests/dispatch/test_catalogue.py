"""Every catalogue entry is complete, and some test provokes it."""

import re

import shiplap as sl
from shiplap.cli.families import installed_verbs, load_families
from shiplap.errors import CATALOGUE, error
from shiplap_testing.paths import REPOSITORY


def test_some_test_provokes_each_entry_of_declarations_calls_kernels_and_libraries():
    files = REPOSITORY.glob("packages/*/tests/**/test_*.py")
    texts = "\n".join(p.read_text() for p in files if p.name != "test_catalogue.py")
    provoked = {id for found in re.findall(r'["^(](SL\d{3})\b|id == "(SL\d{3})"|(SL\d{3}):', texts) for id in found}
    assert {id for id in CATALOGUE if id < "SL5"} <= provoked


def test_each_entry_has_a_title_a_reason_that_is_a_sentence_and_a_fix():
    load_families()  # a family's errors are in the catalogue once the family is imported
    installed_verbs()
    for entry in CATALOGUE.values():
        assert re.fullmatch(r"SL[1-9]\d\d", entry.id)
        assert len(entry.title.split()) > 1, entry
        assert entry.why.endswith("."), entry
        assert len(entry.why.split()) > 4, entry
        assert len(entry.fix.split()) > 1, entry
        raised = error(entry.id, where="here", got=1, expected=2)
        assert isinstance(raised, sl.ShiplapError)
        assert str(raised).splitlines()[0] == f"{entry.id}: {entry.title}"
        assert "  where    here" in str(raised)
