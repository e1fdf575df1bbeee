"""Objects as arguments: declared, checked, traced, compiled, exported, audited."""

import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import grad, jvp, vmap

import shiplap as sl
from shiplap.torch_private import graph_objects
from shiplap_testing.support import fails

pytestmark = pytest.mark.skipif(bool(graph_objects.REASON), reason=graph_objects.REASON)

V = Float[Tensor, "n"]


class Plan(sl.Opaque, fields="kept"):
    """A low-pass filter: which of the frequencies are kept, and work memory that a graph must not see."""

    def __init__(self, kept, gain=1.0):
        self.kept, self.gain, self.runs = kept, gain, 0

    @classmethod
    def sample(cls, rng, sizes):
        return cls(max(sizes["n"] // 2, 0), 2.0)


class Silent(sl.Opaque):
    """Without a way to make one."""


@pytest.fixture
def head(ns):
    @sl.op(f"{ns}::head", fake="reference")
    def head(plan: Plan, x: V) -> Float[Tensor, "m"]:
        return x[: plan.kept].clone()

    @head.kernel("cpu")
    def _(plan, x):
        plan.runs += 1
        return x[: plan.kept].clone()

    @head.backward(saves=("x",))
    def _(grad, saved, needs):
        return {"x": torch.cat([grad, grad.new_zeros(len(saved.x) - saved.plan.kept)])}

    return head


@pytest.fixture
def scale(ns):
    """An op whose sizes do not depend on the object."""

    @sl.op(f"{ns}::scale")
    def scale(x: V, plan: Plan | None = None) -> V:
        return x * (1 if plan is None else plan.gain)

    return scale


def test_eager_and_its_checks(head, scale, ns):
    assert f"{ns}::head({__name__}.Plan plan, Tensor x) -> Tensor" in repr(head)
    plan, x = Plan(2, 3.0), torch.arange(4.0)
    assert head(plan, x).tolist() == [0, 1]
    assert plan.runs == 1
    assert scale(x).tolist() == [0, 1, 2, 3]
    assert scale(x, plan).tolist() == scale(x, plan=plan).tolist() == [0, 3, 6, 9]
    with fails("SL209", where=f"{ns}::head, argument 'plan'", got="int", expected="Plan"):
        head(3, x)
    with fails("SL209", where=f"{ns}::scale, argument 'plan'", got="Silent", expected="Plan or None"):
        scale(x, Silent())


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_code_is_guarded_on_the_fields(head, scale, backend):
    compiled = torch.compile(lambda p, x: head(p, x + 1) + scale(x, p).sum(), backend=backend, fullgraph=True)
    x = torch.arange(5.0)
    for plan in (Plan(2), Plan(3), Plan(3, 2.0), Plan(2)):
        assert compiled(plan, x).tolist() == [v + 10 * plan.gain for v in (1, 2, 3)[: plan.kept]]


class Model(torch.nn.Module):
    def __init__(self, call, plan):
        super().__init__()
        self.call, self.plan = call, plan

    def forward(self, x):
        return self.call(self.plan, x)


def test_fake(head):
    with torch._subclasses.FakeTensorMode() as mode:
        assert head(Plan(2), mode.from_tensor(torch.arange(4.0))).shape == (2,)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="before torch 2.13, module() of a program refuses such objects")
def test_export(head):
    plan, x = Plan(2), torch.arange(4.0)
    exported = torch.export.export(Model(head, plan), (x,)).module()
    assert exported(x).tolist() == [0, 1]


def test_transforms_and_gradients(head):
    plan, x = Plan(2), torch.arange(4.0)
    assert vmap(lambda x: head(plan, x))(torch.stack([x, x])).tolist() == [[0, 1]] * 2
    assert grad(lambda x: head(plan, x).sum())(x).tolist() == [1, 1, 0, 0]
    assert jvp(lambda x: head(plan, x), (x,), (x,))[1].tolist() == [0, 1]


@pytest.mark.long
def test_an_audit_makes_one(head, scale, ns):
    for op in (head, scale):
        findings = sl.audit(op, checks=("numerics", "fake", "schema", "opcheck", "compile", "determinism"), seed=0)
        assert {f.verdict for f in findings} <= {"ok", "skip"}, findings

    @sl.op(f"{ns}::silent")
    def silent(plan: Silent, x: V) -> V:
        return x.clone()

    with fails("SL502", "no way to make a Silent"):
        sl.audit(silent, checks=("numerics",), seed=0)

    @silent.samples
    def _(rng, sizes, dtype, device):
        return Silent(), torch.randn(sizes["n"], generator=rng, dtype=dtype)

    assert [f.verdict for f in sl.audit(silent, checks=("numerics",), seed=0)] == ["ok"]


@pytest.mark.usefixtures("fresh_compiler")
def test_a_trace_reads_declared_fields_alone(ns):
    @sl.op(f"{ns}::loud", fake="reference")
    def loud(plan: Plan, x: V) -> V:
        return x * plan.gain

    assert loud(Plan(1, 2.0), torch.ones(2)).tolist() == [2, 2]
    with pytest.raises(Exception, match="SL132"):
        torch.compile(loud, backend="aot_eager", fullgraph=True)(Plan(1, 2.0), torch.ones(2))


def test_refusals(ns, monkeypatch):
    class Local(sl.Opaque):
        pass

    def local(plan: Local, x: V) -> V:
        return x.clone()

    with fails("SL103", expected="a class that its module has by name"):
        sl.op(f"{ns}::f")(local)

    def foreign(plan: pytest.Session, x: V) -> V:
        return x.clone()

    with fails("SL103", "derive Session from sl.Opaque"):
        sl.op(f"{ns}::f")(foreign)

    def made(x: V) -> Plan:
        return Plan(1)

    with fails("SL109", got="Plan"):
        sl.op(f"{ns}::f")(made)

    def good(plan: Plan, x: V) -> V:
        return x.clone()

    op = sl.op(f"{ns}::g")(good)
    with fails("SL404", got="Plan"):
        op.kernel("cpu", sl.cabi("nowhere", "g"))
    monkeypatch.setattr(graph_objects, "REASON", "this torch has no opaque objects (of that name)")
    with fails("SL103", "use a newer torch"):
        sl.op(f"{ns}::h")(good)
