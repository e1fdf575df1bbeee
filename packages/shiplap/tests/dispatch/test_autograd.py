"""Declared gradients: right, only those that are asked for, also of lists, optionals, keyword-only scalars, twice."""

import pytest
import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import shiplap as sl
from shiplap import torch_private
from shiplap_testing.support import fails

M = Float[Tensor, "n c"]
REAL = 'real numbers, as Float[Tensor, "n c"] has'
V = Float[Tensor, "n"]


@pytest.fixture
def asked():
    return []


@pytest.fixture
def affine(ns, asked):
    @sl.op(f"{ns}::affine_mm")
    def mm(x: Float[Tensor, "a b"], y: Float[Tensor, "b c"]) -> Float[Tensor, "a c"]:
        return x @ y

    @mm.backward
    def _(grad, saved, needs):
        return {"x": mm(grad, saved.y.T) if needs.x else None, "y": mm(saved.x.T, grad) if needs.y else None}

    @sl.op(f"{ns}::affine")
    def affine(
        x: Float[Tensor, "n ci"],
        weight: Float[Tensor, "co ci"],
        bias: Float[Tensor, "co"] | None = None,
        k: int = 1,
        *,
        scale: float = 1.0,
        mode: str = "plain",
    ) -> Float[Tensor, "n co"]:
        out = x @ weight.T * (k * scale)
        return out if bias is None else out + bias

    @affine.backward(saves=["x", "weight"])
    def _(grad, saved, needs):
        asked.append({name for name, wanted in vars(needs).items() if wanted})
        assert saved.mode in ("plain", "other")
        assert not hasattr(saved, "bias")
        factor = saved.k * saved.scale
        return {
            "x": mm(grad, saved.weight) * factor if needs.x else None,
            "weight": mm(grad.T, saved.x) * factor if needs.weight else None,
            "bias": grad.sum(0) if needs.bias else None,
        }

    return affine


def test_a_plain_recorded_call_goes_one_way(ns, monkeypatch):
    """Autograd alone sees it; whatever else has to look at a call still does."""

    @sl.op(f"{ns}::twice")
    def twice(x: V) -> V:
        return x * 2

    @twice.backward
    def _(grad, saved, needs):
        return {"x": grad * 2}

    through, taken = twice._call_dispatcher, []
    monkeypatch.setattr(
        twice, "_call_dispatcher", lambda args, kwargs: taken.append(len(kwargs)) or through(args, kwargs)
    )
    x = torch.ones(3, requires_grad=True)
    twice(x).sum().backward()
    assert (taken, x.grad.tolist()) == ([], [2.0, 2.0, 2.0])
    twice(x=x)
    torch.func.grad(lambda t: twice(t).sum())(x)
    with torch.autocast("cpu"):
        twice(x)
    with torch.autograd.profiler.profile():
        twice(x)
    assert len(taken) == 4


def tensors(*shapes, grad=True):
    torch.manual_seed(0)
    return [torch.randn(s, dtype=torch.float64, requires_grad=grad) for s in shapes]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.usefixtures("fresh_compiler")
def test_gradients_equal_those_of_the_reference(affine, compiled):
    x, w, b = tensors((3, 4), (5, 4), 5)
    for args, kwargs in (
        ((x, w), {}),
        ((x, w, b), {}),
        ((x, w, None, 3), {"scale": 0.5}),
        ((x, w), {"bias": b, "mode": "other"}),
    ):
        f = torch.compile(affine, backend="aot_eager", fullgraph=True) if compiled else affine
        used = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
        got = torch.autograd.grad(f(*args, **kwargs).sin().sum(), used)
        want = torch.autograd.grad(affine.reference(*args, **kwargs).sin().sum(), used)
        for a, e in zip(got, want, strict=True):
            torch.testing.assert_close(a, e)


def test_only_the_needed_gradients_are_asked_for(affine, asked):
    x, w, b = tensors((3, 4), (5, 4), 5)
    affine(x, w.detach()).sum().backward()
    affine(x.detach(), w, b.detach()).sum().backward()
    affine(x.detach(), w.detach(), b).sum().backward()
    affine(x, w, b).sum().backward()
    assert asked == [{"x"}, {"weight"}, {"bias"}, {"x", "weight", "bias"}]


def test_trailing_defaults_that_the_dispatcher_strips(affine, asked):
    x, w = tensors((3, 4), (5, 4))
    affine(x, w, None, 1, scale=1.0, mode="plain").sum().backward()
    assert asked == [{"x", "weight"}]


