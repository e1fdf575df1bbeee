"""A Python kernel, and a gradient, get contiguous tensors, unless strides are asked for."""

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.dispatch import fast_paths as routes
from shiplap_testing.effort import sampled
from shiplap_testing.support import fails

M = Float[Tensor, "n c"]
STRIDED = {
    "transposed": lambda: torch.arange(6.0).view(3, 2).t(),
    "cut": lambda: torch.arange(8.0).view(2, 4)[:, :3],
    "expanded": lambda: torch.arange(2.0)[:, None].expand(2, 3),
    "contiguous": lambda: torch.arange(6.0).view(2, 3),
}


def by_pointer(x: Tensor) -> Tensor:
    """The elements of ``x`` as a kernel behind a pointer reads them: one after the other, whatever the strides."""
    return torch.as_strided(x, (x.numel(),), (1,)).view(x.shape)


@pytest.fixture
def double(ns):
    @sl.op(f"{ns}::double")
    def double(x: M, w: M | None = None, s: float = 2.0) -> M:
        return x * s

    return double


WAYS = {
    "eager": lambda op, x: op(x),
    "keyword": lambda op, x: op(x=x),
    "no_grad": lambda op, x: torch.no_grad()(op)(x),
    "inference": lambda op, x: torch.inference_mode()(op)(x),
    "aot_eager": lambda op, x: torch.compile(lambda x: op(x), backend="aot_eager")(x),
    "recorded": lambda op, x: op(x.requires_grad_()).detach(),
    "vmap": lambda op, x: torch.vmap(op)(x[None])[0],
    "autocast": lambda op, x: torch.autocast("cpu", torch.bfloat16)(op)(x.bfloat16()).float(),
    "out": lambda op, x: op.out(x, out=torch.empty(2, 3)),
}


@pytest.mark.parametrize("layout", sampled(STRIDED, 3))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("into", [False, True])
def test_a_kernel_that_takes_pointers_is_right(double, way, layout, into):
    double.backward(lambda grad, saved, needs: {"x": grad * saved.s, "w": None})
    if into:
        double.kernel("cpu", lambda x, w, s, *, out: torch.mul(by_pointer(x), s, out=out))
    else:
        double.kernel("cpu", lambda x, w, s: by_pointer(x) * s)
    x = STRIDED[layout]()
    assert torch.equal(WAYS[way](double, x), x.detach() * 2)


@pytest.mark.parametrize("into", [False, True])
def test_remembered_calls_too(double, into, monkeypatch):
    """The way past the dispatcher, as it is on a GPU: each layout has its own memory of how it was launched."""
    monkeypatch.setattr(routes.dispatcher_calls, "untouched", lambda: True)
    kernel = (
        (lambda x, w, s, *, out: torch.mul(by_pointer(x), s, out=out)) if into else (lambda x, w, s: by_pointer(x) * s)
    )
    double.kernel("cpu", kernel)
    (bound,) = double.kernels["cpu"]
    for _ in range(2):
        for layout in STRIDED.values():
            x = layout()
            call = double.bind((x, None, 2.0))
            _, rerun = bound.run_first_call(call)
            if rerun is not None:
                assert torch.equal(rerun((layout(), None, 2.0)), x * 2)
    assert into == bound.can_repeat


@pytest.mark.parametrize(("strided", "seen"), [((), [True, True]), ("x", [False, True]), (True, [False, False])])
def test_strides_are_asked_for_by_name(double, strided, seen):
    layouts = []

    @double.kernel("cpu", strided=strided)
    def _(x, w, s):
        layouts[:] = [x.is_contiguous(), w.is_contiguous()]
        return x * s

    double(STRIDED["transposed"](), STRIDED["cut"]())
    assert layouts == seen


