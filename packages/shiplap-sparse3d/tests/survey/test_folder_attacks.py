"""Attacks through the folder of a survey, and its input: what somebody else put there before."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shiplap import ShiplapError
from shiplap_sparse3d.survey import SurveyModel, survey
from shiplap_sparse3d.survey.folder import SurveyFolder, read_mark, write_mark
from shiplap_sparse3d.survey.sorting import read_segment

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


@pytest.mark.parametrize("name", ["survey.lock", "points/0.bin", "classes/0_0.bin", "survey.json", "done/0_0.json"])
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


@pytest.mark.parametrize("name", ["points", "sorted", "classes", "done"])
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


def test_results_of_another_number_of_points_are_refused(tmp_path: Path) -> None:
    folder = SurveyFolder(tmp_path)
    folder.write_result((0, 0), np.zeros(9, np.uint8))
    assert folder.has_result((0, 0), 9)
    with pytest.raises(ShiplapError, match="SL824"):
        folder.read_result((0, 0), 10)
    assert read_mark(folder.done_mark_path((0, 0))) is None


RIGHT: dict[str, Any] = {"tiles": [[0, 0, 3, 7]], "low": [0, 0, 0], "high": [1, 1, 1]}
WRONG: dict[str, Any] = {
    "tiles": [
        [[0, 0, "3", 7]],
        [[0, 0, -3, 7], [0, 1, 6, 7]],
        [[0, 0, 2, 7]],
        [[0, 0, 3]],
        [[0, 0, 3.0, 7]],
        [[0, 0, True, 7]],
        [[2**40, 0, 3, 7]],
        [[0, 0, 2**70, 7]],
        [3],
        [],
        7,
        None,
        {"0_0": 3},
    ],
    "low": [[0, 0], ["a", 0, 0], None, 5, [2**70, 0, 0]],
    "high": [[1, 1, 1, 1], [None, 1, 1], {}],
}


@pytest.mark.parametrize("field", WRONG)
def test_a_mark_of_another_form_counts_as_none(field: str, tmp_path: Path) -> None:
    folder = SurveyFolder(tmp_path)
    for path in (folder.points_path(0), folder.sorted_mark_path(0)):
        path.parent.mkdir()
    folder.points_path(0).write_bytes(b"0" * 72)
    write_mark(folder.sorted_mark_path(0), RIGHT)
    known = read_segment(folder, 0, 3)
    assert known is not None
    assert (known.tiles.tolist(), known.low, known.high) == ([[0, 0, 3, 7]], [0, 0, 0], [1, 1, 1])
    assert read_segment(folder, 0, 4) is None
    for value in WRONG[field]:
        write_mark(folder.sorted_mark_path(0), {**RIGHT, field: value})
        assert read_segment(folder, 0, 3) is None, value
