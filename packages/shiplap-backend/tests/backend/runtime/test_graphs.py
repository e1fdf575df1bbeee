"""Compiled graphs: keyed by all they were built from, bounded, on the tensors' own memory, in the target's layout."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shiplap_testing.effort import sampled


@pytest.fixture
def fresh(dev: Any) -> Iterator[Any]:
    capacity = dev.cache_info()["capacity"]
    dev.cache_clear()
    yield dev
    dev.cache_resize(capacity)


def test_output_sizes_alone_are_no_key(fresh: Any, device: str) -> None:
    """mm (3, 5) @ (5, 7) and (3, 9) @ (9, 7) have the same output: a cache keyed by it would serve the wrong graph."""
    for inner in (5, 9):
        a, b = torch.randn(3, inner), torch.randn(inner, 7)
        torch.testing.assert_close((a.to(device) @ b.to(device)).cpu(), a @ b)
    assert fresh.cache_info()["misses"] == 2


@pytest.mark.usefixtures("of_openvino")
def test_what_is_a_key(fresh: Any, device: str) -> None:
    """dtype, dim, layout and op make a new graph; new values and another tensor of the same kind do not."""
    x = torch.rand(4, 4, device=device)

    def misses(*calls: Any) -> int:
        before = fresh.cache_info()["misses"]
        for call in calls:
            call()
        return int(fresh.cache_info()["misses"] - before)

    assert misses(lambda: torch.softmax(x, 0)) == 1
    assert misses(lambda: torch.softmax(x, 0), lambda: torch.softmax(x * 1, 0)) == 1  # the product
    assert misses(lambda: torch.softmax(x, 1)) == 1
    assert misses(lambda: torch.softmax(x.t(), 1)) == 1
    assert misses(lambda: torch.softmax(x.half(), 1)) == 1
    assert misses(lambda: torch.softmax(x[:2], 1)) == 1
    assert misses(lambda: torch.add(x, x, alpha=2), lambda: torch.add(x, x, alpha=3)) == 1


def test_the_cache_is_bounded(fresh: Any, device: str) -> None:
    fresh.cache_resize(3)
    rows = [torch.rand(n, 4, device=device) for n in range(1, 6)]
    for r in rows:
        r.relu()
    info = fresh.cache_info()
    assert (info["entries"], info["misses"], info["evictions"]) == (3, 5, 2)
    rows[4].relu()
    assert fresh.cache_info()["hits"] == 1
    rows[2].relu()  # used: stays when the next one comes, and the older goes
    rows[0].relu()
    rows[2].relu()
    info = fresh.cache_info()
    assert (info["hits"], info["misses"]) == (3, 6)
    assert info["compile_seconds"] > 0
    with pytest.raises(ValueError, match="got a capacity of 0 graphs"):
        fresh.cache_resize(0)


VIEWS = {
    "row-major": lambda t: t[:6, :6].contiguous(),
    "transposed": lambda t: t[:6, :6].contiguous().t(),
    "offset": lambda t: t.flatten()[5:41].view(6, 6),
    "gaps": lambda t: t[1:7, ::2],
    "expanded": lambda t: t[:6, :1].contiguous().expand(6, 6),
    "expanded rows": lambda t: t[0, :6].expand(6, 6),
    "all expanded": lambda t: t[:1, :1].expand(6, 6),
}


@pytest.mark.parametrize("a", sampled(VIEWS, 4))
@pytest.mark.parametrize("b", ["row-major", "transposed", "expanded rows"])
def test_layouts_of_inputs(dev: Any, device: str, a: str, b: str) -> None:
    x, y = torch.randn(8, 12), torch.randn(8, 12)
    want = VIEWS[a](x), VIEWS[b](y)
    got = VIEWS[a](x.to(device)), VIEWS[b](y.to(device))
    assert [t.stride() for t in got] == [t.stride() for t in want]
    torch.testing.assert_close((got[0] @ got[1]).cpu(), want[0] @ want[1])
    torch.testing.assert_close((got[0] + got[1]).cpu(), want[0] + want[1])


@pytest.mark.parametrize("dims", [(0, 1, 2), (2, 0, 1), (1, 2, 0), (2, 1, 0)])
def test_permuted_inputs_and_outputs(dev: Any, device: str, dims: tuple[int, ...]) -> None:
    x = torch.randn(2, 3, 4)
    got = torch.relu(x.to(device).permute(dims))
    assert torch.equal(got.cpu(), x.permute(dims).relu())
    out = torch.empty(4, 3, 2, device=device).permute(2, 1, 0)
    torch.add(x.to(device), x.to(device), out=out)
    assert torch.equal(out.cpu(), x + x)
    assert out.stride() == (1, 2, 6)


def test_outputs_that_are_inputs(dev: Any, device: str) -> None:
    x = torch.randn(5, 5)
    d = x.to(device)
    d.add_(d)
    torch.testing.assert_close(d.cpu(), x + x)
    y = torch.randn(5, 5).to(device)
    want = y.cpu() @ y.cpu()
    torch.mm(y, y, out=y)
    torch.testing.assert_close(y.cpu(), want)
    z = torch.randn(4, 10, device=device)
    want = z.cpu()[:, ::2] * 2
    torch.mul(z[:, ::2], 2, out=z[:, 1::2])  # gaps between
    torch.testing.assert_close(z.cpu()[:, 1::2], want)


@pytest.mark.parametrize(("m", "k", "n"), [(0, 3, 4), (3, 0, 4), (3, 4, 0), (0, 0, 0), (1, 1, 1)])
def test_no_elements(dev: Any, device: str, m: int, k: int, n: int) -> None:
    a, b = torch.randn(m, k), torch.randn(k, n)
    out = torch.full((m, n), 7.0)
    torch.testing.assert_close(torch.mm(a.to(device), b.to(device), out=out.to(device)).cpu(), a @ b)
    torch.testing.assert_close((a.to(device) + a.to(device)).cpu(), a + a)


def test_results_lie_in_the_tensors_own_memory(dev: Any, device: str) -> None:
    """No staging copies: a large product allocates its output and nothing else."""
    x = torch.rand(256, 256, device=device)
    x @ x
    before = dev.memory_stats()["allocations"]
    y = x @ x
    assert dev.memory_stats()["allocations"] - before == 1
    assert y.numel() == x.numel()


@pytest.mark.parametrize("sizes", [(), (3,), (2, 3)])
def test_a_graph_that_hands_on_its_input(dev: Any, device: str, sizes: tuple[int, ...]) -> None:
    """OpenVINO would leave the output as it was."""
    x = torch.zeros(sizes, device=device)
    for value in (3.0, 4.0):
        assert torch.equal(x.fill_(value).cpu(), torch.full(sizes, value))
    assert dev.counters()["aten::fill_.Scalar"]["native"] >= 2


@pytest.fixture(params=[1, 4, 16])
def blocked(request: pytest.FixtureRequest, dev: Any) -> Iterator[int]:
    """A target that stores tensors with their last dim in blocks, padded."""
    dev._C.set_layout(request.param)
    yield request.param
    dev._C.set_layout(0)


def heap_growth(run: Any) -> int:
    """Return by how many bytes the process grew."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    before = resident()
    run()
    return resident() - before


