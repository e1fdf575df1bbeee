"""Wrong calls of every op of the families, a seeded sample of what ``nox -s hostile`` does for longer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.projects import FAMILIES

from shiplap_testing.forked import python

ROUNDS = os.environ.get("SHIPLAP_TEST_HOSTILE", "4")


@pytest.mark.parametrize("module", sorted(module for _, module in FAMILIES.values()))
def test_no_wrong_call_of_an_op_ends_or_hangs_the_process(module):
    done = python(Path(__file__).with_name("hostile.py"), module, ROUNDS, 17, timeout=36000)
    last = done.stdout.splitlines()[-1:]
    assert done.returncode == 0, f"{last} {done.stderr[-2000:]}"
