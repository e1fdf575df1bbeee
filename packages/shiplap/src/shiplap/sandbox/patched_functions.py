"""Detection of functions of Python, torch or Shiplap that code which is judged has replaced in its process, whole
or in a part: its code, its defaults, and the functions in its closure.
"""

from __future__ import annotations

import builtins
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from copy import copy
from gc import get_referents  # bound now, since the candidate may replace ``gc.get_referents`` later
from itertools import chain, islice
from operator import attrgetter, is_, methodcaller
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any, NamedTuple

import torch

from shiplap.sandbox.trusted_code import function_code, is_genuine_code, is_installed_module, is_trusted_file
from shiplap.sandbox.trusted_objects import (
    HEAP_TYPE_FLAG,
    cell_content,
    forget_observations,
    is_bound_to_code,
    is_class_for_function,
    is_harmless_value,
    is_invoked,
    is_trusted_function,
    is_trusted_replacement,
    remember_objects,
)
from shiplap.torch_private.process_state import (
    altered_overloads,
    operators_of_torch,
    overloads_of_torch,
    replaced_registrations,
)

OURS = "shiplap."
GUARDED_MODULES = (
    "shiplap.sampling.",
    "shiplap.sandbox.",
    "shiplap.torch_private.",
)  # modules of ours in which nothing may change
# Values that such a module keeps unchanged.
GUARDED_VALUES = (ModuleType, frozenset, tuple, str, bytes, float, torch.dtype)
CONSTANTS = (torch.dtype, torch.layout, torch.memory_format, float)
DESCRIPTORS = (property, staticmethod, classmethod)
INHERITED = (*DESCRIPTORS, GetSetDescriptorType, MemberDescriptorType)
MAX_TABLE_ENTRIES = 5000  # entries of the largest table that is compared
PROBED_ENTRIES = 16  # entries of a dictionary that are checked for a function
BLOCK = 64  # modules or classes that are compared at once, as long as nothing in them has changed


class _TrustedModules:
    """A cache that says whether a module, given by name, belongs to Python, torch, an installed package or Shiplap.
    Each name is looked up once.
    """

    def __init__(self) -> None:
        """Start with an empty cache of modules."""
        self._known: dict[str, bool] = {}

    def __call__(self, module: Any) -> bool:
        """Return whether the module called ``module`` belongs to Python, torch, an installed package or Shiplap. The
        result is cached.
        """
        name = module if isinstance(module, str) else ""
        if name not in self._known:
            file = getattr(sys.modules.get(name), "__file__", None)
            self._known[name] = name.startswith(OURS) or (
                isinstance(file, str) and is_trusted_file(os.path.dirname(file))
            )
        return self._known[name]


def _trusted_owners(modules: Mapping[str, Any], known: Set[int]) -> Iterator[tuple[str, Any]]:
    """Yield (name, object) for each trusted module in ``modules`` and for each class defined in one.

    A trusted module belongs to Python, torch, an installed package or Shiplap. The code under test could replace
    attributes of these objects. Objects whose ids are in ``known`` are left out.
    """
    seen, folders, trusted = set(known), dict[str, bool](), _TrustedModules()
    for name, value in (("torch.Tensor", torch.Tensor), ("torch.ops.aten", torch.ops.aten)):
        if id(value) not in seen:
            seen.add(id(value))
            yield name, value
    for name, module in modules.items():
        if type(module) is not ModuleType or name in ("__main__", "__mp_main__") or id(module) in seen:
            continue
        file = vars(module).get("__file__")
        folder = os.path.dirname(file) if isinstance(file, str) else ""
        if folder not in folders:
            folders[folder] = not folder or is_trusted_file(folder)
        if not folders[folder] and not name.startswith(OURS):
            continue
        seen.add(id(module))
        yield name, module
        for value in list(vars(module).values()):
            if issubclass(type(value), type) and id(value) not in seen and value.__flags__ & HEAP_TYPE_FLAG:
                seen.add(id(value))
                if trusted(value.__module__):
                    yield f"{value.__module__}.{value.__qualname__}", value


