"""Gradients that C++ records: those of the references, without Python, in each way in which autograd is used."""

from __future__ import annotations

import sys
import threading
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import shiplap as sl
from shiplap.kernels.native import gradient_recorder
from shiplap.torch_private import available
from shiplap_testing.build import compile_c
from shiplap_testing.support import fails

SOURCE = f"{Path(sl.__file__).parent}/"
capability = pytest.mark.capability  # mark.capability(name)
M, V, N = Float64[Tensor, "n m"], Float64[Tensor, "m"], Float64[Tensor, "n"]

BODY = """
#define D(t) ((double*)(t)->data)
int affine(const sl_context* ctx, const DLTensor* x, const DLTensor* w, const DLTensor* b, DLTensor* y, DLTensor* total,
           double factor) {
  int64_t n = x->shape[0], m = x->shape[1];
  for (int64_t i = 0; i < n; ++i) {
    D(total)[i] = 0;
    for (int64_t j = 0; j < m; ++j) {
      double v = D(x)[i * m + j] * D(w)[j] * factor + (b ? D(b)[j] : 0);
      D(y)[i * m + j] = v;
      D(total)[i] += v;
    }
  }
  return SL_OK;
}
int affine_x(const sl_context* ctx, const DLTensor* grad_y, const DLTensor* grad_total, const DLTensor* w,
             DLTensor* out, double factor) {
  int64_t n = grad_y->shape[0], m = grad_y->shape[1];
  if (factor == 13) { snprintf(ctx->error, ctx->error_size, "thirteen is unlucky"); return SL_INVALID_ARGUMENT; }
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < m; ++j) D(out)[i * m + j] = (D(grad_y)[i * m + j] + D(grad_total)[i]) * D(w)[j] * factor;
  return SL_OK;
}
int affine_wb(const sl_context* ctx, const DLTensor* x, const DLTensor* grad_y, const DLTensor* grad_total,
              DLTensor* gw, DLTensor* gb, double factor) {
  int64_t n = x->shape[0], m = x->shape[1];
  for (int64_t j = 0; j < m; ++j) {
    D(gw)[j] = D(gb)[j] = 0;
    for (int64_t i = 0; i < n; ++i) {
      double g = D(grad_y)[i * m + j] + D(grad_total)[i];
      D(gw)[j] += g * D(x)[i * m + j] * factor;
      D(gb)[j] += g;
    }
  }
  return SL_OK;
}
int cube(const sl_context* ctx, const DLTensor* x, DLTensor* out, DLTensor* positive) {
  for (int64_t i = 0; i < x->shape[0]; ++i) D(out)[i] = D(x)[i] * D(x)[i] * D(x)[i], D(positive)[i] = D(x)[i] > 0;
  return SL_OK;
}
int cube_grad(const sl_context* ctx, const DLTensor* grad_out, const DLTensor* x, const DLTensor* positive,
              DLTensor* out) {
  for (int64_t i = 0; i < x->shape[0]; ++i) D(out)[i] = 3 * D(grad_out)[i] * D(x)[i] * D(x)[i];
  return SL_OK;
}
int slope(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  for (int64_t i = 0; i < x->shape[0]; ++i) D(out)[i] = 3 * D(x)[i] * D(x)[i];
  return SL_OK;
}
int slope_grad(const sl_context* ctx, const DLTensor* grad, const DLTensor* x, DLTensor* out) {
  for (int64_t i = 0; i < x->shape[0]; ++i) D(out)[i] = 6 * D(grad)[i] * D(x)[i];
  return SL_OK;
}
int scale(const sl_context* ctx, const DLTensor* x, const DLTensor* w, DLTensor* out) {
  int64_t n = x->shape[0], m = x->shape[1];
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < m; ++j) D(out)[i * m + j] = D(x)[i * m + j] * D(w)[j];
  return SL_OK;
}
int longer(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  memcpy(out->data, x->data, 8 * x->shape[0]);
  return SL_OK;
}
int longer_grad(const sl_context* ctx, const DLTensor* grad, DLTensor* out) {
  memset(out->data, 0, 8 * out->shape[0]);
  return SL_OK;
}
int inverse(const sl_context* ctx, const DLTensor* x, DLTensor* out) {
  for (int64_t i = 0; i < x->shape[0]; ++i) D(out)[i] = 1 / D(x)[i];
  return SL_OK;
}
int inverse_grad(const sl_context* ctx, const DLTensor* grad, const DLTensor* out, DLTensor* gx) {
  for (int64_t i = 0; i < out->shape[0]; ++i) D(gx)[i] = -D(grad)[i] * D(out)[i] * D(out)[i];
  return SL_OK;
}
"""


