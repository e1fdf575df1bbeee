"""The device as torch sees it: name, index, streams and events, random numbers, memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch


@pytest.mark.usefixtures("of_shared_memory")
def test_it_is_a_device(dev: Any, device: str) -> None:
    assert dev.is_available()
    assert (dev.device_count(), dev.current_device()) == (1, 0)
    assert torch.accelerator.current_accelerator() == torch.device(device)
    assert torch.ones(2, device=device).device == torch.device(device, 0)
    assert torch.ones(2).to(f"{device}:0").sum().item() == 2
    assert getattr(torch.ones(2), device)().device.type == device  # tensor.openvino()
    assert getattr(torch.ones(2, device=device), f"is_{device}")
    with dev.device(0), dev.stream(dev.current_stream()):
        dev.synchronize()
        torch.accelerator.synchronize()


@pytest.mark.usefixtures("of_shared_memory")
def test_there_is_only_one(dev: Any, device: str) -> None:
    with pytest.raises(RuntimeError, match="device index 1 is out of range: there is 1 device, index 0"):
        torch.empty(2, device=f"{device}:1")
    with pytest.raises(ValueError, match="got device index 1, expected 0"):
        dev.set_device(1)
    with pytest.raises(ValueError, match=f"got device cpu, expected '{device}'"):
        dev.synchronize("cpu")


def test_streams_and_events_are_there(dev: Any, device: str) -> None:
    start, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
    start.record()
    torch.ones(100, device=device).sum()
    end.record()
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) > 0
    torch.Stream(device).synchronize()


def test_random_numbers_are_the_cpus_for_the_same_seed(dev: Any, device: str) -> None:
    torch.manual_seed(7)
    assert dev.initial_seed() == 7
    got = [torch.randn(5, device=device).cpu(), torch.nn.functional.dropout(torch.ones(64, device=device)).cpu()]
    torch.manual_seed(7)
    assert torch.equal(got[0], torch.randn(5))
    state = dev.get_rng_state()
    repeated = [torch.rand(3, device=device) for _ in range(2)]
    dev.set_rng_state(state)
    assert torch.equal(torch.rand(3, device=device).cpu(), repeated[0].cpu())
    own = torch.Generator(device=device).manual_seed(3)
    assert own.device.type == device
    assert torch.equal(
        torch.rand(3, generator=own, device=device).cpu(), torch.rand(3, generator=torch.Generator().manual_seed(3))
    )
    with pytest.raises(ValueError, match="RNG state of 3 bytes: expected 5056"):
        dev.set_rng_state(torch.zeros(3, dtype=torch.uint8))


def test_ops_without_a_generator_draw_from_the_devices(dev: Any, device: str) -> None:
    """``native_dropout`` takes no generator: the seed of the device decides, and the CPU's stream is left alone."""
    x, untouched = torch.ones(64, device=device), torch.get_rng_state()
    masks = []
    for seed in (1, 1, 2):
        dev.manual_seed(seed)
        masks.append(torch.native_dropout(x, 0.5, True)[1].cpu())
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])
    assert torch.equal(torch.get_rng_state(), untouched)


def test_threads_that_draw_leave_the_cpus_stream_alone(dev: Any, device: str) -> None:
    """An op without a generator runs with the CPU's, which holds the device's state meanwhile: one thread at a time."""
    x, untouched = torch.ones(64, device=device), torch.get_rng_state()

    def work() -> None:
        for _ in range(100):
            torch.native_dropout(x, 0.5, True)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert torch.equal(torch.get_rng_state(), untouched)


@pytest.mark.parametrize("bytes", [2**63 - 1, 2**62 + 1, 2**52])
def test_more_than_there_can_be(dev: Any, device: str, bytes: int) -> None:
    before = dev.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError, match=f"has no {bytes} bytes"):
        torch.empty(bytes, dtype=torch.int8, device=device)
    assert dev.memory_allocated() == before


def test_memory_is_counted(dev: Any, device: str) -> None:
    before = dev.memory_allocated()
    dev.reset_peak_memory_stats()
    x = torch.empty(1000, device=device)
    y = torch.sin(x)  # of the fallback's making: counted as well
    assert dev.memory_allocated() - before == 8000
    assert torch.accelerator.memory_allocated() == dev.memory_allocated()
    del y
    assert dev.memory_allocated() - before == 4000
    assert dev.max_memory_allocated() - before == 8000
    assert x.untyped_storage().nbytes() == 4000


def test_a_memory_limit_is_kept(dev: Any, device: str) -> None:
    x = torch.ones(1000, device=device)
    dev.set_memory_limit(dev.memory_allocated() + 5000)
    assert dev.mem_get_info()[0] == 5000
    y = torch.empty(1000, device=device)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"tried to allocate 4000 bytes.*raise the limit with set_memory_limit"
    ):
        torch.empty(1000, device=device)
    with pytest.raises(torch.OutOfMemoryError):
        x.sin()
    del y
    assert torch.empty(1000, device=device).numel() == 1000  # nothing was counted for those that failed
    with pytest.raises(ValueError, match="got a memory limit of -1 bytes"):
        dev.set_memory_limit(-1)


def test_pinned_memory(dev: Any, device: str) -> None:
    x = torch.arange(6.0).reshape(2, 3).pin_memory()
    assert x.is_pinned()
    assert x[1].is_pinned()
    assert not torch.ones(2).is_pinned()
    assert torch.equal(x.to(device, non_blocking=True).cpu(), x)


def test_many_threads(dev: Any, device: str) -> None:
    """Threads share graphs, and each gets its own results."""
    failures: list[BaseException] = []
    dev.cache_clear()

    def work(seed: int) -> None:
        try:
            g = torch.Generator().manual_seed(seed)
            for step in range(20):
                a = torch.randn(4 + step % 3, 8, generator=g)
                torch.testing.assert_close((a.to(device) @ a.t().to(device)).cpu(), a @ a.t())
        except BaseException as e:  # to the main thread
            failures.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    assert dev.cache_info()["misses"] == 3  # one graph a shape, made once
