"""What ``make install`` compiles for the tests."""

from shiplap_testing.paths import REPOSITORY
from shiplap_testing.prebuild import BODIES, DEVICE


def test_the_tests_whose_code_is_compiled_in_advance_are_there() -> None:
    assert [name for name in (DEVICE, *BODIES) if not (REPOSITORY / name).exists()] == []
