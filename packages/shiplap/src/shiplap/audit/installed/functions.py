"""Find the ``autograd.Function`` classes of a package and the functions that call them, as subjects of an audit."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, cast

import torch

from shiplap.audit.child_process import ChildDeath, ChildLimits, SendEvent, stream_events
from shiplap.audit.installed.python_function import PythonFunction
from shiplap.scaffold.calls import DispatchRecorder, make_python_call, objects_in
from shiplap.scaffold.object_sources import address_expression, object_at
from shiplap.scaffold.schema import SchemaField, SchemaForm

# Modules that are no part of what a package computes, and that may start work when they are imported.
_LEFT_OUT = re.compile(r"(^|\.)(__main__|_?tests?|test_\w+|\w+_test|conftest|benchmarks?|examples?|setup)(\.|$)")
_LIMITS = ChildLimits(busy_s=60.0, idle_s=20.0)
# Plain versions are recognised by their names: ``norm_ref``, ``naive_norm``, ``torch_norm``.
_PLAIN = r"ref|reference|naive|native|plain|pytorch|torch|eager|slow|python|py|pure"
_PLAIN_NAME = re.compile(rf"^_?(?:(?:{_PLAIN})_(?P<after>\w+)|(?P<before>\w+)_(?:{_PLAIN}))$")
_SUFFIXES = re.compile(r"(_?(func|function|fn|op|autograd|impl|triton|cuda|kernel))+$")
# A signature without annotations says the type of an argument by its name at best.
_NAMED_TYPES = (
    (re.compile(r"^(is|has|use|return|with|do|causal|training|inplace|requires)(_|$)"), "bool"),
    (re.compile(r"(^|_)(eps|epsilon|alpha|beta|gamma|scale|dropout|p|momentum|temperature|slope|lr)$"), "float"),
    (re.compile(r"(^|_)(dim|axis|size|num|n|groups?|stride|padding|dilation|chunk|block|bits|rank)(_|$)"), "int"),
    (re.compile(r"(^|_)(mode|reduction|impl|activation|reduce)$"), "str"),
)
_SCALAR_TYPES = {bool: "bool", int: "int", float: "float", str: "str"}


@dataclass(frozen=True)
class InstalledFunction:
    """The address of an ``autograd.Function``, or of a function that calls one, in a module of a package.

    ``form`` describes its parameters as a schema describes those of an op. ``applied`` is true for an
    ``autograd.Function``, which is called by its ``apply``. ``reference`` is the address of the plain version of the
    package, or empty, and ``shared`` are the names of the parameters that both have.
    """

    form: SchemaForm
    applied: bool
    reference: str = ""
    shared: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The address ``module:qualified.name``."""
        return self.form.name

    @property
    def keywords(self) -> tuple[str, ...]:
        """The names of the parameters that are passed by name."""
        return tuple(a.name for a in self.form.arguments if a.keyword_only)

    @property
    def source(self) -> str:
        """The Python expression that builds the :class:`PythonFunction` of this function in the script of a finding."""
        reference = address_expression(self.reference) if self.reference else "None"
        call = address_expression(self.name) + (".apply" if self.applied else "")
        return f"PythonFunction({call}, {self.keywords!r}, {reference}, {self.shared!r})"

    def load(self) -> PythonFunction:
        """Import the module, and return the function as the checks call it."""
        found = object_at(self.name)
        reference = object_at(self.reference) if self.reference else None
        return PythonFunction(found.apply if self.applied else found, self.keywords, reference, self.shared)


@dataclass
class FoundFunctions:
    """The functions of a package by address, and the reason of each module that could not be imported, by its name."""

    functions: dict[str, InstalledFunction] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def find_functions(package: str) -> FoundFunctions:
    """Return the ``autograd.Function`` classes of the imported ``package`` and the functions that call them.

    Each module is first imported in a child process, so that one that raises, exits, crashes or waits is left out with
    the reason. Those modules that have such a function and could be imported are then imported in this process.
    """
    names = list(module_names(package))
    found, first, wanted = FoundFunctions(), 0, list[str]()
    while first < len(names):
        at, start = first, first

        def look(send: SendEvent, start: int = start) -> None:
            """Import the modules from index ``start`` on, and send an event before and after each."""
            for number in range(start, len(names)):
                send({"kind": "begin", "module": number})
                try:
                    count = len(functions_in(importlib.import_module(names[number])))
                    send({"kind": "found", "module": number, "count": count})
                except BaseException as e:  # a module may raise anything, and even exit
                    send({"kind": "failed", "module": number, "reason": f"{type(e).__name__}: {e}"[:200]})

        for event in stream_events(look, _LIMITS):
            if isinstance(event, ChildDeath):
                found.failed[names[at]] = f"its import ended the process: {event}"
            elif event["kind"] == "begin":
                at = event["module"]
            elif event["kind"] == "failed":
                found.failed[names[event["module"]]] = event["reason"]
            elif event["count"]:  # modules without such a function are not imported here
                wanted.append(names[event["module"]])
        first = at + 1
    for name in wanted:  # after all children have run: an import here may use a device that no fork may inherit
        try:
            found.functions |= functions_in(importlib.import_module(name))
        except Exception as e:  # a module may raise anything
            found.failed[name] = f"{type(e).__name__}: {e}"[:200]
    return with_references(found, package)


