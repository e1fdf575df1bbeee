"""The native binding of C ABI kernels. It is built on request, cached, and attached beside the Python binding.

Python runs a kernel (``kernels/c/declaration.py``) until a library exists. A library that came with the package of the
op, or is in the cache, is attached at the first call. Without one, call number ``HOT_CALLS`` issues a notice of how to
build it. If the environment variable ``SHIPLAP_BACKGROUND_BUILD`` is 1, that call starts a compiler in a separate
process, and a later call attaches the library. No call waits for the compiler. If a library cannot be built or
attached, one notice has the reason, and Python continues to run the kernel.
"""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import torch

from shiplap.declare.native_interface import NativeForm
from shiplap.declare.spec import OpSpec
from shiplap.dispatch import Op, registry
from shiplap.errors import ShiplapError, error, notice
from shiplap.kernels.native import prebuilt
from shiplap.kernels.native.attach import attach_plan
from shiplap.kernels.native.build import LACKING, LIBRARY, build_detached
from shiplap.kernels.native.build import build_once as compile_into
from shiplap.kernels.native.build_plan import LibraryPlan, PlanInputs, compile_command, form_is_native, make_plan
from shiplap.kernels.native.cache import evict_artefacts, is_library_present
from shiplap.kernels.native.gradient_recorder import build_recorder, can_record
from shiplap.settings import settings

HOT_CALLS = 32  # calls that the Python binding serves before a native one pays
SLOWER = 3  # the time of a call through Python, in native calls, where the kernel has no work (benchmarks/overhead.py)
UNBUILT = "its native binding is not built"
BINDING_OFF = "SHIPLAP_NATIVE=0"

_lock = threading.RLock()
_running_builds: dict[Path, subprocess.Popen[bytes]] = {}


def _reset_builds_after_fork() -> None:
    """Replace the lock of builds by a new one, and forget the builds that run in the background. This is done in a
    forked child, which has neither the threads nor the child processes of its parent.
    """
    global _lock
    _lock = threading.RLock()
    _running_builds.clear()


os.register_at_fork(after_in_child=_reset_builds_after_fork)


# --- what the Python binding asks at each call it serves ------------------------------------------------------------


def count_python_call(spec: OpSpec, form: NativeForm) -> None:
    """Count a call of the op ``spec`` that Python has run. ``form`` is the C function of the kernel.

    At the first call and from the 32nd on, attach the op's native binding if it is built. The native binding is
    generated C++ that runs calls without Python. If it is not built, the 32nd call starts its build if the environment
    variable ``SHIPLAP_BACKGROUND_BUILD`` is 1, and otherwise issues a notice. Nothing is done while torch traces a
    graph.
    """
    # Nothing is built or attached while a graph is traced: the trace would record it.
    if torch.compiler.is_compiling():
        return
    # Not locked: a lost count only delays the notice.
    form.calls += 1
    if 1 < form.calls < HOT_CALLS or not _lock.acquire(blocking=False):  # another thread is at it
        return
    try:
        reason = _advance_binding(spec, form)
    except Exception as e:  # the call has been served: nothing that goes wrong here may undo that
        reason = _failure_reason(e)
    finally:
        _lock.release()
    if reason:
        form.settle(reason)
        if (op := registry.find_declared_op(spec.name)) is not None:
            op.install_fast_path()  # Python serves from now on, by a shorter way
        if reason == UNBUILT:
            notice(f"native {spec.name}", how_to_build(spec.name))
        elif reason != BINDING_OFF:
            notice(f"native {reason}", f"{spec.name} stays with the Python binding: {reason}")


def how_to_build(name: str) -> str:
    """Return the notice for the op ``name`` which says that calls would be faster with a native binding. It contains
    the commands that build the binding.
    """
    target = registry.command_target(name)
    return (
        f"{name} is called through the Python binding. Where a kernel has no work, that takes about {SLOWER} times as "
        "long as a native call. "
        f"Build the native binding once: op.build() in Python, 'shiplap build {target}' in a shell, or ship it with "
        "'shiplap package'. SHIPLAP_BACKGROUND_BUILD=1 builds in the background"
    )


def _advance_binding(spec: OpSpec, form: NativeForm) -> str:
    """Attach the op's native binding if its library is built. Otherwise start its build if the calls of ``form``, the C
    function of the kernel, have reached 32 and background builds are allowed. Return the reason if there will be no
    binding, else an empty string.
    """
    if not settings().native:
        return BINDING_OFF
    if form.calls > HOT_CALLS and form.place in _running_builds:
        return _collect_build(spec, form)
    # The op may have been declared again since the kernel was bound.
    op = registry.find_declared_op(spec.name)
    if op is None or not form_is_native(op, form):
        return f"Python picks the kernels of {spec.name}" if op is not None and form.calls >= HOT_CALLS else ""
    if _attach_installed(op):
        return ""
    plan = make_plan(op)
    form.place = plan.place
    if is_library_present(plan.place, spec.name):
        attach_plan(plan)
    elif form.calls >= HOT_CALLS and not settings().background_build:
        return UNBUILT
    elif form.calls >= HOT_CALLS and form.place not in _running_builds:
        _running_builds[form.place] = build_detached(
            plan.place.parent, plan.place.name, plan.source, compile_command(op)
        )
    return ""


