"""The catalogue: an id stands for one failure, whoever declares it; errors survive a process boundary."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest

from shiplap.errors import CATALOGUE, KernelError, ShiplapError, error, register
from shiplap.errors.base import _entries


class FamilyError(ShiplapError, RuntimeError):
    """What a family of kernels declares for itself."""


@pytest.fixture(scope="module", autouse=True)
def _family() -> Iterator[None]:
    register(FamilyError, [("ZZ101", "the scene is empty", "There is nothing to convolve.", "leave the scene out")])
    yield
    # Other tests of this process look at every entry.
    del _entries["ZZ101"]


def test_a_family_adds_entries_of_its_own() -> None:
    raised = error("ZZ101", where="family::conv", got="0 voxels")
    assert isinstance(raised, FamilyError)
    assert str(raised) == (
        "ZZ101: the scene is empty\n  where    family::conv\n  got      0 voxels\n  fix      leave the scene out"
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [("SL301", "other", "Why.", "fix")],
            "error id SL301 is taken: 'an output does not fit the declaration', a KernelError",
        ),
        (
            [("ZZ102", "one", "Why.", "fix"), ("ZZ101", "other", "Why.", "fix")],
            "error id ZZ101 is taken: 'the scene is empty'",
        ),
        ([("ZZ103", "one", "Why.", "fix"), ("ZZ103", "two", "Why.", "fix")], "error id ZZ103 is taken: 'one'"),
    ],
    ids=["of the core", "of another family", "twice in one list"],
)
def test_an_id_is_given_once(rows: list[tuple[str, str, str, str]], message: str) -> None:
    before = dict(CATALOGUE)
    with pytest.raises(ValueError, match=message):
        register(KernelError, rows)
    assert dict(CATALOGUE) == before


def test_nobody_else_writes_to_the_catalogue() -> None:
    with pytest.raises(TypeError):
        CATALOGUE["ZZ104"] = CATALOGUE["SL301"]  # type: ignore[index] # what it refuses


def test_an_error_survives_a_pickle() -> None:
    before = error("ZZ101", where="family::conv", got="0 voxels")
    after = pickle.loads(pickle.dumps(before))
    assert (type(after), str(after), after.got) == (FamilyError, str(before), "0 voxels")
