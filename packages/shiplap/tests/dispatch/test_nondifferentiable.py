"""Results that carry no gradient, arguments through which none flows, and gradients that are no derivative."""

import pytest
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.func import grad, jvp, vmap

import shiplap as sl
from shiplap_testing.support import fails

V = Float[Tensor, "n"]
M = Float[Tensor, "n d"]
ACTIVATIONS = torch.sigmoid, torch.sigmoid, torch.tanh, torch.sigmoid
GATES = ("i", "f", "g", "o", "tanh_c")


@pytest.fixture
def lstm(ns):
    """An LSTM cell: the new state, and five results that a backward wants and nobody else."""

    @sl.op(f"{ns}::lstm", outputs=("h", "c", *GATES), nondifferentiable=GATES)
    def lstm(gates: Float[Tensor, "n 4 d"], cell: M) -> tuple[M, M, M, M, M, M, M]:
        i, f, g, o = gates.unbind(1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c = f * cell + i * g
        tanh_c = c.tanh()
        return o * tanh_c, c, *(t.detach() for t in (i, f, g, o, tanh_c))

    @lstm.backward(saves=("gates", "cell", *GATES))
    def _(grads, saved, needs):
        dh, dc, i, f, g, o, t = *grads[:2], saved.i, saved.f, saved.g, saved.o, saved.tanh_c
        if torch.is_grad_enabled():  # for a second gradient: what was saved is a constant
            i, f, g, o = (a(t) for a, t in zip(ACTIVATIONS, saved.gates.unbind(1), strict=True))
            t = (f * saved.cell + i * g).tanh()
        dc = dc + dh * o * (1 - t * t)
        parts = dc * g * i * (1 - i), dc * saved.cell * f * (1 - f), dc * i * (1 - g * g), dh * t * o * (1 - o)
        return {"gates": torch.stack(parts, 1), "cell": dc * f}

    return lstm


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    return torch.randn(3, 4, 2, dtype=torch.float64), torch.randn(3, 2, dtype=torch.float64)


def flags(results):
    return [r.requires_grad for r in results]


WANTED = [True, True, *[False] * 5]


@pytest.mark.usefixtures("fresh_compiler")
def test_results_carry_no_gradient_whatever_calls_them(lstm, inputs):
    leaves = [t.clone().requires_grad_() for t in inputs]
    eager = lstm(*leaves)
    assert flags(eager) == WANTED
    assert flags(lstm.overload(*leaves)) == WANTED
    for backend in ("aot_eager", "eager"):
        compiled = torch.compile(lstm, backend=backend, fullgraph=True)(*leaves)
        assert flags(compiled) == WANTED
        got = torch.autograd.grad(compiled[0].sum() + compiled[1].sin().sum(), leaves)
        want = torch.autograd.grad(sum(_loss(lstm.reference(*leaves))), leaves)
        for a, e in zip(got, want, strict=True):
            torch.testing.assert_close(a, e)
    mapped = vmap(lstm)(*(torch.stack([t, 2 * t]) for t in leaves))
    assert flags(mapped) == WANTED
    assert not any(flags(lstm(*inputs)))


def test_the_gradient_of_a_result_that_carries_none_takes_no_memory(ns):
    seen = []

    @sl.op(f"{ns}::kept", outputs=("h", "c", "kept"), nondifferentiable="kept")
    def kept(x: M) -> tuple[M, M, M]:
        return x * 2, x * 3, x.detach() * 4

    @kept.backward(strided=True)
    def _(grads, saved, needs):
        seen.extend(grads)
        return {"x": grads[0] * 2 + grads[1] * 3}

    x = torch.ones(30, 4, requires_grad=True)
    assert torch.equal(torch.autograd.grad(kept(x)[1].sum(), x)[0], torch.full((30, 4), 3.0))
    assert [g.shape for g in seen] == [x.shape] * 3
    assert [bool(g.any()) for g in seen] == [False, True, False]
    assert seen[2].untyped_storage().nbytes() == x.itemsize


def _loss(results):
    return results[0].sum(), results[1].sin().sum()


def test_torch_func_and_forward_mode(lstm, inputs):
    def loss(gates, cell):
        return sum(_loss(lstm(gates, cell)))

    def plain(gates, cell):
        return sum(_loss(lstm.reference(gates, cell)))

    torch.testing.assert_close(grad(loss)(*inputs), grad(plain)(*inputs))
    batch = tuple(torch.stack([t, t.cos()]) for t in inputs)
    torch.testing.assert_close(vmap(grad(loss))(*batch), vmap(grad(plain))(*batch))
    tangents = jvp(lstm, inputs, tuple(map(torch.ones_like, inputs)))[1]
    assert [bool(t.any()) for t in tangents] == WANTED
    torch.testing.assert_close(grad(lambda g: lstm(g, inputs[1])[2].sum())(inputs[0]), torch.zeros_like(inputs[0]))


def test_a_second_gradient(lstm, inputs):
    def second(cell):
        leaves = [t.clone().requires_grad_() for t in inputs]
        results = cell(*leaves)
        assert flags(results) == WANTED
        first = torch.autograd.grad(sum(_loss(results)), leaves, create_graph=True)
        return torch.autograd.grad(sum(t.sin().sum() for t in first), leaves)

    torch.testing.assert_close(second(lstm), second(lstm.reference))


@pytest.mark.long
def test_the_audit_agrees(lstm):
    findings = sl.audit(lstm, checks=("gradient", "backward", "requires_grad", "transforms"), seed=0)
    assert {f.verdict for f in findings} == {"ok"}, findings


def test_the_audit_finds_a_result_that_the_reference_detaches(ns):
    @sl.op(f"{ns}::halves")
    def halves(x: V) -> tuple[V, V]:
        return x / 2, (x / 2).detach()

    @halves.backward(saves=())
    def _(grads, saved, needs):
        return {"x": grads[0] / 2}

    (finding,) = sl.audit(halves, checks=("requires_grad",), seed=0)
    assert finding.verdict == "fail"
    assert "out1" in finding.evidence
    assert 'nondifferentiable=("out1",)' in finding.fix


@pytest.fixture
def scaled(ns):
    @sl.op(f"{ns}::scaled", nondifferentiable="scale")
    def scaled(x: V, scale: V, *, keep: Bool[Tensor, "n"] | None = None) -> V:
        return x * scale

    @scaled.kernel("cpu")
    def _(x, scale, *, keep=None, out):
        torch.mul(x, scale, out=out)

    @scaled.backward(saves=("scale",))
    def _(grad, saved, needs):
        assert not needs.scale
        return {"x": scaled(grad, saved.scale)}

    return scaled


@pytest.mark.usefixtures("fresh_compiler")
def test_no_gradient_flows_through_an_argument(scaled):
    x, scale = (torch.rand(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for call in (scaled, scaled.overload, torch.compile(scaled, backend="aot_eager", fullgraph=True)):
        out = call(x, scale)
        assert [g is None for g in torch.autograd.grad(out.sum(), (x, scale), allow_unused=True)] == [False, True]
        assert not call(x.detach(), scale).requires_grad
        assert not call(x.detach(), scale=scale).requires_grad
    assert torch.equal(grad(lambda s: scaled(x.detach(), s).sum())(scale.detach()), torch.zeros_like(x))
    assert not jvp(lambda s: scaled(x.detach(), s), (scale.detach(),), (torch.ones_like(x),))[1].any()
    first = torch.autograd.grad((scaled(x, scale) ** 2).sum(), x, create_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], 2 * scale.detach() ** 2)
    findings = sl.audit(scaled, checks=("gradient", "backward", "requires_grad", "transforms"), seed=0)
    assert {f.verdict for f in findings} == {"ok"}, findings


def test_an_op_that_writes_takes_an_argument_that_requires_a_gradient(ns):
    @sl.op(f"{ns}::store", mutates="cache", nondifferentiable="rows")
    def store(cache: M, rows: M) -> None:
        cache.copy_(rows)

    cache = torch.zeros(2, 3)
    store(cache, torch.ones(2, 3, requires_grad=True))
    assert cache.sum() == 6
    assert not cache.requires_grad


def test_an_op_none_of_whose_results_carries_a_gradient(ns):
    @sl.op(f"{ns}::levels", nondifferentiable="out")
    def levels(x: V, at: Int64[Tensor, "k"]) -> Float[Tensor, "k"]:
        return x[at]

    x = torch.ones(3, requires_grad=True)
    for call in (levels, levels.overload, torch.compile(levels, backend="aot_eager", fullgraph=True)):
        assert not call(x, torch.tensor([0, 2])).requires_grad
    assert not (vmap(lambda x: levels(x, torch.tensor([0])))(torch.stack([x, x]))).requires_grad


@pytest.fixture
def rounded(ns):
    @sl.op(f"{ns}::rounded")
    def rounded(x: V, scale: Float[Tensor, ""]) -> V:
        return (x / scale).round() * scale

    def through(x, scale):
        return x + ((x / scale).round() - x / scale).detach() * scale

    @rounded.backward(surrogate=through)
    def _(grad, saved, needs):
        error = (saved.x / saved.scale).round() - saved.x / saved.scale
        return {"x": grad, "scale": (grad * error.detach()).sum()}

    return rounded


@pytest.mark.long
def test_a_straight_through_estimator_is_compared_with_its_surrogate(rounded):
    findings = sl.audit(rounded, checks=("gradient", "backward", "transforms"), seed=0)
    assert {f.verdict for f in findings} == {"ok"}, findings
    x, scale = torch.tensor([0.3, 1.8]), torch.tensor(0.5)
    primal, tangent = jvp(rounded, (x, scale), (torch.ones(2), torch.tensor(0.0)))
    assert (primal.tolist(), tangent.tolist()) == ([0.5, 2.0], [1.0, 1.0])
    assert vmap(grad(lambda x: rounded(x, scale).sum()))(torch.stack([x, x])).tolist() == [[1, 1]] * 2


def test_a_wrong_surrogate_gradient_is_found(ns):
    @sl.op(f"{ns}::stairs")
    def stairs(x: V) -> V:
        return x.round()

    @stairs.backward(saves=(), surrogate=lambda x: x + (x.round() - x).detach())
    def _(grad, saved, needs):
        return {"x": grad * 2}

    (finding,) = sl.audit(stairs, checks=("gradient",), seed=0)
    assert finding.verdict == "fail"


def test_refusals(ns):
    with fails("SL119", where=f"{ns}::f, nondifferentiable=", got="'y'", expected="one of x, out"):
        sl.op(f"{ns}::f", nondifferentiable="y")(_identity)

    def write(x: V) -> None:
        x.zero_()

    with fails("SL119", got="'x', which the op writes to"):
        sl.op(f"{ns}::f", nondifferentiable="x", mutates="x")(write)
    op = sl.op(f"{ns}::f")(_identity)
    with fails("SL110", got="surrogate= with arguments y", expected="a function of x"):
        op.backward(lambda grad, saved, needs: {}, surrogate=lambda y: y)


def _identity(x: V) -> V:
    return x.clone()
