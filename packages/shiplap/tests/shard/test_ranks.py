"""What docs/many-devices.md says of a user's ops on several ranks, done by two of them."""

from __future__ import annotations

import pytest

from shiplap_testing import ranks

EXPECTED = ranks.table("your op")


@pytest.fixture(scope="module")
def reported() -> dict[str, str]:
    return ranks.outcomes("tests.shard.rank_cells")


@pytest.mark.parametrize("name", EXPECTED)
def test_two_ranks_do_what_the_page_says(name, reported):
    assert reported.get(name, ranks.NO_SUCH_CELL) == EXPECTED[name]


def test_every_combination_is_on_the_page(reported):
    assert reported
    assert set(reported) <= set(EXPECTED)
