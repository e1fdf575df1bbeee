"""A seeded sample of what ``nox -s fuzz`` does for longer: mutated tables, records, metadata and marks."""

from __future__ import annotations

import os

import pytest
from tests.fuzz.fuzzer import SHARES

from shiplap_testing.forked import WITH_VERBS, python

ROUNDS = int(os.environ.get("SHIPLAP_TEST_FUZZ", "2000"))


# One process reads all kinds in turn, since each process would import all readers.
PROGRAM = """
import sys
from pathlib import Path
from tests.fuzz.fuzzer import SHARES, main
for kind, share in SHARES.items():
    status = main(kind, int(sys.argv[1]) * share // 100, int(sys.argv[2]), Path(sys.argv[3]))
    print(f"{kind} ends with {status}", flush=True)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the process prints that reads mutated files of each kind."""
    seed = os.environ.get("SHIPLAP_TEST_SEED", "17")
    done = python("-c", PROGRAM, ROUNDS, seed, tmp_path_factory.mktemp("fuzz"), timeout=36000, imported=WITH_VERBS)
    return f"{done.stdout}{done.stderr}"


@pytest.mark.parametrize("kind", SHARES)
def test_a_mutated_file_is_read_or_refused_in_time(kind: str, told: str) -> None:
    lines = told.splitlines()
    assert f"{kind} ends with 0" in lines, told[-4000:]
    assert any(line.startswith(f"{kind}: {ROUNDS * SHARES[kind] // 100} rounds") for line in lines), told[-4000:]
