"""Whether an object, with all that it holds, is code of Python, torch or an installed package.

An object can claim any class, module and name. So functions are trusted by their code, C functions by the file that
their address lies in, and everything else by what it holds in memory. Only :func:`_is_generated_class` reads the module
that a class names.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import os
import re
import sys
import types
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from gc import get_referents  # bound now, since the candidate may replace ``gc.get_referents`` later
from os.path import realpath  # bound now as well
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

from shiplap.sandbox.proc_filesystem import read_memory_map
from shiplap.sandbox.trusted_code import (
    OURS,
    forget_files,
    function_code,
    is_genuine_code,
    is_installed_module,
    is_trusted_file,
    is_trusted_module,
)
from shiplap.torch_private.process_state import (
    makes_context,
    operator_place,
    registered_operators,
    torch_operator_types,
)

MAX_HELD_DEPTH = 4  # levels of functions in functions of a module that is imported later
MAX_VISITED = 5000  # objects that are visited for one value
HEAP_TYPE_FLAG = 1 << 9  # flag of a class that was made while the program ran
IMMUTABLE_TYPE_FLAG = 1 << 8  # flag of a class that no Python code can have made or can change
PLAIN_TYPES = frozenset({type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented), range})
CONTAINERS = frozenset({list, tuple, set, frozenset, dict, types.MappingProxyType, types.CellType})
# Parts of classes that were written in C.
C_DESCRIPTORS = frozenset(
    {
        types.WrapperDescriptorType,
        types.MethodDescriptorType,
        types.ClassMethodDescriptorType,
        types.GetSetDescriptorType,
        types.MemberDescriptorType,
    }
)
# Classes in C whose objects can be called, and show everything that they call to the garbage collector.
C_CALLABLES = frozenset(
    {
        functools.partial,
        type(functools.lru_cache(len)),
        operator.itemgetter,
        operator.attrgetter,
        operator.methodcaller,
        types.GenericAlias,
        types.MethodType,
        types.MethodWrapperType,
        staticmethod,
        weakref.ref,
    }
)
PYTHON_CALLERS = frozenset({functools.partial, type(functools.lru_cache(len))})  # if they hold a Python function
GENERATED = frozenset({"__dataclass_fields__", "_fields"})  # attributes of classes with methods that Python generates
REMEMBERED = (BuiltinFunctionType, type, ModuleType, torch.jit.ScriptFunction)  # classes of what is remembered
C_METHODS = frozenset({types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType})
CALLED_BY_OPERATORS = ("_op", "_op_dk", "_cpp_dispatch_handle")  # attributes of objects in ``torch.ops``
# Kinds of values by which a part of Python or torch replaces a function. An object of another class that can be called
# may return anything that it holds.
CALLED_TYPES = (FunctionType, types.MethodType, BuiltinFunctionType)
FUNCTION_TYPES = (*CALLED_TYPES, type, *torch_operator_types())
WEAK_PROXIES = weakref.ProxyTypes
OPAQUE_BINDINGS = ("PyCapsule", "pybind11")  # names of classes that hide a C++ function

# A metaclass can replace these attributes of its classes.
_namespace_of, _flags_of, _bases_of, _order_of = (
    type.__dict__[f"__{name}__"].__get__ for name in ("dict", "flags", "bases", "mro")
)
_address_of: Callable[[Any], int | None] = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(
    ("PyCFunction_GetFunction", ctypes.pythonapi)
)
_known: dict[int, Any] = {}  # C functions, classes, modules and scripts that were there before any code under test
_known_operators: set[str] = set()  # names of the operators that were registered by then
_mapped: list[tuple[int, int, str]] = []  # by address
_first_address = operator.itemgetter(0)
LEN_ADDRESS = _address_of(len) or 0  # in the file of Python itself


def remember_objects(values: Iterable[Any]) -> None:
    """Remember the C functions, classes, modules and scripted functions among ``values``, which were there before any
    code under test, and the registered operators.

    They count as trusted from then on. Only objects of trusted modules may be passed, before the code under test is
    loaded. The first call also remembers the classes of C modules that no module shows, such as those of which the
    fields of structures in ``ctypes`` are.
    """
    if not _known:
        _known.update((id(c), c) for c in _classes_of_c_modules())
    _known.update((id(v), v) for v in values if issubclass(type(v), REMEMBERED))
    _known_operators.update(registered_operators())


def _classes_of_c_modules() -> Iterator[type]:
    """Yield the classes that C modules have made while the program ran and that cannot be changed."""
    waiting: list[type] = [object]
    seen = {id(object)}
    while waiting:
        for cls in list[type](type.__subclasses__(waiting.pop())):
            if id(cls) not in seen:
                seen.add(id(cls))
                waiting.append(cls)
                if _flags_of(cls) & HEAP_TYPE_FLAG and _flags_of(cls) & IMMUTABLE_TYPE_FLAG:
                    yield cls


def forget_observations() -> None:
    """Clear the caches of the code objects that were read from files, and of the files that are mapped. The code under
    test runs in this process and could have changed these caches.
    """
    forget_files()
    _mapped.clear()


def is_trusted_function(value: Any) -> bool:
    """Return whether a value that replaces a function of Python or torch is itself a function, class or callable object
    of Python, torch or an installed package.

    This occurs when further parts of Python or torch are imported. Everything that ``value`` holds, such as its
    defaults and its closure, must be trusted as well, so a trusted decorator around another function does not count.
    Return False for other objects that can be called, such as a ``partial`` or a bound method whose function is not a
    Python function, since what they return is in what they hold. Return False for a value that is neither callable nor
    a descriptor.
    """
    kind = type(value)
    if kind is types.MethodType and type(value.__func__) is not FunctionType:
        return False
    is_function = issubclass(kind, FUNCTION_TYPES) or kind in C_DESCRIPTORS or _is_known(value)
    is_descriptor = not callable(value) and has_method(kind, "__get__")
    return (is_function or is_descriptor or kind is staticmethod) and _holds_only_trusted(value)


def is_invoked(value: Any) -> bool:
    """Return whether an attribute with the value ``value`` runs code when it is called or looked up."""
    return callable(value) or has_method(type(value), "__get__")


def is_trusted_replacement(before: Any, now: Any) -> bool:
    """Return whether ``now`` may stand in place of ``before``, a function or descriptor of Python or torch.

    A C function may not stand in place of another function, since no C function is defined anew when further parts of
    Python or torch are imported. A class may not stand in place of a function: ``float`` is a clock that stands still.
    """
    is_c = issubclass(type(now), BuiltinFunctionType) or type(now) in C_DESCRIPTORS
    return now is before or (not is_c and not is_class_for_function(before, now) and is_trusted_function(now))


def is_class_for_function(before: Any, now: Any) -> bool:
    """Return whether ``before`` is a function or a method and ``now`` a class."""
    return issubclass(type(before), CALLED_TYPES) and issubclass(type(now), type)


def is_harmless_value(value: Any, depth: int = MAX_HELD_DEPTH) -> bool:
    """Return whether a value of a module that was imported later is not callable, or is code of Python, torch or an
    installed package.

    Of a Python function, the code, the defaults and the closure must be trusted, and so on through ``depth`` levels of
    functions. A function that is held deeper is not trusted. The attributes of a function do not count. Any other
    callable object must hold only trusted objects, and must not return data that it holds. A class may also be a
    dataclass or a named tuple, see :func:`_is_generated_class`.
    """
    kind = type(value)  # ``isinstance`` would read the attribute ``__class__``, which a class can define
    if issubclass(kind, (FunctionType, types.MethodType, staticmethod, classmethod)):
        function = value if issubclass(kind, FunctionType) else value.__func__
        held = _values_held_by_function(function) if depth > 0 and type(function) is FunctionType else None
        if held is None:
            return False
        own = held[: len(held) - len(function.__dict__)]  # without its attributes, which come last
        contents = [cell_content(v) if type(v) is types.CellType else v for v in own]
        return all(is_harmless_value(v, depth - 1) for v in contents)
    if not callable(value) or (issubclass(kind, type) and _is_generated_class(value)):
        return True
    return not _may_return_data(value) and _holds_only_trusted(value)


def _may_return_data(value: Any) -> bool:
    """Return whether a call of ``value``, a callable object that is no Python function, may return data that it holds.
    An example is the method ``pop`` of a list. Such an object can return anything, although all its code is trusted.
    """
    kind = type(value)
    if _is_known(value) or (kind not in C_CALLABLES and not issubclass(kind, BuiltinFunctionType)):
        return False
    if issubclass(kind, BuiltinFunctionType):
        if value.__name__ == "__contains__":  # returns whether it holds the argument
            return False
        return value.__self__ is not None and not issubclass(type(value.__self__), (ModuleType, type, re.Pattern))
    # A Python function decides itself what it does with the arguments that a partial holds.
    calls_python = kind in PYTHON_CALLERS and any(type(v) is FunctionType for v in get_referents(value))
    return kind is not types.GenericAlias and not calls_python


def _is_generated_class(cls: type) -> bool:
    """Return whether ``cls`` is a dataclass or a named tuple of a trusted module, or derived from one. Methods that
    Python generates for such a class are in no file, so those that were compiled from a string are accepted.

    **Warning:** This is no proof. A class can name any module, and any method can be compiled from a string.
    """
    classes = _order_of(cls)
    is_generated = any(_namespace_of(c).keys() & GENERATED for c in classes)
    return is_generated and all(_has_file_or_generated_methods(c) or _holds_only_trusted(c) for c in classes)


def _has_file_or_generated_methods(cls: type) -> bool:
    """Return whether ``cls`` names a trusted module that has a file, and each of its own methods was compiled from a
    string or is code of a trusted file.
    """
    codes = [c for c in map(function_code, _namespace_of(cls).values()) if c]
    return is_trusted_module(cls) and all(c.co_filename == "<string>" or is_genuine_code(c) for c in codes)


def cell_content(cell: types.CellType) -> Any:
    """Return the value in a cell of a closure, or None if nothing is assigned to it yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _is_known(value: Any) -> bool:
    """Return whether ``value`` was remembered before any code under test."""
    return id(value) in _known  # which keeps each object, so that no other one gets its id