class _FunctionOwner(NamedTuple):
    """A module or a class as it was at one time, with its name, its class, its bases and its attributes.

    Attributes:
        held: the attributes by name.
        parts: for each attribute that is a function, its code, defaults and closure.
        tables: copies of those attributes that are dicts of functions.
    """

    name: str
    value: Any
    kind: type
    bases: tuple[type, ...]
    held: dict[str, Any]
    parts: dict[str, FunctionParts]
    tables: dict[str, dict[Any, Any]]

    @classmethod
    def of(cls, name: str, value: Any) -> _FunctionOwner:
        """Return a record of the module or class ``value`` under the name ``name``. The record holds its present
        attributes, the parts of its functions, and copies of its dicts of functions.
        """
        held = dict(vars(value))
        is_class = isinstance(value, type)
        parts = {k: FunctionParts.of(v) for k, v in held.items() if type(v) is FunctionType}
        if is_class:
            inner = {k: v for name, of in _list_descriptors(held) for k, v in _functions_of(name, of).items()}
            parts |= {k: FunctionParts.of(v) for k, v in inner.items() if type(v) is FunctionType}
        tables = {} if is_class else {k: dict(v) for k, v in held.items() if type(v) is dict and _is_table(v)}
        return cls(name, value, type(value), value.__bases__ if is_class else (), held, parts, tables)

    @property
    def untouched(self) -> bool:
        """Whether the module or class still has the same attribute objects under the same names in the same order."""
        return _is_same_table(vars(self.value), self.held)

    @property
    def bases_now(self) -> tuple[type, ...]:
        """The present bases of the recorded class. The tuple is empty for a module."""
        return self.value.__bases__ if isinstance(self.value, type) else ()

    def changed(self) -> list[str]:
        """Return descriptions, such as ``torch.nn.functional.relu``, of the attributes of the module or class that were
        replaced since the record was made.

        Replacements by code of Python, torch or an installed package are left out.
        """
        replaced: list[str] = []
        if type(self.value) is not self.kind and not is_trusted_function(type(self.value)):
            replaced.append(f"the class of {self.name}")
        if self.bases_now != self.bases:
            replaced.append(f"the bases of {self.name}")
        parts = self.parts
        if not self.untouched:
            now = dict(vars(self.value))
            other = {k for k, v in self.held.items() if now.get(k) is not v}
            replaced += [f"{self.name}.{k}" for k in self.held if k in other and self._is_lost(k, now.get(k))]
            replaced += [f"{self.name}.{k}" for k in now.keys() - self.held.keys() if self._hides(k, now[k])]
            parts = {k: p for k, p in parts.items() if k not in other}
        replaced += [f"{part} of {self.name}.{k}" for k, p in parts.items() if (part := p.changed_part())]
        return [*replaced, *self._tables()]

    def _is_lost(self, name: str, now: Any) -> bool:
        """Return whether the replacement of the attribute ``name`` by its present value ``now`` is a fault of the code
        under test.

        A replacement by code of Python, torch or an installed package is no fault. In guarded modules, which are those
        of Shiplap's sandbox, and for public constants, any replacement is a fault.
        """
        before = self.held[name]
        if isinstance(before, ModuleType):
            return now is not None and not (is_installed_module(now) and now.__name__ == before.__name__)
        if (
            self.name.startswith(GUARDED_MODULES)
            and isinstance(before, GUARDED_VALUES)
            and not isinstance(self.value, type)
        ):
            return True
        if isinstance(before, CONSTANTS):
            return not name.startswith("_") and not isinstance(self.value, type)
        return _is_replaced_function(before, now)

    def _hides(self, name: str, now: Any) -> bool:
        """Return whether the added attribute ``name`` hides an attribute of a base class or a builtin, or is a special
        name such as ``__call__``.

        Return False if its value ``now`` is code of Python, torch or an installed package.
        """
        if not isinstance(self.value, type):
            before = vars(builtins).get(name)
            return (
                (before is not None or _is_special(name))
                and _is_replaced_function(before or len, now)
                and is_invoked(now)
            )
        before = next((vars(base)[name] for base in self.value.__mro__[1:] if name in vars(base)), None)
        if before is None:
            return _is_special(name) and is_invoked(now) and not is_trusted_function(now)
        return _is_replaced_function(before, now)

    def _tables(self) -> list[str]:
        """Return descriptions such as ``module.table[key]`` of replaced entries in the dicts of functions of the
        module.

        Replacements by functions of Python, torch or an installed package are left out. So are new entries, unless the
        key is a class of such code.
        """
        told = []
        for name, before in self.tables.items():
            now = vars(self.value).get(name)
            if type(now) is not dict or _is_same_table(now, before):
                continue
            other = [
                k for k, v in list(now.items()) if _is_function(v) and not is_trusted_replacement(before.get(k), v)
            ]
            told += [f"{self.name}.{name}[{str(k)[:40]}]" for k in other if k in before or _is_shared(k)]
        return told


