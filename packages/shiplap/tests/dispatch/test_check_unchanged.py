"""A write that the declaration does not list is an error of the first calls, without an audit."""

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap.dispatch.check_unchanged import CHECKED_CALLS, writes_are_audited
from shiplap_testing.support import fails

M = Float[Tensor, "n c"]


@pytest.fixture
def add(ns):
    @sl.op(f"{ns}::add")
    def add(x: M, y: M) -> M:
        return x + y

    return add


def ones():
    return torch.ones(2, 3), torch.ones(2, 3)


@pytest.mark.parametrize(
    "way",
    {
        "eager": lambda op: op,
        "inference": lambda op: torch.inference_mode()(op),
        "aot_eager": lambda op: torch.compile(lambda x, y: op(x, y), backend="aot_eager"),
        "out": lambda op: lambda x, y: op.out(x, y, out=torch.empty(2, 3)),
        "vmap": lambda op: lambda x, y: torch.vmap(op)(x[None], y[None]),
    }.values(),
)
def test_a_kernel_that_writes_to_an_argument(add, way):
    add.kernel("cpu", lambda x, y: x.add_(y), name="k")
    fix = "write to a copy, x.clone(), or declare the write: mutates=('x',)"
    where = f"{add.spec.name}, kernel k"
    with fails("SL316", where=where, got="a write to the argument 'x'", expected="writes to no argument", fix=fix):
        way(add)(*ones())


def test_a_reference_that_writes_to_an_argument(ns):
    @sl.op(f"{ns}::f", mutates="x")
    def f(x: M, y: M) -> None:
        x.add_(y.mul_(2))

    got, fix = "a write to the argument 'y'", "write to a copy, y.clone(), or add 'y' to mutates="
    with fails("SL316", where=f"{f.spec.name}, reference", got=got, expected="writes to x", fix=fix):
        f(*ones())


@pytest.mark.parametrize("change", [lambda x, y: x.set_(y), lambda x, y: x.resize_(1, 1)])
@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_written_to_keeps_its_memory(ns, change, compiled):
    @sl.op(f"{ns}::f", mutates="x")
    def f(x: Float[Tensor, "*a"], y: Float[Tensor, "*b"]) -> None:
        change(x, y)

    run = torch.compile(lambda x, y: f(x, y), backend="aot_eager") if compiled else f
    with fails("SL316", "'x' with shape", where=f"{f.spec.name}, reference"):
        run(torch.zeros(4), torch.ones(2))


def test_views_beside_what_is_written_to_are_left_alone(ns, add):
    @sl.op(f"{ns}::into", mutates="x")
    def into(x: M, y: M) -> None:
        x.add_(y)

    both = torch.zeros(2, 2, 3)
    into(both[:, 0], both[:, 1] + 1)
    into(both[:, 1], both[:, 0])
    assert both.eq(1).all()
    add.kernel("cpu", lambda x, y, *, out: torch.add(x, y, out=out))
    buffer = torch.ones(3, 2, 3)
    add.out(buffer[0], buffer[1], out=buffer[2])
    assert buffer[2].eq(2).all()


def test_a_strided_argument_is_written_to_as_a_copy(add):
    add.kernel("cpu", lambda x, y: x.add_(y))
    x = torch.ones(3, 2).t()
    assert add(x, torch.ones(2, 3)).eq(2).all()
    assert x.eq(1).all()


def test_later_calls_are_not_looked_at(add):
    add.kernel("cpu", lambda x, y: x + y)
    for _ in range(CHECKED_CALLS):
        add(*ones())
    (kernel,) = add.kernels["cpu"]
    assert kernel.unchanged.left == 0
    add(*ones())
    assert kernel.unchanged.left == 0


def test_an_audit_names_the_check_and_not_the_error(add):
    add.kernel("cpu", lambda x, y: x.add_(y))
    with writes_are_audited():
        add(*ones())
    (finding,) = sl.audit(add, checks=("schema",), seed=0)
    assert finding.verdict == "fail"
    assert "SL316" not in str(finding.evidence)


def test_a_kernel_that_returns_what_it_should_have_written(add):
    add.kernel("cpu", lambda x, y, *, out: x + y, name="k")
    fix = "write the result into out, or remove out from the parameters and return it"
    with fails("SL301", where=f"{add.spec.name}, kernel k", got="another tensor was returned", fix=fix):
        add(*ones())
    for fine in (
        lambda x, y, *, out: torch.add(x, y, out=out),
        lambda x, y, *, out: out.view(-1).copy_((x + y).view(-1)),
    ):
        add.kernel("cpu", fine)
        assert add(*ones()).eq(2).all()


def test_vmap_of_given_outputs(ns):
    @sl.op(f"{ns}::twice")
    def twice(x: M) -> M:
        return x * 2

    with fails("SL317", where=twice.spec.name, got="a call of op.out under torch.vmap"):
        torch.vmap(lambda x: twice.out(x, out=torch.empty(2, 3)))(torch.ones(4, 2, 3))


def test_an_absent_argument_is_served_after_the_first_calls_too(ns):
    """Generated code then looks at the arguments, whose layout the kernel needs, before it calls the kernel."""

    @sl.op(f"{ns}::scaled")
    def scaled(x: Float[Tensor, "n"], by: Float[Tensor, "n"] | None = None) -> Float[Tensor, "n"]:
        return x.clone() if by is None else x * by

    scaled.kernel("cpu", lambda x, by: x.clone() if by is None else x.view(-1) * by.view(-1))
    x, apart = torch.arange(3.0), torch.arange(6.0)[::2]
    for _ in range(CHECKED_CALLS + 2):
        assert torch.equal(scaled(x), x)
        assert torch.equal(scaled(apart, by=x), apart * x)
        assert torch.equal(scaled(x, by=apart), apart * x)