def test_the_bytes_of_graphs_are_counted_and_bounded(fresh: Any, device: str) -> None:
    assert fresh.cache_info()["limit"] == 48 << 20
    rows = [torch.rand(n, 4, device=device) for n in range(1, 6)]
    for r in rows:
        r.relu()
    info = fresh.cache_info()
    assert info["entries"] == 5
    assert info["bytes"] >= 5 * 200  # at least the keys
    fresh.cache_resize(4096, bytes=1)
    for r in rows:
        assert torch.equal(r.relu().cpu(), r.cpu())
    info = fresh.cache_info()
    assert (info["entries"], info["limit"]) == (1, 1)
    fresh.cache_resize(4096)
    fresh.cache_clear()
    assert (fresh.cache_info()["bytes"], fresh.cache_info()["limit"]) == (0, 48 << 20)
    with pytest.raises(ValueError, match="expected at least 1 of each"):
        fresh.cache_resize(3, bytes=0)


@pytest.mark.long  # OpenVINO compiles for some minutes
def test_a_thousand_lengths_take_a_bounded_room(fresh: Any, device: str) -> None:
    layer = torch.nn.Linear(64, 64).to(device)

    def run(lengths: range) -> None:
        for n in lengths:
            with torch.no_grad():
                torch.nn.functional.layer_norm(torch.softmax(layer(torch.rand(n, 64).to(device)), -1) + 1, (64,))

    run(range(1001, 1011))  # what the vendor's library sets up once
    grown = heap_growth(lambda: run(range(1, 1001)))
    info = fresh.cache_info()
    assert info["bytes"] <= info["limit"] == 48 << 20
    assert grown < info["bytes"] + (16 << 20)  # what a library keeps of each length for itself would not be counted
    assert grown + heap_growth(fresh.cache_clear) < 16 << 20


@pytest.mark.parametrize(("m", "k", "n"), [(3, 5, 7), (3, 7, 5), (1, 16, 4), (8, 4, 8)])
def test_blocked_products(blocked: int, device: str, m: int, k: int, n: int) -> None:
    a, b = torch.randn(m, k), torch.randn(k, n)
    torch.testing.assert_close((a.to(device) @ b.to(device)).cpu(), a @ b)
    torch.testing.assert_close((a.to(device) @ b.t().contiguous().to(device).t()).cpu(), a @ b)


@pytest.mark.parametrize("sizes", sampled([(2, 3, 4, 5), (2, 3), (3, 2), (2, 3, 5, 4)], 1))
def test_blocked_softmax_over_every_dim(blocked: int, device: str, sizes: tuple[int, ...]) -> None:
    x = torch.randn(sizes)
    for dim in range(x.dim()):
        torch.testing.assert_close(torch.softmax(x.to(device), dim).cpu(), x.softmax(dim))
        torch.testing.assert_close(x.to(device).sum(dim).cpu(), x.sum(dim))


def test_a_layout_is_part_of_the_key(fresh: Any, device: str) -> None:
    x = torch.randn(3, 5)
    for block in (0, 4, 0, 4):
        fresh._C.set_layout(block)
        try:
            torch.testing.assert_close(x.to(device).relu().cpu(), x.relu())
        finally:
            fresh._C.set_layout(0)
    assert fresh.cache_info()["misses"] == 2


@pytest.mark.usefixtures("of_shared_memory")
def test_a_forked_child_does_not_hang(dev: Any, device: str) -> None:
    """The vendor's threads are not there in a child: it is told so, and computing on the CPU still works."""
    x = torch.rand(3, device=device).relu()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            assert dev._is_in_bad_fork()
            assert x.cpu().shape == (3,)
            try:
                x.relu()
            except RuntimeError as e:
                code = 0 if "Start processes with multiprocessing's 'spawn'" in str(e) else 3
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert not dev._is_in_bad_fork()
