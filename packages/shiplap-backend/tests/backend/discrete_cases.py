"""What a device with memory and streams of its own must do. `test_discrete.py` runs this file in a process of its own.

The device is the example ``runtime-tinyc/discrete``: two devices, whose memory faults when the host touches it.
"""

from __future__ import annotations

import copy
import importlib
import io
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, os.environ["SHIPLAP_DISCRETE_PROJECT"])
importlib.import_module("torch_mine").autoload()
mine: Any = torch.mine  # type: ignore[attr-defined]
SIZE = 384  # of a product that takes a while in plain C


def slow(x: torch.Tensor, times: int = 3) -> torch.Tensor:
    """``x`` times the identity, some times over: a long kernel whose result is ``x``."""
    one = torch.eye(len(x), device=x.device)
    for _ in range(times):
        x = x @ one
    return x


def test_the_host_cannot_touch_the_memory() -> None:
    code = (
        "import sys, ctypes; sys.path.insert(0, sys.argv[1]); import torch, torch_mine; torch_mine.autoload()\n"
        "x = torch.ones(4, device='mine'); torch.mine.synchronize(); print('here', flush=True)\n"
        "ctypes.string_at(x.data_ptr(), 1)"
    )
    command = [sys.executable, "-c", code, os.environ["SHIPLAP_DISCRETE_PROJECT"]]
    run = subprocess.run(command, capture_output=True, text=True)
    assert "here" in run.stdout
    assert run.returncode == -11  # SIGSEGV


def test_a_call_returns_before_the_work_is_done() -> None:
    stream, x = torch.Stream("mine:0"), torch.randn(SIZE, SIZE)
    for _ in range(5):  # the thread of the stream may be the faster one for once
        with mine.stream(stream):
            y = slow(x.to("mine"))
            early = stream.query()
        stream.synchronize()
        assert stream.query()
        torch.testing.assert_close(y.cpu(), x)
        if not early:
            return
    pytest.fail("the stream had always done its work when the call returned")


def test_events_order_streams_and_tell_time() -> None:
    a, b, x = torch.Stream("mine:0"), torch.Stream("mine:0"), torch.randn(SIZE, SIZE)
    start, end = torch.Event("mine", enable_timing=True), torch.Event("mine", enable_timing=True)
    on = x.to("mine")
    out = torch.zeros_like(on)
    mine.synchronize()
    with mine.stream(a):
        start.record()
        torch.mul(slow(on), 2.0, out=out)
        end.record()
    b.wait_event(end)
    with mine.stream(b):
        got = (out + 1.0).cpu()
    torch.testing.assert_close(got, x * 2 + 1)
    assert end.query()
    assert start.elapsed_time(end) > 0
    b.wait_stream(a)
    with pytest.raises((RuntimeError, ValueError), match="must be recorded before"):
        torch.Event("mine", enable_timing=True).elapsed_time(end)


def test_a_stream_is_the_threads() -> None:
    stream, seen = torch.Stream("mine:0"), []
    with mine.stream(stream):
        thread = threading.Thread(target=lambda: seen.append(mine.current_stream()))
        thread.start()
        thread.join()
        assert mine.current_stream() == stream != mine.default_stream()
    assert seen == [mine.default_stream()]
    assert mine.current_stream() == mine.default_stream()


def test_a_block_is_reused_in_its_own_stream_at_once() -> None:
    x = torch.randn(SIZE, SIZE)
    on = x.to("mine")
    long = slow(on)
    held = on.data_ptr()
    del on
    other = torch.zeros(SIZE, SIZE, device="mine")  # queued behind the reads of the old tensor
    assert other.data_ptr() == held
    torch.testing.assert_close(long.cpu(), x)


def test_record_stream_keeps_a_block_from_others() -> None:
    stream, x = torch.Stream("mine:0"), torch.randn(SIZE, SIZE)
    on = x.to("mine")
    one = torch.eye(SIZE, device="mine")
    busy = torch.randn(SIZE, SIZE).to("mine")
    mine.synchronize()
    with mine.stream(stream):
        for _ in range(4):
            busy = busy @ one
        y = on @ one  # comes late
    on.record_stream(stream)
    held = on.data_ptr()
    del on
    others = [torch.full((SIZE, SIZE), 7.0).to("mine") for _ in range(3)]
    early = not stream.query()
    if early:
        assert held not in {o.data_ptr() for o in others}
    stream.synchronize()
    torch.testing.assert_close(y.cpu(), x)
    more = [torch.empty(SIZE, SIZE, device="mine") for _ in range(8)]
    assert held in {t.data_ptr() for t in (*others, *more)}  # given back when the stream was done


