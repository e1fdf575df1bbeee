"""The benchmark of the host between launches runs where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.long
SCRIPT = Path(__file__).parents[4] / "benchmarks" / "sparse3d_host.py"


def test_every_case_is_timed_and_launches():
    done = subprocess.run([sys.executable, SCRIPT, "--rounds", "1"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cells = json.loads(done.stdout.splitlines()[0])
    launches = {name: cell["launches"] for name, cell in cells.items() if isinstance(cell, dict)}
    assert launches == {
        "map": 2,
        "subm_plan": 2,
        "forward": 2,
        "train": 6,
        "conv_plan + conv": 5,
        "out_coords_bounded": 4,
    }
