"""A seeded sample of what ``nox -s fuzz`` does for longer: mutated tables, records, metadata and marks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.fuzz.fuzzer import SHARES

from shiplap_testing.forked import python

ROUNDS = int(os.environ.get("SHIPLAP_TEST_FUZZ", "4000"))


@pytest.mark.parametrize("kind", SHARES)
def test_a_mutated_file_is_read_or_refused_in_time(kind, tmp_path):
    rounds, seed = ROUNDS * SHARES[kind] // 100, os.environ.get("SHIPLAP_TEST_SEED", "17")
    done = python(Path(__file__).with_name("fuzzer.py"), kind, rounds, seed, tmp_path, timeout=36000)
    assert done.returncode == 0, f"{done.stdout[-2000:]} {done.stderr[-2000:]}"
    assert f"{rounds} rounds" in done.stdout
