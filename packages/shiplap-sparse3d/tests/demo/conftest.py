"""The scan, read once, a part of it, and the packages without which there is no demonstration."""

from __future__ import annotations

import pytest
import torch

from shiplap_sparse3d.demo.scan import Scan

NEEDED = "laspy", "lazrs", "matplotlib"


@pytest.fixture(scope="session")
def scan() -> Scan:
    for name in NEEDED:
        pytest.importorskip(name)
    from shiplap_sparse3d.demo.read import load_shipped_scan

    return load_shipped_scan()


@pytest.fixture(scope="session")
def held(scan: Scan) -> torch.Tensor:
    from shiplap_sparse3d.demo.scan import held_out_mask

    return held_out_mask(scan)


@pytest.fixture(scope="session")
def training(scan: Scan, held: torch.Tensor) -> Scan:
    return scan.take(~held)


@pytest.fixture(scope="session")
def part(scan: Scan, held: torch.Tensor) -> Scan:
    """The points of 28 m along the scan and 20 m across it: describing a tenth of the points takes a tenth as long."""
    border, centre = scan.xyz[held, 0].min(), scan.xyz[:, 1].median()
    along, across = (scan.xyz[:, 0] - border).abs() < 14, (scan.xyz[:, 1] - centre).abs() < 10
    return scan.take(along & across)


@pytest.fixture(scope="session")
def part_held(part: Scan) -> torch.Tensor:
    from shiplap_sparse3d.demo.scan import held_out_mask

    return held_out_mask(part)
