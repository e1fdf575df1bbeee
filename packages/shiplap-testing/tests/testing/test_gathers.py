"""What stands in for torch's functional gathers where torch ends the process gives what torch gives elsewhere."""

from shiplap_testing import ranks


def test_gathers_one_by_one_are_what_torch_gathers():
    same = "equal (same bits)"
    assert ranks.outcomes("tests.testing.rank_gathers") == {"DTensors": same, "several tensors": same}
