"""A tile is cut out of its neighbours the same way by the host, block by block, and by the device of the network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shiplap_sparse3d.survey import Manifest, Points, SurveyModel, point_features, prepare, tiling
from shiplap_sparse3d.survey import predict as prediction
from shiplap_sparse3d.survey.folder import POINT
from shiplap_sparse3d.survey.predict import TilePoints, TileQuestion, points_of, predict_tile, read_tile
from tests.survey.models import build


def heights(points: Points) -> torch.Tensor:
    """Features of the user, who may look around."""
    return torch.cat([point_features(points)[:, :4], points.xyz[:, 2:].float()], 1)


def given(manifest: Manifest) -> tuple[object, ...]:
    return manifest.model, manifest.folder, manifest.buckets, manifest.grid, tiling(manifest.model.field, 20)


def read(manifest: Manifest, tile: tuple[int, int]) -> TilePoints:
    """As on a GPU."""
    model, folder, buckets, grid, tiles = given(manifest)
    rows = prediction._read_whole(prediction._bucket_paths(model, folder, buckets, tiles, tile), pinned=False)  # type: ignore[arg-type]
    return TilePoints(rows, grid, tiles, tile, tiles.grid(tile, buckets.extent))  # type: ignore[arg-type,attr-defined]


def equal(one: TileQuestion, other: TileQuestion) -> bool:
    tensors = ("index", "cells", "feats", "wanted")
    return one.grid == other.grid and all(torch.equal(getattr(one, n), getattr(other, n)) for n in tensors)


@pytest.mark.parametrize("context", [0.0, 13.0])
def test_all_at_once_is_as_block_by_block(
    context: float, corner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction, "_BLOCK", 700)
    model = replace(build(), context=context, features=heights)
    manifest = prepare(corner, tmp_path / "tiles", model, tile=20)
    for tile in manifest.buckets.tiles[:4]:
        blocks = read_tile(*given(manifest), tile)  # type: ignore[arg-type]
        assert isinstance(blocks, TileQuestion)
        whole = read(manifest, tile)
        assert len(whole.rows) > len(blocks.cells) > len(blocks.index) > 0
        assert equal(whole.to_question(model), blocks)
        assert np.array_equal(predict_tile(model, whole), predict_tile(model, blocks))
        assert len(blocks.cells) == len(blocks.feats)
        assert bool((blocks.index.diff() > 0).all())


def test_a_point_is_read_as_it_was_written(corner: Path, tmp_path: Path) -> None:
    manifest = prepare(corner, tmp_path / "tiles", build(), tile=20)
    tile = manifest.buckets.tiles[0]
    rows = np.fromfile(manifest.folder.bucket_path(tile), POINT)
    rows["intensity"][:2] = 65535, 32768  # above what a signed number of 16 bits holds
    rows["number_of_returns"][:2] = 255, 128
    seen = torch.from_numpy(rows.view(np.int32).reshape(-1, 6))
    points = points_of(seen, manifest.grid)
    assert np.array_equal(prediction._point_numbers(seen).numpy(), rows["index"])
    assert np.array_equal(points.xyz.numpy(), manifest.grid.xyz(rows["raw"]))
    for name in ("intensity", "return_number", "number_of_returns"):
        assert np.array_equal(getattr(points, name).numpy(), rows[name].astype(np.int64)), name


def test_a_bucket_that_became_shorter(corner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = prepare(corner, tmp_path / "tiles", build(), tile=20)
    path = manifest.folder.bucket_path(manifest.buckets.tiles[0])
    stat = path.stat()
    path.write_bytes(path.read_bytes()[:-24])
    monkeypatch.setattr(Path, "stat", lambda self, **options: stat)
    with pytest.raises(OSError, match=path.name):
        prediction._read_whole([path], pinned=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_asks_what_the_host_asks(corner: Path, tmp_path: Path) -> None:
    """Cells and order to the bit; features of a GPU may differ in the last one."""
    model = build()
    manifest = prepare(corner, tmp_path / "tiles", model, tile=20)
    on_host = [read_tile(*given(manifest), tile) for tile in manifest.buckets.tiles]  # type: ignore[arg-type]
    model.net.cuda()
    own = SurveyModel(model.net, model.voxel, model.classes, lambda points: point_features(points))
    for tile, host in zip(manifest.buckets.tiles, on_host, strict=True):
        whole = read_tile(*given(manifest), tile)  # type: ignore[arg-type]
        assert isinstance(whole, TilePoints)
        assert isinstance(host, TileQuestion)
        asked = whole.to_question(model)
        for name in ("index", "cells", "wanted"):
            assert torch.equal(getattr(asked, name).cpu(), getattr(host, name)), name
        torch.testing.assert_close(asked.feats.cpu(), host.feats)
        arguments = own, *given(manifest)[1:], tile
        assert isinstance(read_tile(*arguments), TileQuestion)  # type: ignore[arg-type]
        assert np.array_equal(predict_tile(model, whole)["index"], predict_tile(own, host)["index"])
    model.net.cpu()
