"""A survey gives the classes of the untiled scan, whatever the tiles, the interruptions and the workers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shiplap import ShiplapError
from shiplap_sparse3d.survey import Points, SurveyModel, point_features, prepare, survey, tasks
from shiplap_sparse3d.survey import run as running
from shiplap_sparse3d.survey.folder import SurveyFolder
from shiplap_sparse3d.survey.tasks import point_numbers, question_of
from shiplap_testing.effort import sampled
from shiplap_testing.forked import WITH_FAMILIES, python
from tests.survey.conftest import classes_of
from tests.survey.models import build

laspy = pytest.importorskip("laspy")
pytest.importorskip("lazrs")

MODEL = Path(__file__).parent / "models.py"
WHOLE = 4000  # cells: more than the scan has


@pytest.fixture(scope="module")
def untiled(corner: Path, model: SurveyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("untiled") / "out.laz"
    result = survey(corner, out, model, tile=WHOLE)
    assert result.tiles == 1
    return out


@pytest.mark.long
def test_the_network_tells_points_apart(untiled: Path) -> None:
    """Otherwise any tiles would be equal."""
    assert min(np.bincount(classes_of(untiled))[[1, 2, 5]]) > 100


@pytest.mark.parametrize("tile", sampled([16, 28, 32], long=["28", "32"]))
def test_tiles_change_nothing(tile: int, corner: Path, model: SurveyModel, untiled: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.laz"
    result = survey(corner, out, model, tile=tile)
    assert result.tiles > 4
    assert np.array_equal(classes_of(out), classes_of(untiled))
    assert [p.name for p in tmp_path.iterdir()] == ["out.laz"]


def test_logits_are_equal_to_the_bit(corner: Path, model: SurveyModel, tmp_path: Path) -> None:
    kept: dict[int, dict[int, torch.Tensor]] = {}
    for tile in (WHOLE, 20, 32, 48):
        job = prepare(corner, tmp_path / str(tile), model, tile=tile).job
        kept[tile] = {}
        for each in job.tiles:
            asked = question_of(job, [each], torch.device("cpu"))
            with torch.inference_mode():
                logits = model.forward(asked.cells[:, 1:], asked.feats, asked.grid)[asked.wanted]
            kept[tile].update(zip(point_numbers(asked.own).tolist(), logits, strict=True))
    whole = kept.pop(WHOLE)
    for parts in kept.values():
        assert parts.keys() == whole.keys()
        assert all(torch.equal(parts[index], logits) for index, logits in whole.items())


def test_a_halo_that_is_too_small_would_be_seen(
    corner: Path, model: SurveyModel, untiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above can fail: with half of the halo it does."""
    real = running.tiling
    monkeypatch.setattr(running, "tiling", lambda *a: replace(real(*a), halo=4))
    survey(corner, tmp_path / "out.laz", model, tile=16)
    assert not np.array_equal(classes_of(tmp_path / "out.laz"), classes_of(untiled))


def test_everything_else_stays(corner: Path, untiled: Path) -> None:
    before, after = laspy.read(corner), laspy.read(untiled)
    names = [n for n in before.point_format.dimension_names if n != "classification"]
    assert all(np.array_equal(before[name], after[name]) for name in names)
    assert before.point_format == after.point_format
    assert before.header.scales.tolist() == after.header.scales.tolist()
    assert before.header.creation_date == after.header.creation_date
    assert [v.record_data_bytes() for v in before.header.vlrs] == [v.record_data_bytes() for v in after.header.vlrs]


def test_las_of_a_newer_format_with_extra_dimensions(corner: Path, model: SurveyModel, tmp_path: Path) -> None:
    las = laspy.convert(laspy.read(corner), point_format_id=7, file_version="1.4")
    las.add_extra_dim(laspy.ExtraBytesParams(name="amplitude", type=np.float32))
    las["amplitude"][:] = np.arange(len(las))
    las.write(tmp_path / "in.las")
    model = replace(model, classes=(1, 2, 200))
    survey(tmp_path / "in.las", tmp_path / "out.las", model, tile=48)
    out = laspy.read(tmp_path / "out.las")
    assert np.array_equal(out["amplitude"], las["amplitude"])
    assert set(np.unique(out.classification)) == {1, 2, 200}


