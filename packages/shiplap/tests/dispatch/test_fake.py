"""The derived fake: what compiled code is promised, and that run time keeps the promise."""

from types import SimpleNamespace

import pytest
import torch
from jaxtyping import Float, Float32, Int64, Shaped
from torch import Tensor
from torch.library import opcheck

import shiplap as sl
from shiplap import torch_private
from shiplap.dispatch import fake
from shiplap.errors import ShiplapError
from shiplap_testing.effort import sampled
from shiplap_testing.support import fails

V = Float[Tensor, "n"]


@pytest.fixture
def dynamic_outputs():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        yield


@pytest.fixture
def nonzero(ns):
    """Positions above a threshold: between 0 and ``n`` of them, and ``limit`` says how many are allowed."""

    @sl.op(f"{ns}::above", bounds={"m": "min(n, limit)"})
    def above(x: V, limit: int = 1000) -> tuple[Int64[Tensor, "m"], Float[Tensor, "m+1 2"]]:
        rows = (x > 0).nonzero()[:, 0]
        return rows, x.new_ones(len(rows) + 1, 2)

    return above


@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (1, 1)])
def test_outputs_are_contiguous_and_of_the_declared_type(ns, shape):
    @sl.op(f"{ns}::f", dims={"p": "cdiv(n, 2)"})
    def f(x: Shaped[Tensor, "n c"]) -> tuple[Shaped[Tensor, "c n"], Float32[Tensor, "p 2 c+1"]]:
        return x.T, torch.zeros(-(-x.shape[0] // 2), 2, x.shape[1] + 1)

    for dtype in (torch.float16, torch.int64, torch.bool, torch.complex64):
        x = torch.zeros(shape, dtype=dtype)
        real = f(x)
        with torch_private.fake_mode(symbolic=False) as mode:
            pretended = f(mode.from_tensor(x))
        for r, k in zip(real, pretended, strict=True):
            assert (r.shape, r.stride(), r.dtype, r.device) == (k.shape, k.stride(), k.dtype, k.device)
    for r, k in zip(f(torch.zeros(shape)), f(torch.zeros(shape, device="meta")), strict=True):
        assert (r.shape, r.dtype, "meta") == (k.shape, k.dtype, k.device.type)


def test_a_data_dependent_size_is_unbacked(nonzero, ns):
    x = torch.ones(8)
    with torch_private.fake_mode(symbolic=True) as mode:
        index, table = nonzero(torch_private.make_fake_tensor(mode, x, dynamic=True))
        assert str(index.shape[0]).startswith("u")
        assert str(table.shape[0]) == f"{index.shape[0]} + 1"


@pytest.mark.usefixtures("dynamic_outputs", "fresh_compiler")
@pytest.mark.parametrize("backend", sampled(["aot_eager", "inductor"], long=["aot_eager"]))
def test_data_dependent_sizes_compile(nonzero, backend):
    def fn(x):
        index, table = nonzero(x)
        return x[index] * 2, table.sum(0)

    f = torch.compile(fn, backend=backend, fullgraph=True)
    for x in (torch.tensor([1.0, -1, 2]), torch.tensor([-1.0, -2, -3]), torch.tensor([1.0, 2, 3])):
        for a, b in zip(f(x), fn(x), strict=True):
            assert torch.equal(a, b)
    assert torch_private.compile_counts().recompiles == 0


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_size_with_a_bound_breaks_no_graph_without_a_setting(nonzero, backend):
    """Neither ``fullgraph=True`` nor ``capture_dynamic_output_shape_ops``; a question about the size breaks there."""

    def fn(x):
        index, table = nonzero(x)
        return x[index] * 2, table.sum(0)

    def asks(x):  # a size that nobody knows
        index, table = nonzero(x)
        return (x[index], index) if index.shape[0] == 2 else (table.sum(0), index)

    x = torch.tensor([1.0, -1, 2])
    for f in (fn, asks):
        for a, b in zip(torch.compile(f, backend=backend)(x), f(x), strict=True):
            assert torch.equal(a, b)
        graphs = torch_private.compile_counts().graphs
        assert graphs == 1 if f is fn else graphs > 2


@pytest.mark.usefixtures("dynamic_outputs", "fresh_compiler")
@pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.long), "aot_eager", "inductor"])
def test_the_bound_is_asserted_at_run_time(nonzero, ns, backend):
    f = torch.compile(lambda x: nonzero(x, 2)[0] + 1, backend=backend, fullgraph=True)
    assert f(torch.tensor([1.0, -1, 2])).tolist() == [1, 3]
    with fails("SL302", where=f"{ns}::above, output 'out0'", got="m = 3", expected="m <= min(n, limit) = 2"):
        f(torch.tensor([1.0, 1, 2]))
    with fails("SL302"):
        nonzero(torch.ones(5), 4)


