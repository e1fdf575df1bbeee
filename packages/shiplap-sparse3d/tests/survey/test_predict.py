"""A tile is cut out of its neighbours the same way by the host, block by block, and by the device of the network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shiplap import ShiplapError
from shiplap_sparse3d.survey import Manifest, Points, SurveyModel, point_features, prepare
from shiplap_sparse3d.survey import predict as prediction
from shiplap_sparse3d.survey.folder import POINT
from shiplap_sparse3d.survey.job import Grid
from shiplap_sparse3d.survey.predict import TilePoints, TileQuestion, points_of, prepare_tile, read_tile, run_network
from tests.survey.models import build


def heights(points: Points) -> torch.Tensor:
    """Features of the user, who may look around."""
    return torch.cat([point_features(points)[:, :4], points.xyz[:, 2:].float()], 1)


def read(manifest: Manifest, tile: tuple[int, int]) -> TilePoints:
    """As on a GPU."""
    job = manifest.job
    return TilePoints(prediction.read_points(job.folder, prediction._slices_around(job, tile)), job, tile)


def answer(manifest: Manifest, question: TileQuestion | TilePoints) -> np.ndarray:
    model = manifest.job.model
    return run_network(model, prepare_tile(model, question)).wait_for_codes()


def equal(one: TileQuestion, other: TileQuestion) -> bool:
    tensors = ("index", "cells", "feats", "wanted")
    return one.grid == other.grid and all(torch.equal(getattr(one, n), getattr(other, n)) for n in tensors)


@pytest.mark.parametrize("context", [0.0, 13.0])
def test_all_at_once_is_as_slice_by_slice(context: float, corner: Path, tmp_path: Path) -> None:
    manifest = prepare(corner, tmp_path / "tiles", replace(build(), context=context, features=heights), tile=20)
    for tile in manifest.tiles[:4]:
        blocks = read_tile(manifest.job, tile)
        assert isinstance(blocks, TileQuestion)
        whole = read(manifest, tile)
        assert len(whole.rows) > len(blocks.cells) > len(blocks.index) > 0
        assert equal(whole.to_question(), blocks)
        assert np.array_equal(answer(manifest, whole), answer(manifest, blocks))
        assert len(blocks.cells) == len(blocks.feats)
        assert bool((blocks.index.diff() > 0).all())


def test_a_point_is_read_as_it_was_written(corner: Path, tmp_path: Path) -> None:
    manifest = prepare(corner, tmp_path / "tiles", build(), tile=20)
    rows = np.fromfile(manifest.job.folder.points_path(0), POINT)[:500]
    rows["intensity"][:2] = 65535, 32768  # above what a signed number of 16 bits holds
    rows["number_of_returns"][:2] = 255, 128
    seen = torch.from_numpy(rows.view(np.int32).reshape(-1, 6))
    points = points_of(seen, manifest.job.grid)
    assert np.array_equal(prediction._point_numbers(seen).numpy(), rows["index"])
    assert np.array_equal(points.xyz.numpy(), manifest.job.grid.xyz(rows["raw"]))
    for name in ("intensity", "return_number", "number_of_returns"):
        assert np.array_equal(getattr(points, name).numpy(), rows[name].astype(np.int64)), name


@pytest.mark.parametrize("left", [None, -24, 24])
def test_sorted_points_that_became_fewer(left: int | None, corner: Path, tmp_path: Path) -> None:
    manifest = prepare(corner, tmp_path / "tiles", build(), tile=20)
    path = manifest.job.folder.points_path(0)
    path.write_bytes(path.read_bytes()[:left]) if left else path.unlink()
    with pytest.raises(ShiplapError, match="SL824: the sorted points are damaged"):
        _ = [read(manifest, tile) for tile in manifest.tiles]
    assert not manifest.job.folder.sorted_mark_path(0).exists()


def test_cells_are_those_of_whole_rows() -> None:
    """Axis by axis, the coordinates and cells are those of the formula, to the bit."""
    raw = np.random.default_rng(0).integers(-(2**31), 2**31 - 1, (1000, 3), dtype=np.int32)
    grid = Grid((0.01, 0.001, 0.1), (637_000.1, -4_800_000.7, 3.3), (0.3, 1.7, 2.0))
    xyz = raw * np.array(grid.scales) + np.array(grid.offsets)
    assert np.array_equal(grid.xyz(raw), xyz)
    assert np.array_equal(grid.cells(raw), np.floor(xyz / np.array(grid.voxel)).astype(np.int64))
    assert grid.cells(raw[:0]).shape == (0, 3)
    columns = torch.from_numpy(raw)
    assert np.array_equal(torch.stack(grid.coordinates(columns), 1).numpy(), grid.xyz(raw))
    assert np.array_equal(torch.stack(grid.places(columns), 1).numpy(), grid.cells(raw))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_asks_what_the_host_asks(corner: Path, tmp_path: Path) -> None:
    """Cells and order to the bit; features of a GPU may differ in the last one."""
    manifest = prepare(corner, tmp_path / "tiles", build(), tile=20)
    model = manifest.job.model
    on_host = [read_tile(manifest.job, tile) for tile in manifest.tiles]
    model.net.cuda()
    own = SurveyModel(model.net, model.voxel, model.classes, lambda points: point_features(points))
    for tile, host in zip(manifest.tiles, on_host, strict=True):
        whole = read_tile(manifest.job, tile)
        assert isinstance(whole, TilePoints)
        assert isinstance(host, TileQuestion)
        asked = whole.to_question()
        for name in ("index", "cells", "wanted"):
            assert torch.equal(getattr(asked, name).cpu(), getattr(host, name)), name
        torch.testing.assert_close(asked.feats.cpu(), host.feats)
        assert isinstance(read_tile(replace(manifest.job, model=own), tile), TileQuestion)
    model.net.cpu()
