"""What an answer of the sandboxed process points to is still there when the referee reads it."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from shiplap.sandbox import child
from shiplap.sandbox.arguments import ArgumentArena
from shiplap.sandbox.patched_functions import FunctionSnapshot
from shiplap.sandbox.protocol import CallTarget, ListOperators, TensorLocation
from shiplap_testing.effort import sampled
from tests.sandbox.fake_device import driver

__all__ = ["driver"]


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


@pytest.fixture(scope="module", autouse=True)
def taken(few_modules: None) -> Iterator[None]:
    """The snapshot that a launcher takes for all its forks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "_baseline", None)
        child.take_baseline()
        yield


def test_forked_processes_share_one_snapshot_of_the_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "addaudithook", lambda hook: None)  # they stay for as long as a process lives
    assert isinstance(child._baseline, FunctionSnapshot)
    assert child.Child()._intact is child._baseline


@pytest.mark.parametrize("asked", sampled([CallTarget, ListOperators], 1))
def test_results_are_kept_until_they_are_read(memory, asked) -> None:
    told, handle = memory
    host = child.Child()
    host.target = lambda x: (x + 1, x * 2)
    answer = host.answer(asked(told), handle)
    places = {out.at for out in (answer.places.outs if asked is CallTarget else answer.outs)}
    assert len(places) == 2
    assert places <= alive()


@pytest.fixture
def on_device(driver, monkeypatch):
    """One packed tensor on a GPU that is this processor, the file, and the child that has its block."""
    monkeypatch.setattr(sys, "addaudithook", lambda hook: None)  # they stay for as long as a process lives
    arena, host = ArgumentArena(1), child.Child()
    told = arena.pack([torch.arange(64.0)])
    handle, host.block_file = arena.files(arena.write())
    monkeypatch.setattr(host._intact, "threads", lambda: 0)  # a worker of pytest has some
    yield told, handle, host
    os.close(handle)


def test_a_call_on_a_device_is_answered_with_its_clock_and_what_is_left(on_device) -> None:
    told, handle, host = on_device
    host.target = lambda x: [x + 1, 7]
    answer = host.answer(CallTarget(told), handle)
    assert answer.device == 500_000
    assert (answer.traces.raced, answer.traces.left, answer.traces.threads) == (False, [], 0)
    assert [type(out) for out in answer.places.outs] == [TensorLocation, int]
    assert answer.places.outs[0].block
    repeated = host.answer(CallTarget(told, again=True, keep=1), handle)
    first, second = ((place.block, place.at) for place in (answer.places.outs[0], repeated.places.outs[0]))
    assert first != second


def test_what_comes_and_goes_with_the_calls_is_told(on_device) -> None:
    told, handle, host = on_device
    before = signal.getsignal(signal.SIGALRM)

    def target(x: Tensor) -> Tensor:
        signal.signal(signal.SIGALRM, lambda *args: None)
        return x + 1

    host.target = target
    try:
        assert host.answer(CallTarget(told), handle).traces.left == ["signal handlers"]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_modules_of_python_that_make_functions_themselves_can_be_imported() -> None:
    code = """
import importlib
from shiplap.sandbox import child
child.take_baseline()
for name in "http.cookies multiprocessing.managers multiprocessing.sharedctypes asyncio encodings.gbk".split():
    importlib.import_module(name)
print(child._baseline.changed())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert ended.stdout == "[]\n", ended.stderr


def test_each_argument_comes_from_an_operator_in_two_of_four_gradients() -> None:
    host = child.Child(watched=False)
    given = [torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True), torch.ones(2), 3]
    made = [host._taken_from_operators(given) for _ in range(8)]
    for which in (slice(0, 4), slice(1, 5), slice(0, 8, 2), slice(1, 8, 2)):
        taken = [[a.grad_fn is not None for a in listed[:2]] for listed in made[which]]
        assert [sum(column) for column in zip(*taken, strict=True)] == [2, 2]
    assert all(listed[2:] == given[2:] for listed in made)