def declare(ns):
    """Declare ops with optional arguments and numbers, results without a gradient, and one that saves its result."""

    @sl.op(f"{ns}::affine", outputs=("y", "total"))
    def affine(x: M, w: V, b: V | None = None, factor: float = 1.0) -> tuple[M, N]:
        y = x * w * factor + (0 if b is None else b)
        return y, y.sum(1)

    @sl.op(f"{ns}::affine_x", outputs=("grad_x",))
    def affine_x(grad_y: M, grad_total: N, w: V, factor: float) -> M:
        return (grad_y + grad_total[:, None]) * w * factor

    @sl.op(f"{ns}::affine_wb", outputs=("grad_w", "grad_b"))
    def affine_wb(x: M, grad_y: M, grad_total: N, factor: float) -> tuple[V, V]:
        grad = grad_y + grad_total[:, None]
        return (grad * x).sum(0) * factor, grad.sum(0)

    @sl.op(f"{ns}::cube", outputs=("out", "positive"), nondifferentiable=("positive",))
    def cube(x: N) -> tuple[N, N]:
        return x**3, (x > 0).to(x.dtype)

    @sl.op(f"{ns}::cube_grad", outputs=("grad_x",))
    def cube_grad(grad_out: N, x: N, positive: N) -> N:
        return 3 * grad_out * x * x

    @sl.op(f"{ns}::inverse")
    def inverse(x: N) -> N:
        return 1 / x

    @sl.op(f"{ns}::inverse_grad", outputs=("grad_x",))
    def inverse_grad(grad: N, out: N) -> N:
        return -grad * out * out

    inverse_grad.backward(
        lambda grad, saved, needs: {"grad": -grad * saved.out**2, "out": -2 * grad * saved.grad * saved.out}
    )

    @sl.op(f"{ns}::longer")
    def longer(x: N) -> N:
        return x.clone()

    @sl.op(f"{ns}::longer_grad", outputs=("grad_x",), dims={"k": "n + 1"})
    def longer_grad(grad: N) -> Float64[Tensor, "k"]:
        return torch.nn.functional.pad(grad, (0, 1))

    @sl.op(f"{ns}::slope")
    def slope(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            return torch.autograd.grad((inner**3).sum(), inner)[0]

    @sl.op(f"{ns}::slope_grad", outputs=("grad_x",))
    def slope_grad(grad: Float[Tensor, "n"], x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
        return 6 * grad * x

    @sl.op(f"{ns}::scale")
    def scale(x: M, w: V) -> M:
        return x * w

    scale.backward(lambda grad, saved, needs: {"x": scale(grad, saved.w), "w": (grad * saved.x).sum(0)})
    slope.backward(slope_grad)
    longer.backward(longer_grad)
    affine.backward(affine_x, affine_wb)
    cube.backward(cube_grad)
    inverse.backward(inverse_grad)
    affines, slopes = [affine, affine_x, affine_wb], [slope, slope_grad]
    return [*affines, cube, cube_grad, inverse, inverse_grad, longer, longer_grad, scale, *slopes]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    folder.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHIPLAP_CACHE_DIR", str(folder))
        patch.setenv("SHIPLAP_NATIVE", "1")
        yield folder


def built(ns, folder):
    ops = {op.spec.opname: op for op in declare(ns)}
    library = compile_c(folder, ns, ops, BODY)
    for name, op in ops.items():
        op.kernel("cpu", sl.cabi(library, name), dtypes="float64")
    ops["affine"].build()
    return SimpleNamespace(**ops)


@pytest.fixture(scope="module")
def ops(cache):
    if not available("gradients in C++"):
        pytest.skip("gradients in C++ are not verified with this torch")
    made = built("gradients", cache)
    assert all(op.native.records for op in (made.affine, made.cube, made.inverse))
    return made


@contextmanager
def in_cpp(*ops):
    """Fail where Python records a call of ``ops``, or computes a gradient of one."""

    def refused(*args, **kwargs):
        raise AssertionError("Python records the call")

    with pytest.MonkeyPatch.context() as patch:
        for op in ops:
            patch.setattr(op, "record_call", refused)
            patch.setattr(op, "_record_plain_call", refused)
        yield


def arguments(n=3, m=4):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((n, m), (m,), (m,))]


def gradients(f, *args, **kwargs):
    """The results of ``f``, then their gradients by all tensors that require one."""
    y, total = f(*args, **kwargs)
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    return y, total, *torch.autograd.grad(y.sin().sum() + total.cos().sum(), leaves)


def same(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


class Seen(TorchDispatchMode):
    """The declared ops that are called within it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.namespace.startswith("aten"):
            self.names.append(func.name().partition("::")[2].partition(".")[0])
        return func(*args, **(kwargs or {}))


@capability("gradients in C++")
@pytest.mark.parametrize("door", ["op", "torch.ops"])
def test_gradients_equal_those_of_the_reference(ops, door):
    affine = ops.affine if door == "op" else torch.ops.gradients.affine
    for needs, ran in [((1, 1, 1), 2), ((1, 0, 0), 1), ((0, 1, 0), 1), ((0, 0, 1), 1)]:
        x, w, b = (t.detach().requires_grad_(bool(n)) for t, n in zip(arguments(), needs, strict=True))
        for args in ((x, w, b, 3.0), (x, w, b), (x, w), (x.t().contiguous().t(), w)):
            if not any(a.requires_grad for a in args if isinstance(a, Tensor)):
                continue
            with in_cpp(ops.affine):
                got = gradients(affine, *args)
            assert got[0].grad_fn.name() == "affine_backward"
            same(got, gradients(ops.affine.reference, *args))
            total = affine(*args)[1]
            with Seen() as seen:
                total.sum().backward()
            assert len(seen.names) == ran
            assert set(seen.names) <= {"affine_x", "affine_wb"}
    same(
        gradients(lambda *a: affine(*a[:2], factor=2.0), *arguments()[:2])[2:],
        gradients(affine, *arguments()[:2], None, 2.0)[2:],
    )


def name_of(frame):
    file = frame.f_code.co_filename
    ours = file.startswith(SOURCE) or (file.startswith("<") and not file.startswith("<frozen"))
    return f"{'shiplap ' * ours}{frame.f_code.co_name}"


def test_nothing_of_python_in_a_warm_step(ops):
    x, w, b = arguments()
    direction = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    frames = []

    def step(call):
        frames.clear()
        results = call(x, w, b, 2.0)
        forward = frames.copy()
        frames.clear()
        sys.setprofile(lambda frame, event, _: frames.append(name_of(frame)) if event == "call" else None)
        torch.autograd.backward(results, direction, inputs=[x, w, b])
        sys.setprofile(None)
        return forward

    def call(*args):
        sys.setprofile(lambda frame, event, _: frames.append(name_of(frame)) if event == "call" else None)
        results = ops.affine(*args)
        sys.setprofile(None)
        return results

    step(call)
    assert [name for name in step(call) if name.startswith("shiplap")] == ["shiplap __call__", "shiplap record"]
    assert frames
    assert not any("shiplap" in name for name in frames)


def test_a_result_without_a_gradient_and_one_that_is_saved(ops):
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    with in_cpp(ops.cube, ops.inverse):
        out, positive = ops.cube(x)
        assert not positive.requires_grad
        assert positive.grad_fn is None
        same(torch.autograd.grad(out.sum(), x)[0], 3 * x.detach() ** 2)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
            out = ops.inverse(x)
        assert kept == [x.shape]
        same(torch.autograd.grad(out.sum(), x)[0], -1 / x.detach() ** 2)
    assert torch.autograd.gradcheck(lambda x: ops.cube(x)[0], x)


@pytest.mark.filterwarnings("ignore::shiplap.ShiplapNotice")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_reference_that_uses_autograd_itself(ops, dtype):
    """C++ records a call whose dtype no kernel takes, and the reference runs below it."""
    x = torch.randn(5, dtype=dtype, requires_grad=True)
    with in_cpp(ops.slope):
        out = ops.slope(x)
    torch.testing.assert_close(out, 3 * x.detach() ** 2, check_dtype=True)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], 6 * x.detach())


def test_the_gradient_of_a_gradient(ops):
    x = (torch.rand(4, dtype=torch.float64) + 0.5).requires_grad_()
    assert torch.autograd.gradgradcheck(ops.inverse, x)  # whose gradient is an op with a gradient
    args = arguments()

    def second(f):
        first = torch.autograd.grad(f(*args)[0].sin().sum(), args, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), args, allow_unused=True)

    # The ops of its gradient have none, and b is not saved, so that the reference cannot give the second derivative.
    with fails("SL313", "gradients::affine_x, which has no backward", where="gradients::affine, its backward"):
        second(ops.affine)
    out, _ = ops.cube(x)
    (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    same(torch.autograd.grad(first.sum(), x)[0], 6 * x.detach())


def test_hooks_see_what_they_see_where_python_records(ops):
    seen = {}
    for name, f in (("c++", ops.affine), ("python", lambda *args: ops.affine.record_call(None, *args))):
        x, w, b = arguments()
        h = x * 2
        h.retain_grad()
        y, total = f(h, w, b)
        y.retain_grad()
        order = seen[name] = []
        y.register_hook(lambda g, order=order: order.append(("y", g.clone())) or g * 2)
        w.register_hook(lambda g, order=order: order.append(("w", g.clone())))
        b.register_post_accumulate_grad_hook(lambda t, order=order: order.append(("b", t.grad.clone())))
        (y.sum() + total.cos().sum()).backward()
        order += [("h", h.grad), ("y2", y.grad), ("x", x.grad)]
    assert [n for n, _ in seen["c++"]] == [n for n, _ in seen["python"]]
    same(dict(seen["c++"]), dict(seen["python"]))
    y, _ = ops.affine(*arguments())
    calls = []
    y.grad_fn.register_prehook(lambda grads: calls.append(len(grads)))
    y.grad_fn.register_hook(lambda made, given: calls.append((len(made), len(given))))
    y.sum().backward()
    assert calls == [2, (3, 2)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(ops, reentrant):
    args = arguments()
    with in_cpp(ops.affine):
        got = (
            gradients(lambda *a: checkpoint(ops.affine, *a, use_reentrant=reentrant), *args) if not reentrant else None
        )
        if reentrant:
            y, total = checkpoint(ops.affine, *args, use_reentrant=True)
            (y.sin().sum() + total.cos().sum()).backward()
            got = (y, total, *(a.grad for a in args))
    same(got, gradients(ops.affine.reference, *arguments()))


def test_saved_tensors_may_be_packed_and_must_not_change(ops):
    x, w, b = arguments()
    with torch.autograd.graph.save_on_cpu(), in_cpp(ops.affine):
        same(gradients(ops.affine, x, w, b), gradients(ops.affine.reference, x, w, b))
    h = x * 1
    y, _ = ops.affine(h, w, b)
    h.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    out = ops.inverse(b)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_graph_is_used_once_unless_it_is_retained(ops):
    x, w, b = arguments()
    y, total = ops.affine(x, w, b)
    y.sum().backward(retain_graph=True)
    total.sum().backward()
    same((x.grad, w.grad, b.grad), torch.autograd.grad(sum(t.sum() for t in ops.affine.reference(x, w, b)), (x, w, b)))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def test_where_nothing_is_recorded(ops):
    x, w, b = arguments()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, in_cpp(ops.affine):
            y, _ = ops.affine(x, w, b)
            assert not y.requires_grad
            assert y.grad_fn is None
            assert not torch.ops.gradients.affine(x, w, b)[0].requires_grad
    with torch.inference_mode():
        inferred = torch.ones(4, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        ops.affine(x, inferred, b)


@pytest.mark.long
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_autograd(ops):
    expected = [gradients(ops.affine.reference, *arguments(n)) for n in (3, 5)]
    for n, (_, _, *wanted) in zip((3, 5), expected, strict=True):
        args = arguments(n)
        y, total = ops.affine(*args)
        loss = y.sin().sum() + total.cos().sum()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
            loss.backward()
        same([a.grad for a in args], wanted)
    x, w, _ = arguments()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        ops.affine(x, w, None, 3.0)[1].sum().backward()  # the gradient of y is zeros, b is absent
        ops.inverse(w).sum().backward()
    same(x.grad, (w.detach() * 3).expand(3, 4))


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_models_train(ops):
    f = torch.compile(lambda *a: ops.affine(*a), backend="aot_eager", fullgraph=True)
    same(gradients(f, *arguments()), gradients(ops.affine.reference, *arguments()))


def test_transforms_take_the_way_of_python(ops):
    x, w, b = (t.detach() for t in arguments())
    f, reference = (lambda *a, o=o: o(*a)[0].sin().sum() for o in (ops.affine, ops.affine.reference))
    same(torch.func.grad(f, (0, 1, 2))(x, w, b), torch.func.grad(reference, (0, 1, 2))(x, w, b))
    tangents = torch.ones_like(x), torch.ones_like(w), torch.ones_like(b)
    same(torch.func.jvp(f, (x, w, b), tangents), torch.func.jvp(reference, (x, w, b), tangents))
    rows = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    for op in (ops.affine, ops.affine.reference):
        rows.grad = None
        torch.vmap(lambda r, op=op: op(r, w, b)[0])(rows).sin().sum().backward()
    same(rows.grad, rows.detach().mul(w).add(b).cos() * w)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        made = torch.ops.gradients.affine(dual.requires_grad_(), w, b)[0]
        same(torch.autograd.forward_ad.unpack_dual(made).tangent, w.expand(3, 4))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(lambda f, x: torch.func.grad(lambda x: f(x).sin().sum())(x), id="grad"),
        pytest.param(lambda f, x: torch.func.vjp(f, x)[1](x.cos())[0], id="vjp"),
        pytest.param(lambda f, x: torch.func.jvp(f, (x,), (x.cos(),))[1], id="jvp"),
        pytest.param(lambda f, x: torch.vmap(torch.func.grad(lambda r: f(r[None]).sin().sum()))(x), id="vmap grad"),
        pytest.param(lambda f, x: torch.func.jacrev(f)(x), id="jacrev"),
        pytest.param(lambda f, x: torch.func.grad(lambda t: (f(x) * t).sum())(x.cos()), id="grad of another"),
    ],
)
def test_transforms_of_one_input_keep_the_gradients_of_others(ops, transform):
    """The level of a transform differentiates ``x`` alone, and plain autograd outside of it records ``w``."""
    assert ops.scale.native is not None
    x, w, _ = arguments()
    x = x.detach()
    made, expected = (transform(lambda x, f=f: f(x, w), x) for f in (ops.scale, torch.mul))
    same(made, expected)
    same(*(torch.autograd.grad(t.square().sum(), w)[0] for t in (made, expected)))


def test_modes_and_subclasses(ops):
    class Named(Tensor):
        pass

    x, w, b = arguments()
    with Seen() as seen:
        got = gradients(ops.affine, x, w, b)
    assert seen.names[0] == "affine"
    assert sorted(seen.names[1:]) == ["affine_wb", "affine_x"]
    same(got, gradients(ops.affine.reference, x, w, b))
    named = x.detach().as_subclass(Named).requires_grad_()
    same([torch.as_tensor(t).as_subclass(Tensor) for t in gradients(ops.affine, named, w, b)], list(got))
    parameter = torch.nn.Parameter(x.detach())
    with in_cpp(ops.affine):
        same(gradients(ops.affine, parameter, w, b), got)


def test_autocast_is_off_in_a_backward(ops):
    args = arguments()
    with torch.autocast("cpu", torch.bfloat16):
        y, total = ops.affine(*args)
        made = torch.autograd.grad(y.sin().sum() + total.cos().sum(), args)
    same(made, gradients(ops.affine.reference, *args)[2:])


@pytest.fixture
def declared_again(ops):
    """The ops, whose gradients are declared as they were after the test."""
    yield ops
    ops.affine.backward(ops.affine_x, ops.affine_wb)
    ops.inverse.backward(ops.inverse_grad)
    ops.affine.build()
    assert all(op.native.records for op in (ops.affine, ops.cube, ops.inverse))


def test_errors_are_those_of_python(declared_again):
    ops = declared_again
    x, w, b = arguments()
    y, _ = ops.affine(x, w, b, 13.0)
    with fails("SL211", got="thirteen is unlucky", where="gradients::affine_x, kernel affine_x"):
        y.sum().backward()
    with fails("SL202"):
        ops.affine(x, b[:2], b)
    with fails("SL220", where="gradients::affine, argument 'factor'"):
        ops.affine(x, w, b, torch.tensor(2.0, requires_grad=True))
    same(ops.affine(x, w, b, torch.tensor(2.0))[0], ops.affine.reference(x, w, b, 2.0)[0])
    ops.affine.backward(ops.affine_wb)
    ops.affine.build()
    with in_cpp(ops.affine):
        y, _ = ops.affine(x, w, b)
    with fails("SL110", "no gradient of 'x', which was needed"):
        y.sum().backward()


def test_a_gradient_of_another_shape(ops):
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with in_cpp(ops.longer):
        y = ops.longer(x)
    with fails("SL303", where="gradients::longer, argument 'x'", got="gradient (4,)", expected="(3,)"):
        y.sum().backward()


def test_a_gradient_that_is_declared_again(declared_again):
    inverse, by_dispatcher = declared_again.inverse, lambda x: torch.ops.gradients.inverse(x)
    x = torch.full((3,), 2.0, dtype=torch.float64, requires_grad=True)
    before = inverse(x)
    inverse.backward(lambda grad, saved, needs: {"x": grad * 7})
    assert inverse.native is None
    for call in (inverse, by_dispatcher):
        same(torch.autograd.grad(call(x).sum(), x)[0], torch.full_like(x, 7))
    inverse.build()
    assert not inverse.native.records
    for call in (inverse, by_dispatcher):
        same(torch.autograd.grad(call(x).sum(), x)[0], torch.full_like(x, 7))
    same(torch.autograd.grad(before.sum(), x, create_graph=True)[0], torch.full_like(x, -0.25))
    inverse.backward(declared_again.inverse_grad)
    inverse.build()
    with in_cpp(inverse):
        for call in (inverse, by_dispatcher):
            same(torch.autograd.grad(call(x).sum(), x)[0], torch.full_like(x, -0.25))


def test_ops_that_python_records(ns, ops):
    @sl.op(f"{ns}::many")
    def many(xs: list[N]) -> N:
        return sum(xs)

    @sl.op(f"{ns}::bump", mutates=("x",))
    def bump(x: N) -> None:
        x.add_(1)

    assert not any(map(gradient_recorder.can_record, (many, bump, ops.affine_x)))
    with fails("SL304"):
        ops.affine_x(
            torch.ones(3, 4, dtype=torch.float64), torch.ones(3, dtype=torch.float64), arguments()[1], 1.0
        ).sum().backward()


@pytest.mark.parametrize(
    ("source", "compiler", "why"), [("#error no header\n", "c++", "no header"), ("// new\n", "/no/compiler", "SL405")]
)
def test_a_library_that_cannot_be_compiled_is_reported(declared_again, monkeypatch, source, compiler, why):
    affine, started = declared_again.affine, []
    affine.drop_native()
    with monkeypatch.context() as patch:
        patch.setattr(gradient_recorder, "SOURCE", source)
        patch.setattr(gradient_recorder, "build_detached", lambda *order: started.append(order))
        patch.setenv("CXX", compiler)
        with pytest.warns(sl.ShiplapNotice, match=f"Python records the gradients of gradients::affine.*{why}"):
            affine.build()
        assert (affine.native is None, affine.native.records) == (False, False)
        same(gradients(affine, *arguments()), gradients(affine.reference, *arguments()))
        patch.delenv("CXX")
        patch.setenv("SHIPLAP_BACKGROUND_BUILD", "1")
        assert [gradient_recorder.record_in_cpp(affine) for _ in range(2)] == [None, None]
        assert len(started) == 1


def test_many_calls_that_python_records_give_a_notice(declared_again, monkeypatch):
    affine, args = declared_again.affine, arguments()
    affine.drop_native()
    with monkeypatch.context() as patch:
        patch.setattr(gradient_recorder, "find_library", lambda *place: None)  # as after the installation of a wheel
        affine.build()
        assert (affine.native is None, affine.native.records) == (False, False)
        affine.native.start_recording()  # as at each further binding of the process: the calls are counted once
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(gradient_recorder.HOT_RECORDINGS - 1):
                expected = gradients(affine, *args)
        with pytest.warns(sl.ShiplapNotice, match=r"not built for this release of torch. Build it once: op.build\(\)"):
            same(gradients(affine, *args), expected)
        assert affine._record_plain_call.__module__ != gradient_recorder.__name__


def test_threads_and_deep_graphs(ops):
    args, wrong = arguments(), []
    expected = gradients(ops.affine.reference, *args)

    def work():
        for _ in range(50):
            try:
                same(gradients(ops.affine, *args), expected)
            except Exception as e:
                wrong.append(e)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    y = x
    for _ in range(20_000):
        y = ops.inverse(y)
    del y  # whose nodes are freed without a recursion


def test_tools_of_autograd(ops):
    x, w, b = arguments()
    with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="affine_backward"):
        (ops.affine(x, w * float("nan"), b)[0]).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ops.affine(x, w, b)[0].sum().backward()
    assert {"gradients::affine", "affine_backward", "gradients::affine_x"} <= {
        e.name.removesuffix(".raw") for e in profile.events()
    }
    torch.library.opcheck(
        torch.ops.gradients.affine.default, (x.detach().requires_grad_(), w.detach().requires_grad_(), None, 2.0)
    )
