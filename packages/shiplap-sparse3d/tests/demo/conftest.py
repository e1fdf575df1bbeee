"""The scan, read once, and the packages without which there is no demonstration."""

from __future__ import annotations

import pytest
import torch

from shiplap_sparse3d.demo.scan import Scan

NEEDED = "laspy", "lazrs", "matplotlib"


@pytest.fixture(scope="session")
def scan() -> Scan:
    for name in NEEDED:
        pytest.importorskip(name)
    from shiplap_sparse3d.demo.scan import load

    return load()


@pytest.fixture(scope="session")
def held(scan: Scan) -> torch.Tensor:
    from shiplap_sparse3d.demo.scan import split

    return split(scan)


@pytest.fixture(scope="session")
def training(scan: Scan, held: torch.Tensor) -> Scan:
    return scan.take(~held)
