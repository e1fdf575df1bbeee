"""What docs/many-devices.md says of a user's ops on several ranks, done by two of them."""

from __future__ import annotations

import pytest

from shiplap_testing import ranks
from shiplap_testing.places import PLACES

EXPECTED = ranks.table("your op")
MODES = (
    "DDP",
    *(f"DDP, {way}" for way in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "compiled")),
    *(f"FSDP2, {way}" for way in ("root", "each stage", "bfloat16 policy", "compiled")),
    *(f"checkpoint, {way}" for way in ("reentrant", "non-reentrant", "selective")),
)
LONG = ("FSDP2, compiled",)


@pytest.fixture(scope="module", params=PLACES)
def reported(request) -> dict[str, str]:
    return ranks.outcomes("tests.sharding.rank_cells", kind=request.param)


@pytest.mark.parametrize("name", [name for name in EXPECTED if name not in LONG])
def test_two_ranks_do_what_the_page_says(name, reported):
    assert reported.get(name, ranks.NO_SUCH_CELL) == EXPECTED[name]


@pytest.mark.long
@pytest.mark.parametrize("kind", PLACES)
def test_two_ranks_do_what_the_page_says_for_longer(kind):
    assert ranks.outcomes("tests.sharding.rank_cells", *LONG, kind=kind) == {name: EXPECTED[name] for name in LONG}


def test_no_combination_is_left_open():
    """Modes of training times kinds of modules: each is tested in each column, and equal or refused."""
    rows = (*MODES, "checkpoint in FSDP2", "tensor parallel", "pipeline")
    for column in ("sparse3d", "slidesparse", "your op"):
        outcomes = ranks.table(column)
        assert [
            (name, outcomes.get(name)) for name in rows if not outcomes.get(name, "").startswith(("equal", "refused"))
        ] == []


def test_every_combination_is_on_the_page(reported):
    assert reported
    assert set(reported) <= set(EXPECTED)


@pytest.mark.long
def test_an_output_that_may_be_absent_is_none_on_every_rank():
    reported = ranks.outcomes("tests.sharding.rank_optional")
    assert reported.pop("DTensor") == "refused (SL217)"
    assert len(reported) == 8
    assert set(reported.values()) == {"equal (1e-12)"}
