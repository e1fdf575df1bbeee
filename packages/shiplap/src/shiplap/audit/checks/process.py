"""``process``: a call leaves the process as it was: random numbers, threads, defaults, modes, memory, environment."""

from __future__ import annotations

import contextlib
import ctypes
import decimal
import gc
import locale
import os
import random
import signal
import sys
import tempfile
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from shiplap.audit.check import Check, Observation
from shiplap.audit.first_call import make_first_call
from shiplap.dispatch import Op
from shiplap.errors import error_line
from shiplap.sampling.case import SampleCase, tensors_among
from shiplap.sampling.run import call_op, floating_args, require_gradients, sum_to_real, why_no_backward
from shiplap.sampling.samples import Samples
from shiplap.sandbox.proc_filesystem import resident_bytes

ROUNDS, CALLS = 2, 30
WARM, SECONDS = 7, 5.0  # calls before the rounds; of a slow op a round has as many calls as fit into this time
SLOW_CALL_SECONDS, FEW_CALLS = 0.7, 3  # of processor time, from which on a round has that few calls
LONGER, LONGEST = 5, 20  # where the first rounds grew, one follows that is at least and at most so many times as long
SETTING_FIX = "depend on no setting of the process: name the dtype and the device of each tensor that the kernel makes"
# Signals that runtimes and debuggers install handlers for.
HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGABRT, signal.SIGSEGV, signal.SIGFPE)
_BELOW_EPSILON = float("1e-17")  # less than half of what 1.0 can be told from, unless results are rounded up or down
LEAKED_BYTES_PER_CALL = 1 << 14  # per call: less than that is not told from noise

_deterministic_settings: Any = torch.utils.deterministic


def process_cases(samples: Samples) -> Iterable[SampleCase]:
    """Yield the samples on which the check ``process`` calls the op. They are the base sample, samples without optional
    arguments, and one that is large enough for several threads.
    """
    yield from chain(samples.plain(), samples.optionals(), islice(samples.grains(), 1))


RANDOM_STATES = "torch's random state", "CUDA's random state"  # of random ops: the check `distribution` looks at it


def observe_process(op: Op, case: SampleCase) -> Observation:
    """Compare the state of the process before and after calls of the op and their backwards. The returned observation
    has a problem if a call changes settings, prints, or leaks memory.
    """
    first = make_first_call(op, case, process_state)
    changed = [c for c in first.changed if not (op.spec.random and c[0] in RANDOM_STATES)]
    if changed:
        shown = "; ".join(f"{n} from {_shorten_value(a)} to {_shorten_value(b)}" for n, a, b in changed)
        return Observation(f"the first call in a process changes {shown}")
    call_op(op, case.fresh())  # what happens once - a library loaded, a table made - is no leak and no fault
    # A library that is loaded may set such state once; a call must not set it again.
    if repeated := _sets_repeatedly(first.loaded, lambda: call_op(op, case.fresh())):
        return Observation(f"each call changes {repeated}")
    if printed := _capture_stdout(lambda: call_op(op, case.fresh())):
        return Observation(f"each call writes to standard output: {printed!r:.80}", fix="remove what the kernel prints")
    runs: list[tuple[str, Callable[[], Any]]] = [("a call", lambda: call_op(op, case.fresh()))]
    if not why_no_backward(op, case):
        runs.append(("a call and its backward", lambda: _call_and_backward(op, case)))
    for what, run in runs:
        run()
        if (observation := _observe_settings(what, run)).problem:
            return observation
        _advance_random_states()
        before = process_state()
        run()
        after = process_state()
        named = [n for n in before if before[n] != after[n] and not (op.spec.random and n in RANDOM_STATES)]
        if named:
            shown = "; ".join(f"{n} from {_shorten_value(before[n])} to {_shorten_value(after[n])}" for n in named)
            return Observation(f"{what} changes {shown}")
    return _observe_leaks(*runs[-1]) if not case.recipe.absent else Observation()