def test_second_derivatives(affine):
    x, w, b = tensors((2, 3), (4, 3), 4)
    assert torch.autograd.gradcheck(lambda *a: affine(*a, 2, scale=0.5), (x, w, b))
    assert torch.autograd.gradgradcheck(lambda *a: affine(*a, 2, scale=0.5).sin(), (x, w, b))


@pytest.mark.usefixtures("fresh_compiler")
def test_dynamic_sizes_do_not_recompile_the_backward(affine):
    f = torch.compile(lambda x, w: affine(x, w, scale=2.0), backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (3, 4, 5):
        x, w = tensors((n, n + 1), (n + 2, n + 1))
        f(x, w).sum().backward()
        torch.testing.assert_close(x.grad, torch.ones(n, n + 2, dtype=x.dtype) @ w.detach() * 2)
    assert torch_private.compile_counts().recompiles == 0


@pytest.fixture
def stack(ns, asked):
    @sl.op(f"{ns}::stack")
    def stack(xs: list[V], weights: list[float], ints: list[int] = (), bias: V | None = None) -> V:
        return sum(x * w for x, w in zip(xs, weights, strict=True))

    @stack.backward
    def _(grad, saved, needs):
        asked.append((needs.xs, needs.bias))
        assert len(saved.xs) == len(saved.weights)
        assert saved.bias is None
        return {"xs": [grad * w for w in saved.weights]} if needs.xs else {}

    return stack


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.usefixtures("fresh_compiler")
def test_tensor_lists(stack, asked, compiled):
    f = torch.compile(stack, backend="aot_eager", fullgraph=True) if compiled else stack
    a, b = tensors(3, 3)
    for extra in ((), ([],), ([1, 2],), ([], None)):
        a.grad = b.grad = None
        f([a, b], [2.0, 3.0], *extra).sum().backward()
        assert (a.grad.tolist(), b.grad.tolist()) == ([2] * 3, [3] * 3)
        a.grad = b.grad = None
        f([a, b.detach()], [2.0, 3.0], *extra).sum().backward()
        assert (a.grad.tolist(), b.grad) == ([2] * 3, None)
    assert set(asked) == {(True, False)}


def test_a_list_without_a_gradient(ns):
    @sl.op(f"{ns}::f")
    def f(xs: list[V], y: V) -> V:
        return y * 2 + sum(x.detach() for x in xs)

    @f.backward
    def _(grad, saved, needs):
        return {"y": grad * 2, "xs": None}

    a, y = tensors(3, 3)
    f([a, a], y).sum().backward()
    assert y.grad.tolist() == [2] * 3
    assert a.grad is None


def test_several_outputs(ns):
    @sl.op(f"{ns}::split")
    def split(x: M, k: int) -> tuple[Float[Tensor, "k c"], Int64[Tensor, "n"], Float[Tensor, "n-k c"]]:
        return x[:k] * 2, x.argmax(1) if x.numel() else x.new_zeros(len(x), dtype=torch.int64), x[k:] * 3

    @split.backward(saves=["out0", "k"])
    def _(grad, saved, needs):
        assert saved.out0.shape == grad[0].shape
        return {"x": torch.cat([grad[0] * 2, grad[2] * 3])}

    (x,) = tensors((3, 2))
    _, index, rest = split(x, 1)
    assert not index.requires_grad
    rest.sum().backward()
    assert x.grad.tolist() == [[0, 0], [3, 3], [3, 3]]


def test_no_backward_says_so(ns):
    @sl.op(f"{ns}::f")
    def f(x: V) -> V:
        return x * 2

    (x,) = tensors(3)
    y = f(x)
    assert y.requires_grad, "a silently dropped gradient would be worse"
    with fails("SL304", where=f"{ns}::f", got="a gradient was requested"):
        y.sum().backward()
    assert not f(x.detach()).requires_grad
    with torch.no_grad():
        assert not f(x).requires_grad


def test_an_output_of_any_dtype_does_not_drop_the_gradient(ns):
    @sl.op(f"{ns}::f")
    def f(x: Shaped[Tensor, "n"]) -> Shaped[Tensor, "n"]:
        return x * 2

    with fails("SL304"):
        f(*tensors(3)).sum().backward()
    assert f(torch.ones(2, dtype=torch.int64)).tolist() == [2, 2]


def test_integer_outputs_carry_no_gradient(ns):
    @sl.op(f"{ns}::f")
    def f(x: V) -> Int64[Tensor, "n"]:
        assert not torch.is_grad_enabled()
        return (x * 2).long()

    assert not f(*tensors(3)).requires_grad


@pytest.mark.parametrize(
    ("result", "id", "got", "expected"),
    [
        ([1], "SL110", "list", "a dict {argument: gradient}"),
        ({"z": 1}, "SL110", "gradient of 'z'", "a tensor argument: x"),
        ({"x": torch.ones(2, 1)}, "SL303", "gradient (2, 1)", "(2, 3)"),
        ({"x": torch.ones(())}, "SL303", "gradient ()", "(2, 3)"),
        ({"x": torch.ones(2, 3, device="meta")}, "SL303", "gradient on meta", "a tensor on cpu"),
        (
            {"x": torch.ones(2, 3) + 0j},
            "SL303",
            "gradient of torch.complex64",
            'real numbers, as Float[Tensor, "n c"] has',
        ),
    ],
)
def test_a_backward_that_breaks_its_contract(ns, result, id, got, expected):
    @sl.op(f"{ns}::f")
    def f(x: M, k: int = 1) -> M:
        return x * 2

    f.backward(saves=[])(lambda grad, saved, needs: result)
    with fails(id, got=got, expected=expected):
        f(*tensors((2, 3))).sum().backward()


def test_a_backward_takes_three_arguments(ns):
    @sl.op(f"{ns}::f")
    def f(x: M) -> M:
        return x * 2

    with fails("SL110", got="def _(grad): the parameter 'saved' is missing", expected="def _(grad, saved, needs)"):
        f.backward(lambda grad: {"x": grad})


def test_a_gradient_list_of_wrong_shapes(stack, ns):
    @sl.op(f"{ns}::f")
    def f(xs: list[V]) -> V:
        return xs[0] * 2

    f.backward(saves=[])(lambda grad, saved, needs: {"xs": [grad[:1], grad]})
    with fails("SL303", where=f"{ns}::f, argument 'xs'", got="gradient [(1,), (3,)]", expected="[(3,), (3,)]"):
        f(tensors(3, 3)).sum().backward()


def test_what_cannot_be_declared(ns):
    @sl.op(f"{ns}::f")
    def f(x: V) -> V: ...

    with fails("SL110", got="saves 'z'", expected="one of out, x"):
        f.backward(saves=["z"])(lambda grad, saved, needs: {})
    with fails("SL110", fix="name arguments and results of the op in saves="):
        f.backward(saves=["z"])(lambda grad, saved, needs: {})
    with fails("SL110", fix="write saves=('out',)"):
        f.backward(saves=["outt"])(lambda grad, saved, needs: {})

    @sl.op(f"{ns}::g", mutates=["x"])
    def g(x: V, y: V) -> V: ...

    with fails("SL110", got="mutates x", expected="a functional op"):
        g.backward(lambda grad, saved, needs: {})


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.usefixtures("fresh_compiler")
def test_leaf_and_non_leaf_inputs_agree_between_eager_and_compiled(affine, backend):
    x, w = tensors((3, 4), (5, 4))

    def fn(x, w):
        return affine(x * 2, w).square().sum()

    for f in (fn, torch.compile(fn, backend=backend, fullgraph=True)):
        x.grad = w.grad = None
        f(x, w).backward()
        torch.testing.assert_close(x.grad, 8 * x.detach() @ w.detach().T @ w.detach())


def test_checkpointing_recomputes(affine):
    x, w = tensors((3, 4), (5, 4))
    torch.utils.checkpoint.checkpoint(lambda x: affine(x, w).sin(), x, use_reentrant=False).sum().backward()
    got, x.grad = x.grad, None
    affine.reference(x, w).sin().sum().backward()
    torch.testing.assert_close(got, x.grad)


def test_what_was_traced_without_gradients_can_be_trained(affine):
    """A graph of fx holds ``raw``, which leads such calls to autograd; the others hold the op that was declared."""

    class Model(torch.nn.Module):
        def forward(self, x, w):
            return affine(x, w, None, 2, scale=1.5).sin()

    model, given = Model(), tensors((3, 2), (4, 2), grad=False)
    traced = {
        "fx": torch.fx.symbolic_trace(model),
        "make_fx": make_fx(model)(*given),
        "export": torch.export.export(model, tuple(given)).run_decompositions().module(),
    }
    leaves = tensors((3, 2), (4, 2))
    expected = torch.autograd.grad(model(*leaves).sum(), leaves)
    for name, graph in traced.items():
        gradients = torch.autograd.grad(graph(*leaves).sum(), leaves)
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True)), name
        assert not graph(*given).requires_grad