def test_pinned_memory_outlives_its_tensor() -> None:
    stream, x = torch.Stream("mine:0"), torch.randn(SIZE, SIZE)
    on = x.to("mine")
    mine.synchronize()
    with mine.stream(stream):
        slow(on)
        source = torch.randn(SIZE, SIZE).pin_memory()
        expected = source.clone()
        late = source.to("mine", non_blocking=True)
        del source
        for _ in range(4):
            torch.zeros(SIZE, SIZE).pin_memory()
    stream.synchronize()
    assert torch.equal(late.cpu(), expected)
    target = torch.empty(SIZE, SIZE).pin_memory()
    assert target.is_pinned()
    assert target[3:].is_pinned()
    assert not x.is_pinned()
    target.copy_(late, non_blocking=True)
    mine.synchronize()
    assert torch.equal(target, expected)


def test_a_kernel_that_fails_is_named_by_the_next_call() -> None:
    huge = torch.ones(1, device="mine").expand(2**23, 2**23)
    failed = huge.sum()  # tinyc spreads its input out: more than an address space
    with pytest.raises(RuntimeError, match=r"aten::sum.*bad_alloc(.|\n)*after its call had returned"):
        mine.synchronize()
    del failed
    assert (torch.ones(2, device="mine") + 1).cpu().tolist() == [2, 2]  # said once


def test_two_devices() -> None:
    assert mine.device_count() == torch.accelerator.device_count() == 2
    assert torch.ones(2, device="mine").device == torch.device("mine", 0)
    with mine.device(1):
        assert mine.current_device() == torch.accelerator.current_device_index() == 1
        assert torch.ones(2, device="mine").device.index == 1
        assert (torch.ones(2, device="mine:0") + 1).device.index == 0
    assert mine.current_device() == 0
    with torch.device("mine:1"):
        assert torch.zeros(1).device.index == 1
    for wrong in ("mine:2", "mine:9"):
        with pytest.raises(RuntimeError, match="out of range: there are 2 devices"):
            torch.empty(1, device=wrong)
    with pytest.raises(ValueError, match="expected 0 to 1"):
        mine.set_device(2)


MIXED: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "native": lambda a, b: a + b,
    "native product": lambda a, b: a @ b,
    "fallback": lambda a, b: torch.atan2(a, b),
    "list": lambda a, b: torch.cat([a, b]),
    "out": lambda a, b: torch.mul(a, a, out=b),
}


@pytest.mark.parametrize("name", MIXED)
def test_tensors_of_two_devices_do_not_mix(name: str) -> None:
    with pytest.raises(RuntimeError, match="device"):
        MIXED[name](torch.ones(2, 2, device="mine:0"), torch.ones(2, 2, device="mine:1"))


def test_copies_between_devices_wait_for_their_source() -> None:
    x = torch.randn(SIZE, SIZE)
    there = slow(x.to("mine:0")).to("mine:1", non_blocking=True)
    assert there.device.index == 1
    torch.testing.assert_close((there + 1.0).cpu(), x + 1)
    back = torch.empty(SIZE, SIZE, device="mine:0").t()
    back.copy_(there)
    torch.testing.assert_close(back.cpu(), x)


def test_each_device_has_random_numbers_of_its_own() -> None:
    torch.manual_seed(3)  # seeds both
    first, second = torch.rand(4, device="mine:0").cpu(), torch.rand(4, device="mine:1").cpu()
    assert torch.equal(first, second)
    assert torch.equal(first, torch.rand(4, generator=torch.Generator().manual_seed(3)))
    states = mine.get_rng_state_all()
    before = torch.rand(4, device="mine:1").cpu()
    assert torch.equal(mine.get_rng_state(0), states[0])
    mine.set_rng_state_all(states)
    assert torch.equal(torch.rand(4, device="mine:1").cpu(), before)
    own = torch.Generator("mine:1").manual_seed(5)
    assert own.device == torch.device("mine:1")
    torch.empty(4, device="mine:1").normal_(generator=own)


