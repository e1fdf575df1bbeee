"""The one walk over what code uses. It identifies compiled code, choices and proofs, and finds constants of code.

From its roots the walk follows functions, methods, properties, classes with their bases, instances, closures, defaults,
decorators, partial functions, containers, Triton kernels, declared ops, and the globals and modules that code names, in
any file. It does not enter Python, torch and well-known libraries, whose versions identify them. Some code hides what
it uses by ``getattr`` of a computed name, ``eval``, late imports or C code. All files of its package are then included.
What the code itself assigns to or changes in place, such as a table that it fills at the first call, is state. It is
left out, since an identity would otherwise change while the program runs. The files of its module are included instead.
"""

from __future__ import annotations

import builtins
import ctypes
import functools
import hashlib
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, partialmethod
from importlib.util import resolve_name
from pathlib import PurePath
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Literal, NamedTuple, TypeAlias

import torch

from shiplap.declare.code_files import (
    extension_file,
    file_digest,
    module_files,
    shiplap_digest,
    spec_files,
    tensor_text,
    top_package,
    version_covers_code,
    version_text,
)
from shiplap.declare.code_parts import (
    AnyValue,
    HasCode,
    applied_class,
    closure_cell_value,
    defining_module,
    instance_dict,
    shortened_text,
)
from shiplap.declare.code_text import ENVIRONMENT, PLAIN, CodeUse, code_use, plain_text, syntax_digest
from shiplap.torch_private.graph_keys import TORCHS_OWN

Kind: TypeAlias = Literal["code", "constant", "data", "function", "library", "file", "unfollowed"]

NATIVE_CALLABLES = (
    BuiltinFunctionType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
    GetSetDescriptorType,
    MemberDescriptorType,
)
MODULE_NAMES = frozenset({"__builtins__", "__file__", "__loader__", "__name__", "__package__", "__path__", "__spec__"})
CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__", "__setstate__", "__set_name__", "__init_subclass__"})
# Members of a class that say where it stands or that Python derives from others.
_DERIVED = (
    "__abstractmethods__ __annotate__ __annotate_func__ __annotations__ __annotations_cache__ __dict__ __doc__ "
    "__firstlineno__ __module__ __orig_bases__ __parameters__ __qualname__ __static_attributes__ __weakref__ _abc_impl "
    "__jit_unused_properties__ __dataclass_fields__ __dataclass_params__ __match_args__ _autograd_function_id "
    "_backward_cls _compiled_autograd_backward_state"
)
DERIVED = frozenset(_DERIVED.split())
# Objects of these modules are connections, locks and generators: they hold no data that decides about a result.
_LIVE = (
    "_asyncio _contextvars _ctypes _io _queue _random _socket _thread _weakref _weakrefset asyncio concurrent "
    "contextvars io logging queue random socket subprocess threading weakref"
)
LIVE = frozenset(_LIVE.split())
# Attributes under which libraries keep a function.
WRAPPED_ATTRIBUTES = ("fn", "func", "py_func", "__wrapped__", "__func__", "_init_fn")
KERNEL = ("configs", "debug", "do_not_specialize", "do_not_specialize_on_alignment", "keys", "noinline", "values")
MOST_CONSTANTS = 64  # of one container, for those who mine them


class CodePart(NamedTuple):
    """A part of the code or data that a walk has found. ``text`` is what a digest contains of it.

    ``value`` is the constant, the function, the object of Shiplap (such as an op), the name of the library, or the
    reason why code could not be followed. For any other ``kind`` it is None.
    """

    kind: Kind
    text: str
    value: AnyValue = None


# Finds the declared op that is called through ``torch.ops``, by its name. Set by ``dispatch/op.py``.
find_op: Callable[[str], HasCode | None] = dict[str, HasCode]().get
_CONTAINERS: tuple[AnyValue, ...] = (list, tuple, set, frozenset)


def walk_code(*roots: AnyValue, most: int = 1 << 16) -> list[CodePart]:
    """Return all parts of code and data that ``roots``, functions, objects or containers of them, use directly or not.

    The order is the same in every process that loaded the same code. At most ``most`` objects are visited.
    """
    scout = _CodeWalk(most, frozenset(), reads_data=False)
    scout.run(roots)
    walker = _CodeWalk(most, scout.state(), reads_data=True)
    walker.run(roots)
    return walker.parts


