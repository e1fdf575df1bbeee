"""The scan is the one whose provenance is written down, and it is split by area."""

from __future__ import annotations

import hashlib
import io
from importlib.resources import files

import numpy as np
import pytest
import torch

from shiplap_sparse3d.demo.scan import HELD_OUT, Scan, held_out_mask

laspy = pytest.importorskip("laspy")
DATA = files("shiplap_sparse3d.demo") / "data"


def test_points_are_the_last_returns_in_metres_from_the_minimum(scan: Scan) -> None:
    assert len(scan) == 93_728
    assert (scan.xyz.dtype, tuple(scan.xyz.shape)) == (torch.float32, (93_728, 3))
    assert scan.xyz.amin(0).tolist() == [0, 0, 0]
    extent = scan.xyz.amax(0).tolist()
    assert 102 < extent[0] < 104
    assert 105 < extent[1] < 107
    assert 91 < extent[2] < 93  # torch and pedestal


def test_labels_are_those_of_the_survey(scan: Scan) -> None:
    las = laspy.read(io.BytesIO((DATA / "liberty.laz").read_bytes()))
    assert int(scan.ground.sum()) == int((np.asarray(las.classification) == 2).sum()) == 11_551
    assert scan.ground.dtype == torch.bool


def test_labels_fit_their_points(scan: Scan) -> None:
    """In another order the labels would know nothing of the fort, whose terraces are no ground."""
    above = scan.xyz[:, 2]
    assert float(above[scan.ground].quantile(0.95)) + 5 < float(above[~scan.ground].median())
    assert float(scan.ground[above > 15].float().mean()) < 0.01


def test_provenance_and_licence_come_with_the_data() -> None:
    text = (DATA / "README.md").read_text()
    digest = hashlib.sha256((DATA / "liberty.laz").read_bytes()).hexdigest()
    for fact in ("98,976", "11,551", "NY_NewYorkCity", "Public domain", "laspy", digest):
        assert fact in text
    assert "Redistribution and use" in (DATA / "LICENSE-laspy.txt").read_text()


def test_held_out_are_the_30_percent_with_the_largest_x(scan: Scan, held: torch.Tensor) -> None:
    assert abs(float(held.float().mean()) - HELD_OUT) < 1e-3  # positions are whole centimetres: some are equal
    x = scan.xyz[:, 0]
    assert float(x[held].min()) > float(x[~held].max())  # a line lies between the two areas
    assert int(held.sum()) + len(scan.take(~held)) == len(scan)


def test_the_split_knows_positions_only(scan: Scan, held: torch.Tensor) -> None:
    assert torch.equal(held_out_mask(Scan(scan.xyz, ~scan.ground)), held)


def test_take_keeps_points_and_labels_together(scan: Scan) -> None:
    rows = torch.tensor([5, 3, 90_000])
    part = scan.take(rows)
    assert torch.equal(part.xyz, scan.xyz[rows])
    assert torch.equal(part.ground, scan.ground[rows])
