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
from shiplap.sandbox.protocol import ArgumentArena


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


@pytest.mark.parametrize("asked", ["call", "ops"])
def test_copies_of_results_on_a_device_are_kept(monkeypatch, memory, asked) -> None:
    monkeypatch.setattr(
        child, "_copy_to_host", lambda v: v.detach().clone() if isinstance(v, Tensor) else v
    )  # as of a device
    told, handle = memory
    host = child.Child()
    host._target = lambda x: (x + 1, x * 2)
    answer = host.answer({"do": asked, "args": told}, handle)
    places = {out["tensor"]["at"] for out in answer["outs"]}
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
    host._target = lambda x: [x + 1, 7]
    answer = host.answer({"do": "call", "args": told}, handle)
    assert answer["device"] == 500_000
    assert (answer["raced"], answer["left"], answer["threads"]) == (False, [], 0)
    assert [next(iter(out)) for out in answer["outs"]] == ["tensor", "plain"]
    repeated = host.answer({"do": "call", "args": told, "again": True, "keep": 1}, handle)
    assert repeated["outs"][0]["tensor"]["at"] != answer["outs"][0]["tensor"]["at"]


def test_what_comes_and_goes_with_the_calls_is_told(device, memory) -> None:
    told, handle = memory
    host = child.Child()
    before = signal.getsignal(signal.SIGALRM)

    def target(x: Tensor) -> Tensor:
        signal.signal(signal.SIGALRM, lambda *args: None)
        return x + 1

    host._target = target
    try:
        assert host.answer({"do": "call", "args": told}, handle)["left"] == ["signal handlers"]
    finally:
        signal.signal(signal.SIGALRM, before)