def _sets_repeatedly(loaded: Iterable[tuple[str, Any, Any]], run: Callable[[], Any]) -> str:
    """Return a message that names a state of the process that a later call of ``run`` changes again, or an empty string
    if there is none.

    ``loaded`` has ``(name, value before, value after)`` of the changes that the first call made. A library that is
    loaded may make such a change once, but a call must not repeat it.
    """
    for name, before, _ in loaded:
        write = STATE_WRITERS.get(name)
        if write is None:
            continue
        now = process_state()[name]
        try:
            # The state is put back first, so that a second change by the call shows.
            write(before)
            run()
            after = process_state()[name]
        finally:
            write(now)
        if after != before:
            moved = (
                sorted(k for k in {*before, *after} if before.get(k) != after.get(k))
                if name == ENVIRONMENT_NAME
                else []
            )
            return (
                f"{name}: {', '.join(moved)}"
                if moved
                else f"{name} from {_shorten_value(before)} to {_shorten_value(after)}"
            )
    return ""


def _set_environment(values: dict[str, str]) -> None:
    """Set the environment variables of the process to exactly ``values``. All other variables are deleted."""
    # os.environ passes each change on to the C library, which a new dict would not.
    for key in {*os.environ, *values}:
        if key not in values:
            del os.environ[key]
        elif os.environ.get(key) != values[key]:
            os.environ[key] = values[key]


def _set_filters(filters: list[Any]) -> None:
    """Set the filters of Python's warnings to ``filters``."""
    warnings.resetwarnings()
    warnings.filters.extend(filters)  # type: ignore[attr-defined]  # a list, that the stubs call a sequence


def _set_handlers(handlers: list[Any]) -> None:
    """Set the handlers of the signals ``HANDLED_SIGNALS``. Do nothing on a thread other than the main one, since Python
    forbids it there.
    """
    if threading.current_thread() is threading.main_thread():
        for number, handler in zip(HANDLED_SIGNALS, handlers, strict=True):
            if handler is not None:  # None: it was not set by Python
                signal.signal(number, handler)


# Named once, as its changes are listed by variable.
ENVIRONMENT_NAME = "the environment"
STATE_WRITERS: dict[str, Callable[[Any], object]] = {
    ENVIRONMENT_NAME: _set_environment,
    "warning filters": _set_filters,
    "signal handlers": _set_handlers,
    "locale": partial(locale.setlocale, locale.LC_ALL),
    "the module search path": partial(sys.path.__setitem__, slice(None)),
    "NumPy's floating point errors": lambda kept: sys.modules["numpy"].seterr(**kept),
}


def _capture_stdout(run: Callable[[], Any]) -> str:
    """Return what ``run`` writes to standard output, whether by Python or by C, as text of at most 200 bytes."""
    # C code has a buffer of its own, which has to be written before and after.
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    # The descriptor is replaced, because C code does not write through sys.stdout.
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            with contextlib.redirect_stdout(open(1, "w", closefd=False)) as out:
                run()
                out.flush()
            flush(None)
        finally:
            os.dup2(kept, 1)
            os.close(kept)
        file.seek(0)
        return file.read(200).decode(errors="replace")


def _observe_settings(what: str, run: Callable[[], Any]) -> Observation:
    """Call ``run`` several times, each time with other values for all settings in ``PROCESS_SETTINGS``. The returned
    observation has a problem if ``run`` changes a setting, or raises an error because of one. ``what`` names the call
    in the problem.
    """
    # Two values at least for each setting: a call that sets a constant might set the first one.
    for number in range(max(len(values) for _, _, _, values in PROCESS_SETTINGS)):
        wanted = {name: values[number % len(values)] for name, _, _, values in PROCESS_SETTINGS}
        try:
            left = _settings_after(run, wanted)
        except Exception as e:
            if named := next((name for name, value in wanted.items() if _fails_with(run, {name: value})), ""):
                return Observation(f"{what} fails where {named} is {wanted[named]}: {error_line(e)}", fix=SETTING_FIX)
            raise
        for name, value in wanted.items():
            if left[name] != value:
                return Observation(f"{what} changes {name}: {value} before, {left[name]} after")
    return Observation()


