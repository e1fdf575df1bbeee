"""The packaged scan, a small corner of it, and a network for both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shiplap_sparse3d.demo
from shiplap_sparse3d.survey import SurveyModel

SCAN = Path(shiplap_sparse3d.demo.__file__).parent / "data" / "autzen_trim.laz"


@pytest.fixture(scope="session")
def scan() -> Path:
    """110,000 points in feet; 1,180 wide and 560 deep."""
    for name in ("laspy", "lazrs"):
        pytest.importorskip(name)
    return SCAN


@pytest.fixture(scope="session")
def corner(scan: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The points of the scan with x in the first 200 feet, 19,301 of them, with fields that must survive."""
    import laspy

    las = laspy.read(scan)
    las.points = las.points[las.x < las.x.min() + 200]
    las.user_data[:] = range_of(len(las), 256)
    path = tmp_path_factory.mktemp("corner") / "corner.laz"
    las.write(path)
    return path


@pytest.fixture(scope="module")
def model() -> SurveyModel:
    from tests.survey.models import build

    return build()


def range_of(count: int, limit: int) -> Any:
    import numpy as np

    return np.arange(count) % limit


def classes_of(path: Path) -> Any:
    """The classification of each point."""
    import laspy
    import numpy as np

    return np.asarray(laspy.read(path).classification)