def _is_same_table(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    """Return whether two tables have the same keys and the same values, as objects, in the same order. A candidate can
    fill a table anew, with the values in their order under other names.
    """
    return len(now) == len(before) and all(map(is_, now.values(), before.values())) and all(map(is_, now, before))


_bases, _values = attrgetter("__bases__"), methodcaller("values")


class _OwnerBlock:
    """Modules and classes that are compared at once by calls of C functions alone, since most of them never change.

    ``owners`` are the records of these modules and classes.
    """

    def __init__(self, owners: Sequence[_FunctionOwner]) -> None:
        """Record all objects that ``owners``, which were recorded just now, consist of."""
        self.owners = owners
        parts = [part for owner in owners for part in owner.parts.values()]
        self._objects = [owner.value for owner in owners]
        self._classes = [owner.value for owner in owners if isinstance(owner.value, type)]
        # With the cells of their closures, which hold other functions.
        self._functions = [*(part.function for part in parts), *(cell for part in parts for cell, _ in part.held)]
        # Each shows the items that it has at present.
        self._tables: list[Mapping[Any, Any]] = [vars(value) for value in self._objects]
        self._tables += [owner.held[name] for owner in owners for name in owner.tables]
        self._tables += [part.function.__kwdefaults__ for part in parts if part.keywords]
        self._lengths, self._held = [*map(len, self._tables)], self._read()
        self._keys = [*chain.from_iterable(self._tables)]

    @property
    def intact(self) -> bool:
        """Whether the block consists of the same objects as at first: the attributes of each module and class, the
        parts of each function, and the entries of each table, with their keys. If not, that may be no fault.
        """
        now = self._read()
        same = len(now) == len(self._held) and [*map(len, self._tables)] == self._lengths
        if not same or not all(map(is_, now, self._held)):
            return False
        return all(map(is_, chain.from_iterable(self._tables), self._keys))

    def _read(self) -> list[Any]:
        """Return all objects of which the block consists at present.

        Python raises an audit event for each read of a part of a function, and one event for all of these objects.
        """
        return [
            *map(type, self._objects),
            *map(_bases, self._classes),
            *get_referents(*self._functions),
            *chain.from_iterable(map(_values, self._tables)),
        ]


class FunctionSnapshot:
    """The functions of all trusted modules at one time. A trusted module belongs to Python, torch, an installed package
    or Shiplap.

    Args:
        known: an earlier snapshot, whose unchanged parts are used again.
        standard: whether the only modules that are added to those of ``known`` are those of Python's library.
    """

    def __init__(self, known: FunctionSnapshot | None = None, *, standard: bool = False) -> None:
        """Record the functions of all imported trusted modules. Unchanged parts of the snapshot ``known`` are used
        again. The operators of torch are left out. If ``standard`` is true, other new modules than those of Python's
        library are left out, too.
        """
        blocks: list[_OwnerBlock] = known._blocks if known is not None else []
        before: list[_FunctionOwner] = known._owners if known is not None else []
        # The other ones are recorded anew as a whole: the code of a function may have changed, too.
        intact = {id(owner) for block in blocks if block.intact for owner in block.owners}
        present = {n: m for n, m in list(sys.modules.items()) if not standard or _is_standard(n)}
        earlier: dict[str, Any] = known._modules if known is not None else {}
        self._modules: dict[str, Any] = {**earlier, **present} if standard else present
        new = {n: m for n, m in present.items() if n not in earlier}
        self._owners: list[_FunctionOwner] = [
            o if id(o) in intact else _FunctionOwner.of(o.name, o.value) for o in before
        ]
        self._owners += [_FunctionOwner.of(n, v) for n, v in _trusted_owners(new, {id(o.value) for o in before})]
        known_before = {id(owner) for owner in before}
        made = [o for o in self._owners if id(o) not in known_before]
        remember_objects(v for o in made for v in (o.value, *o.held.values()))
        owners = sorted(self._owners, key=lambda o: isinstance(o.value, type))  # modules change more often than classes
        self._blocks: list[_OwnerBlock] = [_OwnerBlock(owners[at : at + BLOCK]) for at in range(0, len(owners), BLOCK)]
        self._operators: tuple[dict[str, str], dict[str, Any]] | None = None

    def with_operators(self) -> FunctionSnapshot:
        """Return this snapshot with the present operators of torch, which any code can register. The functions are not
        looked at again, so no code under test may have run since they were recorded.
        """
        made = copy(self)
        made._operators = operators_of_torch(), overloads_of_torch()
        return made

    def changed(self) -> list[str]:
        """Return descriptions of the functions, modules and operators that have been replaced since the snapshot was
        taken.

        Replacements by code of Python, torch or an installed package are left out.
        """
        forget_observations()  # the cache lies in memory that the candidate can write
        known = self._modules
        replaced = [
            f"sys.modules['{n}']" for n, m in list(sys.modules.items()) if _is_replaced_module(n, m, known.get(n))
        ]
        replaced += [f"sys.modules['{n}'], which is gone" for n, m in known.items() if _is_removed_module(n, m)]
        replaced += [name for block in self._blocks if not block.intact for o in block.owners for name in o.changed()]
        if self._operators is not None:
            operators, overloads = self._operators
            replaced += [
                *replaced_registrations(operators, is_trusted_file),
                *altered_overloads(overloads, is_trusted_function),
            ]
        return replaced

    def threads(self) -> int:
        """Return the number of threads other than this one that run foreign code.

        Code is foreign if it is not the unchanged code of a file of Python, torch, an installed package or Shiplap. One
        such frame on the stack of a thread is enough.
        """
        mine, count = threading.get_ident(), 0
        for ident, frame in sys._current_frames().items():
            genuine = True
            at: FrameType | None = frame
            while ident != mine and at is not None:
                genuine = genuine and is_trusted_file(at.f_code.co_filename) and is_genuine_code(at.f_code)
                at = at.f_back
            count += not genuine
        return count


def _list_descriptors(held: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return (name, value) of the properties, static methods and class methods in ``held``, the attributes of a class
    by name.
    """
    return [(k, v) for k, v in held.items() if type(v) in DESCRIPTORS]


def _functions_of(name: str, value: Any) -> dict[str, Any]:
    """Return the functions of ``value``, the property, static method or class method called ``name``, by name. The
    setter and the deleter of a property get names of their own.
    """
    if type(value) is not property:
        return {name: value.__func__}
    return {name: value.fget, f"{name}.setter": value.fset, f"{name}.deleter": value.fdel}


def _is_table(value: dict[Any, Any]) -> bool:
    """Return whether a dict is a table of functions. It must have at least one item, fewer than ``MAX_TABLE_ENTRIES``
    items, and a Python function among its first values.
    """
    return 0 < len(value) < MAX_TABLE_ENTRIES and any(
        type(v) is FunctionType for v in islice(value.values(), PROBED_ENTRIES)
    )


def _is_shared(key: Any) -> bool:
    """Return whether ``key``, a key in a dict of functions, is a class of Python, torch or an installed package. Such a
    class is also used by code other than the candidate's.
    """
    return issubclass(type(key), type) and is_trusted_function(key)


def _is_standard(module: str) -> bool:
    """Return whether ``module`` is the name of a module of Python's library, or of a part of one."""
    return module.partition(".")[0] in sys.stdlib_module_names


def _is_special(name: str) -> bool:
    """Return whether a name has two underscores on both sides."""
    return name.startswith("__") and name.endswith("__")


def _is_function(value: Any) -> bool:
    """Return whether a value is callable but not a class."""
    return callable(value) and not isinstance(value, type)


def _is_replaced_module(name: str, now: Any, before: Any) -> bool:
    """Return whether ``now``, the module called ``name`` in ``sys.modules``, replaces an earlier module or hides one of
    Python's library.

    ``before`` is the earlier module of that name, or None. The result is False if ``now`` holds only code of Python,
    torch or an installed package. If ``before`` is no module of theirs, the C functions of ``now`` do not count:
    compilers such as Triton's load each module that they compile under the same name.
    """
    if now is before or (before is None and not _is_standard(name)):
        return False
    own = [v for v in vars(now).values() if callable(v)] if hasattr(now, "__dict__") else []
    if type(now) is not ModuleType:
        own += [type(now), *(v for v in vars(type(now)).values() if type(v) is FunctionType)]
    if before is not None and not _is_trusted_module(name, before):
        own = [v for v in own if type(v) is not BuiltinFunctionType]
    elif before is not None:
        if not all(is_bound_to_code(v) for v in own if type(v) is MethodType):
            return True
        held = getattr(now, "__dict__", {})
        if any(is_class_for_function(v, held.get(k)) for k, v in getattr(before, "__dict__", {}).items()):
            return True
    return not all(map(is_harmless_value, own))


def _is_trusted_module(name: str, module: Any) -> bool:
    """Return whether ``module``, called ``name``, belongs to Python, torch, an installed package or Shiplap. A module
    without a file does.
    """
    file = vars(module).get("__file__") if type(module) is ModuleType else None
    return name.startswith(OURS) or not isinstance(file, str) or is_trusted_file(file)


def _is_removed_module(name: str, module: Any) -> bool:
    """Return whether ``module``, an earlier module called ``name``, belongs to trusted code and is no longer in
    ``sys.modules``. The next import would load it again.
    """
    if name in sys.modules or type(module) is not ModuleType:
        return False
    file = vars(module).get("__file__")
    return isinstance(file, str) and is_trusted_file(file)


def _is_replaced_function(before: Any, now: Any) -> bool:
    """Return whether the attribute value ``before`` was replaced by ``now``, a value that is not a function of Python,
    torch or an installed package.

    Return False if ``before`` was neither callable nor a descriptor such as a property.
    """
    return (callable(before) or isinstance(before, INHERITED)) and not is_trusted_replacement(before, now)


class FunctionParts(NamedTuple):
    """The parts of one function at one time. All of them can be replaced while the function stays the same object.
    ``function`` is the object, ``code`` its code, and ``defaults`` and ``keywords`` its default values. ``held`` has
    each cell of its closure that holds a function, with that function.
    """

    function: Any  # typed Any, since mypy takes a function in a class for a method
    code: CodeType
    defaults: tuple[Any, ...] | None
    keywords: dict[str, Any] | None
    held: tuple[tuple[CellType, Callable[..., Any]], ...]

    @classmethod
    def of(cls, function: FunctionType) -> FunctionParts:
        """Return the record of the present code, defaults, keyword defaults and closure functions of ``function``."""
        keywords = function.__kwdefaults__
        cells = function.__closure__
        held = tuple((c, v) for c in cells if callable(v := cell_content(c))) if cells else ()
        return cls(function, function.__code__, function.__defaults__, dict(keywords) if keywords else None, held)

    def changed_part(self) -> str:
        """Return the name of the first part of the function that was replaced since the record was made, such as ``the
        code``. Return an empty string if there is none.

        A function in the closure that was replaced by another function of Python, torch or an installed package does
        not count.
        """
        now = self.function
        if now.__code__ is self.code and now.__defaults__ is self.defaults and not (self.keywords or self.held):
            return ""
        if function_code(now) is not self.code:
            return "the code"
        same = _same_objects(self.defaults or (), now.__defaults__ or ())
        if not same or (self.keywords is not None and not _same_items(self.keywords, now.__kwdefaults__ or {})):
            return "a default"
        lost = any(not is_trusted_replacement(value, cell_content(cell)) for cell, value in self.held)
        return "what is held" if lost else ""


def _same_objects(before: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Return whether two tuples hold the same objects (by ``is``) in the same order."""
    return len(before) == len(now) and all(map(is_, before, now))


def _same_items(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Return whether two dictionaries hold the same objects (by ``is``) under the same keys."""
    return len(before) == len(now) and all(now.get(key, before) is value for key, value in before.items())
