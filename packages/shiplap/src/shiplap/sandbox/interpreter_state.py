"""What code that is judged does to the interpreter that it shares: whom it looks at, and what it leaves changed.

Python tells its audit hooks when somebody asks for frames, for objects of others or for a tracer, whatever the names
were put together from. As everything in the process that is judged, this can be evaded by those who change its memory.
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
from collections.abc import Iterator
from contextlib import contextmanager
from os.path import realpath  # as it is now: what is judged may put another function in its place
from types import FrameType, FunctionType
from typing import Any

import numpy as np
import torch

from shiplap.sandbox.source_scan import HIDES, LOOKS
from shiplap.sandbox.trusted_code import is_genuine, is_theirs, is_trusted, is_trusted_module
from shiplap.torch_private.dispatcher_calls import untouched
from shiplap.torch_private.dispatcher_library import replaced_operators
from shiplap.torch_private.process_state import standing

EVENTS = frozenset(
    {
        *(f"sys.{name}" for name in ("_getframe", "_current_frames", "_current_exceptions")),
        *(f"sys.{name}" for name in ("settrace", "setprofile", "addaudithook")),
        *(f"gc.{name}" for name in ("get_objects", "get_referrers", "get_referents")),
        "sys.monitoring.register_callback",
    }
)
NAMED = frozenset({"object.__getattr__", "ctypes.dlsym"})  # events with a name as the second argument
FRAMES = frozenset({"tb_frame", "gi_frame", "cr_frame", "ag_frame"})
TORCH = os.path.dirname(realpath(torch.__file__))
WHOLE = frozenset(map(realpath, (inspect.__file__, traceback.__file__, sys.modules["ctypes"].__file__ or "")))
IN_PART = {  # functions that look at frames for whoever calls them
    realpath(logging.__file__): {"findCaller", "currentframe", "<lambda>"},
    realpath(typing.__file__): {"_caller"},
    os.path.join(TORCH, "_jit_internal.py"): {"createResolutionCallbackFromFrame"},
    os.path.join(TORCH, "_library", "utils.py"): {"get_source"},
    os.path.join(TORCH, "_ops.py"): {"redispatch"},
}
CALLED = LOOKS | HIDES
LIMITS = [getattr(resource, name) for name in sorted(dir(resource)) if name.startswith("RLIMIT_")]
SUBNORMAL = 1e-40
FLAGS = (  # of torch.backends: which algorithms others get
    *(f"cudnn.{name}" for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
    *(f"cuda.matmul.allow_{name}" for name in ("tf32", "fp16_accumulation")),
    *(f"cuda.matmul.allow_{name}_reduced_precision_reduction" for name in ("fp16", "bf16")),
    *(f"{name}.fp32_precision" for name in ("cuda.matmul", "cudnn.conv", "mkldnn.matmul", "mkldnn.conv")),
    *(f"mkldnn.{name}" for name in ("enabled", "deterministic")),
)


def _flag(path: str) -> Any:
    """A flag of ``torch.backends``; None where this torch has none, or says that two ways to set it were mixed."""
    value: Any = torch.backends
    for name in path.split("."):
        try:
            value = getattr(value, name, None)
        except RuntimeError:
            return "mixed"
    return value


def _precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # two ways to set it were mixed
        return "mixed"


def _monitors() -> tuple[Any, ...]:
    monitoring = getattr(sys, "monitoring", None)
    return tuple(monitoring.get_tool(number) for number in range(6)) if monitoring is not None else ()


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def _umask() -> int:
    """It can be read only by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _finds(finder: Any) -> bool:
    """Whether what finds modules is Python's, or of an installed package."""
    find = getattr(finder, "find_spec", None) or finder
    return is_theirs(find) or (is_trusted_module(find) and not isinstance(find, FunctionType))