def constants_used(*roots: AnyValue, most: int) -> list[AnyValue]:
    """Return the constants, except docstrings, in the code of ``roots`` and in the code that it uses. Those nearest to
    ``roots`` come first. The search stops silently after ``most`` objects.
    """
    scout = _CodeWalk(most, frozenset(), reads_data=False)
    scout.run(roots)
    return [part.value for part in scout.parts if part.kind == "constant"]


def libraries_used(*roots: AnyValue) -> set[str]:
    """Return the names of the top-level packages of all modules whose code ``roots`` use, directly or not."""
    scout = _CodeWalk(1 << 16, frozenset(), reads_data=False)
    scout.run(roots)
    functions = {top_package(defining_module(part.value)) for part in scout.parts if part.kind == "function"}
    return functions | {part.value for part in scout.parts if part.kind == "library" and part.value}


def is_followed(value: AnyValue) -> bool:
    """Return whether the walk reads the code of ``value``. It leaves out torch, Python's and well-known libraries."""
    return not version_covers_code(top_package(defining_module(value)))


def values_used(fn: FunctionType) -> Iterator[tuple[str, AnyValue]]:
    """Yield ``(name, value)`` of the captured variables, globals and module attributes that ``fn`` names."""
    use = code_use(fn.__code__)
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in sorted(use.globals & fn.__globals__.keys()):
        value = fn.__globals__[name]
        yield name, value
        if isinstance(value, ModuleType) and not version_covers_code(top_package(value.__name__)):
            yield from ((f"{name}.{n}", vars(value)[n]) for n in sorted(use.names & vars(value).keys()))


class _HomeModule(NamedTuple):
    """The name and the globals of the module that contains the code which the walk describes."""

    module: str
    names: dict[str, AnyValue]


