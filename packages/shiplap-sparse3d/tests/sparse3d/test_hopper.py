"""Resources of compiled kernels, without the GPU that they are for: nothing spills, everything fits."""

import json

import pytest

from shiplap_testing.effort import EFFORTS
from shiplap_testing.forked import WITH_FAMILIES, python

pytest.importorskip("triton")
SHARED = 232_448  # bytes of shared memory that a program may have there
REGISTERS = 255


@pytest.mark.parametrize("effort", EFFORTS)
def test_the_configs_that_run_first_fit_and_do_not_spill(effort):
    """In full precision the tile of half precision kept 23 kB a thread in memory, and was right."""
    done = python("-m", "tests.sparse3d.hopper_conv", effort, imported=WITH_FAMILIES)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == (7 if effort == "every" else 3)
    assert "BULK=True" in rows[-1][-1]["config"]
    for row in rows:
        *_, resources = row
        assert resources["stack"] == 0, row
        assert resources["shared"] <= SHARED, row
        assert 16 < resources["registers"] <= REGISTERS, row
