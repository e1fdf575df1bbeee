"""Find and record the ops of a package in a process of its own, for a device whose driver no fork may inherit.

The process that starts the audits forks one child for each. CUDA does not work in a fork of a process that has used it,
and the import of a package for GPUs may use it already, so that only children import such a package.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import torch

from shiplap import torch_private
from shiplap.audit.child_process import ChildDeath, ChildLimits, SendEvent, run_isolated
from shiplap.audit.installed.functions import FoundFunctions, FunctionRecorder, InstalledFunction
from shiplap.audit.installed.recipes import CallRecipe, recipe_from_text, recipe_of_call
from shiplap.errors import ShiplapError, error
from shiplap.errors.base import error_parts
from shiplap.scaffold.calls import DispatchRecorder
from shiplap.scaffold.schema import SchemaForm, UndeclarableSchema, parse_schema
from shiplap.torch_private.dispatcher_library import find_overload

if TYPE_CHECKING:
    from collections.abc import Callable

    from shiplap.torch_private.dispatcher_library import Overload

# The program whose calls are recorded may compile for minutes, and the import of a package for seconds.
_LIMITS = ChildLimits(busy_s=900.0, idle_s=120.0, memory=64 << 30)


@dataclass(frozen=True)
class InstalledOverload:
    """The name of a torch op that the import of ``package`` registers. ``form`` describes its arguments, and is None
    for a schema that no declaration can have, for which ``undeclarable`` says why.
    """

    name: str
    package: str
    form: SchemaForm | None
    undeclarable: str = ""

    def load(self) -> Overload:
        """Import the package, and return the op. Raise ``LookupError`` if the import does not register it."""
        importlib.import_module(self.package)
        space, _, rest = self.name.partition("::")
        op = find_overload(space, rest)
        if op is None:
            raise LookupError(f"{self.package} does not register {self.name}")
        return op


LoadedLater: TypeAlias = InstalledOverload | InstalledFunction


def describe_overload(name: str, package: str, op: Overload) -> InstalledOverload:
    """Return the description of the op ``name`` of ``package``, of which ``op`` is the overload in this process."""
    try:
        return InstalledOverload(name, package, parse_schema(op._schema))
    except UndeclarableSchema as e:
        return InstalledOverload(name, package, None, str(e))


@dataclass(frozen=True)
class FoundApart:
    """The ops and functions of a package by name, in a form from which another process can load them. ``failed`` has
    the reason of each module that could not be imported, and ``modules`` the names of the modules that were, in order.
    """

    subjects: dict[str, LoadedLater]
    failed: dict[str, str]
    modules: list[str]


def find_apart(
    package: str, find: Callable[[], tuple[Mapping[str, Overload], FoundFunctions]]
) -> FoundApart | ChildDeath:
    """Return the ops and functions that ``find()`` returns in a child process. If the child dies, return its
    ``ChildDeath``. An error of Shiplap's catalogue that ``find`` raises is raised here as well.
    """
    before = set(sys.modules)

    def work(send: SendEvent) -> Any:
        """Return the descriptions of the ops and of the functions as plain data, or the parts of an error."""
        try:
            ops, found = find()
        except ShiplapError as e:
            return error_parts(e)
        overloads = [describe_overload(name, package, op) for name, op in ops.items()]
        modules = [name for name in list(sys.modules) if name not in before]
        return msgspec.to_builtins([overloads, list(found.functions.values()), found.failed, modules])

    made = run_isolated(work, _LIMITS)
    if isinstance(made, ChildDeath):
        return made
    if isinstance(made, dict):
        raise error(**made)
    overloads = msgspec.convert(made[0], list[InstalledOverload])
    subjects: list[LoadedLater] = [*overloads, *msgspec.convert(made[1], list[InstalledFunction])]
    return FoundApart({subject.name: subject for subject in subjects}, made[2], made[3])


def uses_gpu() -> bool:
    """Return whether this process has begun to use a GPU, so that its forks cannot."""
    opened = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    # The driver opens these files when it starts, and the library that only counts devices opens others.
    devices = [os.readlink(file) for file in opened if os.path.lexists(file)]
    return torch.cuda.is_initialized() or any(d.startswith(("/dev/nvidia-uvm", "/dev/kfd")) for d in devices)


def import_before_forks(package: str, modules: Sequence[str]) -> list[str]:
    """Import in this process, of the ``modules`` that ``package`` imports, those whose import uses no GPU, and the
    package itself if it uses none. Return their names. Children that are forked afterwards need not import them.

    A child process imports one after the other first, and ends at the first one that uses a GPU.
    """
    others = [m for m in modules if not (m + ".").startswith(package + ".")]

    def work(send: SendEvent) -> list[str]:
        """Return the names of the modules that could be imported without a use of a GPU."""
        fine = list[str]()
        for name in (*others, package):
            if _is_importable(name):
                if uses_gpu():
                    break
                fine.append(name)
        return fine

    # Both compilers take seconds to import.
    torch_private.reset_compiler()
    fine = run_isolated(work, _LIMITS)
    return [name for name in ([] if isinstance(fine, ChildDeath) else fine) if _is_importable(name)]


def _is_importable(name: str) -> bool:
    """Import the module ``name``, and return whether that succeeded."""
    try:
        importlib.import_module(name)
    except Exception:  # a module may raise anything
        return False
    return True


@dataclass(frozen=True)
class RecordedCalls:
    """The calls of ops and functions that a program has made, by name. ``failed`` says how the program failed, and is
    empty if it did not. ``objects`` names those arguments of a function because of which its calls could not be
    recorded.
    """

    calls: Mapping[str, list[CallRecipe]] = field(default_factory=dict)
    failed: str = ""
    objects: Mapping[str, list[str]] = field(default_factory=dict)


def record_apart(
    subjects: Mapping[str, LoadedLater], seed: int, run: Callable[[AbstractContextManager[Any]], str]
) -> RecordedCalls:
    """Return the calls of ``subjects`` that ``run(recording)`` makes in a child process. It returns a text that says
    how it failed. ``recording`` is the context in which calls are recorded. If the child dies, there are no calls, and
    the text says how it died.
    """

    def work(send: SendEvent) -> Any:
        """Run the program, and return the recorded calls as texts."""
        functions = {n: s for n, s in subjects.items() if isinstance(s, InstalledFunction)}
        for subject in subjects.values():
            if isinstance(subject, InstalledOverload):
                subject.load()
        recorder = DispatchRecorder([n for n in subjects if n not in functions])
        failed = run(FunctionRecorder(functions, recorder).mode() if functions else recorder.mode())
        calls = {n: [repr(c) for c in made] for n, made in recipes_of_calls(recorder, seed).items()}
        return failed, calls, recorder.objects

    made = run_isolated(work, _LIMITS)
    if isinstance(made, ChildDeath):
        return RecordedCalls(failed=str(made))
    failed, calls, objects = made
    return RecordedCalls({n: [recipe_from_text(t) for t in texts] for n, texts in calls.items()}, failed, objects)


def recipes_of_calls(recorder: DispatchRecorder, seed: int) -> dict[str, list[CallRecipe]]:
    """Return the calls of ``recorder`` as recipes, by name. Their values are drawn from ``seed`` on."""
    calls: Mapping[str, Sequence[Any]] = recorder.calls
    return {name: [recipe_of_call(c, seed + i) for i, c in enumerate(made)] for name, made in calls.items()}
