"""What stands in for torch where torch fails for tensors of a GPU does what torch does with those of the CPU."""

from shiplap_testing import ranks


def test_what_goes_through_the_host_arrives():
    same = "equal (same bits)"
    wanted = {"DTensors": same, "several tensors": same, "messages": same, "a pipeline": "equal (1e-6)"}
    assert ranks.outcomes("tests.testing.rank_through_host") == wanted