def test_strides_of_what_is_no_tensor_are_refused(double):
    fix = "name tensor arguments of the op, or write strided=True for all of them"
    for strided in ("s", ("x", "y")):
        with fails("SL122", expected="names among x, w", fix=fix):
            double.kernel("cpu", lambda x, w, s: x * s, strided=strided)
        with fails("SL122", expected="names among x, w", fix=fix):
            double.kernel("cpu", sl.cabi("nowhere.so", "f", strided=strided))
    with fails("SL122", expected="a Python kernel"):
        double.kernel("cpu", sl.cabi("nowhere.so", "f"), strided=True)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layout", sampled(["transposed", "cut", "contiguous"], 2))
@pytest.mark.parametrize("returned", [False, True])
def test_what_is_written_to_gets_the_result(ns, layout, compiled, returned):
    declared = {"aliases": "x"} if returned else {}

    def add(x: M, y: M):
        x.add_(y)
        return x if returned else None

    add.__annotations__["return"] = M if returned else None
    op = sl.op(f"{ns}::add", mutates="x", **declared)(add)

    @op.kernel("cpu")
    def _(x, y):
        assert x.is_contiguous()
        torch.as_strided(x, (x.numel(),), (1,)).add_(torch.as_strided(y, (y.numel(),), (1,)))
        return x if returned else None

    x, y = STRIDED[layout](), STRIDED["expanded"]()
    want = x + y
    result = (torch.compile(lambda x, y: op(x, y), backend="aot_eager") if compiled else op)(x, y)
    assert torch.equal(x, want)
    assert result is None or torch.equal(result, want)


def test_lists_of_tensors(ns):
    @sl.op(f"{ns}::pair")
    def pair(xs: list[M]) -> M:
        return xs[0] + xs[1]

    pair.kernel("cpu", lambda xs: by_pointer(xs[0]) + by_pointer(xs[1]))
    xs = [STRIDED["transposed"](), STRIDED["cut"]()]
    assert torch.equal(pair(xs), xs[0] + xs[1])


def beside(y: Tensor) -> Tensor:
    return torch.cat([y, torch.ones(2, 4)], 1) * torch.arange(14.0).view(2, 7)


GRADIENTS = {
    "sum": lambda y: y.sum(),
    "cat": lambda y: beside(y).sum(),
    "transposed": lambda y: (y.t() * torch.arange(6.0).view(3, 2)).sum(),
}


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("way", sampled(["eager", "aot_eager", "func", "double"], 2))
@pytest.mark.parametrize("after", GRADIENTS)
def test_a_gradient_that_takes_pointers_is_right(ns, after, way, several):
    def declared(x: M, w: M):
        return (x * w, x * 3) if several else x * w

    declared.__annotations__["return"] = tuple[M, M] if several else M
    op = sl.op(f"{ns}::scale")(declared)

    @op.backward
    def _(grad, saved, needs):
        first, *second = grad if several else (grad,)
        found = by_pointer(first) * by_pointer(saved.w)
        return {"x": found + by_pointer(second[0]) * 3 if several else found, "w": None}

    def total(f):
        def of(x, w):
            made = f(x, w)
            return GRADIENTS[after](made[0] + made[1] if several else made)

        return of

    w = STRIDED["transposed"]()
    want = torch.func.grad(total(declared))(torch.ones(2, 3), w)
    if way == "func":
        assert torch.equal(torch.func.grad(total(op))(torch.ones(2, 3), w), want)
        return
    x = torch.ones(2, 3, requires_grad=True)
    f = torch.compile(total(op), backend="aot_eager") if way == "aot_eager" else total(op)
    (got,) = torch.autograd.grad(f(x, w), x, create_graph=way == "double")
    assert torch.equal(got, want)


def test_a_gradient_may_ask_for_strides(double):
    seen = []
    double.backward(
        lambda grad, saved, needs: (seen.append(grad.stride()), {"x": grad * 2, "w": None})[1], strided=True
    )
    x = torch.ones(2, 3, requires_grad=True)
    double(x).sum().backward()
    assert seen == [(0, 0)]
