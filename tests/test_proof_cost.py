"""What proofs cost a process, as ``benchmarks/proof_cost.py`` measures it: bounded, and kept for the next process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "proof_cost.py"
SECONDS = 45.0  # of CPU time: 3 on the machine of the page, and a machine may be ten times slower


@pytest.mark.long
def test_all_proofs_together_cost_seconds_and_are_kept() -> None:
    output = subprocess.run([sys.executable, SCRIPT, "--json"], capture_output=True, text=True, check=True).stdout
    results = json.loads(output)
    cold, cached = results["cold"], results["cached"]
    assert cold["faults"] == cached["faults"] == []
    assert sum(cold["seconds"].values()) < SECONDS
    assert len(cold["kept"]) == len(cold["seconds"])
    assert cached["kept"] == cold["kept"]
