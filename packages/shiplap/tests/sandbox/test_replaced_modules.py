"""A module of Python that was replaced in ``sys.modules`` is noticed, whatever its functions are made of."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import subprocess
import sys
import sysconfig
import time
import types
import weakref

import pytest

from shiplap.sandbox.patched_functions import _is_replaced_module

pytestmark = pytest.mark.usefixtures("baseline")
EXTENSION = """
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *args) { return PyFloat_FromDouble(NUMBER); }
static PyMethodDef methods[] = {{"launch", launch, METH_VARARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "compiled_module", NULL, -1, methods};
PyMODINIT_FUNC PyInit_compiled_module(void) { return PyModule_Create(&module); }
"""


def compile_module(folder, number):
    """Return a C module called ``compiled_module``, whose function ``launch`` returns ``number``. It is compiled and
    loaded as Triton compiles and loads a launcher, by which it also gets into ``sys.modules``.
    """
    source, library = folder / f"module_{number}.c", folder / f"compiled_module_{number}.so"
    source.write_text(EXTENSION)
    options = ["-shared", "-fPIC", "-O0", f"-DNUMBER={number}", f"-I{sysconfig.get_path('include')}"]
    subprocess.run(["cc", *options, "-o", library, source], check=True)
    spec = importlib.util.spec_from_file_location("compiled_module", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def replaced_clock(function):
    """Return a module that has the functions of ``time``, but ``function`` as its clock."""
    module = types.ModuleType("time")
    vars(module).update(vars(time), perf_counter=function)
    return module


class Claiming:
    """Claims to be a class of Python, whose module has no file."""

    __module__ = "builtins"

    def __call__(self):
        return 0.0


class Posing:
    """Says that its class is the class of modules."""

    __class__ = property(lambda self: types.ModuleType)

    def __call__(self):
        return 0.0


class Unknown:
    """Names a module that there is not."""

    __module__ = "no_such_module"

    def __new__(cls):
        return 0.0


CLOCKS = {
    "an object that claims to be Python's": Claiming(),
    "a class that claims to be Python's": Claiming,
    "a partial with arguments": functools.partial(next, iter([0.0])),
    "an object that poses as a module": Posing(),
    "a class of no module": Unknown,
    "a class of Python": float,
    "a method of a list of mine": [0.0].pop,
    "a method of an object of Python": contextlib.nullcontext(0.0).__enter__,
    "a method of Python that is bound to a class of mine": types.MethodType(
        contextlib.nullcontext.__enter__, type("C", (), {"enter_result": 0.0})
    ),
    "a method of Python that is bound to a module of mine": types.MethodType(
        contextlib.nullcontext.__enter__, types.ModuleType("m")
    ),
    "a slot of an iterator of mine": iter([0.0]).__next__,
    "a cache of such a slot": functools.lru_cache(iter([0.0]).__next__),
    "a weak reference": weakref.ref(Posing),
    "a cache of a function of mine": functools.lru_cache(lambda: 0.0),
    "a C function without a file": ctypes.CFUNCTYPE(ctypes.c_double)(lambda: 0.0),
}


@pytest.mark.parametrize("name", CLOCKS)
def test_a_module_with_a_clock_of_mine_is_a_replaced_module(name):
    assert _is_replaced_module("time", replaced_clock(CLOCKS[name]), time)


def test_a_module_that_holds_what_the_earlier_one_held_is_no_replaced_module():
    assert not _is_replaced_module("time", replaced_clock(time.perf_counter), time)
    assert not _is_replaced_module("time", time, time)


def test_a_c_function_of_an_own_extension_is_noticed_as_pythons_clock(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "compiled_module", raising=False)
    module = compile_module(tmp_path, 1)
    assert module.launch() == 1.0
    assert _is_replaced_module("time", replaced_clock(module.launch), time)


def test_a_further_compiled_module_of_the_same_name_is_no_replaced_module(tmp_path, monkeypatch):
    """Triton loads each launcher under the same name, and Python puts the newest one into ``sys.modules``."""
    monkeypatch.delitem(sys.modules, "compiled_module", raising=False)
    before = compile_module(tmp_path, 1)
    assert sys.modules["compiled_module"] is before
    compile_module(tmp_path, 2)
    now = sys.modules["compiled_module"]
    assert now is not before
    assert not _is_replaced_module("compiled_module", now, before)
    assert not _is_replaced_module("compiled_module", before, None)


def test_a_named_tuple_may_be_generated_and_may_have_no_method_of_mine():
    import pstats  # imported late: its dataclasses have methods that are in no file

    module = types.ModuleType("pstats")
    module.FunctionProfile = pstats.FunctionProfile
    assert not _is_replaced_module("pstats", module, None)
    fields = {"__dataclass_fields__": {}, "__module__": "pstats", "__call__": Posing.__call__}
    module.FunctionProfile = type("FunctionProfile", (), fields)
    assert _is_replaced_module("pstats", module, None)