def _settings_after(run: Callable[[], Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Give the settings named in ``wanted`` these values, call ``run``, and return the values that they have then. The
    values from before are restored, also if ``run`` raises an exception, which is passed on.
    """
    settings = [setting for setting in PROCESS_SETTINGS if setting[0] in wanted]
    was = [read() for _, read, _, _ in settings]
    try:
        for name, _, write, _ in settings:
            write(wanted[name])
        run()
        return {name: read() for name, read, _, _ in settings}
    finally:
        for (_, _, write, _), value in zip(settings, was, strict=True):
            write(value)


def _fails_with(run: Callable[[], Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether ``run`` raises an exception while the settings named in ``wanted`` have these values."""
    try:
        _settings_after(run, wanted)
    except Exception:  # the caller has the error
        return True
    return False


_set_anomaly = partial(torch.autograd.set_detect_anomaly, check_nan=False)
_CUDNN = torch.backends.cudnn
PROCESS_SETTINGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], Any], tuple[Any, ...]], ...] = (
    ("the number of threads", torch.get_num_threads, torch.set_num_threads, (1, 2, 3)),
    (
        "float32 matmul precision",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        ("high", "highest"),
    ),
    ("Python's recursion limit", sys.getrecursionlimit, sys.setrecursionlimit, (2999, 3001)),
    (
        "deterministic algorithms",
        torch.are_deterministic_algorithms_enabled,
        lambda on: torch.use_deterministic_algorithms(on, warn_only=True),
        (True, False),
    ),
    ("garbage collection", gc.isenabled, lambda on: gc.enable() if on else gc.disable(), (False, True)),
    ("anomaly mode", torch.is_anomaly_enabled, _set_anomaly, (True, False)),
    ("Python's switch interval", sys.getswitchinterval, sys.setswitchinterval, (0.004, 0.005)),
    ("cuDNN's choice by timing", lambda: _CUDNN.benchmark, partial(setattr, _CUDNN, "benchmark"), (True, False)),
    ("TF32 in cuDNN", lambda: _CUDNN.allow_tf32, partial(setattr, _CUDNN, "allow_tf32"), (True, False)),
    ("warnings each time", torch.is_warn_always_enabled, torch.set_warn_always, (True, False)),
    ("grad mode", torch.is_grad_enabled, torch.set_grad_enabled, (False, True)),
    ("flushing of subnormal numbers", lambda: _flushes_subnormals(), torch.set_flush_denormal, (False, True)),
    ("the default dtype", torch.get_default_dtype, torch.set_default_dtype, (torch.float64, torch.float32)),
)


def _flushes_subnormals() -> bool:
    """Return whether the processor is set to flush subnormal numbers to zero."""
    return bool((torch.tensor([1e-39], dtype=torch.float32) * 1.0 == 0).item())  # whatever the default dtype is


def _advance_random_states() -> None:
    """Draw from the random generators of torch, Python and NumPy, so that their states are not those after a seed. A
    call that seeds a generator again would otherwise go unnoticed, because it sets the state that is already there.
    """
    torch.rand(3)
    random.random()
    if numpy := sys.modules.get("numpy"):
        numpy.random.random()


def _call_and_backward(op: Op, case: SampleCase) -> None:
    """Call the op on a sample whose floating-point arguments require gradients, and run the backward of the results."""
    names = floating_args(op, case)
    args = require_gradients(op, case.fresh(), names)
    outs = [o for o in call_op(op, args) if o.grad_fn is not None]  # a view made without gradients requires one, too
    wanted = [t for t in tensors_among(args) if t.requires_grad]
    if outs:
        torch.autograd.grad([sum_to_real(o) for o in outs], wanted, allow_unused=True)


def process_state() -> dict[str, Any]:
    """Return the state that belongs to the process or the user, as a dict by name. It includes the settings of torch,
    Python and the operating system, random states, the environment variables and the state of CUDA.
    """
    settings = {name: read() for name, read, *_ in PROCESS_SETTINGS}
    return {**settings, **_state_of_torch(), **_state_of_python(), **_state_of_system(), **_state_of_cuda()}