@pytest.mark.usefixtures("dynamic_outputs", "fresh_compiler")
def test_a_graph_knows_the_bound(nonzero):
    seen = []

    def fn(x):
        index, _ = nonzero(x)
        if index.shape[0] <= x.shape[0]:  # decided from the declaration, without a graph break
            seen.append("bounded")
            return index + 1
        return index

    assert torch.compile(fn, backend="aot_eager", fullgraph=True)(torch.ones(4)).tolist() == [1, 2, 3, 4]
    assert seen


@pytest.mark.usefixtures("dynamic_outputs", "fresh_compiler")
def test_unbacked_sizes_go_through_the_checks_of_the_next_op(nonzero, ns):
    @sl.op(f"{ns}::pair", requires=("m >= 0",), mutates=["z"], contiguous=["y"])
    def pair(y: Float[Tensor, "m 2"], x: Float[Tensor, "m"], z: Float[Tensor, "m 2"]) -> Float[Tensor, "m 2"]:
        z.zero_()
        return y * x[:, None]

    def fn(x):
        _, table = nonzero(x)
        return pair(table, table[:, 0].contiguous(), table.clone())

    x = torch.tensor([1.0, -1, 2])
    assert torch.equal(torch.compile(fn, backend="aot_eager", fullgraph=True)(x), fn(x))

    def mixed(x):
        index, table = nonzero(x)
        return pair(table, x[index], table.clone())

    with pytest.raises(RuntimeError):  # u0 + 1 and u0 can never agree
        torch.compile(mixed, backend="aot_eager", fullgraph=True)(x)


@pytest.mark.usefixtures("dynamic_outputs", "fresh_compiler")
def test_a_run_time_assertion_of_agreeing_sizes(nonzero, ns):
    @sl.op(f"{ns}::add")
    def add(x: V, y: V) -> V:
        return x + y

    def fn(x, y):
        return add(x[nonzero(x)[0]], y)

    f = torch.compile(fn, backend="aot_eager", fullgraph=True)
    assert f(torch.tensor([1.0, -1, 2]), torch.zeros(2)).tolist() == [1, 2]
    with pytest.raises((RuntimeError, ValueError)):
        f(torch.tensor([1.0, 1, 2]), torch.zeros(2))


@pytest.mark.usefixtures("fresh_compiler")
def test_errors_are_the_same_while_tracing(ns):
    @sl.op(f"{ns}::add")
    def add(x: V, y: V) -> V:
        return x + y

    x, y = torch.ones(3), torch.ones(4)
    with fails("SL202"):
        add(x, y)
    # "got": the error of the fake itself, not one that Dynamo met while it traced how shiplap explains errors
    for other, dynamic, error in (
        (y, None, "SL202: sizes disagree"),
        (y, True, "SL202: sizes disagree"),
        (x.double(), None, "SL205: dtypes disagree"),
    ):
        with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=rf"got \w+Error..{error}"):
            torch.compile(add, backend="aot_eager", fullgraph=True, dynamic=dynamic)(x, other)


@pytest.mark.usefixtures("fresh_compiler")
def test_sizes_and_integers_do_not_specialise(ns):
    @sl.op(f"{ns}::window", dims={"m": "n - k + 1"}, requires=("1 <= k and k <= n",))
    def window(x: Float[Tensor, "n c"], k: int, scale: float = 1.0) -> Float[Tensor, "m c"]:
        return x.unfold(0, k, 1).sum(-1) * scale

    f = torch.compile(lambda x, k, s: window(x, k, s) * 2, backend="aot_eager", fullgraph=True, dynamic=True)
    for n, c, k in ((9, 3, 2), (10, 4, 3), (11, 5, 4), (20, 6, 7), (21, 7, 20)):
        x = torch.randn(n, c)
        assert torch.equal(f(x, k, 1.5), window(x, k, 1.5) * 2)
    counts = torch_private.compile_counts()
    assert (counts.graph_breaks, counts.recompiles) == (0, 0)


