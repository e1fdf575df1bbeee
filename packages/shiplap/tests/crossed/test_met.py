"""Where two features met in a crossed run and something was wrong, one small program for each."""

import enum

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.torch_private import dispatcher_calls
from shiplap_testing.private import compiled_autograd


class Shade(enum.Enum):
    DARK = 1
    LIGHT = 3


class Mood(enum.Enum):
    CALM = "calm"
    WILD = "wild"


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_autograd_traces_a_backward_that_reads_members(ns):
    @sl.op(f"{ns}::shaded")
    def shaded(x: Float[Tensor, "n"], shade: Shade = Shade.DARK, mood: Mood | None = None) -> Float[Tensor, "n"]:
        return x * x * shade.value * (5 if mood is Mood.WILD else 2)

    @shaded.backward
    def _(grad, saved, needs):
        return {"x": grad * 2 * saved.x * saved.shade.value * (5 if saved.mood is Mood.WILD else 2)}

    for shade, mood in ((Shade.DARK, None), (Shade.LIGHT, Mood.WILD)):
        x = torch.ones(3, requires_grad=True)
        (expected,) = torch.autograd.grad(shaded(x, shade, mood).sum(), x)
        with compiled_autograd("aot_eager"):
            shaded(x, shade, mood).sum().backward()
        assert torch.equal(x.grad, expected)
        torch.compiler.reset()


def test_the_out_variant_of_an_op_with_a_view_fills_what_is_fresh(ns):
    @sl.op(f"{ns}::halves", aliases=("x", None, None))
    def halves(
        x: Float[Tensor, "n m"],
    ) -> tuple[Float[Tensor, "m n"], Float[Tensor, "n m"], Float[Tensor, "n"]]:
        return x.t(), x * 2, x.sum(1)

    x, doubled, sums = torch.ones(2, 3), torch.empty(2, 3), torch.empty(2)
    halves.out(x, out=(doubled, sums))
    assert doubled.eq(2).all()
    assert sums.eq(3).all()
    assert halves(x)[0]._is_view()


def test_no_formula_of_autograd_calls_a_kernel_under_autocast(ns):
    """An op without a rule comes to autograd's formula with autocast on, and on a GPU from there to its kernels."""

    @sl.op(f"{ns}::doubled", autocast=None)
    def doubled(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * 2

    seen = []
    plain = doubled.call_kernel

    def kernel(*args):
        seen.append(torch.is_autocast_enabled("cpu"))
        return plain(*args)

    doubled.call_kernel = kernel
    with torch.autocast("cpu", torch.bfloat16):
        doubled(torch.ones(2))
        doubled(torch.ones(2, requires_grad=True))
    doubled(torch.ones(2))
    assert seen
    assert not any(seen)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_python_kernel_without_a_rule_runs_outside_of_autocast_on_a_gpu(ns):
    @sl.op(f"{ns}::rows", autocast=None)
    def rows(x: Float[Tensor, "n m"]) -> Float[Tensor, "n"]:
        return x.sum(1)

    @rows.kernel("cuda")
    def _(x):
        assert not torch.is_autocast_enabled("cuda")
        return x.sum(1)

    x = torch.ones(2, 3, device="cuda", dtype=torch.bfloat16)
    for kind in ("cuda", "cpu"):
        with torch.autocast(kind, torch.bfloat16):
            assert rows(x).dtype == torch.bfloat16


@pytest.mark.usefixtures("fresh_compiler")
def test_a_body_conjugates_and_differentiates_below_a_compiled_graph(ns):
    """A compiled graph excludes dispatch keys, without which ``conj()`` and ``torch.func`` have no effect."""

    @sl.op(f"{ns}::correlated")
    def correlated(x: Float[Tensor, "n"], y: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        tangent = torch.func.jvp(torch.sin, (x,), (y,))[1]
        return torch.fft.ifft(torch.fft.fft(x) * torch.fft.fft(y).conj()).real + tangent

    x, y = torch.arange(5.0), torch.arange(5.0).square()
    compiled = torch.compile(lambda x, y: correlated(x, y), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x, y), correlated(x, y))
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x, y), correlated(x, y))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_keys_of_eager_code_are_those_of_torch(mode):
    """Every key of autocast stays excluded, also those of devices that this build of torch does not have."""
    excluded = torch._C._dispatch_tls_local_exclude_set
    graph = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Conjugate))
    with mode():
        eager = str(excluded())
        with graph:
            assert dispatcher_calls.lacks_eager_keys()
            assert str(dispatcher_calls.call_with_eager_keys(excluded, (), {})) == eager
