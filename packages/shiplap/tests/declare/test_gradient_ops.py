"""Gradients that are declared as ops: matched by name, called where they are needed, held to the same contract."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import shiplap as sl
from shiplap.dispatch import autograd_function
from shiplap_testing.support import fails

M, V = Float[Tensor, "n m"], Float[Tensor, "m"]


def declare(ns):
    """``x * w * factor + b`` and the sum of its columns, with one op for x and one for w and b."""

    @sl.op(f"{ns}::affine", outputs=("y", "total"))
    def affine(x: M, w: V, b: V | None = None, factor: float = 1.0) -> tuple[M, Float[Tensor, "n"]]:
        y = x * w * factor + (0 if b is None else b)
        return y, y.sum(1)

    @sl.op(f"{ns}::affine_x")
    def affine_x(grad_y: M, grad_total: Float[Tensor, "n"], w: V, factor: float) -> M:
        return (grad_y + grad_total[:, None]) * w * factor

    @sl.op(f"{ns}::affine_wb", outputs=("grad_w", "grad_b"))
    def affine_wb(x: M, grad_y: M, grad_total: Float[Tensor, "n"], factor: float) -> tuple[V, V]:
        grad = grad_y + grad_total[:, None]
        return (grad * x).sum(0) * factor, grad.sum(0)

    return affine, affine_x, affine_wb


@pytest.fixture
def ops(ns):
    affine, affine_x, affine_wb = declare(ns)

    @sl.op(f"{ns}::affine_named", outputs=("grad_x",))
    def named(grad_y: M, grad_total: Float[Tensor, "n"], w: V, factor: float) -> M:
        return affine_x.reference(grad_y, grad_total, w, factor)

    affine.backward(named, affine_wb)
    return SimpleNamespace(affine=affine, x=named, wb=affine_wb)


@pytest.fixture
def calls(ops):
    """Which of the gradient ops ran, by kernels of theirs."""
    seen = []
    for name, op in (("x", ops.x), ("wb", ops.wb)):

        def run(name=name, op=op, **named):
            seen.append(name)
            return op.reference(**named)

        op.kernel("cpu", run)
    return seen


def arguments():
    torch.manual_seed(0)
    return torch.randn(3, 4, dtype=torch.float64), *(torch.randn(4, dtype=torch.float64) for _ in range(2))


def gradients(f, *args, **kwargs):
    """The results of ``f``, then their gradients by all tensors that require one."""
    y, total = f(*args, **kwargs)
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    return y, total, *torch.autograd.grad(y.sin().sum() + total.cos().sum(), leaves)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.usefixtures("fresh_compiler")
def test_gradients_equal_those_of_the_reference(ops, calls, compiled):
    f = torch.compile(ops.affine, backend="aot_eager", fullgraph=True) if compiled else ops.affine
    cases = [((1, 1, 1), ["x", "wb"]), ((1, 0, 0), ["x"]), ((0, 1, 0), ["wb"]), ((0, 0, 1), ["wb"])]
    for needs, ran in cases[1:3] if compiled else cases:
        x, w, b = (t.requires_grad_(bool(n)) for t, n in zip(arguments(), needs, strict=True))
        for args in ((x, w, b, 3.0), (x, w, b), (x, w)):
            if not any(a.requires_grad for a in args if isinstance(a, Tensor)):
                continue
            calls.clear()
            torch.testing.assert_close(gradients(f, *args), gradients(ops.affine.reference, *args))
            assert calls == ran, (needs, args)


def test_the_general_recorder_agrees(ns, monkeypatch):
    """The straight-line recorder and the one that serves lists do the same; ``torch.func`` takes the latter."""
    monkeypatch.setattr(import_module("shiplap.dispatch.autograd"), "compile_recorder", lambda *_: None)
    affine, affine_x, affine_wb = declare(ns)
    affine.backward(lambda grad, saved, needs: {}, saves=())
    with fails("SL110", "no gradient of 'x'"):
        gradients(affine, arguments()[0].requires_grad_(), *arguments()[1:])

    @sl.op(f"{ns}::other", outputs=("grad_x",))
    def other(grad_y: M, grad_total: Float[Tensor, "n"], w: V, factor: float) -> M:
        return affine_x(grad_y, grad_total, w, factor)

    affine.backward(other, affine_wb)
    args = [t.requires_grad_() for t in arguments()]
    torch.testing.assert_close(gradients(affine, *args, 2.0), gradients(affine.reference, *args, 2.0))
    x, *rest = (t.detach() for t in args)
    by_func = torch.func.grad(lambda x: affine(x, *rest)[1].sum())(x)
    torch.testing.assert_close(by_func, torch.func.grad(lambda x: affine.reference(x, *rest)[1].sum())(x))
    with fails("SL313", got=f"{ns}::other, which has no backward"):  # the gradient by x depends on w, which is tracked
        torch.func.grad(lambda x: affine(x, *args[1:])[1].sum())(x)


def test_what_a_call_saves_is_what_the_ops_take(ops):
    assert set(ops.affine.gradient.saves) == {"x", "w"}
    assert [(p.op, p.gives) for p in ops.affine.gradient.ops] == [(ops.x, ("x",)), (ops.wb, ("w", "b"))]
    text = "\n".join(autograd_function.recorder_lines(ops.affine.spec, ops.affine.gradient))
    assert "save_for_backward(t_w, t_x)" in text
    assert "op0(g0, g1, v_w, k_factor) if w_x else None" in text


def test_an_output_is_saved_by_its_name(ns):
    @sl.op(f"{ns}::exp")
    def exp(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x.exp()

    @sl.op(f"{ns}::exp_grad", outputs=("grad_x",))
    def exp_grad(grad: Float[Tensor, "n"], out: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return grad * out

    exp_grad.backward(lambda grad, saved, needs: {"grad": grad * saved.out, "out": grad * saved.grad})
    exp.backward(exp_grad)
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(exp, x)
    assert torch.autograd.gradgradcheck(exp, x), "a gradient op has a gradient of its own"
    assert "exp_grad" in str(make_fx(lambda x: torch.autograd.grad(exp(x).sum(), x))(x).code)


def test_ops_that_do_not_fit(ns):
    affine, affine_x, affine_wb = declare(ns)

    @sl.op(f"{ns}::strange")
    def strange(grad_y: M, weight: V) -> M:
        return grad_y * weight

    @sl.op(f"{ns}::scalar")
    def scalar(grad_y: M, w: float) -> M:
        return grad_y * w

    @sl.op(f"{ns}::rows")
    def rows(x: Float[Tensor, "n m"], at: Int64[Tensor, "k"]) -> Float[Tensor, "k m"]:
        return x[at]

    @sl.op(f"{ns}::rows_grad", dims={"n": "rows"})
    def rows_grad(grad: Float[Tensor, "k m"], at: Int64[Tensor, "k"], rows: int) -> Float[Tensor, "n m"]:
        return grad.new_zeros(rows, grad.shape[1]).index_add_(0, at, grad)

    with fails("SL110", affine_x.spec.name, "a result 'out'", "outputs=('grad_x', 'grad_w', 'grad_b')"):
        affine.backward(affine_x)
    with fails("SL110", strange.spec.name, "an argument 'weight'", "grad_y, grad_total, x, w"):
        affine.backward(strange)
    with fails("SL110", scalar.spec.name, "an argument 'w'"):
        affine.backward(scalar)
    with fails("SL110", rows_grad.spec.name, "an argument 'rows'"):
        rows.backward(rows_grad)
    with fails("SL110", affine.spec.name, "for 'w'", "one op for each gradient"):
        affine.backward(affine_wb, affine_wb)
    with fails("SL110", affine.spec.name, "saves=", "the ops take what is saved"):
        affine.backward(affine_wb, saves=("x",))
    with fails("SL110", affine.spec.name, "declared ops alone"):
        affine.backward(affine_wb, lambda grad, saved, needs: {})
    assert affine.gradient is None
    affine.backward(affine_wb)
    with fails("SL110", "no gradient of 'x'"):
        gradients(affine, arguments()[0].requires_grad_(), *arguments()[1:])


def test_a_gradient_of_another_shape_is_an_error(ns):
    @sl.op(f"{ns}::sums")
    def sums(x: Float[Tensor, "n m"]) -> Float[Tensor, "n"]:
        return x.sum(1)

    @sl.op(f"{ns}::sums_grad")
    def sums_grad(grad: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return grad.clone()

    sums.backward(sums_grad)
    with fails("SL303", "argument 'x'", "gradient (3,)", "(3, 4)"):
        sums(torch.randn(3, 4, requires_grad=True)).sum().backward()


@pytest.mark.long
def test_the_audit_judges_gradient_ops(ns):
    @sl.op(f"{ns}::cube")
    def cube(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return x * x * x

    @sl.op(f"{ns}::cube_grad")
    def cube_grad(grad: Float[Tensor, "n"], x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return 3 * grad * x * x

    cube_grad.backward(lambda grad, saved, needs: {"grad": 3 * grad * saved.x**2, "x": 6 * grad * saved.grad * saved.x})
    cube.backward(cube_grad)
    assert [f.verdict for f in sl.audit(cube, checks=["gradient"], isolate=False)] == ["ok"]

    @cube_grad.kernel("cpu")
    def wrong(grad, x):
        return 2 * grad * x * x

    assert [f.verdict for f in sl.audit(cube, checks=["gradient"], isolate=False)] == ["fail"]
