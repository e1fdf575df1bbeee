"""Objects are trusted for what they hold, and not for the module, class or name that they claim."""

import contextlib
import ctypes
import functools
import inspect
import operator
import os
import pathlib
import posixpath
import pydoc
import textwrap
import threading
import time
import types
import weakref
from unittest.mock import MagicMock

import pytest
import torch

from shiplap.sandbox import patched_functions, trusted_objects
from shiplap.sandbox.patched_functions import FunctionSnapshot
from shiplap.sandbox.trusted_objects import (
    is_harmless_value,
    is_trusted_function,
    is_trusted_replacement,
    remember_objects,
)
from shiplap_testing.forked import python

F = torch.nn.functional


pytestmark = pytest.mark.usefixtures("baseline")


def mine(*args, **rest):
    return True


class Claiming:
    """Claims to be an operator of torch by its module and its name."""

    __module__ = "torch._ops"
    __qualname__ = __name__ = "OpOverload"

    def __call__(self, *args):
        return True


class Posing:
    """Says that its class is one of torch."""

    __class__ = property(lambda self: torch._ops.OpOverload)

    def __call__(self, *args):
        return True


class Meta(type):
    """Claims to be no class of a program, and to have no bases."""

    __module__ = "torch"
    __flags__ = property(lambda cls: 0)
    __mro__ = property(lambda cls: (object,))

    def __call__(cls, *args):
        return True


class Holder:
    """Cannot be called, and has a method."""

    method = mine


class Layer(torch.nn.Module):
    def forward(self, x):
        return True


def held(function, *, by):
    """Return a wrapper of torch whose closure holds ``function`` in place of ``by``."""
    wrapper = torch.no_grad()(by)
    for cell in wrapper.__closure__:
        if cell.cell_contents is by:
            cell.cell_contents = function
    return wrapper


def with_code(code):
    function = types.FunctionType(posixpath.join.__code__, vars(posixpath), "join")
    function.__code__ = code
    return function


def with_defaults(**changes):
    function = types.FunctionType(posixpath.join.__code__, vars(posixpath), "join")
    for name, value in changes.items():
        setattr(function, name, value)
    return function


def partial_set_later():
    made = functools.partial(len)
    made.__setstate__((mine, (), {}, None))
    return made


def dispatching():
    """Python's own code, whose table sends tensors elsewhere."""
    made = functools.singledispatch(posixpath.join)
    made.register(torch.Tensor, mine)
    return made


def overload(op, **changes):
    made = torch._ops.OpOverload.__new__(torch._ops.OpOverload)
    vars(made).update(vars(op), **changes)
    return made


@functools.cache
def operator_of_mine():
    library = torch.library.Library("shiplap_trusted_objects", "DEF")
    library.define("mine(Tensor x) -> Tensor")
    return library, torch.ops.shiplap_trusted_objects.mine


