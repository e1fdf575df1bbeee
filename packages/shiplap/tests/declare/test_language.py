"""What the language of torch's schemas has, and a declaration can say: schema, call, fake, export and refusal."""

from functools import partial

import pytest
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.func import jvp

import shiplap as sl
from shiplap_testing.support import fails

V = Float[Tensor, "n"]
ANY = Float[Tensor, "..."]


def settings(
    x: V,
    dtype: torch.dtype,
    device: torch.device | None = None,
    layout: torch.layout | None = None,
    memory_format: torch.memory_format | None = None,
    *,
    scale: int | float = 2,
    turn: complex = 1j,
    names: list[str] | None = None,
    scales: list[int | float],
    generator: torch.Generator | None = None,
) -> V:
    assert dtype == torch.float64
    assert device is None or isinstance(device, torch.device)
    assert generator is None or isinstance(generator, torch.Generator)
    noise = torch.rand(x.shape, generator=generator, dtype=x.dtype) if generator is not None else 0
    return x * scale * scales[0] * abs(turn) + len(names or []) + noise


@pytest.fixture
def x():
    return torch.rand(4, dtype=torch.float64)


def test_torchs_own_types(ns, x):
    declared = sl.op(f"{ns}::settings")(settings)
    op = partial(declared, scales=[0.5])
    assert str(declared.overload._schema).partition("::")[2] == (
        "settings(Tensor x, ScalarType dtype, Device? device=None, Layout? layout=None, "
        "MemoryFormat? memory_format=None, *, Scalar scale=2, complex turn=0.+1.j, str[]? names=None, "
        "Scalar[] scales, Generator? generator=None) -> Tensor"
    )
    assert torch.equal(op(x, torch.float64), x)
    device, layout = torch.device("cpu"), torch.strided
    assert torch.equal(op(x, torch.float64, device, layout, torch.contiguous_format, scale=4, names=["a"]), 2 * x + 1)
    first, second = (op(x, torch.float64, generator=torch.Generator().manual_seed(7)) for _ in range(2))
    assert torch.equal(first, second)
    with torch._subclasses.FakeTensorMode() as mode:
        assert op(mode.from_tensor(x), torch.float64, device).shape == (4,)
    graph = torch.export.export(Model(lambda x: op(x, torch.float64, device, scale=3.5)), (x,)).module()
    torch.testing.assert_close(graph(x), x * 1.75)
    with fails("SL209", where=f"{ns}::settings, argument 'dtype'", got="str", expected="dtype"):
        op(x, "float64")
    with fails("SL209", got="str", expected="Scalar"):
        op(x, torch.float64, scale="2")


def test_defaults_of_torchs_own_types_are_torchs(ns, x):
    seen = []

    @sl.op(f"{ns}::defaults")
    def defaults(
        x: V,
        dtype: torch.dtype = torch.float16,
        device: torch.device = torch.device("cpu"),  # noqa: B008
        strided: torch.layout = torch.strided,
        sparse: torch.layout = torch.sparse_coo,
        contiguous: torch.memory_format = torch.contiguous_format,
        preserve: torch.memory_format = torch.preserve_format,
        last: torch.memory_format = torch.channels_last,
        last_3d: torch.memory_format = torch.channels_last_3d,
    ) -> V:
        seen.append((dtype, device, strided, sparse, contiguous, preserve, last, last_3d))
        return x.clone()

    formats = torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d
    for call in (defaults, getattr(torch.ops, ns).defaults):
        call(x)
        assert seen.pop() == (torch.float16, torch.device("cpu"), torch.strided, torch.sparse_coo, *formats)
        # Torch drops last arguments that equal the defaults in its schema.
        names = ("strided", "sparse", "contiguous", "preserve", "last", "last_3d")
        for at, name in enumerate(names, 2):
            for given in formats if at > 3 else (torch.strided, torch.sparse_coo, torch.sparse_csr):
                call(x, **{name: given})
                assert seen.pop()[at] == given


class Model(torch.nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, *args):
        return self.call(*args)


@pytest.mark.long
def test_keyword_only_tensors_have_gradients(ns, x):
    @sl.op(f"{ns}::scaled")
    def scaled(x: V, *, weight: V, bias: V | None = None) -> V:
        return x * weight if bias is None else x * weight + bias

    @scaled.kernel("cpu")
    def _(x, *, weight, bias, out):
        torch.mul(x, weight, out=out)
        if bias is not None:
            out += bias

    @scaled.backward(saves=("x", "weight"))
    def _(grad, saved, needs):
        return {"x": grad * saved.weight, "weight": grad * saved.x, "bias": grad}

    assert "Tensor x, *, Tensor weight, Tensor? bias=None" in str(scaled.overload._schema)
    leaf, w = x.clone().requires_grad_(), (x + 1).requires_grad_()
    assert torch.equal(scaled(x, weight=x), x * x)
    for given in ({}, {"bias": w}):
        got = torch.autograd.grad(scaled(leaf, weight=w, **given).sum(), (leaf, w))
        want = torch.autograd.grad(scaled.reference(leaf, weight=w, **given).sum(), (leaf, w))
        torch.testing.assert_close(got, want)
        assert torch.autograd.grad(torch.ops.__getattr__(ns).scaled(x, weight=w, **given).sum(), w)
    torch.testing.assert_close(jvp(lambda w: scaled(x, weight=w), (x,), (x,))[1], x * x)
    torch.testing.assert_close(torch.func.grad(lambda w: scaled(x, weight=w).sum())(x), x)
    verdicts = {f.check: f.verdict for f in sl.audit(scaled, checks=("schema", "fake", "gradient", "kernels"))}
    assert "fail" not in verdicts.values(), verdicts


