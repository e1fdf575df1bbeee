"""Attacks through the folder of a survey, and its input: what somebody else put there before."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from shiplap import ShiplapError
from shiplap_sparse3d.survey import SurveyModel, prepare, survey
from shiplap_sparse3d.survey.folder import SurveyFolder
from shiplap_sparse3d.survey.tasks import read_segment
from shiplap_testing.effort import sampled

pytest.importorskip("laspy")
pytest.importorskip("lazrs")


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file that nobody asked to have written."""
    path = tmp_path / "victim"
    path.write_text("mine")
    return path


def tree(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


@pytest.mark.parametrize(
    "name", sampled(["survey.lock", "points/0.bin", "classes/0_0.bin", "survey.json", "job.bin"], 3)
)
@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_nothing_is_written_through_a_link_and_no_fifo_waits(
    name: str, kind: str, corner: Path, model: SurveyModel, victim: Path, tmp_path: Path
) -> None:
    """The lock was emptied, buckets were appended to and classes cut, wherever such a name led."""
    folder = tmp_path / "folder"
    (folder / name).parent.mkdir(parents=True)
    if kind == "link":
        (folder / name).symlink_to(victim)
    else:
        os.mkfifo(folder / name)
    with pytest.raises(ShiplapError, match="SL602") as caught:
        survey(corner, tmp_path / "out.laz", model, folder=folder)
    assert caught.value.where == str(folder / name)
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("name", ["points", "classes"])
def test_no_folder_of_it_leads_elsewhere(
    name: str, corner: Path, model: SurveyModel, victim: Path, tmp_path: Path
) -> None:
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "folder"
    elsewhere.mkdir()
    folder.mkdir()
    (folder / name).symlink_to(elsewhere)
    with pytest.raises(ShiplapError, match="SL602"):
        survey(corner, tmp_path / "out.laz", model, folder=folder)
    assert tree(elsewhere) == []


def test_what_the_user_keeps_in_the_folder_stays(corner: Path, model: SurveyModel, tmp_path: Path) -> None:
    """The folder of a survey may be one that was there before: its files are not the survey's to remove."""
    folder = tmp_path / "work"
    (folder / "mine").mkdir(parents=True)
    (folder / "mine" / "notes.txt").write_text("precious")
    survey(corner, folder / "out.laz", model, folder=folder)
    assert sorted(path.name for path in folder.iterdir()) == ["mine", "out.laz"]
    assert (folder / "mine" / "notes.txt").read_text() == "precious"


def test_a_folder_that_everybody_can_write_is_refused(corner: Path, model: SurveyModel, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ShiplapError, match="SL602") as caught:
        survey(corner, tmp_path / "out.laz", model, folder=folder)
    assert "can be written by others" in caught.value.got


def test_the_output_is_not_written_through_a_link_of_its_draft(
    corner: Path, model: SurveyModel, victim: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.laz"
    out.with_name(f".{out.name}.part").symlink_to(victim)
    survey(corner, out, model)
    assert victim.read_text() == "mine"
    assert stat.S_ISREG(out.lstat().st_mode)


def test_an_input_that_is_a_fifo_hangs_nobody(model: SurveyModel, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "in.laz")
    with pytest.raises(ShiplapError, match="SL822"):
        survey(tmp_path / "in.laz", tmp_path / "out.laz", model)


def test_results_of_another_number_of_points_are_none(tmp_path: Path) -> None:
    folder = SurveyFolder(tmp_path)
    folder.write_result((0, 0), np.zeros(9, np.uint8))
    assert folder.read_result((0, 0), 10) is None
    found = folder.read_result((0, 0), 9)
    assert found is not None
    assert found.tolist() == [0] * 9


@pytest.mark.parametrize("change", ["shorter", "longer", "changed", "empty", "none"])
def test_a_segment_whose_table_is_not_the_one_that_was_written_is_none(
    change: str, corner: Path, model: SurveyModel, tmp_path: Path
) -> None:
    job = prepare(corner, tmp_path, model, tile=32).job
    path, known = job.folder.points_path(0), read_segment(job, 0)
    assert known is not None
    assert known[0]["count"].sum() == job.total
    assert (known[1][1] > known[1][0]).all()
    content = path.read_bytes()
    place = len(content) - 40
    changes = {
        "shorter": content[:-1],
        "longer": content + b"0",
        "changed": content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :],
        "empty": b"",
    }
    path.write_bytes(changes[change]) if change in changes else path.unlink()
    assert read_segment(job, 0) is None
