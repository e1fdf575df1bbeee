"""Which scenes of a grid have cells whose numbers fit in 63 bits."""

from __future__ import annotations

import pytest

from shiplap_sparse3d.cuda import lookup

GRIDS = [
    (1, 1, 1),
    (1 << 20, 1 << 20, 1 << 20),
    (1 << 21, 1 << 20, 1 << 12),
    (1 << 20, 1 << 11, 1),
    (7, 0, 9),
    (5, 6, 7),
]


@pytest.mark.parametrize("shape", GRIDS)
def test_the_last_scene_whose_cells_can_be_numbered(shape: tuple[int, int, int]) -> None:
    most = lookup.batches_below(shape)
    cells = max(1, shape[0] * shape[1] * shape[2])
    assert most == 2**31 - 1 or (most + 1) * cells >= lookup.MAX_CELLS
    assert most * cells < lookup.MAX_CELLS
    assert most <= 2**31 - 1


@pytest.mark.parametrize("shape", GRIDS)
def test_the_expression_for_c_is_the_same(shape: tuple[int, int, int]) -> None:
    written = lookup.scenes_below(*map(str, shape))
    expected = lookup.batches_below(shape) if all(shape) else lookup.batches_below([max(1, size) for size in shape])
    assert eval(written, {"min": min, "max": max}) == expected
