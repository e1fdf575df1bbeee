"""The Python binding for good, as with ``SHIPLAP_NATIVE=0``: calls are remembered, and pass by the dispatcher."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.dispatch import launch, tuned_choices
from shiplap.kernels.native import binding
from shiplap_testing.build import compile_c
from shiplap_testing.support import fails

BODY = """
int shifted(const sl_context* ctx, const DLTensor* x, const DLTensor* b, DLTensor* y, DLTensor* half,
            int64_t k, double p, const int64_t* ks, int64_t n) {
  if (k == 13) { snprintf(ctx->error, ctx->error_size, "k is unlucky"); return SL_INVALID_ARGUMENT; }
  if (ctx->workspace_size != (size_t)(8 * x->shape[0]) || ctx->num_threads < 1 || ctx->error[0]) return SL_INTERNAL;
  double shift = p;
  for (int64_t i = 0; i < n; ++i) shift += ks[i];
  for (int64_t i = 0; i < x->shape[0]; ++i) ((double*)ctx->workspace)[i] = b ? ((double*)b->data)[i] : 0;
  for (int64_t i = 0; i < x->shape[0]; ++i) {
    double v = ((double*)x->data)[i * x->strides[0]] * k + shift + ((double*)ctx->workspace)[i];
    ((double*)y->data)[i] = v; ((double*)half->data)[i] = v / 2;
  }
  return SL_OK;
}"""


@pytest.fixture
def op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ns: str) -> Iterator[Any]:
    @sl.op(f"{ns}::shifted", outputs=["y", "half"])
    def shifted(
        x: Float[Tensor, "n"], b: Float[Tensor, "n"] | None, k: int = 2, p: float = 0.5, ks: list[int] = ()
    ) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
        y = x * k + p + sum(ks) + (0 if b is None else b)
        return y, y / 2

    shifted.kernel(
        "cpu",
        sl.cabi(compile_c(tmp_path, "shifted", {"shifted": shifted}, BODY), "shifted", strided=["x"]),
        workspace="8 * n",
        dtypes=["float64"],
    )

    @shifted.backward
    def _(grads: Any, saved: Any, needs: Any) -> dict[str, Any]:
        total = grads[0] + grads[1] / 2
        return {"x": total * saved.k, "b": total if needs.b else None}

    monkeypatch.setenv("SHIPLAP_NATIVE", "0")
    shifted(*arguments(3))
    yield shifted
    shifted.drop_native()


def arguments(n: int, bias: bool = True) -> tuple[Tensor, Tensor | None]:
    return torch.randn(n, dtype=torch.float64), torch.randn(n, dtype=torch.float64) if bias else None


def same(op: Any, *args: Any) -> None:
    for got, want in zip(op(*args), op.reference(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
        assert got.is_contiguous()


def test_calls_are_remembered_by_all_that_they_depend_on(op: Any) -> None:
    for _ in range(3):
        for n in (3, 0, 1, 8):
            for bias in (True, False):
                same(op, *arguments(n, bias))
                same(op, *arguments(n, bias), 3, -0.0, [1, n])
        x, b = arguments(16)
        same(op, x[::2], b[::2])
        same(op, x[1:9], b[3:11], 2)
    assert "fast_execute" in vars(op)
    assert op.fast_execute is not None, "the dispatcher's way into Python is short as well"
    checked = inspect.getclosurevars(
        op.call_kernel
    ).nonlocals  # before it, numbers of the list are checked for gradients
    assert checked["call"].__name__ == "route"
    assert len(tuned_choices.ready_calls(op.spec.name)) >= 8


def test_results_are_fresh_and_threads_do_not_share_a_frame(op: Any) -> None:
    wrong: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(200):
            x = torch.randn(5, generator=generator, dtype=torch.float64)
            y, half = op(x, None, seed)
            if not torch.allclose(y, x * seed + 0.5) or not torch.allclose(half, y / 2):
                wrong.append(str(seed))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (2, 3, 4, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    x, _ = arguments(5)
    first, second = op(x, None), op(x, None)
    assert len({t.data_ptr() for t in (*first, *second)}) == 4


def test_what_is_wrong_is_refused_as_before(op: Any) -> None:
    for _ in range(2):
        with fails("SL211", got="k is unlucky"):
            op(*arguments(3), 13)
        same(op, *arguments(3))  # with a frame that holds no message
        with fails("SL202"):
            op(torch.randn(3, dtype=torch.float64), torch.randn(4, dtype=torch.float64))
        with pytest.raises(sl.ShiplapError):
            op(torch.randn(3, dtype=torch.float64).to_sparse(), None)


def test_modes_gradients_and_the_dispatcher(op: Any) -> None:
    x, b = arguments(4)
    space, name = op.spec.name.split("::")
    by_torch = getattr(getattr(torch.ops, space), name)
    for _ in range(2):
        with torch.inference_mode():
            same(op, x, b)
        for got, want in zip(by_torch(x, b), op.reference(x, b), strict=True):
            torch.testing.assert_close(got, want)
        leaf = x.clone().requires_grad_()
        op(leaf, b)[0].sum().backward()
        torch.testing.assert_close(leaf.grad, torch.full_like(x, 2.0))
        with launch.poisoned_workspace(0xFF):
            same(op, x, b)
    with torch.profiler.profile() as profile:
        op(x, b)
    assert any(name in e.key for e in profile.key_averages()), "a profiler sees the call"


def filled(op: Any, *args: Any, **keywords: Any) -> None:
    """The out-variant, twice: the second call may be a remembered one."""
    want = op.reference(*args)
    for _ in range(2):
        outs = tuple(torch.full_like(w, torch.nan) for w in want)
        assert op.out(*args, out=outs, **keywords) is outs
        for got, w in zip(outs, want, strict=True):
            torch.testing.assert_close(got, w, rtol=0, atol=1e-12)


def test_out_variants_are_remembered_by_all_that_they_depend_on(op: Any) -> None:
    for n in (3, 0, 1, 8):
        for bias in (True, False):
            filled(op, *arguments(n, bias))
            filled(op, *arguments(n, bias), 3, -0.0, [1, n])
    x, b = arguments(16)
    filled(op, x[::2], b[::2])
    filled(op, x[1:9], b[3:11], 2)
    filled(op, x, b, workspace=torch.empty(128, dtype=torch.uint8))
    assert len(tuned_choices.ready_calls(f"{op.spec.name}, out")) >= 8
    by_torch = getattr(torch.ops, op.spec.namespace).shifted__out
    y, half = torch.empty(16, dtype=torch.float64), torch.empty(16, dtype=torch.float64)
    by_torch(x, b, y=y, half=half)
    torch.testing.assert_close(y, op.reference(x, b)[0])
    with torch.profiler.profile() as profile:
        op.out(x, b, out=(y, half))
    assert any("shifted__out" in e.key for e in profile.key_averages()), "a profiler sees the call"


def test_a_remembered_out_variant_looks_at_what_is_new(op: Any) -> None:
    x, b = arguments(6)
    outs = tuple(torch.empty(6, dtype=torch.float64) for _ in range(2))
    whole = torch.empty(18, dtype=torch.float64)
    for _ in range(2):
        op.out(x, b, out=outs)
        with fails("SL210", "'half'"):
            op.out(x, b, out=(outs[0], outs[0]))
        with fails("SL210", "'y'"):
            op.out(x, b, out=(x, outs[1]))
        with fails("SL210", "'half'"):
            op.out(x, b, out=(whole[:6], whole[4:10]))
        op.out(x, b, out=(whole[:6], whole[6:12]))
        with fails("SL304"):
            op.out(x.clone().requires_grad_(), b, out=outs)
        with fails("SL212", "'y'"):
            op.out(x, b, out=(outs[0][:5], outs[1]))
        with fails("SL211", got="k is unlucky"):
            op.out(x, b, 13, out=outs)
        with pytest.raises(sl.ShiplapError):
            op.out(x, b, out=outs[:1])
        with fails("SL209", "'b'"):
            op.out(x, out=outs)
    calls: list[str] = []

    @op.kernel("cpu")
    def later(x: Tensor, b: Tensor | None, k: int, p: float, ks: list[int], *, y: Tensor, half: Tensor) -> None:
        calls.append("later")
        y.fill_(1), half.fill_(2)

    for _ in range(2):
        op.out(x, b, out=outs)
    assert calls == ["later", "later"]
    assert outs[0].sum() == 6


@pytest.mark.long
def test_native_code_takes_over_and_gives_back(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHIPLAP_NATIVE")
    binding.build(op)
    assert op.native is not None
    assert op.fast_execute is None
    assert getattr(op.call_kernel, "__name__", "") != "route"
    same(op, *arguments(3))
    op.drop_native()
    same(op, *arguments(3))
