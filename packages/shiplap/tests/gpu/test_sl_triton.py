"""Plain Triton kernels on a GPU, launched by generated C++: values, streams, graphs, choices, warm calls."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import shiplap as sl
from shiplap.kernels.native import binding

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
pytest.importorskip("triton")

from shiplap.kernels.triton.specializations import LaunchedForm  # noqa: E402
from tests.gpu import launched_ops as ops  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def bound():
    """Each op as native code: built for this torch, connected with Triton's compiler."""
    for op in ops.OPS:
        binding.build(op)
        assert op.native.devices == ("cuda",), binding.state(op, "cuda")


def close(got, want):
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[got.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def cases(dtype):
    def rand(*shape):
        return torch.randn(*shape, device="cuda", dtype=dtype)

    for n, m in ((1, 1), (3, 16), (5, 17), (64, 100), (33, 1024), (7, 4000)):
        yield ops.softmax, (rand(n, m),), lambda x: x.softmax(-1)
        yield ops.softmax, (rand(m, n).t(),), lambda x: x.softmax(-1)
        yield ops.softmax, (rand(n, m + 1)[:, 1:],), lambda x: x.softmax(-1)
        yield ops.layer_norm, (rand(n, m), rand(m), None), lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b)
        yield (
            ops.layer_norm,
            (rand(n, m), rand(m), rand(m), 0.1),
            lambda x, w, b, e: F.layer_norm(x, x.shape[-1:], w, b, e),
        )
    for n, k, m in ((1, 1, 1), (64, 32, 64), (100, 70, 130), (257, 512, 384)):
        scale = k**-0.5
        yield ops.linear_gelu, (rand(n, k), rand(m, k) * scale, rand(m)), lambda x, w, b: F.gelu(F.linear(x, w, b))
        yield ops.linear_gelu, (rand(k, n).t(), rand(m, k) * scale, rand(m)), lambda x, w, b: F.gelu(F.linear(x, w, b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_values(dtype):
    with torch.no_grad():
        for op, args, reference in cases(dtype):
            for _ in range(2):
                close(op(*args), reference(*args))


@pytest.mark.parametrize("nesterov", [False, True])
def test_an_optimiser_step_in_place(nesterov):
    for n in (1, 1000, 4096, 100_001):
        param, grad, velocity = (torch.randn(n, device="cuda") for _ in range(3))
        want, moved = param.clone(), velocity.clone()
        ops.momentum_(param, grad, velocity, 0.1, 0.9, 0.01, nesterov)
        ops.momentum_.reference(want, grad, moved, 0.1, 0.9, 0.01, nesterov)
        close(param, want)
        close(velocity, moved)


def test_streams_and_graphs():
    x, stream = torch.zeros(64, 1024, device="cuda"), torch.cuda.Stream()
    with torch.no_grad():
        ops.softmax(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            x.add_(torch.arange(1024.0, device="cuda") / 100)
            y = ops.softmax(x)
        stream.synchronize()
        close(y, x.softmax(-1))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            z = ops.softmax(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
    close(z, x.softmax(-1))


def test_a_form_that_is_new_is_loaded_while_a_graph_is_captured():
    x = torch.randn(9, 333, device="cuda").half()
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            z = ops.softmax(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
    close(z, x.softmax(-1))


def test_no_python_in_a_warm_call(monkeypatch):
    """Of ``torch.ops``: nothing below the call. Of ``op(...)``: its own frames, and none of a launch."""
    x, frames = torch.randn(64, 1024, device="cuda"), []
    raw = torch.ops.launched_gpu.softmax.default

    def count(frame, event, argument):
        if event == "call":
            frames.append(frame.f_code.co_qualname)

    def compile_again(self, *args):
        raise AssertionError("compiled again")

    with torch.no_grad():
        ops.softmax(x), raw(x)
        monkeypatch.setattr(LaunchedForm, "compile", compile_again)
        sys.setprofile(count)
        try:
            raw(x)
            through = list(frames)
            frames.clear()
            ops.softmax(x)
        finally:
            sys.setprofile(None)
    assert not [f for f in (*through, *frames) if "Kernel" in f or "launch" in f.lower() or "Form" in f], frames
    assert len(through) <= 3, through
    assert len(frames) <= 4, frames


def test_configs_come_from_the_choices():
    x, w, b = (torch.randn(s, device="cuda") for s in ((100, 70), (130, 70), (130,)))
    seen = {config.as_dict()["BM"] for config in ops.linear_gelu.native_kernels("cuda")[0].space.fixed}
    assert seen == {32, 64, 128}
    form = ops.linear_gelu.native_kernels("cuda")[0].native
    sl.tune(ops.linear_gelu, [{"n": 100, "k": 70, "m": 130}], 60, device="cuda")
    with torch.no_grad():
        before = set(form.cubins)
        close(ops.linear_gelu(x, w, b), F.gelu(F.linear(x, w, b)))
    from shiplap.dispatch import tuned_choices

    (entry,) = [e for e in tuned_choices.choice_entries() if e.op == ops.linear_gelu.spec.name]
    chosen = dict(entry.config.items)
    if entry.kernel != tuned_choices.REFERENCE:
        new = set(form.cubins) - before or before
        values = [chosen[name] for name in form.configs]
        assert any(list(key[: len(values)]) == values for _, _, key in new), (chosen, new)


def test_in_compiled_code(fresh_compiler):
    x = torch.randn(64, 1000, device="cuda")
    with torch.no_grad():
        f = torch.compile(lambda x: ops.softmax(x.sin()) + 1, fullgraph=True)
        torch.testing.assert_close(f(x), x.sin().softmax(-1) + 1)


def test_threads():
    import threading

    x, wrong = torch.randn(16, 777, device="cuda"), []

    def work():
        with torch.no_grad():
            wrong.extend(i for i in range(20) if not torch.allclose(ops.softmax(x), x.softmax(-1), atol=1e-5))

    threads = [threading.Thread(target=work) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


def test_modes_still_see_the_call():
    names = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Seen():
        ops.softmax(torch.randn(4, 4, device="cuda"))
    assert "launched_gpu.softmax.default" in names


@pytest.mark.whole_device
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device")
def test_another_device():
    with torch.no_grad():
        for index in (1, 0, 1):
            x = torch.randn(8, 100, device=f"cuda:{index}")
            close(ops.softmax(x), x.softmax(-1))
