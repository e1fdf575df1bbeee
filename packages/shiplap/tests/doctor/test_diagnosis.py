"""The words of an entry of the diagnosis."""

from __future__ import annotations

import pytest

from shiplap.doctor import Recompile
from shiplap.doctor.diagnosis import SourcePlace


@pytest.mark.parametrize(
    ("values", "limit", "rest"),
    [
        ((), False, ""),
        (("2", "3"), False, "; values 2, 3"),
        (("2", "3"), True, "; values 2, 3; torch has stopped compiling it"),
    ],
)
def test_the_effect_of_a_recompile_in_words(values: tuple[str, ...], limit: bool, rest: str) -> None:
    place = SourcePlace("program.py", 3, "f")
    r = Recompile(place, "size", "x", values, guard="", fix="", times=3, seconds=1.5, limit=limit)
    assert r.effect == f"3x, 1.50 s of compilation{rest}"