@pytest.mark.long
def test_order_of_the_file_does_not_matter_to_the_grid(corner: Path, model: SurveyModel, tmp_path: Path) -> None:
    """Shuffled points, read in small chunks: tiles and untiled agree, and every point keeps its own class."""
    las = laspy.read(corner)
    las.points = las.points[np.random.default_rng(0).permutation(len(las))]
    las.write(tmp_path / "in.laz")
    survey(tmp_path / "in.laz", tmp_path / "whole.laz", model, tile=WHOLE)
    survey(tmp_path / "in.laz", tmp_path / "tiled.laz", model, tile=32, segment=2000)
    assert np.array_equal(classes_of(tmp_path / "whole.laz"), classes_of(tmp_path / "tiled.laz"))


@pytest.mark.long
def test_features_with_context_see_the_same_neighbours(corner: Path, tmp_path: Path) -> None:
    def lowest(points: Points) -> torch.Tensor:
        """Height over the lowest point of a square of 60 feet."""
        cell = (points.xyz[:, :2] / 60).floor().long()
        flat = (cell[:, 0] - cell[:, 0].min()) * 100_000 + cell[:, 1] - cell[:, 1].min()
        _, inverse = flat.unique(return_inverse=True)
        low = torch.full((int(inverse.max()) + 1,), torch.inf, dtype=torch.float64)
        low = low.scatter_reduce(0, inverse, points.xyz[:, 2], "amin")
        return torch.cat([point_features(points)[:, :4], (points.xyz[:, 2:] - low[inverse, None]).float()], 1)

    model = replace(build(), features=lowest, context=60.0)
    for tile in (WHOLE, 24):
        survey(corner, tmp_path / f"{tile}.laz", model, tile=tile)
    assert np.array_equal(classes_of(tmp_path / f"{WHOLE}.laz"), classes_of(tmp_path / "24.laz"))
    with pytest.raises(ShiplapError, match="SL825: the features look beyond their context"):
        survey(corner, tmp_path / "out.laz", replace(model, context=10.0))


# --- interruptions


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 10])
def test_killed_at_random_and_resumed(times: int, corner: Path, untiled: Path, tmp_path: Path) -> None:
    """The output is the same file, byte for byte."""
    out = tmp_path / "out.laz"
    done = python("-m", "tests.survey.killed", times, corner, out, MODEL, imported=WITH_FAMILIES)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"killed {times} times, and whole"
    assert out.read_bytes() == untiled.read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["out.laz"]


class Stopped(Exception):
    """A process that ends here."""


@pytest.mark.parametrize("moment", sampled(range(0, 15, 3), long=["0", "3", "6", "12"]))
def test_stopped_before_each_step_and_resumed(
    moment: int, corner: Path, model: SurveyModel, untiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every write of a mark or a result is a place to stop; what is there after it is whole."""
    out, count = tmp_path / "out.laz", 0
    from shiplap_sparse3d.survey import folder

    real = folder.write_whole

    def stopping(path: Path, content: bytes, *, lasting: bool = True) -> None:
        nonlocal count
        count += 1
        if count > moment:
            raise Stopped
        real(path, content, lasting=lasting)

    monkeypatch.setattr(folder, "write_whole", stopping)
    monkeypatch.setattr(tasks, "write_whole", stopping)
    with pytest.raises(Stopped):
        survey(corner, out, model, tile=20, segment=4000)
    monkeypatch.undo()
    assert not out.exists()
    survey(corner, out, model, tile=20, segment=4000)
    assert out.read_bytes() == untiled.read_bytes()


@pytest.mark.parametrize("part", sampled(["points", "classes"], long=["classes"]))
def test_stopped_while_its_own_files_are_removed_and_resumed(
    part: str, corner: Path, model: SurveyModel, untiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a folder is gone then."""
    out = tmp_path / "out.laz"
    import shiplap_sparse3d.survey.folder as folder

    real = folder.shutil.rmtree

    def stopping(path: Path, ignore_errors: bool) -> None:
        if path.name != part:
            return real(path, ignore_errors=ignore_errors)
        for file in sorted(path.iterdir())[::2]:
            file.unlink()
        raise Stopped

    monkeypatch.setattr(folder.shutil, "rmtree", stopping)
    with pytest.raises(Stopped):
        survey(corner, out, model, tile=20, segment=4000)
    monkeypatch.setattr(folder.shutil, "rmtree", real)
    survey(corner, out, model, tile=20, segment=4000)
    assert out.read_bytes() == untiled.read_bytes()
    assert [p.name for p in tmp_path.iterdir()] == ["out.laz"]


def test_finished_tiles_are_not_predicted_again(corner: Path, model: SurveyModel, tmp_path: Path) -> None:
    out, folder = tmp_path / "out.laz", tmp_path / "kept"
    first = survey(corner, out, model, tile=32, folder=folder, keep=True)
    assert first.predicted == first.tiles
    assert survey(corner, out, model, tile=32, folder=folder, keep=True).predicted == 0
    damaged = next((folder / "classes").iterdir())
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1])
    assert survey(corner, out, model, tile=32, folder=folder, keep=True).predicted == 1
    assert damaged.read_bytes() == whole