def state() -> dict[str, Any]:
    """What a call must leave as it was for its caller."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    return {
        "torch.get_default_dtype": torch.get_default_dtype(),
        "torch.get_default_device": torch.get_default_device(),
        "torch.get_num_threads": torch.get_num_threads(),
        "torch.get_float32_matmul_precision": _precision(),
        "torch.initial_seed": torch.initial_seed(),
        "operators of torch": replaced_operators(is_trusted),
        "torch.backends": tuple(_flag(path) for path in FLAGS),
        "garbage collection": (gc.isenabled(), gc.get_threshold(), list(gc.callbacks)),
        "torch.are_deterministic_algorithms_enabled": torch.are_deterministic_algorithms_enabled(),
        "torch.is_grad_enabled": torch.is_grad_enabled(),
        "modes, autocast or tracers of torch": untouched(),
        "torch.set_flush_denormal": float(np.float32(SUBNORMAL) * np.float32(1.0)) == 0.0,
        "sys.settrace or sys.setprofile": (sys.gettrace(), sys.getprofile()),
        "sys.monitoring": _monitors(),
        "tracemalloc": tracemalloc.is_tracing(),
        "signal handlers": handlers,
        "signals that are blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "faulthandler": faulthandler.is_enabled(),
        "limits": tuple(resource.getrlimit(limit) for limit in LIMITS),
        "current folder": _folder(),
        "os.umask": _umask(),
        "locale": locale.setlocale(locale.LC_ALL),
        "decimal": (decimal.getcontext().prec, decimal.getcontext().rounding),
        "sys.meta_path or sys.path_hooks": [f for f in (*sys.meta_path, *sys.path_hooks) if not _finds(f)],
        "rounding": tuple(float(np.float32(1.0) + np.float32(by)) for by in (2.0**-25, -(2.0**-26))),
        "numpy.seterr": np.geterr(),
        "sys.stdout or sys.stderr": (sys.stdout, sys.stderr),
        "threading.settrace or threading.setprofile": (threading.gettrace(), threading.getprofile()),
        "sys.setswitchinterval": sys.getswitchinterval(),
        **standing(),
        "timers": tuple(signal.getitimer(each)[1] > 0 for each in (signal.ITIMER_REAL, signal.ITIMER_PROF)),
    }


def changed(before: dict[str, Any]) -> list[str]:
    """What is not as it was when ``state`` was asked for."""
    now = state()
    return [name for name, value in before.items() if now[name] != value]


class Watch:
    """Listens from its creation on, in this process and for good."""

    def __init__(self) -> None:
        self._looked: dict[str, None] = {}
        self._busy = False
        self._before, self._frozen = state(), gc.get_freeze_count()
        sys.addaudithook(self._hear)

    def reset(self) -> None:
        """Start anew: what was done so far was the user's own doing."""
        self._looked.clear()
        self._before = state()

    def loaded(self) -> None:
        """What is judged was made just now: we set the seed for its parameters, and its module may set one as well."""
        self._before["torch.initial_seed"] = torch.initial_seed()

    def told(self) -> dict[str, list[str]]:
        """``looked``: what was asked for; ``left``: what is not as it was."""
        frozen = ["gc.freeze"] if gc.get_freeze_count() > self._frozen else []
        return {"looked": list(self._looked), "left": changed(self._before) + frozen}

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event in EVENTS:
            what = event
        elif event in NAMED and len(args) > 1 and (args[1] in FRAMES or args[1] in LOOKS):
            what = str(args[1])
        else:
            return
        if self._busy or what in self._looked:
            return
        self._busy = True
        try:
            if self._is_foreign(sys._getframe(1)):
                self._looked[what] = None
        finally:
            self._busy = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear also of functions in C that raise no audit event, whatever the names were put together from."""
        before = sys.getprofile()
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _called(self, frame: FrameType, event: str, function: Any) -> None:
        if event not in ("call", "c_call"):
            return
        name = frame.f_code.co_name if event == "call" else function.__name__
        if name in CALLED and (event == "c_call" or is_genuine(frame.f_code)) and self._is_foreign(frame):
            self._looked[name] = None

    def _is_foreign(self, frame: FrameType | None) -> bool:
        """Whether code of the candidate asks, by itself or through a module that looks at frames for others."""
        while frame is not None:
            code = frame.f_code
            if not is_genuine(code):
                return True
            file = realpath(code.co_filename)
            if file not in WHOLE and code.co_name not in IN_PART.get(file, ()):
                return False
            frame = frame.f_back
        return False
