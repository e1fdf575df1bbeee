"""The time of calls on a GPU by the events of the process that judges, around a gate and an end in shared memory.

The other process has queued its calls before: its stream waits for the gate, and writes the end behind the last call.
It is stopped meanwhile. The arguments in the shared block are zeros until the clock starts. Then a kernel of this
process writes the values, and the gate opens. What a stream of the other process does before that takes its time from
this kernel, since a GPU runs one process at a time, and is measured. Directly behind the end, elements of results at
secret places are read, so that work that other streams finish later is seen.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shiplap.sandbox.device_memory import END_AT, FLAG_BYTES, GATE_AT, KIND, DeviceBlock, PrivateBlock

PROBED_RESULTS, PROBED_ELEMENTS = 8, 1024  # results of a run that are read behind the end, and elements of each
QUEUE_S, END_S = 0.5, 1.5  # seconds in which calls have to be queued, and to end once the gate is open
WRITTEN_EVERY_S = 1e-3  # seconds after which the end is written again for calls that do not end


ProbedResult = tuple[bytes, int, int, int]
"""A result: the handle of its allocation, the offset in it, the number of bytes, and the bytes of an element."""


class CallsNotQueued(Exception):
    """An error for calls that cannot all be queued before the clock starts. They are too many, or they wait for the
    device.
    """


@dataclass(frozen=True)
class Probe:
    """Some elements of a result, read directly after a call.

    ``memory`` is the handle to the result's allocation, and ``at`` the offset of the result in it. ``numbers`` are the
    indices of the elements and ``values`` their bits. An element has ``size`` bytes, and the result has ``length``
    bytes.
    """

    memory: bytes
    at: int
    length: int
    numbers: Tensor
    size: int
    values: Tensor

    def agrees_with(self, content: Tensor) -> bool:
        """Return whether ``content``, the bytes of the whole result as they were read later, has the same elements at
        the indices of this probe.
        """
        return torch.equal(unit_view(content, self.size)[self.numbers], self.values)


def unit_view(content: Tensor, size: int) -> Tensor:
    """Return ``content``, a tensor of bytes, viewed as integers of ``size`` bytes each. For a ``size`` above 8, the
    view is a matrix of int64 with one row for each ``size`` bytes.
    """
    units = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return content.view(units[size]) if size in units else content.view(torch.int64).view(-1, size // 8)


@dataclass(frozen=True)
class RunTime:
    """The seconds of a run of calls on a GPU (``total``). ``written`` is the part of them in which this process wrote
    the arguments' values and emptied the caches.
    """

    total: float
    written: float


def choose_probed(results: Sequence[ProbedResult]) -> list[ProbedResult]:
    """Return the last of the ``results`` of a run and a few others, chosen at random and in secret. Return an empty
    list if there are none.
    """
    few = min(PROBED_RESULTS, len(results))
    return [*results[-1:], *secrets.SystemRandom().sample(results, few)]


class DeviceClock:
    """The clock of calls on a GPU. It has the block of arguments, and the two words in the block for which GPU streams
    wait, called the gate and the end.

    Attributes:
        values: memory of this process in which the values of the arguments are prepared, laid out as the block is.
    """

    def __init__(self, block: DeviceBlock) -> None:
        """Make a clock for calls whose arguments lie in ``block``, with a private copy of their values that the
        sandboxed process cannot read.
        """
        self.block, self.driver = block, block.driver
        self.values = PrivateBlock(block)
        self.opened = False  # whether the gate was opened since the calls could not be queued
        self._rng = torch.Generator(KIND).manual_seed(secrets.randbits(62))
        self._words = block.bytes_at(FLAG_BYTES, block.size - FLAG_BYTES).view(torch.int32)

    def take_values(self) -> None:
        """Move the argument values from the GPU block that is shared with the sandboxed process to private memory of
        this process.

        The block is filled with zeros, so that the other process sees no values before the clock starts.
        """
        self.values.words.copy_(self._words)
        self.erase_values()

    def erase_values(self) -> None:
        """Fill the arguments in the GPU block that is shared with the sandboxed process with zeros."""
        self._words.zero_()
        self.driver.synchronize()

    def _write_values(self) -> None:
        """Queue a kernel that writes the private copy of the arguments' values into the GPU block, then one that
        empties the GPU's caches.

        A copy without a kernel might run beside kernels of the sandboxed process, which shares the block.
        """
        torch.bitwise_xor(self.values.words, 0, out=self._words)
        self.driver.empty_caches()

    def close_gate(self) -> None:
        """Set the two 32-bit words in shared memory for which GPU streams wait to 0. They are called the gate and the
        end.

        The sandboxed process's stream waits for the gate before its calls, and writes the end after them.
        """
        self.block.bytes_at(0, FLAG_BYTES).zero_()
        self.driver.synchronize()
        self.opened = False

    def open_if_late(self, seconds: float) -> None:
        """Open the gate if ``seconds``, the time for which calls are being queued, is more than ``QUEUE_S``. A process
        that waits for the device can then continue.

        The gate is the word in shared memory for which the other process's GPU stream waits.
        """
        if seconds > QUEUE_S and not self.opened:
            self.opened = True
            with self.driver.other_stream():
                self.driver.write_word(self.block, GATE_AT)

    def time_queued(self, probe: Callable[[], None]) -> RunTime:
        """Write the arguments' values, open the gate, and return the times. They are the seconds until the queued calls
        and ``probe`` are done, and the seconds until the values are written.

        The gate is the word in shared memory for which the other process's GPU stream waits. ``probe`` queues reads of
        some elements of the results. Raise ``CallsNotQueued`` if the calls do not end in time.
        """
        self.driver.empty_caches()  # takes so long that this process is ahead of the device
        start = self.driver.record_event()
        self._write_values()
        written = self.driver.record_event()
        self.driver.write_word(self.block, GATE_AT)
        self.driver.wait_for_word(self.block, END_AT)
        probe()
        end = self.driver.record_event()
        self._wait_until(end, END_S)
        return RunTime(float(start.elapsed_time(end)) * 1e-3, float(start.elapsed_time(written)) * 1e-3)

    def start(self) -> tuple[float, float]:
        """Write the arguments' values into the GPU block that is shared with the sandboxed process. Return the times
        just before and just after the write.

        The clock starts before the write, and calls may begin after it. The write is timed as well, since work that the
        process has left on the device could read the values as they arrive.
        """
        self.driver.synchronize()
        began = time.perf_counter()
        self._write_values()
        self.driver.synchronize()
        return began, time.perf_counter()

    def wait_for_end(self, probe: Callable[[], None], seconds: float) -> None:
        """Call ``probe``, which queues reads of some elements of the results behind the calls, and wait at most
        ``seconds`` until they are done. The reads begin when the other process has written the end word, which it does
        after its calls.

        Raise ``CallsNotQueued`` if the calls do not end in time.
        """
        self.driver.wait_for_word(self.block, END_AT)
        probe()
        self._wait_until(self.driver.record_event(), seconds)

    def _wait_until(self, event: torch.cuda.Event, seconds: float) -> None:
        """Wait until ``event`` is done.

        If that takes more than ``seconds``, write the end word, for which the streams of this process wait, in place of
        the other process. Then raise ``CallsNotQueued``.
        """
        ends = time.monotonic() + seconds
        while not event.query():
            if time.monotonic() > ends:
                while not event.query():  # the other process may clear the word again
                    with self.driver.other_stream():
                        self.driver.write_word(self.block, END_AT)
                    time.sleep(WRITTEN_EVERY_S)
                raise CallsNotQueued(f"they have not ended after {seconds:.3g} s")

    def probe_of(self, memory: bytes, at: int, length: int, size: int, block: DeviceBlock) -> Callable[[], Probe]:
        """Return a function that reads elements of one result at random, secret indices and returns them as a
        ``Probe``. The function is called directly after the calls, to detect work that is finished later.

        The result has ``length`` bytes from offset ``at`` in ``block``, and each element has ``size`` bytes. ``memory``
        is the handle to its allocation.
        """
        units, count = unit_view(block.bytes_at(at, length), size), length // size
        numbers = torch.randint(0, count, (min(count, PROBED_ELEMENTS),), generator=self._rng, device=KIND)
        return lambda: Probe(memory, at, length, numbers, size, units[numbers])
