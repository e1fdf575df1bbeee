"""Calls of a sandboxed process that are prepared and timed together."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from shiplap.sandbox import protocol
from shiplap.sandbox.arguments import ArgumentArena, MappedArguments
from shiplap.sandbox.candidate import (
    CandidateError,
    ExpectedEffects,
    MachineLack,
    TargetProcess,
)
from shiplap.sandbox.device_clock import (
    CallsNotQueued,
    DeviceClock,
    Probe,
    ProbedResult,
    RunTime,
    choose_probed,
)
from shiplap.sandbox.device_memory import KIND, DeviceBlock, DeviceError
from shiplap.sandbox.kept_results import ResultSpan, ResultSpans
from shiplap.sandbox.proc_filesystem import RequestTime
from shiplap.sandbox.protocol import TensorLocation, strided_extent
from shiplap.sandbox.request_errors import Timeout

MOST_ALIGNED = 8  # bytes: elements of results are read in units of at most so many
_batch_numbers = count(1)


@dataclass(frozen=True)
class BatchRun:
    """The times of one run of a batch. ``took`` is the time that this process measured, and ``claimed`` the seconds
    that the sandboxed process reported.

    ``written`` are the measured seconds in which values were written to a GPU.
    """

    took: RequestTime
    claimed: float
    written: float = 0.0


class CallBatch:
    """A context manager with calls that a sandboxed process has prepared, on arguments in memory that both processes
    share.

    ``index`` is the number of a candidate in that process, or -1 for calls that compute nothing. If ``poison`` is not
    None, memory that the candidate allocates is filled with this byte. Otherwise that memory is left as it is. If the
    batch is ``blank``, its arguments hold zeros until ``fill`` writes values. By default a batch of index -1 is blank.
    If ``queued`` is true, calls on a GPU are queued before the clock starts. Otherwise each is queued after the clock
    has started.
    """

    def __init__(
        self,
        witness: TargetProcess,
        index: int,
        sets: Sequence[Sequence[Any]],
        poison: int | None = None,
        *,
        blank: bool | None = None,
        queued: bool = False,
    ) -> None:
        """Share the arguments of all calls with the sandboxed process, and make it prepare the calls. ``sets`` has the
        arguments of each call. If ``blank`` is true, they are zeros until ``fill`` writes values. By default this holds
        for a negative ``index``. ``index``, ``poison`` and ``queued`` are explained in the class.
        """
        self.witness, self.sets, self.queued = witness, sets, queued
        self._number = next(_batch_numbers)
        # ``fill`` repeats this layout, so that new values lie where the old ones did.
        self._layout = secrets.randbits(62)
        # The block of the last batch is used again, at other addresses: a large one takes long to allocate and to map.
        arena = ArgumentArena(self._layout, witness.block)
        packed = [arena.pack(list(args)) for args in sets]
        blank = index < 0 if blank is None else blank
        self._handle = arena.make() if blank else arena.write()
        memory = mmap.mmap(self._handle, 0)
        self._given = [MappedArguments.of(self._handle, each, memory) for each in packed]
        self._clock: DeviceClock | None = None
        try:
            if arena.block is not None:
                self._clock = DeviceClock(arena.block)
                if blank:
                    self._clock.erase_values()
            message = protocol.PrepareBatch(self._number, sorted(witness.batches), index, poison, packed)
            witness.request(message, "raised", *arena.files(self._handle))
            witness.batches.add(self._number)
            if self._clock is not None and not blank:
                self._clock.take_values()
        except BaseException:
            witness.use_block(arena.block)
            self.close()
            release_block(witness)
            raise
        witness.use_block(arena.block)

    def __enter__(self) -> CallBatch:
        """Return the batch."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the batch."""
        self.close()

    def close(self) -> None:
        """Close the file of the arguments, and drop the batch. The sandboxed process releases the batch when it
        prepares the next one. Both processes keep its GPU block until then, or until ``release_block`` is called.
        """
        self.witness.batches.discard(self._number)
        os.close(self._handle)

    def fill(self, sets: Sequence[Sequence[Any]]) -> None:
        """Write the values of ``sets`` into the memory of the prepared calls, which is shared with the sandboxed
        process. No message is sent.

        ``sets`` has one list of arguments for each call. Their sizes must be those of the arguments with which the
        batch was made.
        """
        arena = ArgumentArena(self._layout, self._clock.values if self._clock is not None else None)
        for args in sets:
            arena.pack(list(args))
        arena.write(self._handle)
        self.sets = sets

    def run_calls(self, expected: Sequence[ExpectedEffects] | None = None) -> BatchRun:
        """Run each prepared call once and return the times. If ``expected`` is given, the effects of call ``i`` are
        compared with ``expected[i]``. Otherwise nothing is compared.

        Raise ``CandidateError`` if a call fails, and ``CallsNotQueued`` for calls on a GPU that cannot be queued.
        """
        self.witness.forget_results()
        if self._clock is not None:
            return self._run_on_device(self._clock, expected)
        reply, took = self.witness.request(protocol.RunBatch(self._number))
        self._compare_calls(reply, expected, [])
        return BatchRun(took, reply.spent * 1e-9)

    def _compare_calls(
        self, reply: protocol.BatchCalled, expected: Sequence[ExpectedEffects] | None, probes: Sequence[Probe]
    ) -> None:
        """Compare the effects of each call (its results and changed arguments) with ``expected``. If it is None,
        nothing is compared.

        Results on a GPU are also compared with ``probes``, elements that were read as soon as the calls were done.
        Raise ``CandidateError`` with the index of the first call that differs. Raise it also if ``reply`` has not one
        item for each call.
        """
        if len(reply.calls) != len(self.sets):
            raise CandidateError("answer", "not one answer a call")
        # One file holds the arguments of all calls.
        pieces = self.witness.pieces(self._given[0]) if expected else []
        rows = zip(reply.calls, self.sets, expected, self._given, strict=True) if expected else ()
        for number, row in enumerate(rows):
            try:
                self.witness.examine(*row, pieces)
                if self._clock is not None:
                    changed = _argument_spans(row[3], self._clock.block) if any(not p.memory for p in probes) else []
                    _check_probes([*self.witness.last_spans(), *changed], probes)
            except MachineLack:
                raise
            except CandidateError as e:
                raise CandidateError(e.check, e.evidence, number) from None

    def _run_on_device(self, clock: DeviceClock, expected: Sequence[ExpectedEffects] | None) -> BatchRun:
        """Run each call on a GPU, time all calls by events of this process, and compare the effects with ``expected``.

        Raise ``CandidateError`` for a wrong call, and ``CallsNotQueued`` for calls that cannot be queued.
        """
        probes: list[Probe] = []
        taken: list[bytes] = []
        clock.close_gate()
        run = self._time_queued if self.queued else self._time_calls
        try:
            took, reply = run(clock, taken, probes)
            self._compare_calls(reply, expected, probes)
        except DeviceError as e:
            raise CandidateError("memory", f"its results cannot be read: {e}") from None
        finally:
            for handle in taken:
                self.witness.opened.drop(handle)
            self.witness.forget_results()
        return BatchRun(RequestTime(took.total, took.total), 0.0, took.written)

    def _time_queued(
        self, clock: DeviceClock, taken: list[bytes], probes: list[Probe]
    ) -> tuple[RunTime, protocol.BatchCalled]:
        """Make the process queue all calls behind a closed gate, then open the gate and time the calls while the
        process is stopped. Return the times and the reply.

        The gate is a word in shared memory for which the process's GPU stream waits. The handles of opened allocations
        are appended to ``taken``, and the elements that are read behind the calls to ``probes``. Raise
        ``CallsNotQueued`` if the process waits for the device meanwhile.
        """
        try:
            message = protocol.RunBatch(self._number, gated=True)
            reply, _ = self.witness.request(message, waiting=clock.open_if_late)
            if clock.opened:
                raise CallsNotQueued("the process waits for the device")
            picked = self._pick_probes(clock, reply, taken)
            return clock.time_queued(lambda: probes.extend(read() for read in picked)), reply
        except BaseException:
            # Otherwise the process's stream would wait at the gate for ever.
            clock.open_if_late(math.inf)
            raise

    def _time_calls(
        self, clock: DeviceClock, taken: list[bytes], probes: list[Probe]
    ) -> tuple[RunTime, protocol.BatchCalled]:
        """Time calls on a GPU that are not queued in advance. Return the times and the reply.

        The sandboxed process runs the calls after the clock has started. The handles of opened allocations are appended
        to ``taken``, and the elements that are read behind the calls to ``probes``. If the calls do not end in time,
        kill the process and raise ``CandidateError``, or ``Timeout`` if the time of the judgement is over.
        """
        began, started = clock.start()
        reply, _ = self.witness.request(protocol.RunBatch(self._number))
        picked, prisoner = self._pick_probes(clock, reply, taken), self.witness.prisoner
        limit = min(prisoner.bounds.seconds, prisoner.until - time.monotonic())
        try:
            clock.wait_for_end(lambda: probes.extend(read() for read in picked), limit)
        except CallsNotQueued as e:
            prisoner.kill()
            if time.monotonic() > prisoner.until:
                raise Timeout("the time of the judgement is over") from None
            raise CandidateError("process", str(e)) from None
        return RunTime(time.perf_counter() - began, started - began), reply

    def _pick_probes(
        self, clock: DeviceClock, reply: protocol.BatchCalled, taken: list[bytes]
    ) -> list[Callable[[], Probe]]:
        """Return functions that each read a few elements of one of the results of the calls. Some results are chosen in
        secret. The handles of the allocations that are mapped for this are appended to ``taken``.

        Raise ``DeviceError`` for a location that no tensor has. A kernel of this process that reads there would fail,
        and all its later kernels would fail, too.
        """
        picked: list[Callable[[], Probe]] = []
        # Mapping an allocation takes longer than many kernels, so that the others are not mapped.
        for memory, at, length, size in choose_probed(self._results_of(reply)):
            block = self.witness.opened.take(memory) if memory else clock.block
            taken += [memory] if memory else []
            block.bytes_at(at, length)
            picked.append(clock.probe_of(memory, at, length, size, block))
        return picked

    def _results_of(self, reply: protocol.BatchCalled) -> list[ProbedResult]:
        """Return the results of the calls that lie on the GPU. If a call has no such results, its arguments are listed
        in their place, since it may change them. Raise ``DeviceError`` for a location that no tensor has.
        """
        found: dict[ProbedResult, None] = {}
        # Another number of answers is reported by ``_compare_calls``.
        for call, given in zip(reply.calls, self._given, strict=False):
            places = [p for p in call.outs if isinstance(p, TensorLocation) and p.device == KIND]
            for place in places or [p for p in given.places if p.device == KIND]:
                at, length, size = _span_of(place)
                if length:
                    found[place.block, at, length, size] = None
        return list(found)

    def sample(self, repeats: int) -> BatchRun:
        """Run the first prepared call ``repeats`` times on the same values and return the time of all runs together.
        Results are not compared. Raise ``CandidateError`` if a call fails.
        """
        reply, took = self.witness.request(protocol.RunBatch(self._number, repeats))
        return BatchRun(took, reply.spent * 1e-9)


