"""Parts of functions that anybody may exchange."""

import functools
import os

from shiplap.sandbox.patched_functions import FunctionParts, PlainFunctions


def kept(a, b=1, *, c=2):
    return a, b, c


def wrapped():
    inner = os.path.join

    def outer():
        nonlocal inner
        return inner

    return outer


def test_a_default_and_a_keyword_are_parts(monkeypatch):
    parts = FunctionParts.of(kept)
    assert not parts.changed_part()
    monkeypatch.setattr(kept, "__defaults__", (1,))
    assert not parts.changed_part(), "the same value in another tuple"
    monkeypatch.setattr(kept, "__defaults__", (7,))
    assert parts.changed_part()
    monkeypatch.undo()
    assert not parts.changed_part()
    monkeypatch.setitem(kept.__kwdefaults__, "c", 7)
    assert parts.changed_part()
    monkeypatch.undo()
    monkeypatch.setattr(kept, "__code__", (lambda a, b=1, *, c=2: b).__code__)
    assert parts.changed_part()


def test_what_a_function_holds_is_a_part():
    outer = wrapped()
    parts = FunctionParts.of(outer)
    (cell,) = outer.__closure__
    cell.cell_contents = os.path.split
    assert not parts.changed_part(), "Python's own"
    cell.cell_contents = lambda *names: ""
    assert parts.changed_part()
    assert not FunctionParts.of(functools.lru_cache(kept).__wrapped__).changed_part()


def test_functions_of_code_and_defaults_are_compared_together(monkeypatch):
    def scaled(value, by=2):
        return value * by

    plain = PlainFunctions.of([FunctionParts.of(each) for each in (scaled, kept, wrapped(), os.path.join)])
    assert plain.functions == (scaled, os.path.join), "the others have a keyword or hold a function"
    assert plain.intact
    monkeypatch.setattr(scaled, "__defaults__", (3,))
    assert not plain.intact
    monkeypatch.undo()
    assert plain.intact
    monkeypatch.setattr(scaled, "__code__", (lambda value, by=2: by).__code__)
    assert not plain.intact