class _CodeWalk:
    """A walk over the code and data that objects use. ``parts`` lists what it has found, in order."""

    def __init__(self, most: int, state: frozenset[str], *, reads_data: bool) -> None:
        """Start a walk over at most ``most`` objects. Values of the names in ``state``, which change, are not read."""
        self.parts: list[CodePart] = []
        self.most, self.names_of_state, self.reads_data = most, state, reads_data
        self.used: set[str] = set()  # names that code uses
        self.stores: list[tuple[FunctionType, set[str]]] = []  # what functions assign to
        self.members: set[int] = set()  # functions that were met as members of a class
        self._numbers: dict[int, int] = {}
        self._held: list[AnyValue] = []  # a number is by id, which lasts while the object is held
        self._left: deque[tuple[AnyValue, _HomeModule]] = deque()
        self._home = _HomeModule("", {})
        self._filed: set[str] = set()  # modules whose files are parts already

    def run(self, roots: Sequence[AnyValue]) -> None:
        """Add the parts of all code that ``roots`` use. For objects beyond ``most``, add files of their modules."""
        for root in roots:
            if isinstance(root, (FunctionType, MethodType)) and top_package(defining_module(root)) == "shiplap":
                self.add("library", f"shiplap {root.__qualname__} {shiplap_digest()}", "shiplap")
            self.add("data", self.text(root))
            if isinstance(root, FunctionType) and not is_followed(root):  # no version covers what it has captured
                self.add("data", self.text(tuple(map(closure_cell_value, root.__closure__ or ()))))
        while self._left and len(self._held) <= self.most:
            value, self._home = self._left.popleft()
            self._describe(value)
        if self._left:
            self.add("unfollowed", f"more than {self.most} objects", f"more than {self.most} objects")
            for _, home in self._left:
                self._files_of(home)
            self._left.clear()

    def state(self) -> frozenset[str]:
        """Return the names of globals, captured variables and attributes that the visited code assigns in calls."""
        state: set[str] = set()
        for fn, names in self.stores:
            name = fn.__name__
            called = name in self.used or (name.startswith("__") and name not in CONSTRUCTORS)
            if name not in CONSTRUCTORS and (called or id(fn) not in self.members):
                state |= names
        return frozenset(state)

    def add(self, kind: Kind, text: str, value: AnyValue = None) -> None:
        """Append a part to the found code, with its kind such as ``"file"``, its text for digests, and its value."""
        self.parts.append(CodePart(kind, text, value))

    # --- a value where it is used -------------------------------------------------------------------------------------

    def text(self, value: AnyValue) -> str:
        """Return a value as text without addresses. An object is queued, and its text is a number such as ``#3``."""
        kind = type(value)
        if kind in PLAIN:
            self.add("constant", "", value)
            return self._path(value) if kind is str and os.path.isabs(value) else shortened_text(plain_text(value))
        if kind is tuple or kind is torch.Size:
            return f"({', '.join(map(self.text, value))})"
        if kind in (set, frozenset):
            return self._set(value)
        if isinstance(value, PurePath):
            return self._path(str(value))
        if isinstance(value, ModuleType):
            if not version_covers_code(top_package(value.__name__)):
                self._files_of(_HomeModule(value.__name__, vars(value)))
            return f"module {value.__name__}"
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._held)
            # While the list holds the object, no other object can have its id.
            self._held.append(value)
            self._left.append((value, self._home))
        return f"#{number}"

    def _set(self, members: set[AnyValue] | frozenset[AnyValue]) -> str:
        """Return a set as text that does not depend on the order of its members, and so not on the hash seed."""
        if all(type(m) in PLAIN for m in members):
            return f"{{{', '.join(sorted(map(self.text, members)))}}}"
        digests = []
        for member in members:
            alone = _CodeWalk(self.most, self.names_of_state, reads_data=self.reads_data)
            alone._numbers, alone._held = dict(self._numbers), list(self._held)
            alone.run([member])
            digests.append((hashlib.sha256("\n".join(p.text for p in alone.parts).encode()).hexdigest(), alone))
        for _, alone in sorted(digests, key=lambda pair: pair[0]):
            self.parts += alone.parts
            self.used |= alone.used
            self.stores += alone.stores
        return f"{{{', '.join(sorted(d for d, _ in digests))}}}"

    def _path(self, path: str) -> str:
        """Return an existing path by its last name, since folders differ by machine. Add the file there, if any."""
        if os.path.isfile(path):
            self._file(path)
            return f"path {os.path.basename(path)}"
        return f"path {os.path.basename(path)}" if os.path.isdir(path) else plain_text(path)

    def _file(self, path: str) -> None:
        """Add a file, with its name and a digest of its content. If the walk reads no data, its text is empty."""
        self.add("file", f"{os.path.basename(path)} {file_digest(path)}" if self.reads_data else "")

    # --- what cannot be followed --------------------------------------------------------------------------------------

    def _unfollowed(self, why: str) -> None:
        """Add as parts the reason ``why`` code cannot be read, such as ``eval``, and the files of its module."""
        self.add("unfollowed", why, why)
        self._files_of(self._home)

    def _files_of(self, home: _HomeModule) -> None:
        """Add as parts the files of a module, once. If no file has the loaded code, add the module's members."""
        if home.module in self._filed or not home.module:
            return
        self._filed.add(home.module)
        if not self.reads_data:
            return
        files = module_files(home.module)
        for name, digest in files:
            self.add("file", f"{name} {digest}")
        if files:
            return
        for name, value in sorted(home.names.items()):
            if not name.startswith("__") and name not in self.names_of_state and not isinstance(value, ModuleType):
                self.add("data", f"{name}={self.text(value)}")

    def _state(self, name: str) -> None:
        """Add the text ``<name> changes`` in place of the value of a name that calls assign, and the module's files."""
        self.add("data", f"{name} changes")
        self._files_of(self._home)

    # --- descriptions -------------------------------------------------------------------------------------------------

    def _describe(self, value: AnyValue) -> None:
        """Add the parts that describe a value from the queue. They depend on its type, such as function or class."""
        if isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, MethodType) or applied_class(value) is not None:
            function = value.__func__ if isinstance(value, MethodType) else "apply"
            self.add("data", f"method {self.text(function)} of {self.text(value.__self__)}")
        elif isinstance(value, (partial, partialmethod)):
            self.add("data", f"partial {self.text(value.func)} {self.text(value.args)} {self.text(value.keywords)}")
        elif isinstance(value, HasCode):
            self.add("code", f"a {type(value).__name__}", value)
            for text, part in value.code_parts():
                self.add("code", f"{text} {self.text(part)}" if part is not None else text)
        elif isinstance(value, type):
            self._class(value)
        # An instance of a subclass may have attributes besides its members, so it is described as an object.
        elif type(value) in (list, dict, MappingProxyType, deque):
            self._container(value)
        elif isinstance(value, (staticmethod, classmethod)):
            self.add("data", f"{type(value).__name__} {self.text(value.__func__)}")
        elif isinstance(value, property):
            self.add("data", f"property {self.text((value.fget, value.fset, value.fdel))}")
        elif isinstance(value, functools.cached_property):
            self.add("data", f"cached property {self.text(value.func)}")
        elif isinstance(value, CodeType):
            self.add("code", code_use(value).text)
        elif isinstance(value, NATIVE_CALLABLES):
            self._native(value)
        elif version_covers_code(top_package(defining_module(type(value)))):
            self._foreign_object(value)
        else:
            self._object(value)

    def _container(self, value: AnyValue) -> None:
        """Add a list, dict or deque as one part. At most ``MOST_CONSTANTS`` of its constants are added as parts."""
        pairs = isinstance(value, Mapping)
        before = len(self.parts)
        texts = [f"{self.text(k)}: {self.text(v)}" for k, v in value.items()] if pairs else list(map(self.text, value))
        constants = [i for i in range(before, len(self.parts)) if self.parts[i].kind == "constant"]
        for i in reversed(constants[MOST_CONSTANTS:]):
            del self.parts[i]
        self.add("data", f"{type(value).__name__} {shortened_text(', '.join(texts))}")

    def _function(self, fn: FunctionType) -> None:
        """Add as parts a function's code, constants, defaults, captured variables and the globals that it names."""
        module = defining_module(fn)
        if version_covers_code(top_package(module)):
            self._foreign_function(fn)
            return
        self._home = _HomeModule(module, fn.__globals__)
        use = code_use(fn.__code__)
        self.used |= use.names
        if use.stored:
            self.stores.append((fn, use.stored))
        self.add("function", use.text, fn)
        for constant in use.constants:
            self.add("constant", "", constant)
            if isinstance(constant, str) and os.path.isabs(constant) and os.path.isfile(constant):
                self._file(constant)
        self.add("data", f"defaults {self.text(fn.__defaults__)} {self.text(fn.__kwdefaults__)}")
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            self._named(name, closure_cell_value(cell))
        for name in sorted(use.globals):
            if name in fn.__globals__:
                self._global(name, fn.__globals__[name], use)
            elif name not in vars(builtins):
                self.add("data", f"{name} is absent")
        for name, value in sorted(vars(fn).items()):
            if name == "__wrapped__" or (name in use.names and not name.startswith("__")):
                self._named(name, value)
        self._hidden(fn, use)

    def _named(self, name: str, value: AnyValue) -> None:
        """Add ``name=value`` to the digested parts. If code assigns the name in calls, add that its value changes."""
        if name in self.names_of_state and not isinstance(value, (FunctionType, type)):
            self._state(name)
        else:
            self.add("data", f"{name}={self.text(value)}")

    def _global(self, name: str, value: AnyValue, use: CodeUse) -> None:
        """Add a global of a function. For a module, add its attributes whose names are in ``use``, the code's names."""
        if name in MODULE_NAMES:
            return
        if not isinstance(value, ModuleType):
            self._named(name, value)
            return
        top = top_package(value.__name__)
        self.add("library", f"{name}={value.__name__} {version_text(top) if version_covers_code(top) else ''}", top)
        if version_covers_code(top):
            return
        held = vars(value)
        if "__getattr__" in held or extension_file(value.__name__):
            self._files_of(_HomeModule(value.__name__, held))
        for other in sorted((use.names & held.keys()) - MODULE_NAMES):
            self._attribute(f"{name}.{other}", held[other], use)

    def _attribute(self, name: str, value: AnyValue, use: CodeUse) -> None:
        """Add an attribute of a module. An attribute that is a module and is being visited is not added again."""
        if not isinstance(value, ModuleType):
            self._named(name, value)
        elif id(value) not in self._numbers:
            self._numbers[id(value)] = -1  # once: modules may hold each other
            self._global(name, value, use)
            del self._numbers[id(value)]

    def _hidden(self, fn: FunctionType, use: CodeUse) -> None:
        """Add the operators, late imports and environment variables that ``use``, the code of ``fn``, mentions."""
        if use.hiding:
            self._unfollowed(use.hiding)
        for base, operator in sorted(use.operators):
            if fn.__globals__.get(base, torch) is torch:
                self._operator(operator)
        for level, name, names in use.imports:
            self._import(fn, level, name, names)
        if use.names & ENVIRONMENT:
            for name in sorted({c for c in use.constants if isinstance(c, str) and c.isidentifier()}):
                self.add("data", f"${name}={os.environ.get(name)!r}")

    def _import(self, fn: FunctionType, level: int, name: str, names: tuple[str, ...]) -> None:
        """Add the files of the module ``name``, which ``fn`` imports when it runs, by digests, without importing it."""
        package = str(fn.__globals__.get("__package__") or "")
        full = resolve_name("." * level + name, package) if level and package else name
        top = top_package(full)
        self.add("library", f"import {full} {names} {version_text(top) if version_covers_code(top) else ''}", top)
        if not version_covers_code(top) and full not in self._filed:
            self._filed.add(full)
            self.add("unfollowed", f"import {full}", f"import {full}")
            for file, digest in spec_files(full) if self.reads_data else ():
                self.add("file", f"{file} {digest}")

    def _operator(self, name: str) -> None:
        """Add the declared op ``torch.ops.<name>``. If there is none, add that its code is unknown. Skip
        torch's ops.
        """
        if top_package(name.replace("::", ".")) in TORCHS_OWN:
            return
        op = find_op(name)
        if op is not None:
            self.add("data", f"{name}={self.text(op)}")
            return
        for path in sorted(torch.ops.loaded_libraries, key=os.path.basename):
            self._file(path)
        self._unfollowed(f"torch.ops.{name}")

    def _foreign_function(self, fn: FunctionType) -> None:
        """Add the version and name of a function of a well-known library, and the functions that it wraps."""
        top = top_package(defining_module(fn))
        self.add("library", f"{version_text(top)} {defining_module(fn)}.{fn.__code__.co_qualname}", top)
        inner = [closure_cell_value(cell) for cell in fn.__closure__ or ()]
        inner += [vars(fn)[name] for name in ("__wrapped__", "registry") if name in vars(fn)]
        for value in inner:
            if isinstance(value, (FunctionType, MethodType, partial, MappingProxyType, *PLAIN)):
                self.add("data", self.text(value))

    def _class(self, cls: type) -> None:
        """Add as parts a class's bases and members, or the version and name of a well-known library's class."""
        module = defining_module(cls)
        if version_covers_code(top_package(module)):
            self.add("library", f"{version_text(top_package(module))} {module}.{cls.__qualname__}", top_package(module))
            return
        self._home = _HomeModule(module, vars(sys.modules[module]) if module in sys.modules else {})
        self.add("code", f"class of {self.text((type(cls), *cls.__bases__))}")
        for name, member in sorted(vars(cls).items()):
            if name in DERIVED or isinstance(member, (GetSetDescriptorType, MemberDescriptorType)):
                continue
            inner = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
            if isinstance(inner, FunctionType) and id(inner) not in self._numbers:
                self.members.add(id(inner))
            self._named(name, member)

    def _object(self, value: AnyValue) -> None:
        """Add the class and attributes of an author's object, and its value if it is a number, string or container."""
        cls = type(value)
        self.add("data", f"object of {self.text(cls)}")
        self._home = _HomeModule(
            defining_module(cls), vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}
        )
        # The author's class may override the methods that show its value, so those of the builtin bases are called.
        for base in (bool, int, float, complex, str, bytes):
            if isinstance(value, base):
                self.add("data", base.__repr__(value))
        if isinstance(value, dict):
            self.add("data", self.text(list(dict.items(value))))
        for kind in _CONTAINERS:
            if isinstance(value, kind):
                self.add("data", self.text(kind(kind.__iter__(value))))
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        self._attributes(value)

    def _attributes(self, value: AnyValue) -> None:
        """Add as parts the attributes of an object, also those in ``__slots__``, without cached properties."""
        members = {n: m for c in reversed(type(value).__mro__) for n, m in vars(c).items()}
        held = instance_dict(value)
        for name, member in members.items():
            if isinstance(member, MemberDescriptorType) and name not in DERIVED:
                try:
                    held[name] = member.__get__(value, type(value))
                except AttributeError:  # not assigned yet
                    continue
        for name in sorted(held, key=str):
            if name not in DERIVED and not isinstance(members.get(name), functools.cached_property):
                self._named(name, held[name])

    def _native(self, value: AnyValue) -> None:
        """Add the name and library version of a compiled function, or the file of an author's compiled extension."""
        owner = getattr(value, "__self__", None)
        module = defining_module(owner if isinstance(owner, type) else value)
        name = f"{module}.{getattr(value, '__qualname__', '')}"
        if owner is not None and not isinstance(owner, (ModuleType, type)):
            self.add("data", f"bound {name} {self.text(owner)}")
        top = top_package(module or defining_module(getattr(value, "__objclass__", type(value))))
        self.add("library", f"{version_text(top) if version_covers_code(top) else ''} {name}", top)
        if not version_covers_code(top):
            if (file := extension_file(module)) is not None:
                self._file(file)
            self._unfollowed(f"{name}, which is not written in Python")

    def _tensor(self, value: torch.Tensor) -> None:
        """Add the dtype, shape and values of a tensor. If the values cannot be read, add that, too."""
        text, read = tensor_text(value) if self.reads_data else ("", True)
        self.add("data", text)
        if not read:
            self._unfollowed("values of a tensor that cannot be read")

    def _foreign_object(self, value: AnyValue) -> None:
        """Add the class and version of a well-known library's object, and the function that it wraps or its data."""
        cls = type(value)
        module, top = defining_module(cls), top_package(defining_module(cls))
        self.add("library", f"{version_text(top)} {module}.{cls.__qualname__}", top)
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, ctypes.CDLL):
            self._library(value._name)
        elif isinstance(value, _C_FUNCTION):
            self._unfollowed("a C function")
        elif top == "triton":
            self._triton(value)
        elif top == "torch":
            self._of_torch(value)
        elif not self._wrapped(value) and top_package(module) not in LIVE:
            self._reduced(value)

    def _library(self, path: AnyValue) -> None:
        """Add the file of a library that ``ctypes`` has opened. If there is no file, add that its code is unknown."""
        if isinstance(path, str) and os.path.isfile(path):
            self._file(path)
        else:
            self._unfollowed(f"the library {path}")

    def _wrapped(self, value: AnyValue) -> bool:
        """Add the functions that a callable object of a library wraps. Return whether there are any."""
        inner = [getattr(value, name, None) for name in WRAPPED_ATTRIBUTES] if callable(value) else []
        functions = [f for f in inner if isinstance(f, (FunctionType, MethodType, partial))]
        for function in functions:
            self.add("data", self.text(function))
        return bool(functions)

    def _of_torch(self, value: AnyValue) -> None:
        """Add an object of torch, such as a module (by its attributes), a dtype (by its name) or an operator."""
        if isinstance(value, torch.nn.Module):
            self._attributes(value)
        elif isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
            self.add("data", str(value))
        elif type(value).__name__ in ("OpOverload", "OpOverloadPacket"):
            self._operator(str(value).replace(".", "::", 1).partition(".")[0])
        elif type(value).__name__ in ("_Ops", "_OpNamespace"):
            self._unfollowed("torch.ops")
        else:
            self._wrapped(value)

    def _triton(self, value: AnyValue) -> None:
        """Add the settings of a Triton kernel and a digest of its syntax. Add the attributes of any object without a
        Python function.
        """
        held = instance_dict(value)
        if (function := held.get("fn")) is None:
            self._attributes(value)
            return
        source = getattr(value, "src", None)
        if isinstance(source, str):
            self.add("code", syntax_digest(source))
        self.add("data", f"kernel {self.text(function)}")
        for name in KERNEL:
            if name in held:
                self.add("data", f"{name}={self.text(held[name])}")

    def _reduced(self, value: AnyValue) -> None:
        """Add the data by which ``copy`` and ``pickle`` rebuild an object, or the reason why it cannot be copied."""
        try:
            reduced = value.__reduce_ex__(4)
        except Exception as e:  # any code may run here
            self._unfollowed(f"a {type(value).__qualname__}, which cannot be copied ({type(e).__name__})")
            return
        if isinstance(reduced, str):
            self.add("data", reduced)
            return
        plain = [list(part) if isinstance(part, Iterator) else part for part in reduced[:5]]
        self.add("data", f"made by {self.text(tuple(plain))}")


_C_FUNCTION = ctypes.CFUNCTYPE(None).__mro__[1]
