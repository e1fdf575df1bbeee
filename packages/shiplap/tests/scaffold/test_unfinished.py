"""A draft with lines to fill in can be imported, and raises where it is called."""

import pytest

from shiplap.errors import ShiplapError
from shiplap.scaffold import unfinished


@unfinished("lib::scaled", requires=("n > 0",))
def scaled(x):
    """Return the scaled tensor."""


def test_a_draft_takes_all_that_a_declaration_is_given() -> None:
    def function() -> None: ...

    assert (scaled.name, scaled.__doc__, scaled.__module__) == ("lib::scaled", "Return the scaled tensor.", __name__)
    assert scaled.kernel("cpu", function) is function
    assert scaled.kernel("cpu")(function) is function
    assert scaled.backward(function) is function
    assert scaled.backward(saves=())(function) is function
    assert scaled.samples(function) is function


def test_a_call_of_a_draft_says_that_it_is_not_finished() -> None:
    with pytest.raises(ShiplapError, match=r"SL113(.|\n)*lib::scaled"):
        scaled(1)