def is_bound_to_code(method: types.MethodType) -> bool:
    """Return whether ``method`` is a method of a class or module of trusted code, and bound to it, or is bound to an
    object that was remembered.

    Code under test can make an object of any class of a library, and a method of such an object may return what it
    holds, as ``nullcontext(0.0).__enter__`` does. So may the same function that is bound to a class or module of code
    under test. The method by which a decorator of torch makes its context for each call does not.
    """
    own, kind = method.__self__, type(method.__self__)
    if issubclass(kind, (type, ModuleType)):
        return (_is_known(own) or _is_class_of_installed_module(own)) and _is_own_method(method)
    return _is_known(own) or (_is_known(kind) and makes_context(method))


def _is_class_of_installed_module(value: Any) -> bool:
    """Return whether ``value`` is a class in the module of a file of Python, torch or an installed package."""
    if not issubclass(type(value), type):
        return False
    module = sys.modules.get(str(_namespace_of(value).get("__module__")))
    installed = is_installed_module(module) and "__file__" in vars(module)
    return installed and any(each is value for each in vars(module).values())


def _is_own_method(method: types.MethodType) -> bool:
    """Return whether ``method``, which is bound to a class or module, is a class method of it or a method of its class,
    and not a function that was bound to it from elsewhere.
    """
    own, kind, function = method.__self__, type(method.__self__), method.__func__
    classes = _order_of(own) if issubclass(kind, type) else ()
    methods = [v.__func__ for c in classes for v in _namespace_of(c).values() if type(v) is classmethod]
    methods += [v for c in _order_of(kind) for v in _namespace_of(c).values()]
    return any(each is function for each in methods)


