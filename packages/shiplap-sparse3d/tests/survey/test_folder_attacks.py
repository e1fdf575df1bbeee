"""Attacks through the folder of a survey, its checkpoint and its input: what somebody else put there before."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shiplap import ShiplapError
from shiplap_sparse3d.survey import SurveyModel, survey
from shiplap_sparse3d.survey.buckets import Buckets, _marked_buckets
from shiplap_sparse3d.survey.folder import RESULT, SurveyFolder, read_mark, write_mark
from shiplap_sparse3d.survey.train import _load_checkpoint

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


@pytest.mark.parametrize("name", ["worker0.lock", "points/0_0.bin", "classes.bin", "survey.json", "done/0_0.json"])
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


@pytest.mark.parametrize("name", ["points", "classes", "done"])
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


ROWS = {
    "beyond the end": [(0, 1), (99, 1)],
    "before the start": [(-5, 1), (0, 1)],
    "not ascending": [(3, 1), (1, 1)],
    "twice": [(1, 1), (1, 1)],
    "far apart": [(0, 1), (2**62, 1)],
}


@pytest.mark.parametrize("name", ROWS)
def test_results_of_points_that_are_not_of_the_survey_are_refused(name: str, tmp_path: Path) -> None:
    folder = SurveyFolder(tmp_path)
    folder.write_result((0, 0), np.array(ROWS[name], RESULT))
    with pytest.raises(ShiplapError, match="SL824"):
        folder.read_result((0, 0), 10)
    assert read_mark(folder.done_mark_path((0, 0))) is None


def test_results_that_break_off_within_a_row_are_refused(tmp_path: Path) -> None:
    import hashlib

    folder, content = SurveyFolder(tmp_path), b"1234567"
    folder.result_path((0, 0)).parent.mkdir()
    folder.result_path((0, 0)).write_bytes(content)
    write_mark(folder.done_mark_path((0, 0)), {"points": 1, "sha256": hashlib.sha256(content).hexdigest()})
    with pytest.raises(ShiplapError, match="SL824"):
        folder.read_result((0, 0), 10)


RIGHT: dict[str, Any] = {"points": 3, "sizes": {"0_0": 3}, "low": [0, 0, 0], "high": [1, 1, 1]}
WRONG: dict[str, Any] = {
    "points": ["3", -1, None, 2.5, True],
    "sizes": [{"0_0": "3"}, {"0_0": -3}, {"x_y": 3}, {"": 3}, {"0_0": 1e3}, [3], None],
    "low": [[0, 0], ["a", 0, 0], None, 5],
    "high": [[1, 1, 1, 1], [None, 1, 1], {}],
}


@pytest.mark.parametrize("field", WRONG)
def test_a_mark_of_another_form_counts_as_none(field: str, tmp_path: Path) -> None:
    folder = SurveyFolder(tmp_path)
    folder.progress.write_text(json.dumps(RIGHT))
    assert _marked_buckets(folder) == Buckets(3, {(0, 0): 3}, [0, 0, 0], [1, 1, 1])
    for value in WRONG[field]:
        folder.progress.write_text(json.dumps({**RIGHT, field: value}))
        assert _marked_buckets(folder) is None, value


class Evil:
    """Runs a program when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch hacked",)


def test_a_checkpoint_runs_no_code_and_a_fifo_waits_for_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    net, path = nn.Linear(2, 2), tmp_path / "checkpoint.pt"
    optimizer = torch.optim.AdamW(net.parameters())
    torch.save({"net": Evil(), "optimizer": {}, "epoch": 1}, path)
    with pytest.raises(ShiplapError, match="SL823"):
        _load_checkpoint(path, net, optimizer)
    assert not (tmp_path / "hacked").exists()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ShiplapError, match="SL823"):
        _load_checkpoint(path, net, optimizer)