def release_block(witness: TargetProcess) -> None:
    """Let the sandboxed process ``witness`` release the batches that are closed, and unmap the GPU block of its last
    arguments in both processes. Do nothing if there is no block.
    """
    if witness.block is None:
        return
    with contextlib.suppress(CandidateError, Timeout):  # it may have ended
        witness.request(protocol.ReleaseBatches(sorted(witness.batches)))
    witness.use_block(None)


def _check_probes(spans: ResultSpans, probes: Sequence[Probe]) -> None:
    """Raise ``CandidateError`` if an element of a result on the device differs from its value in ``probes``, which was
    read as soon as the calls were done. ``spans`` holds the bytes of the results.
    """
    for span in spans:
        where = span.memory, span.at, span.length
        of_it = [probe for probe in probes if (probe.memory, probe.at, probe.length) == where]
        if isinstance(span.content, Tensor) and not all(probe.agrees_with(span.content) for probe in of_it):
            raise CandidateError("streams", "a result was not complete when the call's own stream was done")


def _argument_spans(given: MappedArguments, block: DeviceBlock) -> ResultSpans:
    """Return a span with the present bytes of each argument in ``given`` that lies in the GPU ``block``."""
    spans = [_span_of(place) for place in given.places if place.device == KIND]
    return [ResultSpan(b"", at, length, block.bytes_at(at, length)) for at, length, _ in spans]


def _span_of(place: TensorLocation) -> tuple[int, int, int]:
    """Return (offset, extent in bytes, bytes of one element) of the tensor at the location ``place``. Raise
    ``DeviceError`` for an unknown dtype or a misaligned offset.
    """
    dtype = getattr(torch, place.dtype, None)
    if not isinstance(dtype, torch.dtype) or place.at % min(dtype.itemsize, MOST_ALIGNED):
        raise DeviceError(f"no {place.dtype} lies at offset {place.at}")
    return place.at, strided_extent(place.shape, place.stride) * dtype.itemsize, dtype.itemsize
