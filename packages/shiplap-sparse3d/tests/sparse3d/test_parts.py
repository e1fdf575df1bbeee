"""Into how many parts tables are sorted, and what a user may set."""

from __future__ import annotations

import pytest

import shiplap as sl
import shiplap_sparse3d as sparse3d
from shiplap_sparse3d.plan import parts_for, parts_that_fill


@pytest.fixture(autouse=True)
def unset():
    yield
    sparse3d.set_most_parts(None)


def test_few_parts_where_the_user_wants_few():
    assert [parts_for(rows, 27) for rows in (4_000, 30_000, 100_000, 300_000)] == [9, 3, 2, 1]
    assert sparse3d.set_most_parts(2) is None
    assert [parts_for(rows, 27) for rows in (4_000, 30_000, 100_000, 300_000)] == [2, 2, 2, 1]
    assert sparse3d.set_most_parts(1) == 2
    assert parts_for(4_000, 27) == 1
    assert parts_for(4_000, 125) == 5  # a part has a bit for each of its taps, and no more than 31
    with pytest.raises(sl.ShiplapError, match="SL208"):
        sparse3d.set_most_parts(0)


def test_tables_of_strided_steps_have_fewer_parts():
    assert [parts_for(rows, 27, strided=True) for rows in (900, 4_000, 30_000, 70_000, 100_000)] == [9, 5, 3, 2, 1]


def test_no_part_is_empty():
    assert [parts_for(4_000, taps) for taps in (0, 1, 8, 15, 27, 40)] == [0, 1, 8, 8, 9, 8]
    assert [parts_for(4_000, taps, strided=True) for taps in (8, 27)] == [4, 5]


def test_parts_that_fill_a_device():
    assert parts_that_fill(4_000, 1024, 27) == 1  # 63 x 8 tiles
    assert parts_that_fill(4_000, 128, 27) == 5
    assert parts_that_fill(500, 64, 27) == 9  # cannot be filled
    assert parts_that_fill(300_000, 64, 125) == 5
    assert parts_that_fill(4_000, 256, 27, multiprocessors=60) == 1
