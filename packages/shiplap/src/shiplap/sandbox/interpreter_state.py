"""Observation of the interpreter that judged code shares: reads of frames and objects of others, and changed settings.

Python raises audit events for reads of frames, of other objects and of tracers, however their names were composed. Code
that changes the memory of its process can evade this, as it can evade everything in that process.
"""

from __future__ import annotations

import decimal
import faulthandler
import gc
import inspect
import locale
import logging
import os
import resource
import signal
import sys
import threading
import traceback
import tracemalloc
import typing
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from operator import is_
from os.path import realpath  # bound now, since the candidate may replace ``os.path.realpath`` later
from types import FrameType, FunctionType
from typing import Any

import numpy as np
import torch

from shiplap.sandbox.trusted_code import is_genuine_code, is_trusted_file
from shiplap.sandbox.trusted_objects import is_trusted_function
from shiplap.torch_private.dispatcher_calls import untouched
from shiplap.torch_private.dispatcher_library import replaced_operators
from shiplap.torch_private.process_state import process_settings

EVENTS = frozenset(
    {
        *(f"sys.{name}" for name in ("_getframe", "_current_frames", "_current_exceptions")),
        *(f"sys.{name}" for name in ("settrace", "setprofile", "addaudithook")),
        *(f"gc.{name}" for name in ("get_objects", "get_referrers", "get_referents")),
        "sys.monitoring.register_callback",
    }
)
NAMED = frozenset({"object.__getattr__", "ctypes.dlsym"})  # events with a name as the second argument
FRAME_ATTRIBUTES = frozenset({"tb_frame", "gi_frame", "cr_frame", "ag_frame"})
TORCH = os.path.dirname(realpath(torch.__file__))
FRAME_READING_FILES = frozenset(
    map(realpath, (inspect.__file__, traceback.__file__, sys.modules["ctypes"].__file__ or ""))
)
FRAME_READING_FUNCTIONS = {  # functions that read frames for their callers
    realpath(logging.__file__): {"findCaller", "currentframe", "<lambda>"},
    realpath(typing.__file__): {"_caller"},
    os.path.join(TORCH, "_jit_internal.py"): {"createResolutionCallbackFromFrame"},
    os.path.join(TORCH, "_library", "utils.py"): {"get_source"},
    os.path.join(TORCH, "_ops.py"): {"redispatch"},
}
STACK_NAMES = frozenset(
    {
        "_getframe",
        "_current_frames",
        "_getframemodulename",
        "currentframe",
        "getouterframes",
        "f_back",
        "tb_frame",
        "extract_stack",
        "walk_stack",
        "format_stack",
        "print_stack",
        "dump_traceback",
        "dump_traceback_later",
        "get_object_traceback",
        "take_snapshot",
        "CapturedTraceback",
        "gather_traceback",
    }
)
HEAP_NAMES = frozenset({"get_objects", "get_referrers", "get_referents"})
MEMORY_NAMES = frozenset(
    {
        "mprotect",
        "ptrace",
        "process_vm_readv",
        "process_vm_writev",
        "LD_PRELOAD",
        "clock_gettime",
        "pthread_create",
    }
)
PYTHON_C_NAMES = frozenset(  # functions of Python's C interface
    {
        "PyEval_GetFrame",
        "PyThreadState_GetFrame",
        "PyFrame_GetBack",
        "_PyThread_CurrentFrames",
        "PyEval_SetTrace",
        "PyEval_SetProfile",
        "PyUnstable_GC_VisitObjects",
    }
)
HIDING_NAMES = frozenset({"_enable_record_function", "redispatch"})
"""Functions of torch that keep an operator out of the list of those that ran."""
LOOKING_NAMES = STACK_NAMES | HEAP_NAMES | MEMORY_NAMES | PYTHON_C_NAMES
"""Names whose use is held against a candidate, wherever it finds them."""
WATCHED_FUNCTIONS = LOOKING_NAMES | HIDING_NAMES
WATCHED_NAMES = LOOKING_NAMES | FRAME_ATTRIBUTES
RESOURCE_LIMITS = [getattr(resource, name) for name in sorted(dir(resource)) if name.startswith("RLIMIT_")]
HOOKS = "sys.meta_path or sys.path_hooks"
SUBNORMAL, USUAL_RECURSION = 1e-40, 1000
BACKEND_FLAGS = (  # flags of torch.backends that select the algorithms of other code
    *(f"cudnn.{name}" for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
    *(f"cuda.matmul.allow_{name}" for name in ("tf32", "fp16_accumulation")),
    *(f"cuda.matmul.allow_{name}_reduced_precision_reduction" for name in ("fp16", "bf16")),
    *(f"{name}.fp32_precision" for name in ("cuda.matmul", "cudnn.conv", "mkldnn.matmul", "mkldnn.conv")),
    *(f"mkldnn.{name}" for name in ("enabled", "deterministic")),
)


def _backend_flag(path: str) -> Any:
    """Return the value of the flag ``path`` of ``torch.backends``, such as ``cudnn.enabled``. Return None if this torch
    has no such flag, and ``"mixed"`` if torch refuses to report it.
    """
    value: Any = torch.backends
    for name in path.split("."):
        try:
            value = getattr(value, name, None)
        except RuntimeError:
            return "mixed"
    return value


def _matmul_precision() -> str:
    """Return torch's precision of float32 matrix products, or ``"mixed"`` if torch refuses to report it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # two ways to set it were mixed
        return "mixed"


def _monitoring_tools() -> tuple[Any, ...]:
    """Return the tool that is registered for each of the six ids of ``sys.monitoring``, or None for an id without a
    tool. Return an empty tuple on a Python without that module.
    """
    monitoring = getattr(sys, "monitoring", None)
    return tuple(monitoring.get_tool(number) for number in range(6)) if monitoring is not None else ()


def _working_folder() -> str:
    """Return the working folder, or an empty string if it was removed."""
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def _read_umask() -> int:
    """Return the umask of this process. It is set for a moment, since it cannot be read otherwise."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _is_trusted_finder(finder: Any) -> bool:
    """Return whether ``finder``, an import finder or path hook, comes from Python, torch or an installed package.

    The import of a library may add a finder, as that of ``six`` does. If ``finder`` is neither a class nor a function,
    its class and what it holds, such as modules by name, must be of libraries, too.
    """
    if isinstance(finder, (type, FunctionType)):
        return is_trusted_function(finder)
    # An instance can hold a function in place of each method that its class calls.
    return is_trusted_function(type(finder)) and all(map(_is_trusted_content, getattr(finder, "__dict__", {}).values()))


def _is_trusted_content(value: Any) -> bool:
    """Return whether ``value``, an attribute of an import finder, runs no code but that of Python, torch or an
    installed package.

    Of lists, tuples, sets and dicts, all elements or values must do so. Of any other object that cannot be called, the
    class must. A function without closure and defaults is trusted for its code alone.
    """
    # A library that puts a lazy module in its own place leaves its functions with globals of no module.
    if type(value) is FunctionType and not (value.__closure__ or value.__defaults__ or value.__kwdefaults__):
        return is_genuine_code(value.__code__) and is_trusted_file(value.__code__.co_filename)
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(map(_is_trusted_content, value))
    if isinstance(value, dict):
        return all(map(_is_trusted_content, value.values()))
    return is_trusted_function(value if callable(value) else type(value))


def import_hooks() -> list[Any]:
    """Return the import finders and path hooks of this process."""
    return [*sys.meta_path, *sys.path_hooks]


def _foreign_hooks(known: Sequence[Any] = ()) -> list[Any]:
    """Return the import finders and path hooks that are neither trusted nor among the objects ``known``."""
    return [hook for hook in import_hooks() if not any(hook is each for each in known) and not _is_trusted_finder(hook)]


def read_interpreter_state(hooks: Sequence[Any]) -> dict[str, Any]:
    """Return, by name, the settings of this process that a call must leave unchanged. Examples are torch's default
    dtype, signal handlers and resource limits.

    The import finders and path hooks ``hooks`` may stay. What they hold is not looked at, which takes long.
    """
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    return {
        "torch.get_default_dtype": torch.get_default_dtype(),
        "torch.get_default_device": torch.get_default_device(),
        "torch.get_num_threads": torch.get_num_threads(),
        "torch.get_float32_matmul_precision": _matmul_precision(),
        "torch.initial_seed": torch.initial_seed(),
        "operators of torch": replaced_operators(is_trusted_file),
        "torch.backends": tuple(_backend_flag(path) for path in BACKEND_FLAGS),
        "garbage collection": (gc.isenabled(), gc.get_threshold(), list(gc.callbacks)),
        "torch.are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled(),
        "torch.is_grad_enabled": torch.is_grad_enabled(),
        "modes, autocast or tracers of torch": untouched(),
        "torch.set_flush_denormal": float(np.float32(SUBNORMAL) * np.float32(1.0)) == 0.0,
        "sys.settrace or sys.setprofile": (sys.gettrace(), sys.getprofile()),
        "sys.monitoring": _monitoring_tools(),
        "tracemalloc": tracemalloc.is_tracing(),
        "signal handlers": handlers,
        "signals that are blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "faulthandler": faulthandler.is_enabled(),
        "limits": tuple(resource.getrlimit(limit) for limit in RESOURCE_LIMITS),
        "current folder": _working_folder(),
        "os.umask": _read_umask(),
        "locale": locale.setlocale(locale.LC_ALL),
        "decimal": (decimal.getcontext().prec, decimal.getcontext().rounding),
        HOOKS: _foreign_hooks(hooks),
        # Sums that round up or down reveal the rounding mode of the processor.
        "rounding": tuple(float(np.float32(1.0) + np.float32(by)) for by in (2.0**-25, -(2.0**-26))),
        "numpy.seterr": np.geterr(),
        "sys.stdout or sys.stderr": (sys.stdout, sys.stderr),
        "threading.settrace or threading.setprofile": (threading.gettrace(), threading.getprofile()),
        "sys.setswitchinterval": sys.getswitchinterval(),
        "sys.setrecursionlimit": min(sys.getrecursionlimit(), USUAL_RECURSION),  # compilers raise it
        "warnings as errors": [f for f in warnings.filters if f[:2] == ("error", None) and f[3] is None],
        "torch.set_warn_always": torch.is_warn_always_enabled(),
        **process_settings(),
        # A timer would interrupt later calls.
        "timers": tuple(signal.getitimer(each)[1] > 0 for each in (signal.ITIMER_REAL, signal.ITIMER_PROF)),
    }


def changed_interpreter_state(before: dict[str, Any], hooks: Sequence[Any]) -> list[str]:
    """Return the names of the settings of this process that differ from ``before``, an earlier result of
    ``read_interpreter_state`` with the same ``hooks``.
    """
    now = read_interpreter_state(hooks)
    return [name for name, value in before.items() if now[name] != value]


def _audit_hook(record: Callable[[str, tuple[Any, ...]], None]) -> Callable[[str, tuple[Any, ...]], None]:
    """Return a function for ``sys.addaudithook`` that calls ``record`` for watched events alone.

    A snapshot of all functions reads a hundred thousand code objects, each of which is an event. Python calls a plain
    function in a third of the time of a method (3.11, 2026-11-30).
    """

    def hook(event: str, args: tuple[Any, ...]) -> None:
        """Call ``record`` if the event is watched, by itself or by the name that is its second argument."""
        if event in EVENTS or (event in NAMED and len(args) > 1 and args[1] in WATCHED_NAMES):
            record(event, args)

    return hook


class InterpreterWatch:
    """A record of the functions with which the code under test reads frames and objects of other code, and of changed
    settings. The record begins when the instance is created, which installs an audit hook that cannot be removed.
    """

    def __init__(self) -> None:
        """Record the present settings and install a Python audit hook, which cannot be removed again."""
        self._looked: dict[str, None] = {}
        self._busy = False
        self._record_state()
        self._collected: list[None] = []  # an object that the garbage collector looks at until ``gc.freeze`` is called
        sys.addaudithook(_audit_hook(self._record_event))

    def reset(self) -> None:
        """Delete all observations, and record the present settings as those that later calls must not change. This
        method is called after the imports of the user's own modules, since they may change settings.
        """
        self._looked.clear()
        self._record_state()

    def _record_state(self) -> None:
        """Record the present settings as those that later calls must not change."""
        self._hooks, self._foreign = import_hooks(), _foreign_hooks()
        self._before = read_interpreter_state(self._hooks)

    def loaded(self) -> None:
        """Record the present seed of torch as the one that later calls must not change. This method is called after the
        code under test was loaded, which sets the seed to initialise parameters.
        """
        self._before["torch.initial_seed"] = torch.initial_seed()

    def read_observations(self, *, thorough: bool = True) -> dict[str, list[str]]:
        """Return what the code under test has done, as a dict of lists of names.

        The list ``looked`` has the functions with which it has read frames or objects of other code. The list ``left``
        has the settings that are still changed. Unless ``thorough`` is true, what import finders hold that were there
        before is not looked at.
        """
        left = changed_interpreter_state(self._before, self._hooks)
        if thorough and HOOKS not in left and _foreign_hooks() != self._foreign:
            left.append(HOOKS)
        frozen = [] if self._is_collected() else ["gc.freeze"]
        return {"looked": list(self._looked), "left": left + frozen}

    def _is_collected(self) -> bool:
        """Return whether the garbage collector still looks at the objects that existed when this record began, which
        ``gc.freeze`` ends.
        """
        # Objects of the launcher are frozen before it forks: to count them, as gc.get_freeze_count does, takes 30 ms.
        self._busy = True  # the list of objects is an event of the audit hook
        try:
            return any(map(is_, gc.get_objects(), repeat(self._collected)))
        finally:
            self._busy = False

    def _record_event(self, event: str, args: tuple[Any, ...]) -> None:
        """Handle a watched event of Python's audit hook, whose function calls this one. The name of the event, or of
        the function in it, is recorded in ``_looked`` if the code under test has read frames or objects of other code.
        """
        what = event if event in EVENTS else str(args[1])
        # ``_is_foreign`` raises audit events itself.
        if self._busy or what in self._looked:
            return
        self._busy = True
        try:
            if self._is_foreign(sys._getframe(2)):
                self._looked[what] = None
        finally:
            self._busy = False

    @contextmanager
    def record_calls(self) -> Iterator[None]:
        """Return a context in which a profile function also records calls of C functions that read frames or hide
        operators. Such calls raise no audit event.
        """
        before = sys.getprofile()
        sys.setprofile(self._record_call)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _record_call(self, frame: FrameType, event: str, function: Any) -> None:
        """Handle an event of Python's profile function. The name of a watched function, such as one that reads frames,
        is recorded in ``_looked`` if the code under test calls it.
        """
        if event not in ("call", "c_call"):
            return
        name = frame.f_code.co_name if event == "call" else function.__name__
        if (
            name in WATCHED_FUNCTIONS
            and (event == "c_call" or is_genuine_code(frame.f_code))
            and self._is_foreign(frame)
        ):
            self._looked[name] = None

    def _is_foreign(self, frame: FrameType | None) -> bool:
        """Return whether code under test made the call in ``frame``.

        The frames are searched from ``frame`` to its callers. Library functions that read frames for their callers are
        skipped. The first other frame determines the result, which is True if its code does not belong to Python, an
        installed package or Shiplap.
        """
        while frame is not None:
            code = frame.f_code
            if not is_genuine_code(code):
                return True
            file = realpath(code.co_filename)
            if file not in FRAME_READING_FILES and code.co_name not in FRAME_READING_FUNCTIONS.get(file, ()):
                return False
            frame = frame.f_back
        return False