def test_lists_and_optionals_that_are_written_to(ns, x):
    @sl.op(f"{ns}::step", mutates=("params", "best"))
    def step(params: list[ANY], grads: list[ANY], best: V | None = None, lr: float = 0.5) -> None:
        for p, g in zip(params, grads, strict=True):
            p.sub_(lr * g)
        if best is not None:
            best.copy_(params[0])

    assert "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)? best=None, float lr=0.5)" in str(step.overload._schema)
    params, best = [x.clone(), x[:2].clone()], torch.zeros_like(x)
    step(params, [x, x[:2]], best)
    assert torch.equal(params[0], x / 2)
    assert torch.equal(best, x / 2)
    step(params, [x, x[:2]])
    assert not params[1].any()
    with fails("SL210"):
        step([x], [x])
    with fails("SL304"):
        step([x.clone().requires_grad_()], [x])
    traced = torch.export.export(Model(lambda p, g: step([p], [g])), (x.clone(), x)).module()
    p = x.clone()
    traced(p, x)
    assert torch.equal(p, x / 2)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_step_over_a_list(ns, x):
    @sl.op(f"{ns}::sgd", mutates="params")
    def sgd(params: list[V], grads: list[V]) -> None:
        for p, g in zip(params, grads, strict=True):
            p.sub_(g)

    params = [x.clone(), x.clone()]
    torch.compile(lambda ps, gs: sgd(ps, [2 * g for g in gs]), fullgraph=True, backend="aot_eager")(params, [x, x])
    assert all(torch.equal(p, -x) for p in params)


def test_overloads_of_one_name(ns, x):
    @sl.op(f"{ns}::pick.row")
    def row(x: V, i: int) -> Float[Tensor, "1"]:
        return x[i : i + 1] * 1

    @sl.op(f"{ns}::pick.rows")
    def rows(x: V, i: Int64[Tensor, "m"]) -> Float[Tensor, "m"]:
        return x[i]

    assert str(row.overload._schema).startswith(f"{ns}::pick.row(Tensor x, SymInt i)")
    assert torch.equal(row(x, 1), x[1:2])
    assert torch.equal(rows(x, torch.tensor([2, 0])), x[[2, 0]])
    assert getattr(torch.ops, ns).pick.rows is rows.overload
    with fails("SL304"):
        rows(x.clone().requires_grad_(), torch.tensor([1])).sum().backward()


@pytest.mark.parametrize("name", ["pick.default", "pick.raw", "pick.a.b", "pick."])
def test_overloads_that_torch_has_a_use_for(ns, name):
    with fails("SL101"):
        sl.op(f"{ns}::{name}")


def test_arguments_called_as_python_calls_its_own(ns, x):
    @sl.op(f"{ns}::own")
    def own(self: V, workspace: V, out_: V) -> V:
        return self + workspace + out_

    @own.kernel("cpu", workspace="8 * n")
    def _(self, workspace, out_, *, out, workspace_):
        assert workspace_.numel() == 32
        torch.add(self, workspace + out_, out=out)

    assert torch.equal(own(x, x, x), 3 * x)
    assert torch.equal(torch.ops.__getattr__(ns).own(self=x, workspace=x, out_=x), 3 * x)


def test_c_cannot_take_them(ns):
    @sl.op(f"{ns}::typed")
    def typed(x: V, dtype: torch.dtype) -> V:
        return x * 1

    with fails("SL404", where=f"{ns}::typed, argument 'dtype'", got="dtype"):
        typed.kernel("cpu", sl.cabi("none.so", "typed"))


def test_what_no_schema_has(ns):
    with fails("SL103", got="default [1, 0.5]", expected="no default, which torch cannot parse for list[Scalar]"):

        @sl.op(f"{ns}::listed")
        def listed(x: V, scales: list[int | float] = [1, 0.5]) -> V:  # noqa: B006
            return x * 1

    with fails("SL103", got="bytes"):

        @sl.op(f"{ns}::raw")
        def raw(x: V, key: bytes) -> V:
            return x * 1