def _state_of_torch() -> dict[str, Any]:
    """Return the state of torch that a call could change, as a dict by name, without the settings in
    ``PROCESS_SETTINGS``.
    """
    return {
        "torch's random state": bytes(torch.get_rng_state().numpy().tobytes()),
        "the default device": str(torch.get_default_device()) if hasattr(torch, "get_default_device") else "",
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "the dtype of autocast": torch.get_autocast_dtype("cpu"),
        "memory that is not initialised": _deterministic_settings.fill_uninitialized_memory,
        "cuDNN": torch.backends.cudnn.enabled,
        "MKL-DNN": getattr(torch.backends.mkldnn, "enabled", True),
    }


def _state_of_python() -> dict[str, Any]:
    """Return the state of Python and NumPy, such as random states, hooks and warning filters, as a dict by name."""
    numpy: Any = sys.modules.get("numpy")
    return {
        "Python's random state": random.getstate(),
        # As text, since a comparison of the arrays in it has no single truth value.
        "NumPy's random state": str(numpy.random.get_state()) if numpy else "",
        "NumPy's floating point errors": numpy.geterr() if numpy else "",
        "threads": threading.active_count(),
        "the thresholds of garbage collection": gc.get_threshold(),
        "warning filters": list(warnings.filters),
        "standard output": (id(sys.stdout), id(sys.stderr)),
        "what traces calls": (sys.gettrace(), sys.getprofile()),
        "the handler of exceptions": (sys.excepthook, threading.excepthook),
        "decimal precision": decimal.getcontext().prec,
        "the module search path": list(sys.path),
    }


def _state_of_system() -> dict[str, Any]:
    """Return the state that the operating system keeps for the process, such as open files and signal handlers, as a
    dict by name.
    """
    linux = sys.platform == "linux"
    return {
        ENVIRONMENT_NAME: dict(os.environ),
        "the working directory": os.getcwd(),
        "open files": len(os.listdir("/proc/self/fd")) if linux else 0,
        "signal handlers": [signal.getsignal(number) for number in HANDLED_SIGNALS],
        "locale": locale.setlocale(locale.LC_ALL),
        # Both are False while results are rounded to the nearest number.
        "the rounding mode": (1.0 + _BELOW_EPSILON > 1.0, 1.0 - _BELOW_EPSILON < 1.0),
        "processors": sorted(os.sched_getaffinity(0)) if linux else [],
        "priority": os.getpriority(os.PRIO_PROCESS, 0) if linux else 0,
    }


def _state_of_cuda() -> dict[str, Any]:
    """Return the random state, the current device and the current stream of CUDA, as a dict by name. It is empty if
    CUDA is not initialised.
    """
    if not torch.cuda.is_initialized():
        return {}
    return {
        "CUDA's random state": bytes(torch.cuda.get_rng_state().numpy().tobytes()),
        "the current CUDA device": torch.cuda.current_device(),
        "the current CUDA stream": torch.cuda.current_stream().cuda_stream,
    }


def _shorten_value(value: Any) -> str:
    """Return ``repr(value)``. If it has 60 characters or more, return its first 20 characters and a short hash of the
    whole instead.
    """
    text = repr(value)
    return text if len(text) < 60 else f"{text[:20]}... ({hash(text) & 0xFFFF:04x})"


def _observe_leaks(what: str, run: Callable[[], Any]) -> Observation:
    """Return an observation with a problem if each run leaves memory behind. The growth, in resident bytes or Python
    objects, must show in each of several rounds. ``what`` names the run in the problem.
    """
    began = time.process_time()
    run()
    took = time.process_time() - began
    if took > SECONDS:
        return Observation(missed=f"memory is not watched where {what} takes {took:.1f} s of processor time")
    few = took > SLOW_CALL_SECONDS
    gc.freeze()  # what is there already need not be looked through each time
    for _ in range(FEW_CALLS if few else WARM):
        run()
    calls = FEW_CALLS if few else min(CALLS, max(WARM, int(SECONDS / (took + 1e-9))))
    try:
        growths = [_measure_growth(run, calls) for _ in range(ROUNDS)]
        if not _describe_growth(growths, calls, what):
            return Observation()
        # A leak grows with the number of calls; what a round itself leaves, and a cache that fills up, do not.
        longer = max(LONGER, min(LONGEST, int(4 * SECONDS / (took * calls + 1e-9))))
        growths = [_measure_longer_round(run, calls, times) for times in (2, longer)]
        problem = _describe_growth(growths, calls, what)
        return Observation(problem and problem + _place_of_growth(run, calls))
    finally:
        gc.unfreeze()