@pytest.mark.parametrize("left", sampled([b"", None], 1), ids=["empty", "missing"])
def test_results_that_a_loss_of_power_took_are_made_anew(
    left: bytes | None, corner: Path, model: SurveyModel, untiled: Path, tmp_path: Path
) -> None:
    """The mark of a tile reached the disk, and its classes did not: of three tiles, in one go."""
    out, folder = tmp_path / "out.laz", tmp_path / "kept"
    survey(corner, out, model, tile=32, folder=folder, keep=True)
    for path in sorted((folder / "classes").iterdir())[:3]:
        path.unlink() if left is None else path.write_bytes(left)
    assert survey(corner, out, model, tile=32, folder=folder, keep=True).predicted == 3
    assert out.read_bytes() == untiled.read_bytes()


def test_results_that_vanish_before_they_are_merged(
    corner: Path, model: SurveyModel, untiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, folder = tmp_path / "out.laz", tmp_path / "kept"

    def gone(*arguments: Any) -> None:
        next((folder / "classes").iterdir()).unlink()
        real(*arguments)

    real = running.write_cloud
    monkeypatch.setattr(running, "write_cloud", gone)
    with pytest.raises(ShiplapError, match="SL824"):
        survey(corner, out, model, tile=32, folder=folder, keep=True)
    monkeypatch.undo()
    assert survey(corner, out, model, tile=32, folder=folder).predicted == 1
    assert out.read_bytes() == untiled.read_bytes()


@pytest.mark.parametrize("damage", sampled(["points", "table", "shorter"], long=["table", "shorter"]))
def test_sorted_points_that_are_lost_are_made_anew(
    damage: str, corner: Path, model: SurveyModel, untiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found when the survey goes on: of three segments, one has no points, another table, or too few points."""
    out, folder = tmp_path / "out.laz", tmp_path / "kept"
    monkeypatch.setattr(running, "_predict_tiles", lambda *_: (_ for _ in ()).throw(Stopped))
    with pytest.raises(Stopped):
        survey(corner, out, model, tile=32, folder=folder, segment=7_000)
    monkeypatch.undo()
    points = folder / "points" / "1.bin"
    if damage == "points":
        points.unlink()
    elif damage == "table":
        points.write_bytes(points.read_bytes()[:-50] + b"0" * 50)
    else:
        points.write_bytes(points.read_bytes()[:-24])
    made: list[int] = []
    real = tasks.read_chunks
    monkeypatch.setattr(tasks, "read_chunks", lambda *to: made.append(to[2]) or real(*to))
    survey(corner, out, model, tile=32, folder=folder, segment=7_000)
    assert made == [7_000]
    assert out.read_bytes() == untiled.read_bytes()


@pytest.mark.parametrize("stage", sampled(["predict", "merge"], 1))
def test_sorted_points_that_a_disk_has_changed(
    stage: str, corner: Path, model: SurveyModel, untiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of one point: no class is made of it, and the segment is sorted again by the next call."""
    out, folder, name = tmp_path / "out.laz", tmp_path / "kept", {"predict": "_predict_tiles", "merge": "write_cloud"}

    def changed(*arguments: Any) -> Any:
        content = bytearray((folder / "points" / "1.bin").read_bytes())
        content[24 * 100 + (8 if stage == "predict" else 0)] ^= 1
        (folder / "points" / "1.bin").write_bytes(content)
        return real(*arguments)

    real = getattr(running, name[stage])
    monkeypatch.setattr(running, name[stage], changed)
    with pytest.raises(ShiplapError, match="SL824: the sorted points are damaged") as caught:
        survey(corner, out, model, tile=32, folder=folder, segment=7_000)
    assert caught.value.where == str(folder / "points" / "1.bin")
    assert not out.exists()
    monkeypatch.undo()
    survey(corner, out, model, tile=32, folder=folder, segment=7_000)
    assert out.read_bytes() == untiled.read_bytes()


@pytest.mark.long
def test_a_folder_of_another_survey(corner: Path, model: SurveyModel, tmp_path: Path) -> None:
    out, folder = tmp_path / "out.laz", tmp_path / "kept"
    survey(corner, out, model, tile=32, folder=folder, keep=True)
    with pytest.raises(ShiplapError, match="SL823") as caught:
        survey(corner, out, model, tile=48, folder=folder)
    assert (caught.value.got, caught.value.expected) == ("tile 32", "tile 48")
    other = build()
    with torch.no_grad():
        other.net.stem.weight[0] += 1
    with pytest.raises(ShiplapError, match="SL823"):
        survey(corner, out, other, tile=32, folder=folder)


@pytest.mark.parametrize(
    ("name", "value"), [("torch", "1.0"), ("device", "cuda"), ("points at a time", 7), ("format", 2)]
)
def test_a_folder_that_another_arithmetic_began(
    name: str, value: object, corner: Path, model: SurveyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last bits would not be those of the tiles to come."""
    out, folder = tmp_path / "out.laz", tmp_path / "kept"
    monkeypatch.setattr(SurveyModel, "check", lambda model: model.field)
    monkeypatch.setattr(running, "_predict_tiles", lambda *_: (_ for _ in ()).throw(Stopped))
    with pytest.raises(Stopped):
        survey(corner, out, model, tile=32, folder=folder)
    path = folder / "survey.json"
    known = json.loads(path.read_text())
    path.write_text(json.dumps({**known, name: value}))
    with pytest.raises(ShiplapError, match="SL823") as caught:
        survey(corner, out, model, tile=32, folder=folder)
    assert (caught.value.got, caught.value.expected) == (f"{name} {value}", f"{name} {known[name]}")


def test_any_value_of_a_network_makes_another_survey() -> None:
    """Parameters and buffers of all kinds: the counter of a batch norm has no axes, and a parameter may be empty."""
    net = torch.nn.BatchNorm1d(4).to(torch.bfloat16)
    net.register_buffer("none", torch.zeros(0, 3))
    net.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
    model = SurveyModel(net, (1.0, 1.0, 1.0), (1,))
    seen = {model.digest()}
    for value in net.state_dict().values():
        value += 1
        seen.add(model.digest())
    assert len(seen) == 1 + len(net.state_dict()) - 1  # the empty one has no value to change


def test_points_that_a_survey_has_sorted_serve_for_training(
    corner: Path, model: SurveyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kept"
    survey(corner, tmp_path / "out.laz", model, tile=32, folder=folder, keep=True)
    monkeypatch.setattr(tasks, "read_chunks", None)
    assert len(prepare(corner, folder, model, tile=32).tiles) > 4


def test_one_survey_at_a_time_in_a_folder(corner: Path, model: SurveyModel, tmp_path: Path) -> None:
    folder = SurveyFolder(tmp_path / "work")
    with folder.open_for_work(), folder.lock(), pytest.raises(ShiplapError, match="SL823: another process is at work"):
        survey(corner, tmp_path / "out.laz", model, folder=folder.path)
