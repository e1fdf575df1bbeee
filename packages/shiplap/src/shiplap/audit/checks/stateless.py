"""``stateless``: the libraries of C ABI kernels hold no writable globals and no thread-locals.

Scratch buffers, plan caches, handles and error texts that a library keeps are shared by threads, streams, devices and
CUDA graphs, none of which is aware of the others. The symbol table shows them without running anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shiplap.audit.check import Check, Observation
from shiplap.declare.native_interface import NativeForm
from shiplap.dispatch import Op
from shiplap.errors import LibraryError
from shiplap.kernels.c.library import locate_library
from shiplap.render.lines import list_first
from shiplap.sampling.case import SampleCase
from shiplap.sampling.samples import Samples
from shiplap.sampling.symbols import LibraryState, read_library_state


def _native_forms(op: Op) -> Iterator[NativeForm]:
    """Yield the C functions of the op's kernels, with their libraries. Functions that Shiplap generates are
    left out.
    """
    for kernels in op.kernels.values():
        yield from (kernel.native for kernel in kernels if kernel.native is not None and not kernel.native.generated)


def find_libraries(op: Op) -> tuple[list[Path], list[str]]:
    """Return two sorted lists for the libraries of the op's C functions. The first has the paths of those that are on
    this machine, and the second the names of the others.
    """
    there, absent = set(), set()
    for source in _native_forms(op):
        try:
            there.add(locate_library(source.library))
        except LibraryError:
            absent.add(source.library.name)
    return sorted(there), sorted(absent)


def why_skip_stateless(op: Op) -> str:
    """Return why the check ``stateless`` does not apply to the op, or an empty string if it does. It does not apply if
    the op has no C ABI kernel.
    """
    return "" if any(_native_forms(op)) else "no C ABI kernel; for Python kernels see fresh, determinism and threads"


def observe_stateless(op: Op, case: SampleCase) -> Observation:
    """Read the symbol tables of all libraries of the op. The returned observation has a problem if a library has
    writable globals or thread-local memory. It is ``missed`` if the symbols do not show whether it has some, and a
    ``skip`` if the library declares what it keeps.
    """
    notes, unclear, admitted = [], [], []
    there, absent = find_libraries(op)
    if not there:
        return Observation(skip=f"not on this machine: {list_first(absent)}")
    for library in there:
        try:
            state = read_library_state(library)
        except ValueError as e:
            return Observation(missed=str(e))
        if state.symbols:
            return Observation(
                f"{library.name} keeps {list_first([str(s) for s in state.symbols])}", fix=_fix_for_state(state)
            )
        threaded = [f"{size} bytes" for section, size in state.nameless if section.startswith((".tbss", ".tdata"))]
        # A static C++ runtime has thread-locals of its own, which have no names after strip either.
        if threaded and not state.linked_in:
            return Observation(
                f"{library.name} keeps thread-local memory, nameless since stripped: {list_first(threaded)}"
            )
        unclear += [reason] if (reason := _why_unclear(library.name, state)) else []
        if state.declared:
            admitted.append(f"{library.name} keeps {list_first(state.declared)}, and says so")
        notes += [f"{library.name}: only {list_first(state.runtime)}" if state.runtime else f"{library.name}: none"]
    if unclear:
        return Observation(missed="; ".join(unclear + admitted))
    if admitted:  # whether what it keeps is harmless, cuda_graph, threads and workspace observe
        return Observation(skip="; ".join(admitted))
    return Observation(note="; ".join(notes + [f"{name} is not on this machine" for name in absent]))


def _why_unclear(name: str, state: LibraryState) -> str:
    """Return why ``state``, the variables of the library ``name``, proves nothing, as for a stripped file or one with a
    C++ runtime linked in. Return an empty string if it proves something.
    """
    if state.linked_in:
        return f"{name} has a C++ runtime linked in, whose private state looks like its own: link libstdc++ dynamically"
    sections = [f"{size} bytes in {section}" for section, size in state.nameless]
    return f"{name} is stripped: {list_first(sections)} have no names; audit it before strip" if sections else ""


def _fix_for_state(state: LibraryState) -> str:
    """Return the advice for the kind of state, thread-local or global, that a library keeps."""
    if {s.kind for s in state.symbols} == {"thread-local"}:
        return "write messages to sl_context.error, and take scratch memory from sl_context.workspace"
    return (
        "take scratch memory from sl_context.workspace. Declare a table that never changes const, also behind "
        "__constant__, and make plans outside the call"
    )


CHECK = Check(
    "stateless",
    order=250,
    observes="the kernel's library has no writable globals and no thread-locals in its symbol table",
    observe=observe_stateless,
    cases=Samples.plain,
    obligations=(),
    fix="take scratch memory from sl_context.workspace, and write messages to sl_context.error",
    skips=why_skip_stateless,
)