def _holds_only_trusted(value: Any) -> bool:
    """Return whether ``value`` and all objects that it holds, directly or through others, are data or trusted code.
    Return False if more than ``MAX_VISITED`` objects would have to be visited.
    """
    waiting, seen = [value], dict[int, Any]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        held = _values_held_by(each) if len(seen) < MAX_VISITED else None
        if held is None:
            return False
        seen[id(each)] = each  # kept, so that no other object gets its id
        waiting += held
    return True


def _values_held_by(value: Any) -> Iterable[Any] | None:
    """Return the objects that must be trusted for ``value`` to be trusted, or None if it is not trusted anyhow."""
    kind = type(value)
    if kind in PLAIN_TYPES or _is_known(value):
        return ()
    if kind is FunctionType:
        return _values_held_by_function(value)
    if issubclass(kind, type):
        return _values_held_by_class(value)
    if issubclass(kind, BuiltinFunctionType):
        return _values_held_by_c_function(value)
    if issubclass(kind, ModuleType):
        own = [v for v in vars(value).values() if type(v) is FunctionType]
        return [*own, *([] if kind is ModuleType else [kind])] if is_installed_module(value) else None
    if kind is CodeType:
        return () if is_genuine_code(value) else None
    if kind in C_DESCRIPTORS:
        return (value.__objclass__,)
    if kind is types.MethodType:
        return (value.__func__, value.__self__) if is_bound_to_code(value) else None
    if (operator_place(value) or None) in _known_operators:
        return _values_held_by_operator(value)
    if kind in CONTAINERS:
        return get_referents(value)
    return _values_held_by_object(value, kind)


def _values_held_by_operator(operator: Any) -> list[Any] | None:
    """Return the class and the attributes of an object at its place in ``torch.ops``, without the C functions that it
    calls and without other such objects. Return None if it calls another function in the place of these C functions.
    """
    own = dict(vars(operator))
    called = [own.pop(name) for name in CALLED_BY_OPERATORS if name in own]
    held = [v for v in own.values() if type(v) not in torch_operator_types()]
    return [type(operator), *held] if all(map(_is_trusted_c_function, called)) else None


