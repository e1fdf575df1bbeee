"""The kernels that a network of spconv's layers compiles ahead are the ones that it proves."""

import json
import os
from pathlib import Path

import pytest

from shiplap_testing.forked import interpreted

pytest.importorskip("triton")


@pytest.mark.long
def test_each_kind_of_layer_is_compiled_ahead_and_proven_once(tmp_path):
    """Another text of a kernel than that of the proof would be compiled in vain."""
    script = Path(__file__).with_name("ahead_case.py")
    done = interpreted(script, env={**os.environ, "SHIPLAP_CACHE_DIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert set(told["ahead"]) == set(told["proven"])
    assert len(told["proven"]) == len(set(told["proven"])) == 5
    assert len(told["chosen"]) == 7
    assert all(name.startswith("conv(") for name in told["chosen"])
    assert told["error"] < 1e-6
