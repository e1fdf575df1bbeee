"""A tile is cut out of its neighbours the same way by the host, block by block, and by the device of the network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shiplap import ShiplapError
from shiplap_sparse3d.survey import Points, point_features, prepare, tasks
from shiplap_sparse3d.survey.tasks import POINT, SurveyJob, TileQuestion, point_numbers, question_of, read_points
from tests.survey.models import build


def heights(points: Points) -> torch.Tensor:
    """Features of the user, who may look around."""
    return torch.cat([point_features(points)[:, :4], points.xyz[:, 2:].float()], 1)


def equal(one: TileQuestion, other: TileQuestion) -> bool:
    tensors = ("own", "cells", "feats", "wanted")
    return one.grid == other.grid and all(torch.equal(getattr(one, n), getattr(other, n)) for n in tensors)


@pytest.mark.parametrize("context", [0.0, 13.0])
def test_all_at_once_is_as_part_by_part(
    context: float, corner: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = prepare(corner, tmp_path / "tiles", replace(build(), context=context, features=heights), tile=20).job
    sizes, real = list[int](), tasks.read_points

    def reading(folder: Any, slices: Any, **options: Any) -> torch.Tensor:
        rows = real(folder, slices, **options)
        sizes.append(len(rows))
        return rows

    monkeypatch.setattr(tasks, "read_points", reading)
    for tile in job.tiles[:4]:
        parts = []
        for bits in (6, 30):
            monkeypatch.setattr(tasks, "_PART", {"cpu": bits})
            sizes.clear()
            parts.append(question_of(job, [tile], torch.device("cpu")))
            read = list(sizes)
        assert len(read) == 1
        assert read[0] > len(parts[0].cells) > len(parts[0].own) > 0
        assert equal(*parts)
        assert len(parts[0].cells) == len(parts[0].feats)
        assert bool((point_numbers(parts[0].own).diff() > 0).all())


def test_slices_that_follow_each_other_are_read_as_those_apart(corner: Path, tmp_path: Path) -> None:
    job = prepare(corner, tmp_path / "tiles", build(), tile=20).job
    order = np.random.default_rng(0).permutation(len(job.slices))
    one_by_one = [read_points(job.folder, job.slices[n : n + 1]) for n in order]
    assert torch.equal(read_points(job.folder, job.slices[order]), torch.cat(one_by_one))
    inverse = np.argsort(order)
    together = read_points(job.folder, job.slices)
    assert torch.equal(together, torch.cat([one_by_one[n] for n in inverse]))


def test_a_point_is_read_as_it_was_written(corner: Path, tmp_path: Path) -> None:
    import laspy

    job = prepare(corner, tmp_path / "tiles", build(), tile=20).job
    rows = np.fromfile(job.folder.points_path(0), POINT, 500)
    las = laspy.read(corner)[rows["index"]]
    assert np.array_equal(rows["code"], las.classification)
    rows["intensity"][:2] = 65535, 32768  # above what a signed number of 16 bits holds
    seen = torch.from_numpy(rows.view(np.int32).reshape(-1, 6))
    points = tasks.points_of(job, seen)
    assert np.array_equal(point_numbers(seen).numpy(), rows["index"])
    assert np.array_equal(points.xyz.numpy(), np.stack([las.x, las.y, las.z], 1))
    assert np.array_equal(points.intensity.numpy(), rows["intensity"])
    for name in ("return_number", "number_of_returns"):
        assert np.array_equal(getattr(points, name).numpy(), las[name]), name


@pytest.mark.parametrize("left", [None, -24, 24])
def test_sorted_points_that_became_fewer(left: int | None, corner: Path, tmp_path: Path) -> None:
    job = prepare(corner, tmp_path / "tiles", build(), tile=20).job
    path = job.folder.points_path(0)
    kept = path.read_bytes()[: job.total * 24][:left]
    path.write_bytes(kept) if left else path.unlink()
    with pytest.raises(ShiplapError, match="SL824: the sorted points are damaged"):
        read_points(job.folder, job.slices)
    assert not path.exists()


def test_cells_are_those_of_whole_rows(corner: Path, tmp_path: Path) -> None:
    """Axis by axis, the coordinates and cells are those of the formula, to the bit."""
    raw = np.random.default_rng(0).integers(-(2**31), 2**31 - 1, (1000, 3), dtype=np.int32)
    job = prepare(corner, tmp_path / "tiles", replace(build(), voxel=(0.3, 1.7, 2.0))).job
    job = replace(job, scales=(0.01, 0.001, 0.1), offsets=(637_000.1, -4_800_000.7, 3.3))
    xyz = raw * np.array(job.scales) + np.array(job.offsets)
    rows = torch.from_numpy(np.pad(raw, ((0, 0), (2, 1))))
    assert np.array_equal(job.coordinates(rows).t().numpy(), xyz)
    assert np.array_equal(job.cells(rows).t().numpy(), np.floor(xyz / np.array(job.model.voxel)))
    assert job.cells(rows[:0]).shape == (3, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_asks_what_the_host_asks(corner: Path, tmp_path: Path) -> None:
    """Cells and order to the bit; features of a GPU may differ in the last one."""
    job: SurveyJob = prepare(corner, tmp_path / "tiles", build(), tile=20).job
    for tile in job.tiles:
        host, asked = (question_of(job, [tile], torch.device(name)) for name in ("cpu", "cuda"))
        assert asked.cells.is_cuda
        for name in ("own", "cells", "wanted"):
            assert torch.equal(getattr(asked, name).cpu(), getattr(host, name)), name
        torch.testing.assert_close(asked.feats.cpu(), host.feats)
