"""A call on a GPU is timed with work queued behind it, and its results are those that the next kernel sees.

The GPU is played by the CPU: its events and streams write a log, and what another stream still does is done when
somebody waits for the device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shiplap.sandbox import gpu_call as module
from shiplap.sandbox.gpu_call import KERNELS_BEHIND, call_in_queue


class Played(TorchDispatchMode):
    """Whatever happens, in order; ``later`` is what other streams have not done yet."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.later: list[Callable[[], object]] = []
        self.stream = "main"

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.log.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def wait(self, *_: object) -> None:
        self.log.append("wait")
        while self.later:
            self.later.pop()()

    def event(self, **_: object) -> Event:
        return Event(self)


class Event:
    def __init__(self, played: Played) -> None:
        self.played = played

    def record(self, stream: object) -> None:
        self.played.log.append(f"record {stream}")

    def synchronize(self) -> None:
        self.played.wait()

    def elapsed_time(self, end: Event) -> float:
        return 0.25


@pytest.fixture
def played(monkeypatch) -> Iterator[Played]:
    mode = Played()
    monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(module, "FLUSHED", 1024)
    monkeypatch.setattr(torch.cuda, "Event", mode.event)
    monkeypatch.setattr(torch.cuda, "synchronize", mode.wait)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: mode.stream)
    with mode:
        yield mode


def test_a_call_stands_between_the_emptied_caches_and_the_kernels_behind_it(played):
    call = call_in_queue(lambda x: x + 1, [torch.zeros(3)])
    assert call.clock["device"] == 250_000
    assert call.seen[0].tolist() == [1, 1, 1]
    assert not call.raced
    first, start = played.log.index("wait"), played.log.index("record main")
    end, last = [i for i, what in enumerate(played.log) if what == "record main"][1:]
    assert played.log[start + 1 : end] == ["add", "detach"]
    assert "fill_" in played.log[first:start]
    behind = played.log[end:last]
    assert behind.count("fill_") == KERNELS_BEHIND
    assert "wait" not in played.log[first + 1 : last]


def test_numbers_and_tensors_of_elsewhere_stay_what_they_are(played):
    call = call_in_queue(lambda x: (x * 2, [3, None]), [torch.ones(2)])
    assert [v if isinstance(v, int) else v.tolist() for v in call.seen] == [[2, 2], 3]


class Lazy(list):
    """It computes when somebody looks into it."""

    def __iter__(self):
        return iter([self.later()])


def in_a_list(x: Tensor) -> object:
    lazy = Lazy([None])
    lazy.later = lambda: x + 1
    return lazy


def in_a_method(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for name in ("detach", "clone", "numel", "reshape", "contiguous", "view"):
        setattr(out, name, lambda *args: out.copy_(x + 1))
    return out


def in_a_circle(x: Tensor) -> Tensor:
    """Its finalizer runs when the interpreter looks for circles, which it does when enough objects were made."""
    out = torch.zeros_like(x)

    class Later:
        def __del__(self) -> None:
            out.copy_(x + 1)

    later = Later()
    later.me = later
    return out


def in_an_argument(x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for name in ("detach", "clone", "numel", "reshape", "contiguous", "view"):
        setattr(x, name, lambda *args: out.copy_(torch.ones(3)))
    return out


@pytest.mark.parametrize("target", [in_a_list, in_a_method, in_an_argument])
def test_nothing_that_was_returned_works_after_the_end(played, target):
    call = call_in_queue(target, [torch.zeros(3)])
    end = [i for i, what in enumerate(played.log) if what == "record main"][1]
    assert "add" not in played.log[end:]
    assert [v.tolist() for v in call.seen] == ([] if target is in_a_list else [[0, 0, 0]])
    assert type(call.result) is list


def test_no_circle_is_collected_before_the_results_are_looked_at(played, monkeypatch):
    probe = module._probe_elements

    def long_after(result: Tensor) -> tuple[int, int, Tensor]:
        if gc.isenabled():  # where the interpreter may look for circles, it does
            gc.collect()
        return probe(result)

    monkeypatch.setattr(module, "_probe_elements", long_after)
    call = call_in_queue(in_a_circle, [torch.zeros(3)])
    assert "add" not in played.log
    assert call.seen[0].tolist() == [0, 0, 0]
    assert gc.isenabled()
    gc.collect()
    assert "add" in played.log


def test_nan_is_no_race(played):
    assert not call_in_queue(lambda x: x / x, [torch.zeros(3)]).raced


@pytest.mark.parametrize("size", [1, 5, 5000])
def test_a_result_that_another_stream_completes_is_noticed(played, size):
    def late(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        played.later.append(lambda: out.copy_(x))
        return out

    call = call_in_queue(late, [torch.rand(size) + 1])
    assert call.raced
    assert not call.seen[0].any()


def test_an_argument_that_another_stream_writes_is_noticed(played):
    def late(x: Tensor) -> Tensor:
        played.later.append(x.zero_)
        return x + 1

    assert call_in_queue(late, [torch.ones(4)]).raced


def test_who_leaves_another_stream_current_is_told(played):
    def switches(x: Tensor) -> Tensor:
        played.stream = "side"
        return x + 1

    with pytest.raises(RuntimeError, match="another stream"):
        call_in_queue(switches, [torch.ones(4)])
