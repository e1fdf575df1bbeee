"""The cost card of an op: the overhead of a raw, eager, compiled and captured call, on a very small sample.

*raw* is the C function alone, called through ctypes with arguments that are ready. *eager* is ``op(...)`` as a user
writes it. *compiled* is the slope per op inside one Inductor-compiled function (nine calls less one), so that the entry
into the compiled function does not count. *captured* is the share of one call in a replayed CUDA graph.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shiplap import torch_private
from shiplap.audit.capture import CaptureError, on_stream, record_cuda_graph
from shiplap.dispatch import Op
from shiplap.errors import ShiplapError, error_line
from shiplap.kernels.c.declaration import CKernel
from shiplap.sampling.case import SampleCase, describe_arguments
from shiplap.sampling.run import call_op, suppress_warnings
from shiplap.sampling.samples import Samples

# An odd number of rounds has one median.
ROUNDS, ROUND_S = 7, 0.01
# Differences and quotients over many calls leave out the fixed cost of entering compiled code or a graph.
CHAIN, GRAPHED = 9, 20


@dataclass(frozen=True)
class CostCard:
    """The costs of one call of an op. Each time is in nanoseconds, and is the median of seven rounds. A time is None if
    it cannot be measured, and ``notes`` has the reason.

    Attributes:
        binding: the implementation of an eager call. It is ``"native"`` or ``"python"`` for a C ABI kernel, otherwise
            the name of the kernel, ``"reference"`` or ``"adopted"``.
    """

    subject: str
    device: str
    input: str
    binding: str
    raw_ns: float | None
    eager_ns: float
    compiled_ns: float | None
    captured_ns: float | None
    notes: tuple[str, ...] = ()


def measure_cost(op: Op, *, seed: int = 0, device: str = "cpu") -> CostCard:
    """Return the cost card of the op, which has the times of one call on its smallest sample without gradients. The
    sample is made on ``device`` with ``seed``.

    The times are those of its C function alone, of an eager call, of a call in compiled code and of a call in a CUDA
    graph. The measurement takes some seconds and resets Dynamo.
    """
    notes: list[str] = []
    with suppress_warnings(), torch.no_grad():
        samples = Samples(op, seed, device)
        # The smallest sample: the card shows overhead, which larger ones would hide.
        case = samples.build(samples.base)
        binding = _describe_binding(op, torch.device(device).type, notes)
        positional, named = op.spec.split(case.fresh())
        eager = _nanoseconds_per_call(lambda: op(*positional, **named), device)
        raw = _measure_raw(op, case, notes)
        compiled = _measure_or_note("compiled", lambda: _measure_compiled(op, case, notes), notes)
        captured = _measure_or_note("captured", lambda: _measure_captured(op, case), notes)
    return CostCard(
        op.spec.name, device, describe_arguments(op, case), binding, raw, eager, compiled, captured, tuple(notes)
    )


def _nanoseconds_per_call(run: Callable[[], Any], device: str) -> float:
    """Return the median time of one call of ``run`` in nanoseconds, over seven rounds. Work that the call leaves to the
    device is included.
    """
    # Kernels run asynchronously; without the wait only their launches would be timed.
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    for _ in range(3):
        run()
    repeats, spent = 1, 0.0
    # The number of repeats doubles until a round is long enough for the clock.
    while spent < ROUND_S and repeats < 1 << 20:
        repeats, spent = 2 * repeats, _time_repeats(run, 2 * repeats, wait)
    return statistics.median(_time_repeats(run, repeats, wait) / repeats for _ in range(ROUNDS)) * 1e9


def _time_repeats(run: Callable[[], Any], repeats: int, wait: Callable[[], None]) -> float:
    """Return the seconds that ``repeats`` calls of ``run`` take. ``wait`` is called before and after them, and waits
    for the device.
    """
    wait()
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    wait()
    return time.perf_counter() - began


def _measure_or_note(what: str, measure: Callable[[], float], notes: list[str]) -> float | None:
    """Return the result of ``measure()``. If it raises an exception, append a note to ``notes`` and return None.
    ``what`` names the measurement in the note.
    """
    try:
        return measure()
    except Exception as e:  # the card shows what there is
        notes.append(f"{what}: {e if isinstance(e, _NotMeasurable) else error_line(e)}")
        return None


class _NotMeasurable(Exception):
    """The error that there is nothing to measure. Its message is the reason."""


def _describe_binding(op: Op, device: str, notes: list[str]) -> str:
    """Return the name of the implementation that the timed calls run.

    It is ``native`` or ``python`` for a C ABI kernel, and otherwise the name of the kernel, ``reference``, or
    ``adopted`` for another library's op. The native binding is built first. If it is not used, the reason is appended
    to ``notes``.
    """
    kernels = op.eager_kernels(device)
    if not kernels:
        return "reference" if op.kernels or type(op) is Op else "adopted"
    if not any(k.native is not None for k in kernels):
        return kernels[0].name
    from shiplap.kernels.native import binding  # not when only checks are asked for

    with suppress(ShiplapError, OSError):
        binding.build(op)
    which, why = binding.state(op, device)
    if which != "native":
        notes.append(f"Python binding: {why}")
    return which


def _measure_raw(op: Op, case: SampleCase, notes: list[str]) -> float | None:
    """Return the nanoseconds of one call of the op's C function alone. If the op has none, append the reason to
    ``notes`` and return None. The function is timed inside a call of the kernel, because its C arguments exist only
    there.
    """
    device = torch.device(case.device).type
    kernel = next((k for k in op.kernels.get(device, ()) if isinstance(k, CKernel)), None)
    if kernel is None:
        notes.append("raw: no C ABI kernel")
        return None
    return kernel.timed(op.bind(case.fresh()), lambda function: _nanoseconds_per_call(function, case.device))


def _chainable_pair(op: Op) -> tuple[int, int] | None:
    """Return ``(argument index, output index)`` of the first argument and output that are declared with one type, or
    None if there are none. Calls can be chained by passing this output as this argument of the next call.
    """
    for i, arg in enumerate(op.spec.args):
        for j, out in enumerate(op.spec.outputs):
            if arg.tensor is not None and not arg.mutated and not arg.many and str(arg.tensor) == str(out.tensor):
                return i, j
    return None


def _make_chain(op: Op, length: int) -> Callable[[list[tuple[Any, ...]]], list[Any]]:
    """Return a function that takes a list of the arguments of each call, calls the op on the first ``length`` of them,
    and returns a list of the results. If possible, each call takes a result of the previous one, so that a compiler
    does not merge the calls. The list then holds only the result of the last call.
    """
    link = _chainable_pair(op)

    def program(groups: list[tuple[Any, ...]]) -> list[Any]:
        """Return the results of the calls in a list. ``groups`` has the arguments of each call. If each call takes a
        result of the previous one, the list has only the results of the last call.
        """
        results, previous = [], None
        for group in groups[:length]:
            args = list(group)
            if link and previous is not None:
                args[link[0]] = previous[link[1]]
            previous = call_op(op, tuple(args))
            results.append(previous)
        # The compiler would remove calls whose results nothing uses.
        return results[-1:] if link else results

    return program


def _arguments_of_chain(op: Op, case: SampleCase, length: int) -> list[tuple[Any, ...]]:
    """Return a list of the arguments of ``length`` calls. If each call takes a result of the previous one, all calls
    get one copy of the sample's arguments. Otherwise each call gets a copy of its own.
    """
    shared = case.fresh()
    return [shared if _chainable_pair(op) else case.fresh() for _ in range(length)]


def _measure_compiled(op: Op, case: SampleCase, notes: list[str]) -> float:
    """Return the nanoseconds of one call in compiled code. They are computed from the difference between a chain of
    nine calls and a single call. A note is appended to ``notes`` if the calls cannot be chained.
    """
    took = []
    with torch_private.data_dependent_sizes():
        for length in (1, CHAIN):
            torch_private.reset_compiler()
            compiled = torch.compile(_make_chain(op, length), fullgraph=True, dynamic=False)
            groups = _arguments_of_chain(op, case, length)
            took.append(_nanoseconds_per_call(partial(compiled, groups), case.device))
    torch_private.reset_compiler()
    if not _chainable_pair(op):
        notes.append("compiled: calls on arguments of their own, so the guards on those are in it")
    # What both pay once, such as the entry into compiled code, is not in their difference.
    return max(0.0, (took[1] - took[0]) / (CHAIN - 1))


def _measure_captured(op: Op, case: SampleCase) -> float:
    """Return the nanoseconds of one call inside a replayed CUDA graph. Raise ``_NotMeasurable`` if no graph can be
    captured.
    """
    if not case.device.startswith("cuda"):
        raise _NotMeasurable("graphs are captured on a CUDA device")
    stream, groups, program = (
        torch.cuda.Stream(case.device),
        _arguments_of_chain(op, case, GRAPHED),
        _make_chain(op, GRAPHED),
    )

    def run(_: Any) -> tuple[Tensor, ...]:
        """Return the results of all calls of the chain as one tuple of tensors. The argument is not used."""
        return tuple(t for outs in program(groups) for t in outs)

    with on_stream(stream):
        # A first call outside of the capture makes plans and caches, which a capture may not.
        run(())
    try:
        recording = record_cuda_graph(run, (), stream)
    except CaptureError as e:
        raise _NotMeasurable(str(e)) from None
    return _nanoseconds_per_call(recording.graph.replay, case.device) / GRAPHED
