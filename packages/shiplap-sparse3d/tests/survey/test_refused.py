"""What a survey cannot process, or cannot write, is told as such: nothing is left of it, and no process ends."""

from __future__ import annotations

import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shiplap import ShiplapError
from shiplap_sparse3d.survey import SurveyModel, survey
from tests.survey.models import VOXEL, UNet, shifted

laspy = pytest.importorskip("laspy")
pytest.importorskip("lazrs")


def with_table_at(content: bytes, place: int) -> bytes:
    """A LAZ file whose chunk table is said to be elsewhere."""
    first = struct.unpack_from("<I", content, 96)[0]
    return content[:first] + struct.pack("<q", place) + content[first + 8 :]


def with_chunks(content: bytes, count: int) -> bytes:
    """A LAZ file whose chunk table says ``count`` chunks: lazrs ended the process for want of 69 GB."""
    table = struct.unpack_from("<q", content, struct.unpack_from("<I", content, 96)[0])[0]
    return content[: table + 4] + struct.pack("<I", count) + content[table + 8 :]


def damaged(kind: str, corner: Path, folder: Path) -> Path:
    content, path = corner.read_bytes(), folder / "in.laz"
    if kind.startswith("las"):
        path = folder / "in.las"
        laspy.read(corner).write(path)
        content = path.read_bytes()
    if kind == "no points":
        las = laspy.read(corner)
        las.points = las.points[:0]
        las.write(path)
        return path
    parts = {
        "empty": b"",
        "short": content[:100],
        "foreign": b"\x89PNG\r\n" * 1000,
        "truncated": content[: len(content) // 2],
        "end cut off": content[:-20],
        "las truncated": content[: len(content) // 2],
        "las odd": content[:-5],
        "header alone": content[:400],
        "many chunks": with_chunks(content, 2**32 - 1),
        "table nowhere": with_table_at(content, 1 << 60),
    }
    path.write_bytes(parts[kind])
    return path


@pytest.mark.parametrize(
    "kind",
    [
        "empty",
        "short",
        "foreign",
        "truncated",
        "end cut off",
        "las truncated",
        "las odd",
        "header alone",
        "no points",
        "many chunks",
        "table nowhere",
    ],
)
def test_files_that_cannot_be_read(kind: str, corner: Path, model: SurveyModel, tmp_path: Path) -> None:
    path = damaged(kind, corner, tmp_path)
    with pytest.raises(ShiplapError, match="SL822") as caught:
        survey(path, tmp_path / "out.laz", model)
    assert str(path) in caught.value.where
    assert not (tmp_path / "out.laz").exists()


@pytest.mark.parametrize("scale", [0.0, float("nan"), float("inf")])
def test_a_scale_that_gives_no_coordinates(scale: float, corner: Path, model: SurveyModel, tmp_path: Path) -> None:
    path = tmp_path / "in.las"
    laspy.read(corner).write(path)
    content = bytearray(path.read_bytes())
    struct.pack_into("<d", content, 131, scale)
    path.write_bytes(content)
    with pytest.raises(ShiplapError, match="SL822") as caught:
        survey(path, tmp_path / "out.laz", model)
    assert caught.value.where == str(path)
    assert not (tmp_path / "out.laz").exists()


def test_a_missing_file(model: SurveyModel, tmp_path: Path) -> None:
    with pytest.raises(ShiplapError, match="SL822"):
        survey(tmp_path / "none.laz", tmp_path / "out.laz", model)


@pytest.mark.parametrize("target", ["in.txt", "nowhere/out.laz", "in.laz", "folder.laz"])
def test_targets_that_cannot_be_written(target: str, corner: Path, model: SurveyModel, tmp_path: Path) -> None:
    source = tmp_path / "in.laz"
    source.write_bytes(corner.read_bytes())
    (tmp_path / "folder.laz").mkdir()
    with pytest.raises(ShiplapError, match="SL602"):
        survey(source, tmp_path / target, model)
    assert source.read_bytes() == corner.read_bytes()


def test_models_that_cannot_be_used(corner: Path, model: SurveyModel, tmp_path: Path) -> None:
    out = tmp_path / "out.laz"
    torch.manual_seed(0)
    changes: list[dict[str, Any]] = [
        {"classes": (1, 2)},
        {"classes": (1, 2, 40)},
        {"features": shifted},
        {"features": shifted, "net": UNet(8, 4, 1, 3)},
        {"features": lambda points: points.xyz[:1]},
    ]
    for change in changes:
        with pytest.raises(ShiplapError, match="SL825"):
            survey(corner, out, replace(model, **change))
        assert list(tmp_path.iterdir()) == [], "a folder of the wrong model would refuse the right one"
    for wrong in ({"net": 3}, {"voxel": (1, 2)}, {"voxel": (1, 0, 1)}, {"classes": ()}, {"classes": (300,)}):
        with pytest.raises(ShiplapError, match="SL825"):
            SurveyModel(**{"net": model.net, "voxel": VOXEL, "classes": (1, 2, 5), **wrong})


@pytest.mark.parametrize(
    "wrong",
    [
        {"tile": 32.0},
        {"tile": "32"},
        {"halo": None, "tile": (32, 32)},
        {"origin": (0, 0.5)},
        {"segment": 0},
        {"segment": 2.5},
        {"workers": "2"},
        {"workers": 0},
        {"device": "nowhere"},
        {"device": 3.5},
    ],
    ids=str,
)
def test_arguments_of_another_kind(wrong: dict[str, Any], corner: Path, model: SurveyModel, tmp_path: Path) -> None:
    """Each is an error of ours, before anything is written."""
    with pytest.raises(ShiplapError):
        survey(corner, tmp_path / "out.laz", model, **wrong)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", [None, 3, "net"])
def test_a_model_of_another_kind(what: Any, corner: Path, model: SurveyModel, tmp_path: Path) -> None:
    with pytest.raises(ShiplapError, match="SL825"):
        survey(corner, tmp_path / "out.laz", model.net if what == "net" else what)
    assert list(tmp_path.iterdir()) == []


def test_an_input_that_was_damaged_and_is_whole_now(corner: Path, model: SurveyModel, tmp_path: Path) -> None:
    """Nothing of the damaged one is left, which would make the whole one the input of another survey."""
    source, out = tmp_path / "in.laz", tmp_path / "out.laz"
    source.write_bytes(corner.read_bytes()[: corner.stat().st_size // 2])
    with pytest.raises(ShiplapError, match="SL822"):
        survey(source, out, model, segment=10_000)
    assert [path.name for path in tmp_path.iterdir()] == ["in.laz"]
    source.write_bytes(corner.read_bytes())
    assert survey(source, out, model, segment=10_000).tiles > 0


def test_an_input_that_changes_while_a_survey_is_stopped(corner: Path, model: SurveyModel, tmp_path: Path) -> None:
    """Its head and its size stay, as when a program writes other coordinates into a file."""
    source, folder = tmp_path / "in.las", tmp_path / "kept"
    las = laspy.read(corner)
    las.write(source)
    survey(source, tmp_path / "out.laz", model, folder=folder, keep=True)
    before = source.stat()
    with source.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(ShiplapError, match="SL823"):
        survey(source, tmp_path / "out.laz", model, folder=folder, keep=True)


def test_a_folder_of_the_output_that_cannot_be_written(
    corner: Path, model: SurveyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before the work, also if the survey's own folder is elsewhere."""
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and real(path, mode))
    with pytest.raises(ShiplapError, match="SL602"):
        survey(corner, tmp_path / "out.laz", model, folder=tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


def test_features_that_are_not_finite(corner: Path, model: SurveyModel, tmp_path: Path) -> None:
    nan = replace(model, features=lambda points: torch.full((len(points), 5), torch.nan))
    with pytest.raises(ShiplapError, match="SL825") as caught:
        survey(corner, tmp_path / "out.laz", nan)
    assert caught.value.got == "values that are not finite"


@pytest.mark.parametrize("count", [1, 2000])
def test_points_at_one_place(count: int, model: SurveyModel, tmp_path: Path) -> None:
    import numpy as np

    las = laspy.create(point_format=1, file_version="1.2")
    las.header.scales = np.full(3, 0.01)
    las.x = las.y = las.z = np.full(count, 7.0)
    las.write(tmp_path / "in.las")
    result = survey(tmp_path / "in.las", tmp_path / "out.las", model)
    assert (result.points, result.tiles) == (count, 1)
    assert set(laspy.read(tmp_path / "out.las").classification) <= {1, 2, 5}
