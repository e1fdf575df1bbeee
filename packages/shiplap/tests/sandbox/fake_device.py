"""A GPU that is this processor: blocks, allocations that are named, and a stream that waits at a word."""

from __future__ import annotations

import ctypes
import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from shiplap.sandbox import arguments, call_batch, child, device_clock, device_memory, gpu_call
from shiplap.sandbox.candidate import TargetProcess
from shiplap.sandbox.device_memory import END_AT, GATE_AT, GRAIN, DeviceBlock
from shiplap.sandbox.proc_filesystem import RequestTime
from shiplap.sandbox.protocol import RunBatch
from shiplap.sandbox.supervisor import Bounds


class FakeBlock(DeviceBlock):
    """A block in the memory of this processor."""

    def bytes_at(self, at: int, length: int) -> Tensor:
        if at < 0 or at + length > self.size:
            raise device_memory.DeviceError("memory outside of a block")
        if not length:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer((ctypes.c_char * length).from_address(self.address + at), dtype=torch.uint8)

    def close(self) -> None:
        self.close_file()

    def __del__(self) -> None:
        self.close()


class Event:
    """An event that is over once the end is written, and the work of other streams begins then."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver

    def query(self) -> bool:
        self.driver.run_later()
        return self.driver.ended

    def elapsed_time(self, end: Event) -> float:
        return 1.0


class FakeDriver:
    """The driver of both processes.

    Attributes:
        rooms: the memory of each block by its open file.
        opened: the number of allocations that are mapped.
        made: the number of blocks so far.
    """

    def __init__(self) -> None:
        self.retired: list[object] = []
        self.rooms: dict[int, Tensor] = {}
        self.blocked, self.ended, self.opened, self.made = False, False, 0, 0
        self._queue: list[Callable[[], object]] = []
        self._later: list[Callable[[], object]] = []

    # --- memory

    def make_block(self, size: int) -> FakeBlock:
        size = -(-size // GRAIN) * GRAIN
        room, file = torch.zeros(size, dtype=torch.uint8), os.memfd_create("block")
        self.rooms[file] = room
        self.made += 1
        return FakeBlock(self, room.data_ptr(), size, 1, file)

    def receive_block(self, file: int, size: int) -> FakeBlock:
        assert self.rooms[file].numel() == size
        return FakeBlock(self, self.rooms[file].data_ptr(), size, 1)

    def export_allocation(self, address: int) -> tuple[bytes, int]:
        return struct.pack("Q", address - address % 4096), address % 4096

    def open_allocation(self, handle: bytes) -> FakeBlock:
        self.opened += 1
        driver = self

        class Opened(FakeBlock):
            def close(self) -> None:
                driver.opened -= 1 if self.address else 0
                self.address = 0

        return Opened(self, struct.unpack("Q", handle)[0], 1 << 24)

    def free_bytes(self) -> int:
        return 1 << 30

    # --- the stream

    def launch(self, work: Callable[[], object]) -> None:
        """Do some work, or queue it behind the word at which the stream waits."""
        if self.blocked:
            self._queue.append(work)
        else:
            work()

    def launch_beside(self, work: Callable[[], object]) -> None:
        """Do some work on another stream, when the calls have ended."""
        self._later.append(work)

    def run_later(self) -> None:
        """Do the work of other streams."""
        later, self._later = self._later, []
        for work in later:
            work()

    def wait_for_word(self, block: DeviceBlock, at: int) -> None:
        if at == GATE_AT:
            self.blocked = True

    def write_word(self, block: DeviceBlock, at: int) -> None:
        if at == END_AT:
            self.launch(self._end)
            return
        self.blocked = False
        for work in self._queue:
            work()
        self._queue.clear()

    def _end(self) -> None:
        self.ended = True

    def empty_caches(self) -> None:
        self.ended = False

    def record_event(self) -> Event:
        return Event(self)

    @contextmanager
    def other_stream(self) -> Iterator[None]:
        yield

    def synchronize(self) -> None: ...

    def release_retired(self) -> None: ...

    def leave_room(self) -> None: ...


class FakePrisoner:
    """A process that is an object of this one.

    Attributes:
        waits: whether calls wait for the device, so that they cannot be queued.
    """

    pid, bounds, until = os.getpid(), Bounds(), math.inf

    def kill(self) -> None: ...

    def __init__(self, host: child.Child) -> None:
        self.host, self.waits = host, False

    def request_reply(self, message, *files: int, waiting=None):
        self.host.block_file = files[1] if len(files) > 1 else -1
        reply = self.host.answer(message, files[0] if files else -1)
        if isinstance(message, RunBatch) and message.gated and self.waits:
            waiting(100.0)
        return reply, RequestTime(1.0, 1.0)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """A GPU that is this processor."""
    fake = FakeDriver()
    for module in (arguments, call_batch, device_clock, device_memory):
        monkeypatch.setattr(module, "KIND", "cpu")
    for module in (arguments, child, device_memory):
        monkeypatch.setattr(module, "device_driver", lambda: fake)
    monkeypatch.setattr(gpu_call, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_call, "FLUSHED", 1024)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: _Clock())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "main")
    return fake


class _Clock:
    def record(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: _Clock) -> float:
        return 0.5


def process_of(target: Callable[..., object]) -> TargetProcess:
    """Return a process in which ``target`` is loaded."""
    host = child.Child(watched=False)
    host.target = target
    host._watch = type("Watch", (), {"read_observations": lambda self, **rest: {"left": []}})()
    host._intact = type("Intact", (), {"threads": lambda self: 0})()
    made = TargetProcess(FakePrisoner(host))  # type: ignore[arg-type]
    made.pieces = lambda at: []  # type: ignore[method-assign]
    return made


def drawn(count: int, size: int = 5000) -> Sequence[list[Tensor]]:
    """Return the arguments of some calls."""
    return [[torch.rand(size) + 1] for _ in range(count)]