def _attach_installed(op: Op) -> bool:
    """Attach the prebuilt native library that came with the package of ``op``. Return whether it is attached. If a
    library exists and cannot be used, issue a notice once.
    """
    plan, why = prebuilt.find_prebuilt_library(op)
    if plan is not None:
        try:
            attach_plan(plan)
        except ShiplapError as e:
            why = f"{plan.place}: {e.got}"
            prebuilt.give_up_library(plan.place, e.got)
        else:
            return True
    if why:
        problem = error("SL309", where=op.spec.name, got=why, expected="a binding for this op, machine and torch")
        notice(
            f"installed {op.spec.name}",
            f"{op.spec.name} does not use the binding of its package: {_failure_reason(problem)}",
        )
    return False


def attach_installed_library(op: Op) -> bool:
    """Attach the prebuilt native library that came with the package of ``op``, before the first call of the op. Return
    whether the op has native code now. Return False if the environment variable ``SHIPLAP_NATIVE`` is 0 or torch is
    tracing a graph.
    """
    if not settings().native or torch.compiler.is_compiling():
        return False
    with _lock:
        return op.native is not None or _attach_installed(op)


def _collect_build(spec: OpSpec, form: NativeForm) -> str:
    """Attach the library that a background build for the op ``spec`` has made. ``form`` is the kernel whose calls
    started the build.

    Return the problem if the build failed. Return an empty string if the library is attached, if the build still runs,
    or if the op no longer uses the kernel.
    """
    child = _running_builds[form.place]
    if child.poll() is None:
        return ""
    assert child.stdout is not None
    output = "" if child.stdout.closed else child.stdout.read().decode(errors="replace")
    op = registry.find_declared_op(spec.name)
    # While the build ran, the op may have been declared anew, or a kernel bound that excludes C++.
    if op is None or not form_is_native(op, form):
        return ""
    plan = make_plan(op)
    if not is_library_present(plan.place, spec.name):
        return _build_failed(output or f"the builder ended with status {child.returncode}")
    child.stdout.close()
    evict_artefacts(plan.place.parent)
    attach_plan(plan)
    return ""


# --- on request -----------------------------------------------------------------------------------------------------


def build(op: Op) -> Path:
    """Build or find the native binding of ``op`` now, attach it, and return the path of its library.

    If C++ can record the op's gradients, the library for that is built as well. Raise ``SL404`` if only Python can run
    calls of the declaration. Raise ``SL405`` or ``SL406`` if the binding cannot be built.
    """
    with _lock:
        plan = make_plan(op)
        compile_plan(plan, op)
        if any(can_record(each.op) for each in plan.entries.values()):
            build_recorder(op)
        attach_plan(plan)
        # Last, so that the library of this op is the most recently used one.
        evict_artefacts(plan.place.parent)
        return plan.place / LIBRARY


def compile_plan(plan: LibraryPlan, op: Op) -> None:
    """Compile the library of ``plan``, generated C++ for one or more ops, into the cache unless it is there. Raise
    ``SL405`` or ``SL410``, with the name of ``op``, if it cannot be built.
    """
    if is_library_present(plan.place, op.spec.name):
        return
    try:
        problem = compile_into(plan.place.parent, plan.place.name, plan.source, compile_command(op))
    except MemoryError:
        problem = f"{LACKING} memory"
    if problem:
        raise build_error(op.spec.name, problem)


def state(op: Op, device: str = "cpu", inputs: PlanInputs | None = None) -> tuple[str, str]:
    """Return which binding runs the C ABI kernel of ``op`` on ``device``, as a pair of strings. The first is
    ``"native"`` or ``"python"``. The second names the library of the native binding, or the reason why there is none.

    A library in the package of the op or in the cache counts as native, because the first call attaches it. ``shiplap
    env`` prints both strings. ``inputs`` are shared by the plans of several ops, and new ones if they are None.
    """
    form = next((k.native for k in op.kernels.get(device, ()) if k.native is not None), None)
    if op.native is not None and device in op.native.devices:
        return "native", str(op.native.library)
    if not settings().native:
        return "python", BINDING_OFF
    if form is None:
        return "python", "no C ABI kernel"
    if not form.wanted:
        return "python", "its launches are generated where there is a CUDA device"
    plan, why = prebuilt.find_prebuilt_library(op)
    if plan is not None and not form.why:
        return "native", f"{plan.place / LIBRARY}, attached at the first call"
    try:
        # Raises where the op cannot be bound, which is the reason that is shown.
        plan = make_plan(op, inputs)
        there = is_library_present(plan.place, op.spec.name)
    except (ShiplapError, OSError) as e:
        return "python", _failure_reason(e)
    if device not in [e.device for e in plan.entries.values() if e.op is op]:
        return "python", form.why or "a kernel of Python, or one that asks supports=, is tried first"
    if there and not form.why:
        return "native", f"{plan.place / LIBRARY}, attached at the first call"
    background = f"built in the background from call {HOT_CALLS} on" if settings().background_build else UNBUILT
    reason = form.why or background
    return "python", f"{reason} ({why})" if why else reason


def build_error(where: str, problem: str) -> ShiplapError:
    """Return the error which says that the native binding of the op named ``where`` could not be built. ``problem`` is
    the builder's output. The error is ``SL410`` if the machine lacked a resource, and otherwise ``SL405``.
    """
    if problem.startswith(LACKING):
        return error("SL410", where=where, got=problem, expected="a machine with room for the build")
    return error("SL405", where=where, got=problem, expected="a library")


def _build_failed(output: str) -> str:
    """Return one line which says why a background build failed. ``output`` is the builder's output."""
    return _failure_reason(build_error("", output))


def _failure_reason(e: Exception) -> str:
    """Return an exception as one line for a notice. For a catalogue error, the line holds its id, such as ``SL405``,
    its title and its observation. For any other exception, it holds the type and the message.
    """
    return f"{e.id}: {e.what}, {e.got}" if isinstance(e, ShiplapError) else f"{type(e).__name__}: {e}"
