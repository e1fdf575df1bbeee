"""The embedded engine: threads beside the network change no class, and what fails in one is raised."""

from __future__ import annotations

import shutil
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shiplap_sparse3d import geometry
from shiplap_sparse3d.geometry import NOTHING
from shiplap_sparse3d.survey import Points, SurveyModel, point_features, prepare, tasks
from shiplap_sparse3d.survey.model import VoxelScene
from shiplap_sparse3d.survey.tasks import SurveyEngine, SurveyJob, predict_codes, predict_group
from tests.survey.models import build

pytest.importorskip("laspy")
pytest.importorskip("lazrs")


def around(points: Points) -> torch.Tensor:
    """Features that depend on points up to 6 along x: the greatest z among those that are near."""
    order = points.xyz[:, 0].argsort(stable=True)
    x, z = points.xyz[order, 0].contiguous(), points.xyz[order, 2].contiguous()
    first, last = torch.searchsorted(x, x - 6), torch.searchsorted(x, x + 6, right=True)
    high = torch.stack([z[a:b].max() for a, b in zip(first.tolist(), last.tolist(), strict=True)]).float()
    made = point_features(points)
    made[order, 1] = high
    return made


@pytest.fixture
def job(corner: Path, tmp_path: Path) -> SurveyJob:
    return prepare(corner, tmp_path / "tiles", build(), tile=20).job


def predict_all(job: SurveyJob, threads: int, times: int = 1) -> list[bytes]:
    """The classes of all tiles, by an engine with so many threads."""
    with closing(SurveyEngine(threads)) as engine:
        engine.share(replace(job))  # with a network of its own
        done = [first for first, _ in engine.run(predict_group, [*job.groups] * times, ordered=True)]
    assert done == [*job.groups] * times
    results = [job.folder.read_result(tile, job.count(tile)) for tile in job.tiles]
    return [result.tobytes() for result in results if result is not None]


def test_threads_change_no_class(job: SurveyJob) -> None:
    assert predict_all(job, 3) == predict_all(job, 1)
    assert len(job.tiles) == len(predict_all(job, 2)) > 4


@pytest.mark.parametrize("features", [point_features, around])
def test_tiles_that_are_predicted_together_have_the_classes_of_each_alone(features: Any, job: SurveyJob) -> None:
    model = replace(job.model, features=features, context=13.0 if features is around else 0.0)
    job = replace(job, model=model)
    alone, together = predict_all(job, 1), replace(job, together=9 * job.total)
    assert max(map(len, together.groups.values())) > 1
    assert sorted(tile for group in together.groups.values() for tile in group) == job.tiles
    shutil.rmtree(job.folder.path / "classes")
    assert predict_all(together, 2) == alone


def test_a_group_of_tiles_is_bounded_by_the_points_of_halos_and_by_scenes(
    job: SurveyJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Smaller tiles, of which the halos are the larger part, would not take less memory otherwise."""
    for together, most in ((job.total, 1), (2 * job.total, 2)):
        groups = replace(job, together=together).groups.values()
        assert max(map(len, groups)) == most
        assert all(len(tasks.question_of(job, tiles, torch.device("cpu")).cells) < together for tiles in groups)
    monkeypatch.setattr(tasks, "MOST_SCENES", 2)
    assert {*map(len, replace(job, together=10**9).groups.values())} <= {1, 2}


def test_the_points_of_a_tile_at_the_border_are_those_of_its_halo(job: SurveyJob) -> None:
    """A tile of two points beside dense ones: its halo, and not its own points, is what takes memory."""
    expected = {tile: job._expected_points(tile) for tile in job.tiles}
    found = {tile: len(tasks.question_of(job, [tile], torch.device("cpu")).cells) for tile in job.tiles}
    assert max(found[tile] / job.count(tile) for tile in job.tiles) > 1000
    assert all(0.5 < found[tile] / expected[tile] < 1.25 for tile in job.tiles)


def test_a_network_on_the_cpu_needs_no_stream_of_a_gpu(job: SurveyJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.cuda.stream`` makes a context on a GPU, even for no stream."""
    monkeypatch.delattr(torch.cuda, "stream")
    assert len(predict_codes(job, job.tiles[:1])) == job.count(job.tiles[0])


def test_the_next_tile_is_read_while_the_network_runs(job: SurveyJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first network waits until a second tile has been read; no two networks run at a time."""
    second, count, inside = threading.Event(), 0, threading.Lock()
    read, run = tasks.question_of, SurveyModel.answer

    def reading(*arguments: Any) -> Any:
        nonlocal count
        made = read(*arguments)
        count += 1
        if count > 1:
            second.set()
        return made

    def running(*arguments: Any) -> Any:
        assert inside.acquire(blocking=False)
        assert second.wait(120)
        answer = run(*arguments)
        inside.release()
        return answer

    monkeypatch.setattr(tasks, "question_of", reading)
    monkeypatch.setattr(SurveyModel, "answer", running)
    predict_all(job, 3)


def test_tables_that_were_built_are_not_built_by_the_network(job: SurveyJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the recipe of the tile before, as on a GPU, a network makes no step itself."""
    made, inside, run = list[bool](), False, SurveyModel.answer
    reach = geometry.output_cells

    def reaching(*arguments: Any) -> Any:
        made.append(inside)
        return reach(*arguments)

    def running(model: SurveyModel, scene: VoxelScene) -> torch.Tensor:
        nonlocal inside
        inside = True
        answer = run(model, scene)
        inside, job.network.recipe = False, scene.voxels.geometry.recipe
        return answer

    monkeypatch.setattr(geometry, "output_cells", reaching)
    monkeypatch.setattr(SurveyModel, "answer", running)
    assert job.network.recipe == NOTHING
    for tile in job.tiles[:4]:
        predict_codes(job, [tile])
    assert made == [True, True, *[False] * 6]


@pytest.mark.parametrize("fails", ["question_of", "read_points", "SurveyFolder.write_result"])
def test_what_fails_in_a_thread_is_raised(fails: str, job: SurveyJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: object, **options: object) -> object:
        raise OSError("the disk")

    monkeypatch.setattr(f"{tasks.__name__}.{fails}", failing)
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
    for together in (0, 9 * job.total):
        job = replace(job, together=together)
        first = predict_all(job, 1)
        assert all(predict_all(job, 3, 4) == first for _ in range(5))
    job.model.net.cpu()


def test_threads_share_one_lock_of_the_network(job: SurveyJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that look at it first at the same time, as each of an engine may."""
    made, others, threads = tasks.SimpleNamespace, list[Any](), list[threading.Thread]()

    def make_beside_another(**state: Any) -> Any:
        if not threads:
            threads.append(threading.Thread(target=lambda: others.append(job.network)))
            threads[0].start()
            threads[0].join(0.5)  # a lock may keep it waiting
        return made(**state)

    monkeypatch.setattr(tasks, "SimpleNamespace", make_beside_another)
    job = replace(job)
    network = job.network
    threads[0].join(120)  # a busy machine, too
    assert job.network is network is others[0]
