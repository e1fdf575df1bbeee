"""What a survey cannot process, or cannot write, is told as such: nothing is left of it, and no process ends."""

from __future__ import annotations

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