def test_figures_of_memory() -> None:
    mine.empty_cache()
    before = [mine.memory_allocated(i) for i in (0, 1)]
    x = torch.empty(1000, device="mine:1")
    assert [mine.memory_allocated(i) - b for i, b in zip((0, 1), before, strict=True)] == [0, 4000]
    assert torch.accelerator.memory_allocated(1) == mine.memory_allocated(1)
    reserved = torch.accelerator.memory_reserved(1)
    assert reserved >= mine.memory_allocated(1)
    del x
    assert mine.memory_allocated(1) == before[1]
    assert torch.accelerator.memory_reserved(1) == reserved  # kept for the next
    torch.accelerator.empty_cache()
    assert mine.memory_reserved(1) < reserved
    stats = torch.accelerator.memory_stats(1)
    assert stats["allocated_bytes.all.peak"] >= 4000
    assert stats["num_device_free"] > 0
    torch.accelerator.reset_peak_memory_stats(1)
    assert mine.max_memory_allocated(1) == before[1]
    assert mine.mem_get_info(1)[1] == 2**30
    assert "reserved" in mine.memory_summary(1)


def test_memory_that_there_is_not() -> None:
    kept = torch.empty(600 * 2**20, dtype=torch.int8, device="mine")
    with pytest.raises(torch.OutOfMemoryError, match="has no 629145600 bytes left"):
        torch.empty(600 * 2**20, dtype=torch.int8, device="mine")
    del kept
    torch.empty(500 * 2**20, dtype=torch.int8, device="mine")  # what is kept is given back first
    mine.empty_cache()
    mine.set_memory_limit(mine.memory_allocated(1) + 5000, 1)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="device memory limit"):
            torch.empty(6000, dtype=torch.int8, device="mine:1")
        torch.empty(6000, dtype=torch.int8, device="mine:0")
    finally:
        mine.set_memory_limit(None, 1)


def both(f: Callable[[Any], object]) -> None:
    """``f(device)`` gives the CPU's values on each device."""
    expected = f("cpu")
    for device in ("mine:0", "mine:1"):
        got = f(device)
        torch.testing.assert_close(torch.utils._pytree.tree_map(lambda t: t.cpu(), got), expected)


def made(device: str, *sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(sizes).numel()).reshape(sizes).to(dtype).to(device)


def _out_that_grows(d: str) -> torch.Tensor:
    out = torch.empty(0, device=d)
    torch.sin(made(d, 3, 4), out=out)
    return out


def _written_view(d: str) -> torch.Tensor:
    x = made(d, 4, 6)
    x[1:3, ::2].atan_()
    return x


def _resized(d: str) -> torch.Tensor:
    x = made(d, 6)
    x.resize_(12)[6:] = 1
    x.untyped_storage().resize_(80)
    return x.clone()


def _running(d: str) -> tuple[torch.Tensor, ...]:
    norm = nn.BatchNorm1d(4).to(d)
    return (norm(made(d, 8, 4)), *norm.buffers())


