"""Every catalogue entry is provoked by some test."""

import re

import pytest

import shiplap as sl
from shiplap.errors import CATALOGUE, error
from shiplap_testing.paths import REPOSITORY

TESTS = "\n".join(
    p.read_text() for p in REPOSITORY.glob("packages/*/tests/**/test_*.py") if p.name != "test_catalogue.py"
)


@pytest.mark.parametrize("id", sorted(id for id in CATALOGUE if id < "SL5"))  # declarations, calls, kernels, libraries
def test_some_test_provokes_it(id):
    assert re.search(rf'["^(]{id}\b|id == "{id}"|{id}:', TESTS), f"no test asserts {id}"


@pytest.mark.parametrize("entry", list(CATALOGUE.values()), ids=list(CATALOGUE))
def test_entries_are_complete(entry):
    assert re.fullmatch(r"SL[1-9]\d\d", entry.id)
    assert entry.title
    assert entry.why.endswith(".")
    assert entry.fix
    raised = error(entry.id, where="here", got=1, expected=2)
    assert isinstance(raised, sl.ShiplapError)
    assert str(raised).splitlines()[0] == f"{entry.id}: {entry.title}"
    assert "  where    here" in str(raised)
