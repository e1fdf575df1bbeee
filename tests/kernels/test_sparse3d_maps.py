"""Triton kernels of tables, sorted tables and strided coordinates, interpreted on the CPU beside the references."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_interpreted_kernels_agree_with_the_references_and_tell_what_was_wrong():
    root, script = Path(__file__).parents[2], Path(__file__).with_name("maps_interpreted.py")
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, str(script), str(random.randrange(2**31))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.stdout.endswith("agree\n"), f"{command}\n{done.stdout}{done.stderr}"
