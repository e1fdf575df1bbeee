"""The embedded engine: threads beside the network change no class, and what fails in one is raised."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shiplap_sparse3d import geometry
from shiplap_sparse3d.geometry import NOTHING
from shiplap_sparse3d.survey import SurveyModel, point_features, prepare, tasks
from shiplap_sparse3d.survey.engine import SurveyEngine
from shiplap_sparse3d.survey.job import SurveyJob
from shiplap_sparse3d.survey.predict import PreparedTile
from shiplap_sparse3d.survey.tasks import predict_codes, predict_tile
from tests.survey.models import build

pytest.importorskip("laspy")
pytest.importorskip("lazrs")


@pytest.fixture
def job(corner: Path, tmp_path: Path) -> SurveyJob:
    return prepare(corner, tmp_path / "tiles", build(), tile=20).job


def predict_all(job: SurveyJob, threads: int | None, times: int = 1) -> list[bytes]:
    """The classes of all tiles, by an engine with so many threads."""
    engine = SurveyEngine(threads)
    engine.share(replace(job))  # with a network of its own
    done = [tile for tile, _ in engine.run(predict_tile, job.points.tiles * times)]
    assert done == job.points.tiles * times
    return [job.folder.read_result(tile, job.points.count(tile)).tobytes() for tile in job.points.tiles]


def test_threads_change_no_class(job: SurveyJob) -> None:
    assert predict_all(job, 3) == predict_all(job, None)
    assert len(job.points.tiles) > 4


def test_the_next_tile_is_read_while_the_network_runs(job: SurveyJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first network waits until a second tile has been read; no two networks run at a time."""
    second, count, inside = threading.Event(), 0, threading.Lock()
    read, run = tasks.read_tile, tasks.run_network

    def reading(*arguments: object) -> object:
        nonlocal count
        made = read(*arguments)  # type: ignore[arg-type]
        count += 1
        if count > 1:
            second.set()
        return made

    def running(*arguments: object) -> object:
        assert inside.acquire(blocking=False)
        assert second.wait(30)
        answer = run(*arguments)  # type: ignore[arg-type]
        inside.release()
        return answer

    monkeypatch.setattr(tasks, "read_tile", reading)
    monkeypatch.setattr(tasks, "run_network", running)
    predict_all(job, 3)


def test_tables_that_were_built_are_not_built_by_the_network(job: SurveyJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the recipe of the tile before, as on a GPU, a network makes no step itself."""
    made, inside, run = list[bool](), False, tasks.run_network
    reach = geometry.output_cells

    def reaching(*arguments: object) -> object:
        made.append(inside)
        return reach(*arguments)  # type: ignore[arg-type]

    def running(model: SurveyModel, tile: PreparedTile) -> object:
        nonlocal inside
        inside = True
        answer = run(model, tile)
        inside, job.network.recipe = False, tile.scene.voxels.geometry.recipe
        return answer

    monkeypatch.setattr(geometry, "output_cells", reaching)
    monkeypatch.setattr(tasks, "run_network", running)
    assert job.network.recipe == NOTHING
    for tile in job.points.tiles[:4]:
        predict_codes(job, tile)
    assert made == [True, True, *[False] * 6]


@pytest.mark.parametrize("fails", ["read_tile", "prepare_tile", "run_network"])
def test_what_fails_in_a_thread_is_raised(fails: str, job: SurveyJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: object) -> object:
        raise OSError("the disk")

    monkeypatch.setattr(tasks, fails, failing)
    with pytest.raises(OSError, match="the disk"):
        predict_all(job, 3)


def test_a_full_disk_is_raised(job: SurveyJob) -> None:
    (job.folder.path / "classes").write_text("in the way")
    with pytest.raises(OSError, match="classes"):
        predict_all(job, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("whose", ["ours", "a user's"])
def test_streams_change_no_class_on_a_gpu(job: SurveyJob, whose: str) -> None:
    """Again and again, since memory that is given away too early is wrong only now and then."""
    if whose != "ours":  # these are made on the host
        job = replace(job, model=replace(job.model, features=lambda points: point_features(points)))
    job.model.net.cuda()
    first = predict_all(job, 1)
    assert all(predict_all(job, None, 4) == first for _ in range(10))
    job.model.net.cpu()