def module_names(package: str) -> Iterator[str]:
    """Yield the names of the package and of its modules, found in its folders without an import. Modules of tests and
    programs are left out.
    """
    found = importlib.util.find_spec(package)
    yield package
    pending = [(package, list((found and found.submodule_search_locations) or []))]
    while pending:
        parent, folders = pending.pop()
        for info in sorted(pkgutil.iter_modules(folders), key=lambda m: m.name):
            name = f"{parent}.{info.name}"
            if _LEFT_OUT.search(name.removeprefix(package)):
                continue
            yield name
            if info.ispkg:
                pending.append((name, [f"{folder}/{info.name}" for folder in folders]))


def functions_in(module: ModuleType) -> dict[str, InstalledFunction]:
    """Return the ``autograd.Function`` classes that ``module`` defines, and its functions that call ``apply`` of one,
    by address.
    """
    functions = dict[str, InstalledFunction]()
    members: list[tuple[str, Any]] = list(vars(module).items())
    for name, value in members:
        if not isinstance(value, (type, FunctionType)):
            continue
        if (value.__module__, value.__qualname__) != (module.__name__, name):  # it is imported from elsewhere
            continue
        applied = isinstance(value, type) and issubclass(value, torch.autograd.Function)
        if not applied and not _calls_apply(value):
            continue
        function = cast(type[torch.autograd.Function], value).forward if applied else value
        form = form_of(f"{module.__name__}:{name}", function, context=_has_context(value))
        if form is not None:
            functions[form.name] = InstalledFunction(form, applied)
    return functions


def _has_context(value: Any) -> bool:
    """Return whether ``value`` is an ``autograd.Function`` whose ``forward`` takes the context as its first argument.
    It does not if the class has a ``setup_context``.
    """
    is_class = isinstance(value, type) and issubclass(value, torch.autograd.Function)
    return is_class and value.setup_context is torch.autograd.Function.setup_context


def _calls_apply(value: Any) -> bool:
    """Return whether ``value`` is a Python function whose code names ``apply`` and an ``autograd.Function``."""
    if not inspect.isfunction(value) or "apply" not in value.__code__.co_names:
        return False
    named = [value.__globals__.get(name) for name in value.__code__.co_names]
    return any(isinstance(v, type) and issubclass(v, torch.autograd.Function) for v in named)


def form_of(address: str, function: Callable[..., Any], *, context: bool = False) -> SchemaForm | None:
    """Return the parameters of a function as a schema describes those of an op. If ``context`` is true, the first
    parameter is left out.

    Return None for a function whose parameters are not known, and for the ``forward`` of a base class that nobody
    applies, to which its subclasses pass a context in addition.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())[context:]
    except (TypeError, ValueError):
        return None
    if context and any(p.name == "ctx" for p in parameters):
        return None
    fields = list[SchemaField]()
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:  # one argument of it is tried; a record has as many as it saw
            fields.append(SchemaField(f"{p.name}_0", "Tensor"))
        elif p.kind is not p.VAR_KEYWORD:
            default = None if p.default is p.empty or not _is_plain(p.default) else repr(p.default)
            fields.append(SchemaField(p.name, kind_of(p), default, keyword_only=p.kind is p.KEYWORD_ONLY))
    return SchemaForm(address, f"{address}({', '.join(a.name for a in fields)})", tuple(fields), ())


def _is_plain(value: Any) -> bool:
    """Return whether ``repr(value)`` is Python source for an argument of a call: a number, a text, None or a dtype."""
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


def kind_of(parameter: inspect.Parameter) -> str:
    """Return the type of a parameter as a schema writes it. It follows from the annotation, else from the default, else
    from the name. ``Any`` stands for a tensor or a scalar.
    """
    note = parameter.annotation
    text = "" if note is parameter.empty else note.__name__ if isinstance(note, type) else str(note)
    optional = "?" if re.search(r"\bOptional\b|\bNone\b", text) or parameter.default is None else ""
    if re.search(r"\bTensor\b|\bParameter\b", text):
        return ("Tensor[]" if re.search(r"[Ll]ist\[|Sequence\[|[Tt]uple\[", text) else "Tensor") + optional
    for word, kind in (("bool", "bool"), ("int", "int"), ("float", "float"), ("str", "str"), ("dtype", "ScalarType")):
        if re.search(rf"\b{word}\b", text):
            return kind + optional
    if type(parameter.default) in _SCALAR_TYPES:
        return _SCALAR_TYPES[type(parameter.default)]
    named = [kind for pattern, kind in _NAMED_TYPES if pattern.search(parameter.name)]
    return (named[0] if named else "Any") + optional


def with_references(found: FoundFunctions, package: str) -> FoundFunctions:
    """Return the functions with the plain versions that the imported modules of ``package`` hold under a similar name,
    such as ``norm_ref`` for ``NormFunction``. A plain version must take no argument that the function does not take.
    """
    plain = _plain_versions(package)
    functions = dict[str, InstalledFunction]()
    for name, function in found.functions.items():
        address = plain.get(_base_name(name.rpartition(":")[2]), "")
        form = form_of(address, object_at(address)) if address else None
        own = {a.name for a in function.form.arguments}
        if form is not None and address != name and {a.name for a in form.arguments if a.default is None} <= own:
            shared = tuple(a.name for a in form.arguments if a.name in own)
            function = InstalledFunction(function.form, function.applied, address, shared)
        functions[name] = function
    return FoundFunctions(functions, found.failed)


def _plain_versions(package: str) -> dict[str, str]:
    """Return the addresses of the functions of a package whose names say that they are plain versions, by the base of
    their name.
    """
    versions = dict[str, str]()
    for name, module in sorted(sys.modules.items()):
        if module is None or not (name == package or name.startswith(package + ".")):
            continue
        for key, value in list(vars(module).items()):
            match = _PLAIN_NAME.match(key) if inspect.isfunction(value) and value.__module__ == name else None
            if match:
                versions.setdefault(_base_name(match["after"] or match["before"]), f"{name}:{key}")
    return versions


def _base_name(name: str) -> str:
    """Return the name of a function or class in lower case with underscores, without endings such as ``Function``."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower().strip("_")
    return _SUFFIXES.sub("", words) or words


