"""``stateless``: the libraries of C ABI kernels hold no writable globals and no thread-locals.

Scratch buffers, plan caches, handles and error texts that a library keeps are shared by threads, streams, devices and
CUDA graphs, none of which is aware of the others. The symbol table shows them without running anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from shiplap.audit.check import Check, Observation
from shiplap.declare.native_interface import NativeForm
from shiplap.dispatch import Op
from shiplap.errors import LibraryError
from shiplap.kernels.c.library import locate
from shiplap.sampling.case import Case
from shiplap.sampling.samples import Samples
from shiplap.sampling.symbols import State, state_of

SHOWN = 6


def _libraries(op: Op) -> Iterator[NativeForm]:
    """Yield the C functions behind the kernels of an op."""
    for kernels in op.kernels.values():
        yield from (kernel.native for kernel in kernels if kernel.native is not None and not kernel.native.generated)


def located(op: Op) -> tuple[list[Path], list[str]]:
    """Return the library files, and the names of libraries that are not on this machine (of another device's kernels,
    usually).
    """
    there, absent = set(), set()
    for source in _libraries(op):
        try:
            there.add(locate(source.library))
        except LibraryError:
            absent.add(source.library.name)
    return sorted(there), sorted(absent)


def skips(op: Op) -> str:
    """Return the reason why the check does not apply to an op, empty where it does."""
    return "" if any(_libraries(op)) else "no C ABI kernel; for Python kernels see fresh, determinism and threads"


def cases(samples: Samples) -> Iterable[Case]:
    """Yield plain samples."""
    yield from samples.plain()


def observe(op: Op, case: Case) -> Observation:
    """Read the symbols of all libraries of the op."""
    notes, unclear, admitted = [], [], []
    there, absent = located(op)
    if not there:
        return Observation(skip=f"not on this machine: {_listed(absent)}")
    for library in there:
        try:
            state = state_of(library)
        except ValueError as e:
            return Observation(skip=str(e))
        if state.symbols:
            return Observation(f"{library.name} keeps {_listed([str(s) for s in state.symbols])}", fix=_fix(state))
        threaded = [f"{size} bytes" for section, size in state.nameless if section.startswith((".tbss", ".tdata"))]
        # A static C++ runtime has thread-locals of its own, which have no names after strip either.
        if threaded and not state.linked_in:
            return Observation(
                f"{library.name} keeps thread-local memory, nameless since stripped: {_listed(threaded)}"
            )
        unclear += [reason] if (reason := _unclear(library.name, state)) else []
        if state.declared:
            admitted.append(f"{library.name} keeps {_listed(state.declared)}, and says so")
        notes += [f"{library.name}: only {_listed(state.runtime)}" if state.runtime else f"{library.name}: none"]
    if unclear or admitted:  # whether what it keeps is harmless, cuda_graph, threads and workspace observe
        return Observation(skip="; ".join(unclear + admitted))
    return Observation(note="; ".join(notes + [f"{name} is not on this machine" for name in absent]))


def _unclear(name: str, state: State) -> str:
    """Return the reason why the symbols are no evidence, empty where they are."""
    if state.linked_in:
        return f"{name} has a C++ runtime linked in, whose private state looks like its own: link libstdc++ dynamically"
    sections = [f"{size} bytes in {section}" for section, size in state.nameless]
    return f"{name} is stripped: {_listed(sections)} have no names; audit it before strip" if sections else ""


def _listed(names: Iterable[str]) -> str:
    """Return the first names as text, with the number of the others."""
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _fix(state: State) -> str:
    """Return the fix for the kind of state that a library keeps."""
    if {s.kind for s in state.symbols} == {"thread-local"}:
        return "write messages to sl_context.error, and take scratch memory from sl_context.workspace"
    return "take scratch memory from sl_context.workspace; build tables at compile time (const), plans outside the call"


CHECK = Check(
    "stateless",
    order=250,
    observes="the kernel's library has no writable globals and no thread-locals in its symbol table",
    observe=observe,
    cases=cases,
    obligations=(),
    fix="take scratch memory from sl_context.workspace, and write messages to sl_context.error",
    skips=skips,
)