@pytest.mark.usefixtures("fresh_compiler")
def test_lists_of_integers_do_not_specialise_their_values(ns):
    @sl.op(f"{ns}::pool", dims={"m": "cdiv(n, prod(ks))"})
    def pool(x: V, ks: list[int]) -> Float[Tensor, "m"]:
        return x.new_zeros(-(-x.shape[0] // (ks[0] * ks[1])))

    f = torch.compile(lambda x, a, b: pool(x, [a, b]), backend="aot_eager", fullgraph=True, dynamic=True)
    for n, a, b in ((100, 2, 3), (90, 3, 4), (80, 4, 5)):
        assert f(torch.zeros(n), a, b).shape[0] == -(-n // (a * b))
    assert torch_private.compile_counts().recompiles == 0


def test_opcheck_agrees(nonzero, ns):
    @sl.op(f"{ns}::lin")
    def lin(x: Float[Tensor, "n c"], w: Float[Tensor, "m c"], k: int = 1, *, s: float = 1.0) -> Float[Tensor, "n m"]:
        return x @ w.T * (k * s)

    @lin.backward
    def _(grad, saved, needs):
        g = grad * (saved.k * saved.s)
        return {"x": g @ saved.w if needs.x else None, "w": g.T @ saved.x if needs.w else None}

    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    opcheck(lin.overload, (x, w), {"s": 2.0})
    opcheck(lin.overload, (x.detach().T.contiguous().T, w, 3))
    opcheck(nonzero.overload, (torch.randn(6),))


@pytest.mark.usefixtures("fresh_compiler")
def test_export_keeps_one_node(ns):
    @sl.op(f"{ns}::scale")
    def scale(x: Float[Tensor, "n c"], k: int = 2) -> Float[Tensor, "n c"]:
        return x * k

    class Model(torch.nn.Module):
        def forward(self, x):
            return scale(x, 3) + 1

    n = torch.export.Dim("n", min=2)
    program = torch.export.export(Model(), (torch.ones(4, 2),), dynamic_shapes={"x": {0: n}})
    assert sum(node.target is scale.overload for node in program.graph.nodes) == 1
    assert torch.equal(program.module()(torch.ones(7, 2)), torch.full((7, 2), 4.0))


def test_a_size_of_zero_is_a_size_and_a_negative_one_is_not(ns):
    @sl.op(f"{ns}::shorter")
    def shorter(x: V) -> Float[Tensor, "n-1"]:
        return x[1:].clone()

    with torch_private.fake_mode(symbolic=False) as mode:
        assert shorter(mode.from_tensor(torch.ones(1))).shape == (0,)
        assert shorter(torch.ones(1)).shape == (0,)
        with fails("SL208"):
            shorter(mode.from_tensor(torch.ones(0)))
    assert shorter(torch.ones(1, device="meta")).shape == (0,)


def test_the_least_of_unknown_sizes_is_not_decided(ns):
    @sl.op(f"{ns}::least", requires=("max(n, 1) >= min(n, 1)",))
    def least(x: V, y: Float[Tensor, "m"]) -> Float[Tensor, "min(n,m)"]:
        return x[: len(y)] + y[: len(x)]

    real = [torch.empty(n) for n in (4, 6)]
    with torch_private.fake_mode(symbolic=True) as mode:
        x, y = (torch_private.make_fake_tensor(mode, t, True) for t in real)
        before = len(mode.shape_env.guards)
        assert str(least(x, y).shape[0]).startswith("Min(")
        assert len(mode.shape_env.guards) == before


def test_python_is_refused_in_a_package_unless_a_template_takes_the_device(ns, monkeypatch):
    @sl.op(f"{ns}::packed")
    def packed(x: V) -> V:
        return x.clone()

    asked = []
    monkeypatch.setattr(fake, "refuse_python_in_package", lambda op, call: asked.append(call.device.type))
    with torch_private.fake_mode(symbolic=False) as mode:
        x = mode.from_tensor(torch.ones(2))
        packed(x)
        assert not asked
        monkeypatch.setattr(fake.dynamo, "is_packaging", lambda: True)
        packed(x)
        assert asked == ["cpu"]
        monkeypatch.setitem(packed.templates, "cuda", ["a template"])
        packed(x)
        assert asked == ["cpu", "cpu"]
        monkeypatch.setitem(packed.templates, "cpu", ["a template"])
        packed(x)
        assert asked == ["cpu", "cpu"]


@pytest.mark.parametrize(
    ("refused", "native", "got"),
    [
        ({}, "", "the reference"),
        ({"a": "it reads Python"}, "", "it reads Python"),
        ({"a": "other dtypes", "b": ""}, "a", "b, which Python picks"),
        ({"a": "other dtypes", "b": "other sizes"}, "ab", "other sizes"),
        ({"a": "other dtypes", "b": ""}, "ab", None),
        ({"a": "", "b": "it reads Python"}, "a", None),
    ],
)
def test_a_package_takes_the_first_native_kernel_that_serves(ns, refused, native, got):
    @sl.op(f"{ns}::packed")
    def packed(x: V) -> V:
        return x.clone()

    kernels = [SimpleNamespace(name=n, why_not_packaged=lambda call, why=why: why) for n, why in refused.items()]
    choices = [k for k in kernels if k.name in native]
    state = SimpleNamespace(
        spec=packed.spec, native_kernels=lambda device: kernels, native_choices=lambda device: choices
    )
    call = SimpleNamespace(device=torch.device("cpu"))
    if got is None:
        fake.refuse_python_in_package(state, call)
        return
    with pytest.raises(ShiplapError) as e:
        fake.refuse_python_in_package(state, call)
    assert e.value.id == "SL307"
    assert e.value.got.startswith(got)