def _values_held_by_function(function: FunctionType) -> list[Any] | None:
    """Return the defaults, the cells of the closure and, last, the attributes of a function. Return None if its code is
    not genuine, or if its globals are not those of an imported module of Python, torch, an installed package or
    Shiplap, since it would then call other functions.
    """
    name, file = function.__globals__.get("__name__"), function.__globals__.get("__file__")
    module = sys.modules.get(name) if type(name) is str else None
    if module is None or vars(module) is not function.__globals__ or not is_genuine_code(function.__code__):
        return None
    is_theirs = type(file) is str and (is_trusted_file(file) or realpath(file).startswith(OURS))
    if not is_theirs and not _is_known(module):
        return None
    held: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [*held, *(function.__closure__ or ()), *function.__dict__.values()]


def _values_held_by_class(cls: type) -> list[Any] | None:
    """Return the metaclass, the bases, and the functions and descriptors in a class. Return None if the class was
    written in C and is not part of a trusted file.
    """
    own = _namespace_of(cls)
    if not _flags_of(cls) & HEAP_TYPE_FLAG:
        return [] if _lies_in_trusted_file(id(cls)) else None
    if any(type(v) in C_METHODS and v.__objclass__ is cls for v in own.values()):
        module = sys.modules.get(str(own.get("__module__")))
        return [] if is_installed_module(module) and any(v is cls for v in vars(module).values()) else None
    runs = [v for v in own.values() if is_invoked(v)]
    parts = (part for v in runs for part in ((v.__func__, v.__self__) if _is_method_of_attribute(v, cls) else (v,)))
    return [type(cls), *_bases_of(cls), *parts]


def _is_method_of_attribute(value: Any, cls: type) -> bool:
    """Return whether ``value`` is a method of an object that is an attribute of ``cls``, a class in a file of a
    library, as those of ``pydoc`` have them. The class of the object must have the method itself.
    """
    if type(value) is not types.MethodType or not _is_class_of_installed_module(cls):
        return False
    return any(each is value.__self__ for each in _namespace_of(cls).values()) and _is_own_method(value)


def _values_held_by_c_function(function: Any) -> tuple[Any, ...] | None:
    """Return the object to which a C function is bound, if any. Return None if its code is not in a trusted file, or if
    it calls something that cannot be looked at, as a function of pybind11 does.
    """
    if not _is_trusted_c_function(function):
        return None
    bound = function.__self__
    if bound is None or issubclass(type(bound), ModuleType):
        return ()
    return None if type(bound).__name__.startswith(OPAQUE_BINDINGS) else (bound,)


def _is_trusted_c_function(function: Any) -> bool:
    """Return whether a value is a C function whose code is in a trusted file."""
    return issubclass(type(function), BuiltinFunctionType) and _lies_in_trusted_file(_address_of(function) or 0)


def _values_held_by_object(value: Any, kind: type) -> list[Any] | None:
    """Return the class and all that the object ``value`` of the class ``kind`` shows to the garbage collector. Return
    None if it is a weak proxy, which does not show its object, or if it can be called and its class does not show
    everything that it calls.
    """
    if kind in WEAK_PROXIES:
        return None
    if callable(value):
        owner = next(c for c in _order_of(kind) if "__call__" in _namespace_of(c))
        if type(_namespace_of(owner)["__call__"]) is not FunctionType and owner not in C_CALLABLES:
            return None
    target = [weakref.ref.__call__(value)] if issubclass(kind, weakref.ref) else []
    return [kind, *get_referents(value), *target]


def has_method(kind: type, name: str) -> bool:
    """Return whether a class or one of its bases defines ``name``."""
    return any(name in _namespace_of(c) for c in _order_of(kind))


def _lies_in_trusted_file(address: int) -> bool:
    """Return whether an address lies in the memory of a mapped file of Python, torch or an installed package."""
    file = _file_at(address)
    return bool(file) and (file == _file_at(LEN_ADDRESS) or is_trusted_file(file))


def _file_at(address: int) -> str:
    """Return the file whose mapping contains an address of this process, or an empty string if there is none."""
    for fresh in (False, True):
        if fresh or not _mapped:
            _mapped[:] = _read_mapped_files()
        at = bisect_right(_mapped, address, key=_first_address) - 1  # a process that uses a GPU maps thousands
        if at >= 0 and address < _mapped[at][1]:
            return _mapped[at][2]
    return ""


def _read_mapped_files() -> list[tuple[int, int, str]]:
    """Return the first address, the end and the path of each file that is mapped in this process, by address."""
    rows = []
    for line in read_memory_map("/proc/self"):
        span, _, _, _, _, *path = line.split(maxsplit=5)
        if path and path[0].startswith(os.sep):
            first, last = span.split("-")
            rows.append((int(first, 16), int(last, 16), path[0]))
    return rows
