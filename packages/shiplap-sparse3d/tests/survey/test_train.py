"""Training on a survey folder: what a tile teaches, the order of an epoch, interruptions, two workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shiplap import ShiplapError
from shiplap_sparse3d.survey import Manifest, SurveyModel, epoch_order, prepare, train
from shiplap_testing.forked import python
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
    for tile in opened.buckets.tiles:
        cells, feats, grid, labels = opened.batch(tile)
        assert len(cells) == len(feats) == len(labels)
        assert bool((cells >= 0).all() & (cells < torch.tensor(grid)).all())
        counts += torch.bincount(labels[labels >= 0], minlength=2)
    codes = np.asarray(laspy.read(corner).classification)
    assert counts.tolist() == [int((codes == 1).sum()), int((codes == 2).sum())]


def test_the_order_of_an_epoch() -> None:
    tiles = [(x, 0) for x in range(10)]
    whole = epoch_order(tiles, 3, 7, (0, 1))
    assert whole == epoch_order(tiles, 3, 7, (0, 1))
    assert sorted(whole) == tiles
    assert whole != epoch_order(tiles, 4, 7, (0, 1)) != epoch_order(tiles, 4, 8, (0, 1))
    parts = [epoch_order(tiles, 3, 7, (rank, 4)) for rank in range(4)]
    assert {len(part) for part in parts} == {3}
    assert set().union(*parts) == set(tiles)
    assert [len(epoch_order(tiles[:1], 0, 0, (rank, 3))) for rank in range(3)] == [1, 1, 1]


def test_an_interruption_changes_nothing(corner: Path, folder: Path, tmp_path: Path) -> None:
    straight, stopped = manifest(corner, folder), manifest(corner, folder)
    losses = train(straight, tmp_path / "straight.pt", epochs=3)
    assert losses[-1] < losses[0]

    def stop(step: int, steps: int, loss: float) -> None:
        if step > steps // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(stopped, tmp_path / "stopped.pt", epochs=3, progress=stop)
    resumed = manifest(corner, folder)
    assert train(resumed, tmp_path / "stopped.pt", epochs=3) == losses[1:]
    one, two = straight.model.net.state_dict(), resumed.model.net.state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert train(resumed, tmp_path / "stopped.pt", epochs=3) == []


def test_a_checkpoint_of_another_network(corner: Path, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "net.pt"
    for content in (b"no checkpoint", b""):
        path.write_bytes(content)
        with pytest.raises(ShiplapError, match="SL823: the checkpoint cannot be used"):
            train(manifest(corner, folder), path, epochs=1)


WORKERS = """
import os
import sys
from pathlib import Path
import torch
from tests.survey.test_train import manifest
from shiplap_sparse3d.survey import train
from shiplap_testing.ranks import together
corner, folder, out = map(Path, sys.argv[1:])

def work():
    opened = manifest(corner, folder)
    train(opened, out / "net.pt", epochs=1)
    torch.save(opened.model.net.state_dict(), out / f"rank{os.environ['RANK']}.pt")

together(2, work, 200)
"""


@pytest.mark.slow
def test_two_workers_end_with_the_same_parameters(corner: Path, folder: Path, tmp_path: Path) -> None:
    done = python("-c", WORKERS, corner, folder, tmp_path, timeout=260)
    assert done.returncode == 0, done.stderr
    one, two = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1))
    assert all(torch.equal(one[name], two[name]) for name in one)
    start = fresh().net.state_dict()
    assert not any(torch.equal(one[name], start[name]) for name in one)