TENSORS: dict[str, Callable[[Any], object]] = {
    "strides": lambda d: made(d, 3, 4).t()[::2, 1:] + made(d, 2, 2),
    "steps": lambda d: made(d, 20)[::3] * 2.5,
    "negative and conjugate": lambda d: made(d, 4, dtype=torch.complex64).mul(1 + 2j).conj().imag + 1,
    "expand": lambda d: made(d, 1, 4).expand(3, 4) * made(d, 3, 4),
    "dtype": lambda d: (made(d, 4).to(torch.int32), made(d, 4).half(), made(d, 4).double() * 2),
    "zero-dim": lambda d: made(d, 3) * torch.tensor(2.0),
    "alpha": lambda d: torch.add(made(d, 3), made(d, 3), alpha=3),
    "item": lambda d: torch.tensor(made(d, 2, 3)[1, 2].item()),
    "bool": lambda d: made(d, 3) > 1,
    "indices": lambda d: made(d, 5, 2)[torch.tensor([3, 1])],
    "mask": lambda d: made(d, 5)[made(d, 5) > 2],
    "view results": lambda d: tuple(t + 1 for t in made(d, 6, 2).split(2)),
    "empty": lambda d: made(d, 4)[:0] + 1,
    "overlap": lambda d: made(d, 6)[1:].copy_(made(d, 6)[:-1]),
    "in place on itself": lambda d: (x := made(d, 3, 3)).add_(x.t().clone()),
    "out aliasing an input": lambda d: (lambda x: torch.mm(x, x, out=x.clone()))(made(d, 3, 3)),
    "out that grows": _out_that_grows,
    "written view": _written_view,
    "resized": _resized,
    "running statistics": _running,
    "deterministic fill": lambda d: torch.zeros(3, device=d).new_zeros(4),
    "channels last": lambda d: nn.functional.avg_pool2d(
        made(d, 1, 2, 4, 4).contiguous(memory_format=torch.channels_last), 2
    ),
    "cat and chunk": lambda d: torch.cat([c * 2 for c in made(d, 4, 2).chunk(2)]),
    "sort": lambda d: made(d, 5).flip(0).sort(),
    "set_": lambda d: torch.empty(0, device=d).set_(made(d, 6).untyped_storage(), 2, (2, 2)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_are_as_on_the_cpu(name: str) -> None:
    both(TENSORS[name])


def test_text_and_files() -> None:
    x = torch.arange(6.0)
    assert repr(x.to("mine")) == repr(x)[:-1] + ", device='mine:0')"
    file = io.BytesIO()
    torch.save({"x": x.to("mine:1")}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["x"]
    assert loaded.device == torch.device("mine:1")
    assert torch.equal(loaded.cpu(), x)
    assert x.to("mine").tolist() == x.tolist()
    assert torch.equal(copy.deepcopy(x.to("mine")).cpu(), x)


def test_backward_runs_in_the_streams_of_the_forward() -> None:
    stream = torch.Stream("mine:0")
    weight = torch.eye(SIZE).to("mine").requires_grad_()
    x = torch.randn(SIZE, SIZE)
    stream.wait_stream(mine.current_stream())
    with mine.stream(stream):
        y = (slow(x.to("mine")) @ weight).sum()
    y.backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.cpu(), x.sum(0, keepdim=True).t().expand(SIZE, SIZE), rtol=1e-3, atol=1e-3)


def test_a_loader_pins() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    loaded = [b.to("mine", non_blocking=True) for (b,) in torch.utils.data.DataLoader(data, 4, pin_memory=True)]
    assert torch.cat(loaded).tolist() == list(range(8))


def test_fallbacks_are_counted_and_refused() -> None:
    x = torch.ones(3, device="mine")
    mine.reset_counters()
    x.atan()
    (x + 1).tanh()
    counted = mine.counters()
    assert counted["aten::add.out"]["native"] == 1
    assert sum(counted["aten::atan.out"]["fallback"].values()) == 1
    with mine.fallback_policy("error"), pytest.raises(NotImplementedError, match=r"aten::atan\.out"):
        x.atan()


def test_torch_compile() -> None:
    """Inductor's loops would read the memory, so a graph that has some is refused; calls of operators are made."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).tanh() + 1

    x = torch.randn(5)
    torch.testing.assert_close(torch.compile(f, backend="aot_eager")(x.to("mine")).cpu(), f(x))
    with pytest.raises(Exception, match=r"cannot address the memory of device 'mine': compile with options"):
        torch.compile(f)(x.to("mine"))
    torch._dynamo.reset()
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.LayerNorm(4), torch.nn.GELU(), torch.nn.Linear(4, 2))
    y = torch.randn(3, 5)
    want = torch.autograd.grad(model(y).square().sum(), list(model.parameters()))
    model.to("mine")
    mine.reset_counters()
    made = torch.compile(model, options={"fallback_by_default": True}, fullgraph=True)(y.to("mine"))
    got = torch.autograd.grad(made.square().sum(), list(model.parameters()))
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)
    assert mine.counters()["aten::addmm.out"]["native"] > 0


def test_what_the_device_does_not_do_is_an_error() -> None:
    x = torch.ones(2, 3, device="mine")
    with pytest.raises(NotImplementedError, match="a sparse tensor, layout Sparse"):
        x.to_sparse()
    with pytest.raises(NotImplementedError, match=r"nested_tensor|NestedTensor"):
        torch.nested.nested_tensor([torch.ones(2)], device="mine").unbind()
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device="mine", layout=torch.jagged)
    assert (jagged * 2).values().cpu().tolist() == [2.0] * 5
    pytest.importorskip("torch.accelerator.graphs")
    with pytest.raises(RuntimeError, match="Graph is not supported on device type: mine"):
        torch.accelerator.Graph()


def test_a_forked_process_is_refused() -> None:
    """It lacks the threads of the streams: waiting for them would never end."""
    x = torch.ones(3, device="mine")
    mine.synchronize()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for use in (x.cpu, mine.init):
                with pytest.raises(RuntimeError, match="forked"):
                    use()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
