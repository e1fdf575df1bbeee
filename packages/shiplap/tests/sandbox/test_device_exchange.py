"""Calls whose arguments and results stay on a GPU: the logic, with a GPU that is this processor."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from dataclasses import replace

import msgspec
import pytest
import torch
from torch import Tensor

from shiplap.sampling.compare import Difference, bitwise_difference
from shiplap.sandbox import call_batch, device_memory
from shiplap.sandbox.arguments import ArgumentArena, MappedArguments, packed_locations
from shiplap.sandbox.call_batch import CallBatch, release_block
from shiplap.sandbox.candidate import CandidateError, ExpectedEffects
from shiplap.sandbox.device_clock import CallsNotQueued
from shiplap.sandbox.device_memory import FLAG_BYTES, GRAIN
from shiplap.sandbox.launcher_environment import launcher_environment
from shiplap.sandbox.protocol import BatchCalled, CallPlaces
from shiplap.sandbox.request_errors import Timeout
from shiplap.sandbox.supervisor import Bounds
from tests.sandbox.fake_device import FakeDriver, drawn, driver, process_of

__all__ = ["driver"]


HELD = torch.empty(5000)


def expect(*results: Tensor, changed: tuple[int, ...] = ()) -> ExpectedEffects:
    """Return effects that have to be these, bit by bit."""
    return ExpectedEffects(results, lambda got: Difference(bitwise_difference(got, results)), changed)


def test_a_call_reads_its_block_and_its_results_are_compared(driver: FakeDriver) -> None:
    witness = process_of(lambda x: x * 2)
    for _ in range(4):
        (x,) = drawn(1)[0]
        witness.call([x], expect(x * 2))
    with pytest.raises(CandidateError, match="result 0"):
        witness.call([x], expect(x * 3))
    assert driver.opened == 0  # nothing of the process stays mapped after a fault


def test_new_values_in_place_reach_the_tensors_of_the_last_call(driver: FakeDriver) -> None:
    seen: list[Tensor] = []

    def target(x: Tensor) -> Tensor:
        seen.append(x)
        return x * 2

    witness = process_of(target)
    (x,), (y,) = drawn(2)
    witness.call([x], expect(x * 2))
    witness.call([y], expect(y * 2), in_place=True)
    assert seen[0].data_ptr() == seen[1].data_ptr()


@pytest.mark.parametrize(
    ("target", "check"),
    [
        (lambda x: x.mul_(2).clone(), "arguments"),
        (lambda x: x[:], "aliases"),
        (lambda x: torch.mul(x, 2, out=HELD), "aliases"),
        (lambda x: (x * 2).double(), "results"),
    ],
    ids=["writes its argument", "returns its argument", "one buffer for all results", "another dtype"],
)
def test_faults_of_a_call(driver: FakeDriver, target, check: str) -> None:
    witness, found = process_of(target), ""
    for (x,) in drawn(2):
        try:
            witness.call([x], expect(target(x.clone()).clone() if check != "results" else x * 2))
        except CandidateError as e:
            found = e.check
    assert found == check


def test_a_result_that_changes_later_is_seen_by_the_next_call(driver: FakeDriver) -> None:
    held: list[Tensor] = []

    def target(x: Tensor) -> Tensor:
        for earlier in held:
            earlier.zero_()
        held.append(x * 2)
        return held[-1]

    witness = process_of(target)
    (x,), (y,) = drawn(2)
    witness.call([x], expect(x * 2))
    with pytest.raises(CandidateError, match="changed after the call"):
        witness.call([y], expect(y * 2))


def queued_double(driver: FakeDriver):
    """Return a target whose work waits in the stream of the GPU."""

    def target(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        driver.launch(lambda: torch.mul(x, 2, out=out))
        return out

    return target


def run(driver: FakeDriver, target, *, queued: bool = True, count: int = 3):
    """Return the time of a batch whose results have to be twice the arguments."""
    sets, opened = drawn(count), driver.opened
    with CallBatch(process_of(target), 0, sets, blank=True, queued=queued) as batch:
        batch.fill(sets)
        first = batch.run_calls([expect(x * 2) for (x,) in sets])
        batch.run_calls()  # the same values again
    assert driver.opened == opened
    return first


@pytest.mark.parametrize("queued", [True, False])
def test_calls_of_a_batch_are_timed_and_compared(driver: FakeDriver, queued: bool) -> None:
    took = run(driver, queued_double(driver), queued=queued).took
    assert took.wall == took.quiet
    assert (took.wall == 1e-3) == queued  # the time between the events of this process


def test_work_before_the_gate_has_other_arguments(driver: FakeDriver) -> None:
    """The arguments get their values when the clock has started."""
    with pytest.raises(CandidateError, match="result 0"):
        run(driver, lambda x: x * 2)


def test_work_of_another_stream_behind_the_end_is_seen(driver: FakeDriver) -> None:
    def target(x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        driver.launch(lambda: torch.mul(x[::2], 2, out=out[::2]))
        driver.launch_beside(lambda: torch.mul(x, 2, out=out))
        return out

    with pytest.raises(CandidateError) as caught:
        run(driver, target)
    assert caught.value.check == "streams"


def test_calls_that_wait_for_the_device_are_not_queued(driver: FakeDriver) -> None:
    sets = drawn(2)
    witness = process_of(queued_double(driver))
    witness.prisoner.waits = True
    with CallBatch(witness, 0, sets, blank=True, queued=True) as batch:
        batch.fill(sets)
        with pytest.raises(CallsNotQueued):
            batch.run_calls()
        assert not driver.blocked  # the gate is open, so that the process goes on


def test_the_gate_is_opened_for_a_call_that_raises(driver: FakeDriver) -> None:
    sets = drawn(2)

    def target(x: Tensor) -> Tensor:
        raise ValueError("no")

    with CallBatch(process_of(target), 0, sets, blank=True, queued=True) as batch:
        batch.fill(sets)
        with pytest.raises((CandidateError, ValueError)):
            batch.run_calls()
    assert not driver.blocked


def test_a_block_is_memory_of_its_own(driver: FakeDriver) -> None:
    """Arguments lie behind the words at which streams wait, and the block has whole grains."""
    arena = ArgumentArena()
    held = torch.rand(4, 6)
    packed = arena.pack([held.t(), held[1:], 3])
    handle = arena.write()
    block = arena.block
    assert block is not None
    assert block.size % GRAIN == 0
    places = packed_locations(packed)
    assert all(place.at >= FLAG_BYTES for place in places)
    for place, t in zip(places, (held.t(), held[1:]), strict=True):
        room = block.bytes_at(place.at, t.numel() * 4).view(torch.float32)
        assert torch.equal(room.as_strided(t.shape, t.stride()), t)
    block.close_file()
    os.close(handle)


def test_a_block_is_used_again_by_calls_and_batches_that_fit(driver: FakeDriver) -> None:
    witness = process_of(lambda x: x * 2)
    for (x,) in drawn(3):
        witness.call([x], expect(x * 2))
    (large,) = drawn(1, 1 << 20)[0]
    witness.call([large], expect(large * 2))
    assert driver.made == 2
    witness = process_of(queued_double(driver))
    for sets in (drawn(3), drawn(3), drawn(2)):
        with CallBatch(witness, 0, sets, blank=True, queued=True) as batch:
            batch.fill(sets)
            batch.run_calls([expect(x * 2) for (x,) in sets])
    assert driver.made == 3
    release_block(witness)
    assert witness.block is None


def test_a_batch_that_uses_a_block_again_shows_no_values_before_the_clock_starts(driver: FakeDriver) -> None:
    """Neither those of the last batch, nor results of it that lie in its arguments."""
    seen: list[Tensor] = []

    def target(x: Tensor) -> Tensor:
        seen.append(x.clone())
        out = torch.zeros_like(x)
        driver.launch(lambda: torch.mul(x, 2, out=out))
        return out

    witness = process_of(target)
    for sets in (drawn(2), drawn(2)):
        with CallBatch(witness, 0, sets, blank=True, queued=True) as batch:
            assert witness.block is not None
            assert not witness.block.bytes_at(FLAG_BYTES, witness.block.size - FLAG_BYTES).any()
            batch.fill(sets)
            batch.run_calls([expect(x * 2) for (x,) in sets])
    assert len(seen) == 4
    assert not any(x.any() for x in seen)


def test_a_result_in_an_argument_may_change_with_the_next_call(driver: FakeDriver) -> None:
    """The next arguments lie in the same block."""
    witness = process_of(lambda x: x.mul_(2))
    for (x,) in drawn(3):
        twice = x * 2
        witness.call([x], ExpectedEffects([twice, twice], lambda got: Difference(), (0,), aliased=True))


def test_what_lies_on_a_gpu_is_no_memory_of_the_host(driver: FakeDriver) -> None:
    """A leak is what the process holds on the host beyond what it keeps on request."""
    witness = process_of(lambda x: x * 2)
    for (x,) in drawn(3):
        witness.call([x], expect(x * 2))
    assert witness.kept_bytes == 0


@pytest.mark.parametrize(
    ("forged", "check"),
    [
        ({"dtype": "Tensor"}, "memory"),
        ({"at": 1}, "memory"),
        ({"shape": [0], "stride": [1]}, "results"),
    ],
    ids=["no dtype", "between two elements", "of no elements"],
)
def test_a_forged_location_is_a_fault_and_ends_no_judgement(driver: FakeDriver, forged, check: str) -> None:
    """Kernels of this process would fail that read there, and all later ones with them."""
    witness, sets = process_of(queued_double(driver)), drawn(2)
    honest = witness.prisoner.request_reply

    def forge(message, *files: int, waiting=None):
        reply, took = honest(message, *files, waiting=waiting)
        if isinstance(reply, BatchCalled):
            outs = [[msgspec.structs.replace(place, **forged) for place in call.outs] for call in reply.calls]
            reply = BatchCalled([CallPlaces(places) for places in outs], 0)
        return reply, took

    witness.prisoner.request_reply = forge  # type: ignore[method-assign]
    with CallBatch(witness, 0, sets, blank=True, queued=True) as batch:
        batch.fill(sets)
        with pytest.raises(CandidateError) as caught:
            batch.run_calls([expect(x * 2) for (x,) in sets])
    assert caught.value.check == check
    assert driver.opened == 0


def test_an_idle_batch_leaves_no_work_to_its_clock(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is subtracted from all others. Its arguments become zeros next, which no call may read then."""
    made: list[Tensor] = []
    monkeypatch.setattr(torch.cuda, "synchronize", driver.run_later)

    def target(x: Tensor) -> Tensor:
        driver.launch_beside(lambda: made.append(x.clone()))
        return x * 2

    (args,) = drawn(1)
    with CallBatch(process_of(target), -1, [args], blank=False, queued=True):
        assert len(made) == 1
    assert torch.equal(made[0], args[0])


