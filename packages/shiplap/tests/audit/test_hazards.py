"""The table of CUDA-graph hazards in docs/audit.md: 22 rows, each with a check that exists and an op that it flags."""

from __future__ import annotations

import re

import pytest

from shiplap.audit import CHECKS
from shiplap_testing.paths import REPOSITORY
from shiplap_testing.zoo import bad, boundary, gpu, stateful

PAGE = (REPOSITORY / "docs" / "audit.md").read_text()
TABLE = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)
ZOO = {s.name: s for s in (*bad.SPECIMENS, *stateful.SPECIMENS, *boundary.SPECIMENS, *gpu.BAD)}


def test_all_22_are_there():
    assert [int(number) for number, *_ in TABLE] == list(range(1, 23))


@pytest.mark.parametrize(("number", "hazard", "checks", "specimens"), TABLE, ids=[row[0] for row in TABLE])
def test_a_hazard_has_a_check_and_a_bad_op(number, hazard, checks, specimens):
    named = set(re.findall(r"`(\w+)`", checks)) & set(CHECKS)
    assert named, f"{hazard}: no check"
    if "does not reproduce" in checks:  # then the op is among the sound ones, where a GPU run proves it again
        pytest.importorskip("triton", reason="the zoo has no op of Triton without it")
        assert set(specimens.split("; ")) <= {s.name for s in gpu.GOOD}
        return
    listed = [ZOO[name] for name in specimens.split("; ")]  # KeyError: the page names an op that is not there
    assert named & {check for s in listed for check in s.flagged_by}, f"{hazard}: no op of it is flagged by its checks"


def test_every_check_has_a_section():
    """In the reference, which is written from the checks; the explanation has sections of checks that exist."""
    reference = (REPOSITORY / "docs" / "checks.md").read_text()
    assert [name for name in re.findall(r"^## (\w+)$", reference, re.MULTILINE) if name in CHECKS] == list(CHECKS)
    explained = PAGE.partition("\n## Checks\n")[2].partition("\n## ")[0]
    sections = re.findall(r"^### (\w+)$", explained, re.MULTILINE)
    assert set(sections) <= {*CHECKS, "sanitizer"}
    assert len(sections) >= 25
