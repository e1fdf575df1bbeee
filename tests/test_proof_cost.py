"""Proofs are kept for the next process, as ``benchmarks/proof_cost.py`` measures it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "proof_cost.py"


@pytest.mark.long
def test_all_proofs_are_right_and_kept() -> None:
    output = subprocess.run([sys.executable, SCRIPT, "--json"], capture_output=True, text=True, check=True).stdout
    results = json.loads(output)
    cold, cached = results["cold"], results["cached"]
    assert cold["faults"] == cached["faults"] == []
    assert len(cold["kept"]) == len(cold["seconds"])
    assert cached["kept"] == cold["kept"]
