"""Tiles are aligned and wide enough, or refused; and they cover the plane once."""

from __future__ import annotations

import numpy as np
import pytest

from shiplap import ShiplapError
from shiplap_sparse3d.survey import Field, tiling
from shiplap_sparse3d.survey.field import CellBox, triple

FIELD = Field((14, 14, 14), (14, 14, 14), (4, 4, 4), 10)


def test_defaults_fit_the_network() -> None:
    tiles = tiling(FIELD)
    assert (tiles.halo, tiles.size % 4, tiles.origin) == (16, 0, (0, 0))
    assert tiles.size >= 4 * tiles.halo


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({"size": 66}, "tile"),
        ({"halo": 18}, "halo"),
        ({"halo": 8}, "halo"),
        ({"halo": 0}, "halo"),
        ({"origin": (0, 2)}, "origin"),
        ({"size": 0}, "tile"),
        ({"size": -4}, "tile"),
    ],
)
def test_tiles_that_would_give_other_values_are_refused(arguments: dict[str, int], where: str) -> None:
    with pytest.raises(ShiplapError, match="SL821") as caught:
        tiling(FIELD, **arguments)  # type: ignore[arg-type]
    assert caught.value.where.startswith(where)


def test_a_field_that_is_not_the_same_on_all_axes() -> None:
    tiles = tiling(Field((1, 9, 50), (2, 3, 50), (2, 3, 16), 3))
    assert (tiles.halo, tiles.size % 6) == (12, 0)


def test_grids_are_aligned_and_end_with_the_survey() -> None:
    tiles = tiling(FIELD, 64)
    extent = CellBox(np.array((-13, 5, -1)), np.array((201, 71, 10)))
    whole = tiling(FIELD, 64, 400).grid((1, 0), extent)  # its halo covers the survey
    assert (triple(whole.low), whole.shape) == ((-16, 4, -4), (220, 68, 16))
    for tile in ((-1, 0), (0, 0), (3, 1)):
        box = tiles.grid(tile, extent)
        assert not (box.low % 4).any()
        assert not (box.high % 4).any()
        assert (box.low >= whole.low).all()
        assert (box.high <= whole.high).all()
    assert tiles.grid((1, 0), extent).low[0] == 64 - 16


def test_neighbours_reach_as_far_as_the_halo() -> None:
    assert len(tiling(FIELD, 64).around((0, 0), 0)) == 9
    assert len(tiling(FIELD, 12).around((0, 0), 0)) == 25
    assert len(tiling(FIELD, 64).around((0, 0), 49)) == 25