def test_values_are_written_within_the_time_of_calls_that_are_not_queued(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that an earlier call has left to the device could work as soon as there are values."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(driver, "empty_caches", lambda: now.__setitem__(0, now[0] + 2.0))
    ran = run(driver, queued_double(driver), queued=False)
    assert (ran.took.wall, ran.written) == (2.0, 2.0)


def test_a_batch_without_memory_leaves_nothing_behind(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer calls are tried next, for which the memory has to be free."""
    witness, sets, made = process_of(queued_double(driver)), drawn(2), []

    def refuse(block: object) -> None:
        made.append(block)
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(call_batch, "DeviceClock", refuse)
    with pytest.raises(torch.OutOfMemoryError):
        CallBatch(witness, 0, sets, blank=True, queued=True)
    assert (witness.block, made[0].file) == (None, -1)


@pytest.mark.parametrize("returned", [True, False], ids=["returned", "not returned"])
def test_an_argument_that_another_stream_changes_behind_the_end_is_seen(driver: FakeDriver, returned: bool) -> None:
    def target(x: Tensor) -> Tensor | None:
        driver.launch_beside(lambda: x.mul_(2))
        return x if returned else None

    sets = drawn(1)
    twice = [sets[0][0] * 2] * (2 if returned else 1)
    expected = ExpectedEffects(twice, lambda got: Difference(bitwise_difference(got, twice)), (0,), aliased=True)
    with CallBatch(process_of(target), 0, sets, blank=True, queued=True) as batch:
        batch.fill(sets)
        with pytest.raises(CandidateError) as caught:
            batch.run_calls([expected])
    assert caught.value.check == "streams"


@pytest.mark.parametrize(("until", "raised"), [(0.0, Timeout), (float("inf"), CandidateError)])
def test_calls_that_never_end_wait_no_longer_than_the_judgement(driver: FakeDriver, until: float, raised: type) -> None:
    """The process has replied, and left a kernel to the device."""
    witness, sets = process_of(queued_double(driver)), drawn(1)
    witness.prisoner.bounds, witness.prisoner.until = Bounds(seconds=0.0), until
    ends: list[bool] = []

    def end() -> None:
        """Be cleared twice, first the word of the process, and then that of this one."""
        ends.append(True)
        driver.ended = len(ends) > 2

    driver._end = end  # type: ignore[method-assign]
    with CallBatch(witness, 0, sets, blank=True, queued=False) as batch:
        batch.fill(sets)
        with pytest.raises((Timeout, CandidateError)) as caught:
            batch.run_calls()
    assert caught.type is raised
    assert len(ends) == 3


def test_settings_of_the_allocator_of_torch_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of expandable segments has no handle by which results could be read."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in launcher_environment()


@pytest.mark.parametrize(
    ("free", "cached", "emptied"),
    [(60, 40, False), (40, 30, True), (40, 5, False), (3, 4, True), (3, 2, False)],
    ids=["there is room", "a large cache", "a small cache", "no room", "no room and nothing to return"],
)
def test_freed_memory_is_returned_where_other_processes_may_need_it(monkeypatch, free, cached, emptied) -> None:
    """Of 100 bytes. The process that judges and the others each keep what they have freed, which adds up."""
    returned: list[bool] = []
    for name, value in (("mem_get_info", (free, 100)), ("memory_reserved", cached + 7), ("memory_allocated", 7)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: returned.append(True))
    object.__new__(device_memory.DeviceDriver).leave_room()
    assert bool(returned) == emptied


def test_memory_is_returned_before_each_request_and_after_all_but_batches(driver: FakeDriver, monkeypatch) -> None:
    """What a batch has allocated once has to be there when it is timed."""
    left: list[str] = []
    monkeypatch.setattr(driver, "leave_room", lambda: left.append("it"))
    witness, (args, *_) = process_of(lambda x: x + 1), drawn(3)
    witness.call(args)
    left.clear()
    witness.call(args)
    assert len(left) == 2
    left.clear()
    with CallBatch(witness, 0, [args], blank=False) as batch:
        assert len(left) == 1
        batch.run_calls()
    assert len(left) == 2


def test_memory_is_returned_when_batches_are_released(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[str] = []
    witness, (args, *_) = process_of(lambda x: x + 1), drawn(3)
    with CallBatch(witness, 0, [args], blank=False) as batch:
        batch.run_calls()
    monkeypatch.setattr(driver, "leave_room", lambda: left.append("it"))
    release_block(witness)
    assert len(left) == 2  # here before the request, and there


def test_what_a_call_for_gradients_keeps_ends_with_the_next_request(driver: FakeDriver) -> None:
    """A gradient of a large argument would take its room on a GPU while calls are timed."""
    witness, (args, *_) = process_of(lambda x: x * 2), drawn(3)
    seed = torch.ones_like(args[0])
    witness.gradients(args, [seed], [seed], [], [True], expect(args[0] * 2))
    assert witness.prisoner.host._last
    with CallBatch(witness, 0, [args], blank=False):
        assert not witness.prisoner.host._last


@pytest.mark.parametrize("unused", [None, 0])
def test_gradients_are_zeros_where_only_results_without_one_are_used(driver: FakeDriver, unused: int | None) -> None:
    """A reference such as ``x.round()`` has a gradient of zeros, and a kernel for it has none."""
    witness, (args, *_) = process_of(lambda x: (x * 2, x.detach().round())), drawn(3)
    expected, seed = expect(args[0] * 2), torch.ones_like(args[0])
    expected = replace(expected, own=[args[0] * 2, args[0].round()], against=lambda got: Difference())
    seeds = [None if unused == 0 else seed, seed]
    (got,) = witness.gradients(args, seeds, [seed], [], [True], expected)
    assert torch.equal(got.cpu(), torch.full_like(seed, 0.0 if unused == 0 else 2.0).cpu())


def test_a_write_behind_an_argument_is_seen(driver: FakeDriver) -> None:
    def target(x: Tensor) -> Tensor:
        ctypes.memset(x.data_ptr() + x.numel() * x.itemsize, 0, 1)
        return x + 1

    (args, *_) = drawn(3)
    assert process_of(lambda x: x + 1).call(args, expect(args[0] + 1)).error == 0.0
    with pytest.raises(CandidateError, match="past the end of tensor argument 0"):
        process_of(target).call(args, expect(args[0] + 1))


def test_a_write_behind_an_argument_on_the_host_is_seen() -> None:
    arena = ArgumentArena()
    packed, handle = arena.pack([torch.ones(5), torch.empty(0), torch.ones(3, dtype=torch.int8)]), arena.write()
    given = MappedArguments.of(handle, packed)
    os.close(handle)
    assert given.find_overrun(None) == -1
    given.memory[given.places[2].at + 3] = 0
    assert given.find_overrun(None) == 2


@pytest.mark.parametrize(
    ("target", "is_fault"),
    [
        (lambda x: (x + 1, x + 1), False),
        (lambda x: (x + 1).repeat(2).chunk(2), False),
        (lambda x: (x + 1).repeat_interleave(2).view(-1, 2).unbind(1), False),
        (lambda x: [x + 1] * 2, True),
    ],
    ids=["two tensors", "halves of one", "columns of one", "one tensor twice"],
)
def test_two_results_share_no_memory_unless_those_of_the_reference_do(driver, target, is_fault: bool) -> None:
    (args, *_) = drawn(3)
    expected = expect(args[0] + 1, args[0] + 1)
    process_of(target).call(args, expected)
    with pytest.raises(CandidateError, match="shares memory") if is_fault else contextlib.nullcontext():
        process_of(target).call(args, replace(expected, overlapping=False))
