"""The scan is the one whose provenance is written down, and it is split by area."""

from __future__ import annotations

import io
from importlib.resources import files

import numpy as np
import torch

from shiplap_sparse3d.demo.scan import HELD_OUT, Scan, split

DATA = files("shiplap_sparse3d.demo") / "data"


def test_points_are_metres_from_the_minimum(scan: Scan) -> None:
    assert len(scan) == 110_000
    assert (scan.xyz.dtype, tuple(scan.xyz.shape)) == (torch.float32, (110_000, 3))
    assert scan.xyz.amin(0).tolist() == [0, 0, 0]
    extent = scan.xyz.amax(0).tolist()
    assert 350 < extent[0] < 370  # in feet it would be 1,180
    assert 160 < extent[1] < 180
    assert 20 < extent[2] < 60


def test_labels_are_the_packed_ones(scan: Scan) -> None:
    packed = np.load(io.BytesIO((DATA / "autzen_ground_csf.npy").read_bytes()))
    assert (packed.dtype, len(packed)) == (np.uint8, 110_000 // 8)
    assert int(scan.ground.sum()) == int(np.unpackbits(packed).sum()) == 58_835
    assert scan.ground.dtype == torch.bool


def test_labels_fit_their_points(scan: Scan) -> None:
    """In another order the labels would know nothing of the height."""
    above = scan.xyz[:, 2]
    assert float(above[scan.ground].median()) < float(above[~scan.ground].median()) + 10
    crowns = above > 20
    assert float(scan.ground[crowns].float().mean()) < 0.01


def test_provenance_and_licence_come_with_the_data() -> None:
    text = (DATA / "README.md").read_text()
    for fact in ("110,000", "58,835", "cloth-simulation-filter", "laspy", "packbits"):
        assert fact in text
    assert "Redistribution and use" in (DATA / "LICENSE-laspy.txt").read_text()


def test_held_out_are_the_30_percent_with_the_largest_x(scan: Scan, held: torch.Tensor) -> None:
    assert abs(float(held.float().mean()) - HELD_OUT) < 1e-4
    x = scan.xyz[:, 0]
    assert float(x[held].min()) > float(x[~held].max())  # a line lies between the two areas
    assert int(held.sum()) + len(scan.take(~held)) == len(scan)


def test_the_split_knows_positions_only(scan: Scan, held: torch.Tensor) -> None:
    assert torch.equal(split(Scan(scan.xyz, ~scan.ground)), held)


def test_take_keeps_points_and_labels_together(scan: Scan) -> None:
    rows = torch.tensor([5, 3, 100_000])
    part = scan.take(rows)
    assert torch.equal(part.xyz, scan.xyz[rows])
    assert torch.equal(part.ground, scan.ground[rows])
