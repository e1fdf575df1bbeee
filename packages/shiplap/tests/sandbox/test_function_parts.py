"""Parts of functions that anybody may exchange."""

import functools
import os
from types import ModuleType

from shiplap.sandbox.patched_functions import FunctionParts, _FunctionOwner, _OwnerBlock


def kept(a, b=1, *, c=2):
    return a, b, c


def wrapped():
    inner = os.path.join

    def outer():
        nonlocal inner
        return inner

    return outer


def exchange(table, one, other):
    """Exchange two names of a table, whose values stay as they are, in their order. A second time undoes it."""
    items = [({one: other, other: one}.get(name, name), value) for name, value in table.items()]
    table.clear()
    for name, value in items:
        table[name] = value


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


def test_modules_and_classes_are_compared_together(monkeypatch):
    """A block of them is intact until any part of any of them is another object."""

    first, second = (type(name, (), {}) for name in ("First", "Second"))

    class Scaled(first):
        by = 2

        def times(self, value, by=2):
            return value * by

    module = ModuleType("scaling")
    vars(module).update(kept=kept, outer=wrapped(), table={"kept": kept})
    block = _OwnerBlock([_FunctionOwner.of(each.__name__, each) for each in (module, Scaled)])
    assert block.intact
    for change in (
        lambda: monkeypatch.setattr(module, "outer", kept),
        lambda: monkeypatch.setattr(module, "new", 1, raising=False),
        lambda: monkeypatch.delattr(module, "table"),
        lambda: monkeypatch.setitem(module.table, "kept", wrapped),
        lambda: monkeypatch.setitem(module.table, "other", kept),
        lambda: monkeypatch.setattr(module, "__class__", type("Other", (ModuleType,), {})),
        lambda: monkeypatch.setattr(module.outer.__closure__[0], "cell_contents", os.path.split),
        lambda: monkeypatch.setattr(kept, "__defaults__", (3,)),
        lambda: monkeypatch.setitem(kept.__kwdefaults__, "c", 3),
        lambda: monkeypatch.setattr(kept, "__kwdefaults__", dict(kept.__kwdefaults__)),
        lambda: monkeypatch.setattr(Scaled.times, "__code__", (lambda self, value, by=2: by).__code__),
        lambda: monkeypatch.setattr(Scaled, "by", 3),
    ):
        change()
        assert not block.intact
        monkeypatch.undo()
        assert block.intact
    for table, other in ((vars(module), "outer"), (module.table, "moved")):
        exchange(table, "kept", other)
        assert not block.intact
        exchange(table, "kept", other)
        assert block.intact
    Scaled.__bases__ = (second,)
    assert not block.intact


def test_functions_that_change_their_names_are_replaced():
    module = ModuleType("scaling")
    vars(module).update(kept=kept, outer=wrapped(), table={"kept": kept, "join": os.path.join})
    owner = _FunctionOwner.of("scaling", module)
    exchange(module.table, "kept", "join")
    assert owner.changed() == ["scaling.table[join]"]
    exchange(module.table, "kept", "join")
    assert not owner.changed()
    exchange(vars(module), "kept", "outer")
    assert owner.changed() == ["scaling.kept", "scaling.outer"]


def test_an_empty_cell_is_a_change():
    outer = wrapped()
    module = ModuleType("holding")
    module.outer = outer
    block = _OwnerBlock([_FunctionOwner.of("holding", module)])
    del outer.__closure__[0].cell_contents
    assert not block.intact
