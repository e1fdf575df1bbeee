"""The recording of gradients in C++, by one library for all ops and a formula of each op.

Torch's stable ABI has no autograd. The library is therefore compiled once for each torch, against torch's own headers.
It has the Autograd kernel and the node of the graph (``shiplap/autograd.h``). The formula of an op is data. It states
which tensors a call saves, and which ops compute its gradients from what. The library records an op if the op's
gradient is declared as ops, and if the op and those ops have native bindings. Until the library is built, and for all
other gradients, Python records. A wheel cannot contain the library. An op whose binding came in a wheel therefore
issues a notice when Python has recorded many of its calls.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch

from shiplap.declare.gradient import Backward, GradientOp
from shiplap.declare.schema import gradient_schema, schema_text
from shiplap.declare.spec import OpSpec
from shiplap.dispatch import Op, registry
from shiplap.dispatch.autograd import make_gradient_call
from shiplap.errors import ShiplapError, notice
from shiplap.kernels.native.build import LACKING, build_detached, build_once
from shiplap.kernels.native.build_digest import INCLUDE, WRAP, library_name_digest
from shiplap.kernels.native.build_plan import compiler_command, extra_compiler_flags
from shiplap.kernels.native.cache import cache_folder, find_library, is_library_present
from shiplap.settings import settings
from shiplap.torch_private import available
from shiplap.torch_private.dispatcher_library import Registrations, find_overload, name_of_edition

SOURCE = """#include "shiplap/autograd.h"
using namespace shiplap::autograd;
#define EXPORT extern "C" __attribute__((visibility("default")))
// What went wrong, empty where nothing did.
static thread_local std::string problem;
EXPORT const char* shiplap_problem() { return problem.c_str(); }
EXPORT void* shiplap_route(const char* op, const char* python) {
  return guarded(problem, [&] { return static_cast<void*>(route_of(op, python)); });
}
EXPORT const void* shiplap_formula(const int64_t* words, const char* const* names) {
  return guarded(problem, [&] { return static_cast<const void*>(read_formula(Reader(words, names))); });
}
// Calls are recorded by this formula from now on, and by Python where it is null.
EXPORT void shiplap_record(void* route, const void* formula) {
  static_cast<Route*>(route)->store(static_cast<const Formula*>(formula), std::memory_order_release);
}
"""
FLAGS = (
    *("-O2", WRAP, "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden"),
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
)
ARGUMENT, RESULT = range(2)  # `Source` of the header
GRADIENT, SAVED, VALUE = range(3)  # `Taken` of the header
SIMPLE_KINDS = ("int", "float", "bool", "str", "list[int]", "list[float]", "list[bool]", "list[str]")
HOT_RECORDINGS = 32  # calls that Python records before a notice says how C++ can
_numbers = count(1)  # of gradients in Python: a node keeps the one that was declared when it was made
_started_builds: dict[Path, subprocess.Popen[bytes]] = {}  # in the background: each library is compiled once


def can_record(op: Op) -> bool:
    """Return whether C++ can record calls of ``op`` for autograd. Its gradient must be declared as calls of other ops.
    Its arguments must be tensors, numbers, strings or lists of these, and it must neither write to an argument nor
    return one.
    """
    spec, gradient = op.spec, op.gradient
    if gradient is None or not gradient.ops or not op.can_skip_dispatcher or not available("gradients in C++"):
        return False
    # C++ saves tensors and plain values, and no objects.
    simple = all(a.tensor is not None or (a.cls is None and a.scalar in SIMPLE_KINDS) for a in spec.args)
    return simple and not (spec.mutated or spec.traced or spec.returns) and bool(spec.outputs)


def record_in_cpp(op: Op) -> tuple[ctypes.CDLL, int] | None:
    """Let the C++ library record calls of ``op`` for autograd. Return the library and the address of the op's data in
    it. Return None if Python must record, because C++ cannot record the gradient or the library is missing.
    """
    if not can_record(op) or (library := _open_recorder(op)) is None:
        return None
    python = Registrations(op.spec.namespace, op.edition)
    # A new op each time: nodes of earlier graphs keep calling the gradient that they were made with.
    gradient = f"{op.spec.stem}__gradient{next(_numbers)}"
    python.define(gradient_schema(op.spec, gradient))
    assert op.gradient is not None
    python.implement_by_ops(gradient, make_gradient_call(op.spec, op.gradient, op.run_surrogate))
    words, names = formula_words(op.spec, op.gradient)
    texts = [f"{op.spec.opname}_backward", python.overload(gradient).name(), *names]
    formula = library.shiplap_formula(
        (ctypes.c_int64 * len(words))(*words), (ctypes.c_char_p * len(texts))(*map(str.encode, texts))
    )
    recorded = _define_recording_op(op, python)
    route = library.shiplap_route(op.mutating_overload.name().encode(), recorded.encode())
    if not formula or not route:
        _report_python_recording(op, library.shiplap_problem().decode(errors="replace"))
        return None
    library.shiplap_record(route, formula)
    return library, route


def _define_recording_op(op: Op, python: Registrations) -> str:
    """Define the torch op that C++ calls if Python must record a call of ``op`` for autograd, unless it is defined
    already. Return the name of its overload. ``python`` registers the implementations of the op in Python.
    """
    name = f"{op.spec.stem}__record"
    if (known := find_overload(op.spec.namespace, name_of_edition(name, op.edition))) is not None:
        return str(known.name())
    python.define(schema_text(op.spec, name))
    python.register_autograd(name, op.call_recorded)
    return str(python.overload(name).name())


def formula_words(spec: OpSpec, gradient: Backward) -> tuple[list[int], list[str]]:
    """Return the declared gradient of an op as a list of integers and a list of names, in the encoding that the C++
    library reads.

    The integers state which arguments and results a call saves, and which gradients each op computes from them. The
    names are those of the torch overloads of these ops.
    """
    places = {a.name: (ARGUMENT, i) for i, a in enumerate(spec.args)}
    places |= {name: (RESULT, i) for i, name in enumerate(spec.results)}
    values = [a.name for a in spec.scalars]
    saves = [name for name in dict.fromkeys(gradient.saves) if name not in values]
    kinds = [0 if a.tensor is None else 2 if _is_detached(spec, a.name) else 1 for a in spec.args]
    # In the order in which ``Reader`` in shiplap/autograd.h reads them.
    words = [len(kinds), *kinds, len(spec.results), *(name not in spec.detached for name in spec.results)]
    words += [len(saves), *(number for name in saves for number in places[name]), len(gradient.ops)]
    tensors = [a.name for a in spec.tensors]
    for part in gradient.ops:
        words += [len(part.op.spec.args), *_taken_words(spec, part, saves, values)]
        words += [len(part.gives), *map(tensors.index, part.gives)]
    return words, [_below_autograd_name(part) for part in gradient.ops]


def _taken_words(spec: OpSpec, part: GradientOp, saves: list[str], values: list[str]) -> Iterator[int]:
    """Yield two integers for each argument of ``part``, an op that computes some of the gradients. The first states
    whether the value is an incoming gradient, a saved tensor of ``saves`` or a scalar of ``values``. The second is its
    position among the incoming gradients, in ``saves`` or in ``values``.
    """
    for name, at in part.takes(spec):
        if at >= 0:
            yield from (GRADIENT, at)
        elif name in values:
            yield from (VALUE, values.index(name))
        else:
            yield from (SAVED, saves.index(name))


def _below_autograd_name(part: GradientOp) -> str:
    """Return the name of the torch overload of ``part``, one op of a gradient, that is called below autograd."""
    assert isinstance(part.op, Op)
    return str(part.op.below_autograd.name())


def _is_detached(spec: OpSpec, name: str) -> bool:
    """Return whether the argument ``name`` gets no gradient. That is so if it, or every result of the op, is declared
    as detached.
    """
    return name in spec.detached or {*spec.results} <= {*spec.detached}


# --- the library ------------------------------------------------------------------------------------------------------


def build_recorder(op: Op) -> None:
    """Compile the library that records gradients, unless it is in the cache. If it cannot be compiled, issue a
    notice.
    """
    try:
        place, problem = _recorder_folder(op), ""
        if not is_library_present(place, op.spec.name):
            problem = build_once(place.parent, place.name, SOURCE, _recorder_command(op))
    except MemoryError:
        problem = f"{LACKING} memory"
    except ShiplapError as e:  # such as SL405 where the binding of the op came from the cache
        problem = f"{e.id}: {e.got}"
    if problem:
        _report_python_recording(op, problem)


def _open_recorder(op: Op) -> ctypes.CDLL | None:
    """Return the loaded library that records gradients, or None if it is not in the cache or cannot be loaded.

    If it is not in the cache, start its build if the environment variable ``SHIPLAP_BACKGROUND_BUILD`` is 1. Otherwise
    prepare a notice for the 32nd recorded call. If it cannot be loaded, issue a notice.
    """
    try:
        place = _recorder_folder(op)
        library = find_library(place, op.spec.name)
        if library is None:
            if settings().background_build and place not in _started_builds:
                _started_builds[place] = build_detached(place.parent, place.name, SOURCE, _recorder_command(op))
            elif not settings().background_build:
                _announce_hot_recording(op)
            return None
    except ShiplapError as e:
        _report_python_recording(op, f"{e.id}: {e.got}")
        return None
    library.shiplap_problem.restype = ctypes.c_char_p
    library.shiplap_route.restype = library.shiplap_formula.restype = ctypes.c_void_p
    # Without argtypes ctypes would pass an address as a 32-bit int.
    library.shiplap_record.restype, library.shiplap_record.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p)
    return library


def _announce_hot_recording(op: Op) -> None:
    """Replace the function by which Python records calls of ``op`` by a function that issues a notice at the 32nd call.
    The notice says how to build the library that records in C++.
    """
    recorded, calls = op._record_plain_call, count(1)
    # Wrapped already.
    if recorded is None or getattr(recorded, "__module__", None) == __name__:
        return

    def counted(*args: Any) -> Any:
        """Record one call in Python by ``recorded`` and return its result. At the 32nd call, issue the notice and put
        ``recorded`` back in place of this function.
        """
        if next(calls) == HOT_RECORDINGS and op._record_plain_call is counted:
            op._record_plain_call = recorded
            name = op.spec.name
            why = "the library that records them in C++ is not built for this release of torch"
            fix = f"Build it once: op.build() in Python, or 'shiplap build {registry.command_target(name)}' in a shell"
            notice(f"recorder {name}", f"Python records the gradients of {name}: {why}. {fix}")
        return recorded(*args)

    op._record_plain_call = counted


def _report_python_recording(op: Op, why: str) -> None:
    """Issue a notice that Python records the gradients of ``op`` and of other ops, with the reason ``why``."""
    notice(f"recorder {why}", f"Python records the gradients of {op.spec.name} and of other ops: {why}")


def _recorder_folder(op: Op) -> Path:
    """Return the cache folder of the library that records gradients. It need not exist. Its digest covers the release
    of torch.
    """
    # Compiled against torch's own headers, so that each release needs its own library.
    release = f"torch {torch.__version__} {torch.version.git_version}"
    return cache_folder(op.spec.name) / library_name_digest(SOURCE, (*FLAGS, *extra_compiler_flags()), release)


def _recorder_command(op: Op) -> list[str]:
    """Return the words of the command that compiles the library that records gradients against torch's headers and
    libraries. Raise ``SL405``, with the name of ``op``, if there is no compiler.
    """
    home = Path(torch.__file__).parent
    folders = (home / "include", home / "include" / "torch" / "csrc" / "api" / "include")
    include = ["-I", str(INCLUDE), *(word for folder in folders for word in ("-isystem", str(folder)))]
    return [*compiler_command(op.spec.name), *FLAGS, *include, f"-L{home / 'lib'}", "-ltorch_cpu", "-ltorch", "-lc10"]
