"""Ops with a capacity give the output voxels of ``out_coords`` and padding, or a count that says there are more."""

import pytest
import torch

from shiplap_sparse3d import bounded, ops
from shiplap_sparse3d.coords import NO_KEY

GRID, WINDOW = [5, 6, 7], ([2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1])
OUT = [2, 3, 3]
COORDS = torch.tensor([[0, 0, 0, 0], [0, 1, 1, 1], [0, 2, 4, 5], [1, 3, 0, 2], [1, 0, 5, 1]], dtype=torch.int32)
REACHED = ops.out_coords(COORDS, GRID, *WINDOW)


def test_first_voxels_are_those_of_all_and_padding():
    voxels, count = bounded.first_voxels(COORDS, GRID, *WINDOW, 7, 0)
    assert int(count) == len(REACHED) == 4
    assert torch.equal(voxels[:4], REACHED)
    assert voxels[4:].eq(-1).all()
    voxels, count = bounded.first_voxels(COORDS, GRID, *WINDOW, 3, 2)
    assert int(count) > 3
    assert torch.equal(voxels, REACHED[:3])


@pytest.mark.parametrize("scenes", [1, 2])
def test_a_scene_without_room_gives_no_voxels(scenes):
    voxels, count = bounded.first_voxels(COORDS, GRID, *WINDOW, 4, scenes)
    assert int(count) == (-1 if scenes == 1 else 4)
    assert voxels.eq(-1).all() == (scenes == 1)


def test_keys_are_the_voxels():
    keys, count = bounded.reached_keys(COORDS, GRID, *WINDOW, 6)
    assert int(count) == 4
    assert keys.eq(NO_KEY).sum() == 2
    voxels = bounded.voxels_of_keys(keys, OUT)
    assert torch.equal(voxels[:4], REACHED)
    assert voxels[4:].eq(-1).all()
    assert int(bounded.reached_keys(COORDS, GRID, *WINDOW, 3)[1]) > 3
