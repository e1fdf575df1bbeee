"""Strided steps on a GPU: outputs by cells, and sorts under a profiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shiplap as sl
import shiplap_sparse3d as sparse3d
from shiplap_sparse3d import bounded, ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
WINDOWS = (
    [[3] * 3, [2] * 3, [1] * 3, [1] * 3],
    [[3] * 3, [1] * 3, [1] * 3, [1] * 3],
    [[2, 3, 1], [2, 1, 3], [0] * 3, [1, 2, 3]],
)


def voxels(rows: int, edge: int, scenes: int) -> torch.Tensor:
    cells = torch.randperm(scenes * edge**3, device="cuda")[:rows]
    coords = [cells // edge**3, cells // edge**2 % edge, cells // edge % edge, cells % edge]
    return torch.stack(coords, 1).int()


@pytest.mark.parametrize("window", WINDOWS, ids=["strided", "more outputs than inputs", "uneven"])
@pytest.mark.parametrize(("rows", "edge", "scenes"), [(100, 8, 1), (6000, 24, 2), (200_000, 128, 3), (9000, 40, 70)])
def test_outputs_by_cells(rows, edge, scenes, window):
    """Also where there are more scenes than a bitmap has room for: then they are found by hash."""
    coords = voxels(rows, edge, scenes)
    coords[::7] = -1
    got = ops.out_coords(coords, [edge] * 3, *window)
    assert torch.equal(got, ops.out_coords.reference(coords, [edge] * 3, *window))


@pytest.mark.parametrize("step", ["strided", "pooled", "transposed"])
def test_a_row_of_a_scene_that_there_is_not(step):
    coords = voxels(6000, 24, 2)
    geometry = sparse3d.Geometry(coords, 24, 2)
    assert getattr(geometry, step)(2, 2).geometry.coords.shape[0] > 0
    with pytest.raises(sl.ShiplapError, match=r"SL211(.|\n)*batch index outside \[-1, 1\)"):
        getattr(sparse3d.Geometry(coords, 24, 1), step)(2, 2)


@pytest.mark.parametrize(("capacity", "scenes"), [(900, 2), (7000, 2), (7000, 1), (7000, 0)])
def test_the_first_voxels(capacity, scenes):
    coords = voxels(6000, 24, 2)
    want = bounded.first_voxels.reference(coords, [24] * 3, *WINDOWS[0], capacity, scenes)
    got = bounded.first_voxels(coords, [24] * 3, *WINDOWS[0], capacity, scenes)
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


def test_sorts_under_a_profiler_leave_the_heap_alone():
    """On torch 2.11 every such process ended by a signal."""
    script = Path(__file__).parent / "profiled_steps.py"
    done = subprocess.run([sys.executable, "-P", str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout[-5:]) == (0, "done\n"), done.stderr[-2000:]
