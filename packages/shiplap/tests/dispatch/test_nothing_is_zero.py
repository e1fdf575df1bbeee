"""A gradient or a tangent that nobody declared is an error; it is never zero, and never absent."""

import pytest
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jvp
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import shiplap as sl
from shiplap_testing.support import fails

V = Float[Tensor, "n"]


@pytest.fixture
def x():
    return torch.rand(4, dtype=torch.float64) + 0.5


@pytest.fixture
def cube(ns):
    @sl.op(f"{ns}::cube")
    def cube(x: V, *, scale: float = 1.0) -> V:
        return x**3 * scale

    @cube.kernel("cpu")
    def _(x, *, scale, out):
        torch.mul(x**3, scale, out=out)

    @cube.backward
    def _(grad, saved, needs):
        return {"x": grad * 3 * saved.x**2 * saved.scale}

    return cube


@pytest.fixture
def write(ns):
    @sl.op(f"{ns}::write", mutates="cache")
    def write(x: V, cache: V) -> V:
        cache.copy_(x)
        return x + 1

    return write


GRAPHS = {
    "make_fx": lambda f, x: make_fx(f)(x),
    "make_fx of symbols": lambda f, x: make_fx(f, tracing_mode="symbolic")(x),
    "torch.fx": lambda f, x: torch.fx.symbolic_trace(f),
}


@pytest.mark.parametrize("trace", GRAPHS)
def test_a_graph_that_was_traced_without_gradients_has_them(cube, x, trace):
    graph = GRAPHS[trace](lambda x: cube(x).sin(), x)
    leaf = x.clone().requires_grad_()
    (got,) = torch.autograd.grad(graph(leaf).sum(), leaf)
    want = (x**3).cos() * 3 * x**2
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(jvp(graph, (x,), (torch.ones_like(x),))[1], want)
    with forward_ad.dual_level():
        torch.testing.assert_close(forward_ad.unpack_dual(graph(forward_ad.make_dual(x, x * 0 + 1))).tangent, want)


def test_the_part_below_autograd_leads_to_autograd(cube, x):
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(cube.below_autograd(leaf, scale=2.0).sum(), leaf)[0], 6 * x**2)
    torch.testing.assert_close(jvp(cube.below_autograd, (x,), (torch.ones_like(x),))[1], 3 * x**2)
    assert not cube.below_autograd(x).requires_grad


def test_modes_and_graphs_know_one_name(cube, x):
    class Log(TorchDispatchMode):
        seen = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen = (*self.seen, func)
            return func(*args, **(kwargs or {}))

    leaf = x.clone().requires_grad_()
    for call in (lambda: cube(x), lambda: cube(leaf), lambda: cube(x, scale=2.0), lambda: cube.below_autograd(x)):
        with Log() as log:
            call()
        assert log.seen[0] is cube.overload
    for name in ("make_fx", "make_fx of symbols"):
        nodes = GRAPHS[name](lambda x: cube(x), x).graph.nodes
        assert [n.target for n in nodes if n.op == "call_function"] == [cube.overload]
    with torch.profiler.profile() as profile:
        cube(x)
        cube.below_autograd(x)
    names = [e.name for e in profile.events() if "::cube" in e.name]
    assert names == [cube.spec.name] * 2


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_code_calls_the_part_below_autograd(cube, write, x):
    from torch._inductor.utils import run_and_get_code

    _, (code,) = run_and_get_code(torch.compile(lambda x: cube(x).sin(), fullgraph=True), x)
    assert f"= in_code(torch.ops.{cube.spec.namespace}.cube.raw)" in code.replace(".raw.default", ".raw")
    cache = torch.zeros_like(x)
    out, (code,) = run_and_get_code(torch.compile(lambda x, c: write(x, c) + c, fullgraph=True), x, cache)
    assert f"= in_code(torch.ops.{cube.spec.namespace}.write.raw)" in code.replace(".raw.default", ".raw")
    torch.testing.assert_close(out, 2 * x + 1)
    assert torch.equal(cache, x)


def test_what_is_written_to_carries_the_error(write, x):
    leaf, cache = x.clone().requires_grad_(), torch.zeros_like(x)
    out = write(leaf, cache)
    assert torch.equal(cache, x)
    for result in (out, cache):
        with fails("SL304", where=write.spec.name, fix="call the op under torch.no_grad(), or pass .detach()"):
            result.sum().backward()
    by_name = torch.zeros_like(x)
    assert write(cache=by_name, x=leaf).requires_grad
    assert by_name.requires_grad
    cache = torch.zeros_like(x)
    assert not write(x, cache).requires_grad
    with torch.no_grad():
        write(leaf, cache)
    write(leaf.detach(), cache)
    assert not cache.requires_grad


def test_transforms_of_an_op_that_writes_are_refused(write, x):
    def total(x):
        return write(x, x * 0).sum()

    for transform in (
        lambda: grad(total)(x),
        lambda: jvp(total, (x,), (x,)),
        lambda: jvp(make_fx(total)(x), (x,), (x,)),
    ):
        with fails("SL304"):
            transform()
    with forward_ad.dual_level(), fails("SL304", got="a tangent was requested (forward mode)"):
        write(forward_ad.make_dual(x, x), torch.zeros_like(x))


def test_an_out_variant_has_no_tangent(cube, x):
    def into(x):
        return cube.out(x, out=torch.empty(4, dtype=torch.float64))

    for transform in (lambda: jvp(into, (x,), (x,)), lambda: grad(lambda x: into(x).sum())(x)):
        with fails("SL304"):
            transform()
    assert torch.equal(into(x), cube(x))


def test_a_backward_that_leaves_out_what_is_needed(ns, x):
    @sl.op(f"{ns}::scale")
    def scale(x: V, w: V) -> V:
        return x * w

    @scale.backward
    def _(grad, saved, needs):
        return {"x": grad * saved.w}

    leaf, w = x.clone().requires_grad_(), x.clone().requires_grad_()
    scale(leaf, x).sum().backward()
    with fails("SL110", where=f"{ns}::scale, argument 'w'", got="no gradient of 'w', which was needed"):
        scale(leaf, w).sum().backward()


def test_integers_that_are_written_to_need_no_care(ns, x):
    @sl.op(f"{ns}::count", mutates="n")
    def count(x: V, n: Int64[Tensor, "one"]) -> None:
        n.add_(x.numel())

    n = torch.zeros(1, dtype=torch.int64)
    count(x.clone().requires_grad_(), n)
    assert n.item() == 4
    assert not count.needs_autograd