@dataclass
class FunctionRecorder:
    """A recorder of the calls of ``functions``, in addition to those of ops that ``ops`` records.

    The interpreter reports each call of a Python function, so that neither torch nor the package is changed. The calls
    are stored in ``ops``, by address.
    """

    functions: Mapping[str, InstalledFunction]
    ops: DispatchRecorder

    @contextmanager
    def mode(self) -> Iterator[None]:
        """Return a context in which calls are recorded, also those of threads that are started inside of it."""
        codes: dict[CodeType, list[InstalledFunction]] = {}
        for function in self.functions.values():
            for code in _codes_of(function):
                codes.setdefault(code, []).append(function)

        def notice(frame: FrameType, event: str, argument: object) -> None:
            """Record the call that has begun in ``frame`` if it is one of a wanted function."""
            for function in codes.get(frame.f_code, ()) if event == "call" else ():
                # An exception would end the recording and reach the program: tensors under vmap have no values.
                with suppress(Exception):
                    self._record(function, frame)

        before, before_in_threads = sys.getprofile(), threading.getprofile()
        threading.setprofile(notice)
        sys.setprofile(notice)
        try:
            with self.ops.mode():
                yield
        finally:
            sys.setprofile(before)
            threading.setprofile(before_in_threads)
            codes.clear()  # threads that were started inside and go on still call ``notice``

    def _record(self, function: InstalledFunction, frame: FrameType) -> None:
        """Store the arguments with which ``function`` was called, unless one of them cannot be made again."""
        information = inspect.getargvalues(frame)
        # Classes may inherit one ``forward``; the class of the context has the name of the caller. It is the first
        # argument, or the second one of a class method.
        owners = [
            type(first).__name__
            for name in information.args[:2]
            if isinstance(first := information.locals.get(name), torch.autograd.function.FunctionCtx)
        ]
        if owners and owners != [f"{function.name.rpartition(':')[2]}Backward"]:
            return
        named = {n: information.locals[n] for n in information.args if n in information.locals}
        wanted = {a.name for a in function.form.arguments}
        arguments = {n: v for n, v in named.items() if n in wanted}
        if information.varargs:
            rest = information.locals[information.varargs]
            arguments |= {f"{information.varargs}_{i}": v for i, v in enumerate(rest)}
        # The interpreter calls no profile function inside of one, so that nothing here is recorded.
        if (call := make_python_call(arguments)) is not None:
            self.ops.counts[function.name] = self.ops.counts.get(function.name, 0) + 1
            self.ops.keep(function.name, call)
        elif names := objects_in(arguments):
            self.ops.objects[function.name] = names


def _codes_of(function: InstalledFunction) -> Sequence[CodeType]:
    """Return the code object of a function, or of the ``forward`` of an ``autograd.Function``."""
    found = object_at(function.name)
    called = inspect.unwrap(found.forward if function.applied else found)
    if inspect.ismethod(called):  # of a class method
        called = called.__func__
    return [called.__code__] if inspect.isfunction(called) else []
