"""Training on a survey folder: what a tile teaches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shiplap_sparse3d.survey import Manifest, SurveyModel, prepare
from tests.survey.models import VOXEL, UNet

pytest.importorskip("laspy")
pytest.importorskip("lazrs")


def fresh() -> SurveyModel:
    torch.manual_seed(0)
    return SurveyModel(UNet(5, 4, 2, 2), VOXEL, (1, 2))


@pytest.fixture(scope="module")
def folder(corner: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("training")
    prepare(corner, place, fresh(), tile=24)
    return place


def manifest(corner: Path, folder: Path) -> Manifest:
    return prepare(corner, folder, fresh(), tile=24)


def test_every_point_teaches_once(corner: Path, folder: Path) -> None:
    import laspy
    import numpy as np

    opened = manifest(corner, folder)
    counts = torch.zeros(2, dtype=torch.long)
    for tile in opened.tiles:
        cells, feats, grid, labels = opened.batch(tile)
        assert len(cells) == len(feats) == len(labels)
        assert bool((cells >= 0).all() & (cells < torch.tensor(grid)).all())
        counts += torch.bincount(labels[labels >= 0], minlength=2)
    codes = np.asarray(laspy.read(corner).classification)
    assert counts.tolist() == [int((codes == 1).sum()), int((codes == 2).sum())]


def test_a_loop_of_torch_learns_from_the_tiles(corner: Path, folder: Path) -> None:
    opened = manifest(corner, folder)
    model, losses = opened.job.model, list[float]()
    optimizer = torch.optim.AdamW(model.net.parameters(), 3e-3)
    for _ in range(3):
        total = 0.0
        for tile in opened.tiles:
            cells, feats, grid, labels = opened.batch(tile)
            loss = torch.nn.functional.cross_entropy(model.forward(cells, feats, grid), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach())
        losses.append(total)
    assert losses[2] < losses[1] < losses[0]