ATTACKS = {
    "claimed module": Claiming,
    "claimed module of the class itself": lambda: Claiming,
    "__class__": Posing,
    "metaclass": lambda: Meta("relu", (), {"__module__": "torch"}),
    "instance of a metaclass with __call__": lambda: Meta("relu", (), {})(),
    "class with another __new__": lambda: type("relu", (), {"__module__": "torch", "__new__": mine}),
    "subclass of torch's layer": Layer,
    "partial": lambda: functools.partial(mine),
    "partial that is set later": partial_set_later,
    "partial of a partial": lambda: functools.partial(functools.partial(mine)),
    "partial of a harmless function": lambda: functools.partial(operator.is_, None),
    "method caller": lambda: operator.methodcaller("__class__"),
    "mock of Python": lambda: MagicMock(return_value=True),
    "bound method of a list": lambda: [mine].append,
    "method of an object of Python": lambda: contextlib.nullcontext(True).__enter__,
    "method of Python bound to a class of mine": lambda: types.MethodType(
        contextlib.nullcontext.__enter__, type("C", (), {"enter_result": 0.0})
    ),
    "method of Python bound to another class": lambda: types.MethodType(contextlib.nullcontext.__enter__, pathlib.Path),
    "method of Python bound to a module of mine": lambda: types.MethodType(
        contextlib.nullcontext.__enter__, types.ModuleType("m")
    ),
    "Python's function bound to mine": lambda: types.MethodType(posixpath.join, mine),
    "C function bound to mine": lambda: types.MethodType(len, mine),
    "slot of a function": lambda: mine.__call__,
    "code swapped": lambda: with_code(mine.__code__),
    "code compiled in torch's name": lambda: eval(compile("lambda *a: True", F.__file__, "eval"), vars(F)),
    "code of torch with other globals": lambda: types.FunctionType(posixpath.join.__code__, {"__name__": "posixpath"}),
    "defaults": lambda: with_defaults(__defaults__=(mine,)),
    "keyword defaults": lambda: with_defaults(__kwdefaults__={"of": mine}),
    "a table in the defaults": lambda: with_defaults(__defaults__=({"of": [mine]},)),
    "an attribute of a function": lambda: with_defaults(of=mine),
    "cell of a closure": lambda: held(mine, by=posixpath.join),
    "cell with a method of an object of Python": lambda: held(contextlib.nullcontext(0.0).__enter__, by=posixpath.join),
    "cell with a partial": lambda: held(functools.partial(mine), by=posixpath.join),
    "cell with a cache": lambda: held(functools.lru_cache(mine), by=posixpath.join),
    "cell with a weak reference": lambda: held(weakref.ref(mine), by=posixpath.join),
    "cell with an iterator": lambda: held(map(mine, ()), by=posixpath.join),
    "table of a single dispatch": dispatching,
    "decorator of torch": lambda: torch.no_grad()(mine),
    "wraps": lambda: functools.wraps(torch.relu)(mine),
    "wrapped by Python's own": lambda: functools.wraps(mine)(with_defaults()),
    "cache": lambda: functools.lru_cache(mine),
    "getter": lambda: property(mine),
    "setter": lambda: property(posixpath.join, mine),
    "deleter": lambda: property(posixpath.join, None, mine),
    "cached property": lambda: functools.cached_property(mine),
    "static method": lambda: staticmethod(mine),
    "class method": lambda: classmethod(mine),
    "overload with another function": lambda: overload(torch.ops.aten.mm.default, _op=mine),
    "overload in another place": lambda: overload(torch.ops.aten.mm.default),
    "operator of mine": lambda: operator_of_mine()[1],
    "overload of mine": lambda: operator_of_mine()[1].default,
    "C function of an operator of mine": lambda: operator_of_mine()[1].default._op,
    "scripted function": lambda: torch.jit.script(F.relu),
    "function of ctypes": lambda: ctypes.CFUNCTYPE(None)(mine),
    "compiled": lambda: torch.compile(mine),
    "ignored by scripts": lambda: torch.jit.ignore(mine),
    "nothing": lambda: None,
    "data": lambda: {"relu": 1},
}
HONEST = {
    "C function": lambda: torch.mm,
    "C function of torch.nn": lambda: F.gelu,
    "C function of Python": lambda: len,
    "table of C functions": lambda: torch._C._VariableFunctions.mm,
    "module of C functions": lambda: torch._VF.stft,
    "C method": lambda: torch.Tensor.add,
    "C slot": lambda: torch.Tensor.__add__,
    "C property": lambda: torch.Tensor.__dict__["__cuda_array_interface__"],
    "overload": lambda: torch.ops.aten.mm.default,
    "overload with a name": lambda: torch.ops.aten.add.Tensor,
    "packet of overloads": lambda: torch.ops.aten.add,
    "boolean dispatch": lambda: F.adaptive_max_pool2d,
    "script": lambda: torch.jit.script,
    "ignored by scripts": lambda: torch.jit.ignore(with_defaults()),
    "layer": lambda: torch.nn.Linear,
    "method of a layer": lambda: torch.nn.Linear.forward,
    "method with a decorator": lambda: torch.optim.SGD.step,
    "function with a decorator": lambda: torch.no_grad()(posixpath.join),
    "function that is wrapped": lambda: functools.wraps(F.relu)(F.relu),
    "context of Python": lambda: contextlib.contextmanager(posixpath.join),
    "not compiled": lambda: torch.compiler.disable(with_defaults()),
    "compile": lambda: torch.compile,
    "class of Python": lambda: pathlib.Path,
    "bound to a class": lambda: pathlib.Path.cwd,
    "function with a signature": lambda: inspect.signature,
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_object_is_not_trusted_for_what_it_claims(name):
    assert not is_trusted_function(ATTACKS[name]())


@pytest.mark.parametrize("name", HONEST)
def test_objects_of_torch_and_python_are_trusted(name):
    assert is_trusted_function(HONEST[name]())


def test_a_scripted_function_is_trusted_if_it_was_there_before(monkeypatch):
    monkeypatch.setattr(trusted_objects, "_known", dict(trusted_objects._known))
    scripted = torch.jit.script(F.relu)
    remember_objects([scripted])
    assert is_trusted_function(scripted)


def test_a_c_function_stands_in_place_of_itself_alone():
    assert is_trusted_replacement(torch.relu, torch.relu)
    assert not is_trusted_replacement(torch.relu, torch.abs)
    assert not is_trusted_replacement(torch.Tensor.__add__, torch.Tensor.__sub__)
    assert is_trusted_replacement(posixpath.join, posixpath.split)


@pytest.mark.parametrize("function", [dict.get, functools.partial(operator.is_, None), bool])
def test_a_bound_method_without_a_python_function_is_refused_like_a_partial(function):
    assert not is_trusted_function(types.MethodType(function, {}))


def test_code_of_python_in_a_module_of_mine_calls_functions_of_mine():
    assert not is_trusted_function(types.FunctionType(posixpath.join.__code__, globals()))


def test_a_weak_proxy_does_not_show_its_object():
    kept = Holder()
    assert not is_trusted_function(held(weakref.proxy(kept), by=posixpath.join))
    assert not is_trusted_function(with_defaults(__defaults__=(weakref.proxy(kept),)))


def test_what_takes_too_long_to_visit_is_not_trusted(monkeypatch):
    function = with_defaults(__defaults__=([[] for _ in range(100)],))
    assert is_trusted_function(function)
    monkeypatch.setattr(trusted_objects, "MAX_VISITED", 50)
    assert not is_trusted_function(function)


LATE = """
import importlib, sys, warnings
from shiplap.sandbox import patched_functions
warnings.simplefilter("ignore")
before = dict(sys.modules)
patched_functions.FunctionSnapshot()
names = sys.argv[1:]
for name in names:
    importlib.import_module(name)
new = {name: module for name, module in sys.modules.items() if name not in before}
print(*(name for name, module in new.items() if patched_functions._is_replaced_module(name, module, None)))
"""


def test_modules_of_python_are_no_replacements_where_they_are_imported_late():
    """From Python 3.12 on, the classes of the fields of structures are made while the program runs."""
    late = ["ctypes.wintypes", "pydoc", "wsgiref.util", "sqlite3", "xmlrpc.client", "dbm.dumb", "asyncio"]
    done = python("-c", LATE, *late, "unittest.mock")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_generated_methods_are_harmless_in_a_module_that_is_imported_later():
    import pstats  # imported late: its dataclasses have methods that are in no file

    assert is_harmless_value(pstats.FunctionProfile)
    assert is_harmless_value(functools.singledispatch(posixpath.join))
    assert not is_harmless_value(mine)
    assert not is_harmless_value(torch.no_grad()(mine))
    assert not is_harmless_value(staticmethod(mine))
    assert not is_harmless_value(with_defaults(__defaults__=(mine,), of=mine)), "also if it is an attribute as well"
    assert not is_trusted_function(type("It", (), {"__init__": eval("lambda self: None", {})}))


@pytest.mark.parametrize("part", ["fget", "fset"])
def test_the_code_of_each_function_of_a_property_is_watched(part, baseline, monkeypatch):
    snapshot = FunctionSnapshot(baseline)
    function = getattr(threading.Thread.name, part)
    code = function.__code__
    monkeypatch.setattr(function, "__code__", code.replace(co_consts=(*code.co_consts, "other")))
    assert any("threading.Thread.name" in each for each in snapshot.changed())


def test_a_descriptor_of_mine_under_a_special_name_is_noticed(baseline, monkeypatch):
    class Hiding:
        def __get__(self, owner, kind):
            return mine

    snapshot = FunctionSnapshot(baseline)
    monkeypatch.setattr(torch.nn.Module, "__array__", Hiding(), raising=False)
    assert any("__array__" in each for each in snapshot.changed())


def test_a_class_that_denies_its_module_still_keys_a_table(baseline, monkeypatch):
    import copyreg

    snapshot = FunctionSnapshot(baseline)
    monkeypatch.setattr(torch.nn.Linear, "__module__", "mine")
    monkeypatch.setitem(copyreg.dispatch_table, torch.nn.Linear, mine)
    assert any("dispatch_table" in each for each in snapshot.changed())


def test_a_class_of_a_library_may_hold_a_method_of_an_object_that_it_holds() -> None:
    """Classes of pydoc do, which Liger's kernels import by way of other packages."""

    class Mine(pydoc.HTMLDoc):
        repr = contextlib.nullcontext(0.0).__enter__

    held = trusted_objects._values_held_by_class(pydoc.HTMLDoc)
    assert pydoc.HTMLDoc._repr_instance in (held or [])
    assert not any(type(v) is types.MethodType for v in held or [])
    assert any(type(v) is types.MethodType for v in trusted_objects._values_held_by_class(Mine) or [])


@pytest.mark.parametrize("before", [time.perf_counter, os.path.join, [].append])
def test_a_class_of_python_stands_in_place_of_no_function(before) -> None:
    assert not trusted_objects.is_trusted_replacement(before, float)
    assert trusted_objects.is_trusted_replacement(int, float)


def test_the_file_at_an_address_is_found_without_reading_all_that_is_mapped(monkeypatch) -> None:
    """A process that uses a GPU maps thousands of files and pieces of memory, and looks up hundreds of addresses."""
    rows = [(4096 * n, 4096 * n + 2048, f"/file{n}") for n in range(2000)]
    read, seen = [], []

    class Row(tuple):
        def __getitem__(self, at):
            seen.append(at)
            return super().__getitem__(at)

    monkeypatch.setattr(trusted_objects, "_read_mapped_files", lambda: read.append(1) or [Row(row) for row in rows])
    monkeypatch.setattr(trusted_objects, "_mapped", [])
    found = [trusted_objects._file_at(4096 * n + at) for n in (0, 700, 1999) for at in (0, 2047)]
    assert found == ["/file0"] * 2 + ["/file700"] * 2 + ["/file1999"] * 2
    assert (len(read), len(seen) < 100) == (1, True)
    assert trusted_objects._file_at(2048) == trusted_objects._file_at(4096 * 2000) == ""  # between files, behind all
    assert len(read) == 3, "a file may have been mapped since"


def test_a_snapshot_may_be_extended_by_modules_of_python_alone(baseline, monkeypatch) -> None:
    """Otherwise all that they hold is looked at in each comparison. What a candidate may import itself is left out."""
    import wave

    modules = patched_functions.sys.modules
    monkeypatch.delitem(modules, "wave", raising=False)
    snapshot = FunctionSnapshot(baseline)
    other = types.ModuleType("transformers_of_mine")
    other.__file__, other.load = torch.__file__, wave.open
    monkeypatch.setitem(modules, "wave", wave)
    monkeypatch.setitem(modules, other.__name__, other)
    extended, visited = FunctionSnapshot(snapshot, standard=True), []
    monkeypatch.setattr(patched_functions, "is_harmless_value", lambda value: visited.append(value) or True)
    assert extended.changed() == [] == visited
    assert snapshot.changed() == []
    assert wave.open in visited
    monkeypatch.setattr(wave, "open", mine)
    monkeypatch.setattr(other, "load", mine)
    assert extended.changed() == ["wave.open"]


def test_a_new_snapshot_accepts_all_that_has_changed(baseline: FunctionSnapshot, monkeypatch) -> None:
    """As of modules of the user's own: in a function that stays the same object, too."""
    monkeypatch.setattr(textwrap.dedent, "__code__", (lambda text: text).__code__)
    assert baseline.changed() != []
    accepted = FunctionSnapshot(baseline)
    monkeypatch.setattr(textwrap, "new", 1, raising=False)
    assert accepted.changed() == []
    monkeypatch.setattr(textwrap.dedent, "__code__", (lambda text: text * 2).__code__)
    assert "the code of textwrap.dedent" in accepted.changed()
