"""What an answer of the sandboxed process points to is still there when the referee reads it."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys

import pytest
import torch
from torch import Tensor

from shiplap.sandbox import child, gpu_call
from shiplap.sandbox.patched_functions import FunctionSnapshot
from shiplap.sandbox.protocol import ArgumentArena, CallTarget, ListOperators, TensorLocation


@pytest.fixture
def memory():
    """One packed tensor, and the memory that holds it."""
    arena = ArgumentArena(1)
    told = arena.pack([torch.arange(64.0)])
    handle = arena.write()
    yield told, handle
    os.close(handle)


def alive() -> set[int]:
    """Addresses of all tensors. Other tests may have left some that have none, such as sparse ones."""
    gc.collect()
    addresses = set()
    for tensor in gc.get_objects():
        if type(tensor) is Tensor:
            with contextlib.suppress(RuntimeError):
                addresses.add(tensor.data_ptr())
    return addresses


def test_forked_processes_share_one_snapshot_of_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_baseline", None)
    child.take_baseline()
    assert isinstance(child._baseline, FunctionSnapshot)


@pytest.mark.parametrize("asked", [CallTarget, ListOperators])
def test_copies_of_results_on_a_device_are_kept(monkeypatch, memory, asked) -> None:
    monkeypatch.setattr(
        child, "_copy_to_host", lambda v: v.detach().clone() if isinstance(v, Tensor) else v
    )  # as of a device
    told, handle = memory
    host = child.Child()
    host.target = lambda x: (x + 1, x * 2)
    answer = host.answer(asked(told), handle)
    places = {out.at for out in (answer.places.outs if asked is CallTarget else answer.outs)}
    assert len(places) == 2
    assert places <= alive()


class Clock:
    def __init__(self, **_: object) -> None: ...

    def record(self, stream: object) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Clock) -> float:
        return 0.5


@pytest.fixture
def device(monkeypatch):
    """A GPU that is this processor."""
    monkeypatch.setattr(sys, "addaudithook", lambda hook: None)  # they stay for as long as a process lives
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda self: True), raising=False)
    monkeypatch.setattr(gpu_call, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_call, "FLUSHED", 1024)
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "main")


def test_a_call_on_a_device_is_answered_with_its_clock_and_what_is_left(device, memory, monkeypatch) -> None:
    told, handle = memory
    host = child.Child()
    monkeypatch.setattr(host._intact, "threads", lambda: 0)  # a worker of pytest has some
    host.target = lambda x: [x + 1, 7]
    answer = host.answer(CallTarget(told), handle)
    assert answer.device == 500_000
    assert (answer.traces.raced, answer.traces.left, answer.traces.threads) == (False, [], 0)
    assert [type(out) for out in answer.places.outs] == [TensorLocation, int]
    repeated = host.answer(CallTarget(told, again=True, keep=1), handle)
    assert repeated.places.outs[0].at != answer.places.outs[0].at


def test_what_comes_and_goes_with_the_calls_is_told(device, memory) -> None:
    told, handle = memory
    host = child.Child()
    before = signal.getsignal(signal.SIGALRM)

    def target(x: Tensor) -> Tensor:
        signal.signal(signal.SIGALRM, lambda *args: None)
        return x + 1

    host.target = target
    try:
        assert host.answer(CallTarget(told), handle).traces.left == ["signal handlers"]
    finally:
        signal.signal(signal.SIGALRM, before)