def _measure_longer_round(run: Callable[[], Any], calls: int, times: int) -> tuple[float, float]:
    """Return ``(objects, bytes)``, the number of Python memory blocks and of resident bytes that ``calls`` runs leave
    behind.

    They are the growth in a round of ``times * calls`` runs minus the growth in a round of ``calls`` runs, divided by
    the number of additional rounds. What a measurement itself leaves behind then does not count.
    """
    once, longer = _measure_growth(run, calls), _measure_growth(run, times * calls)
    return (longer[0] - once[0]) / (times - 1), (longer[1] - once[1]) / (times - 1)


def _place_of_growth(run: Callable[[], Any], calls: int) -> str:
    """Return a clause for a finding that names the line of code which allocates the Python objects that ``calls`` runs
    leave behind. Return an empty string if no single line allocates one in nine of ten runs.
    """
    if tracemalloc.is_tracing():  # by somebody who needs the traces
        return ""
    tracemalloc.start()
    snapshots = []
    try:
        # After the first round, objects that take the place of others which nobody traced are not new any more.
        for _ in range(2):
            for _ in range(calls):
                run()
            gc.collect()
            snapshots.append(tracemalloc.take_snapshot())
    finally:
        tracemalloc.stop()
    grown = snapshots[1].compare_to(snapshots[0], "lineno")
    most = max(grown, key=lambda place: place.count_diff, default=None)
    if most is None or most.count_diff < calls * 0.9:
        return ""
    frame = most.traceback[0]
    return f"; {most.count_diff} of them are made at {Path(frame.filename).name}:{frame.lineno}"


def _measure_growth(run: Callable[[], Any], calls: int) -> tuple[float, float]:
    """Return ``(objects, bytes)``, the number of Python memory blocks and of resident bytes that ``calls`` runs leave
    behind.
    """
    before = _memory_in_use()
    for _ in range(calls):
        run()
    objects, resident = _memory_in_use()
    return objects - before[0], resident - before[1]


def _describe_growth(growths: list[tuple[float, float]], calls: int, what: str) -> str:
    """Return a message that says how much memory every round of ``calls`` runs has left behind, or an empty string if
    that is below the limits. ``growths`` has the objects and bytes of each round, and ``what`` names the runs in the
    message.
    """
    for at, (kind, limit) in enumerate(
        (("Python objects", calls * 0.9), ("bytes of resident memory", calls * LEAKED_BYTES_PER_CALL))
    ):
        # A leak shows in every round, noise does not.
        least = min(growth[at] for growth in growths)
        if least >= limit:
            return f"{what}, {calls} times with one size, leaves {least:.0f} {kind} behind, each time again"
    return ""


def _clear_attribute_cache() -> None:
    """Clear Python's cache of the attributes of types. Python 3.13 has deprecated the older name of the function."""
    if sys.version_info >= (3, 13):
        sys._clear_internal_caches()
    else:
        sys._clear_type_cache()


def _memory_in_use() -> tuple[float, float]:
    """Return the number of memory blocks that Python has allocated and the resident bytes of the process. Both are read
    after a garbage collection.
    """
    # Garbage that waits for a collection is no leak, and neither are names in Python's cache of type attributes. Torch
    # makes a new text for each look-up, and the cache keeps up to 4,096 of them.
    gc.collect()
    _clear_attribute_cache()
    return sys.getallocatedblocks(), resident_bytes(os.getpid())


CHECK = Check(
    "process",
    order=150,
    observes="random states, threads, default dtype, modes, environment and memory are after a call what they were",
    observe=observe_process,
    cases=process_cases,
    obligations=("mode",),
    varies=("mode", "order of calls"),
    fix="set nothing that belongs to the process, draw no random numbers, and keep nothing of a call",
    patience=60.0,
)
