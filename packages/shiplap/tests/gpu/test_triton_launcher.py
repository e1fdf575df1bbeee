"""The Triton launcher on a GPU, against Triton's own launch."""

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.kernels.triton import triton_launcher

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@triton.jit
def axpy(x_ptr, out_ptr, n, stride, a, BLOCK: tl.constexpr, SHIFT: tl.constexpr = 0, TO: tl.constexpr = tl.float64):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    x = tl.load(x_ptr + offsets * stride, mask=inside)
    tl.store(out_ptr + offsets, (x * a + SHIFT).to(TO).to(out_ptr.dtype.element_ty), mask=inside)


@pytest.fixture
def launch():
    launcher = triton_launcher(axpy)
    launcher[(1,)](torch.ones(4, device="cuda"), torch.ones(4, device="cuda"), 4, 1, 2.0, BLOCK=128)
    assert launcher.compiled_by_key, "this Triton is served"
    return launcher


def run(launcher, x, a, **keywords):
    n, stride = x.shape[0], x.stride(0)
    out = torch.empty(n, device=x.device, dtype=x.dtype)
    return out, launcher[(triton.cdiv(n, 128),)](x, out, n, stride, a, BLOCK=128, **keywords)


def test_values_and_kernels_are_those_of_triton(launch):
    base = torch.randn(5000, device="cuda")
    views = [base[:n] for n in (1, 2, 15, 16, 17, 128, 4096)] + [base[1:1000], base[4:], base[::2], base[3::16]]
    for _ in range(2):
        for x in [*views, *(v.half() for v in views), *(v.double()[1:] for v in views[2:])]:
            for a in (2.0, 3, 1):
                for keywords in ({}, {"num_warps": 2}, {"SHIFT": 3}, {"SHIFT": 1.5}, {"TO": tl.float16}):
                    got, kernel = run(launch, x, a, **keywords)
                    want, expected = run(axpy, x, a, **keywords)
                    assert torch.equal(got, want)
                    assert kernel is expected, "the very kernel that Triton picks"


def test_the_second_launch_is_the_short_one(launch, monkeypatch):
    x = torch.randn(100, device="cuda")
    run(launch, x, 2.0)
    calls = []
    monkeypatch.setattr(type(axpy), "run", lambda *args, **kwargs: calls.append(1))
    run(launch, x, 2.0)
    assert not calls
    run(launch, x[1:], 2.0)
    assert calls, "another alignment"


def test_streams_and_graphs(launch):
    stream, x = torch.cuda.Stream(), torch.zeros(1000, device="cuda")
    run(launch, x, 2.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.add_(1)
        y, _ = run(launch, x, 2.0)
    stream.synchronize()
    assert torch.equal(y, torch.full_like(y, 2.0))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z, _ = run(launch, x, 2.0)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(z, x * 2)


def test_hooks_see_it(launch):
    from triton import knobs

    x, seen = torch.randn(100, device="cuda"), []
    run(launch, x, 2.0)

    def hook(metadata):
        seen.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        run(launch, x, 2.0)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert seen == ["axpy"]
    run(launch, x, 2.0)
    assert seen == ["axpy"]


def test_a_tensor_of_the_cpu_is_refused_as_ever(launch):
    with pytest.raises(ValueError, match="cpu tensor"):
        run(launch, torch.randn(100), 2.0)


@pytest.mark.whole_device
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device")
def test_another_device(launch):
    for index in (1, 0, 1):
        with torch.cuda.device(index):
            x = torch.randn(100, device="cuda")
            assert torch.equal(run(launch, x, 2.0)[0], x * 2)


def test_inside_an_op(launch, ns, fresh_compiler):
    @sl.op(f"{ns}::twice")
    def twice(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 2

    @twice.kernel("cuda")
    def _(x, *, out):
        launch[(triton.cdiv(x.shape[0], 128),)](x, out, x.shape[0], x.stride(0), 2.0, BLOCK=128)

    x = torch.randn(1000, device="cuda")
    assert torch.equal(twice(x), x * 2)
    f = torch.compile(lambda x: twice(x.sin()) + 1, fullgraph=True)
    torch.testing.assert_close(f(x), x.sin() * 2 + 1)
    y = torch.empty_like(x)
    with torch.no_grad():
        assert torch.equal(twice.out(x, out=y), x * 2)
