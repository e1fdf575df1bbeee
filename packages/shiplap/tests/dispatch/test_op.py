"""The Op object: reload, adoption, cost, and how it behaves inside other people's tools."""

import copy
import inspect
import pickle
import sys

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap import torch_private
from shiplap.dispatch import registry
from shiplap_testing.support import fails

V = Float[Tensor, "n"]


def cell(ns, factor, gradient=None, annotation=V):
    """A notebook cell that declares the same function again, edited."""

    def f(x: V) -> V:
        return x * factor

    f.__annotations__["x"] = annotation
    op = sl.op(f"{ns}::f")(f)
    if gradient is not None:
        op.backward(saves=[])(lambda grad, saved, needs: {"x": grad * gradient})
    return op


@pytest.mark.usefixtures("fresh_compiler")
def test_declaring_again_replaces(ns):
    x = torch.ones(2, requires_grad=True)
    op = cell(ns, 2, 2)
    packet = lambda x: getattr(torch.ops, ns).f(x)  # noqa: E731
    module = {"op": op}
    compiled = torch.compile(lambda x: module["op"](x) + 1, backend="aot_eager", fullgraph=True)
    through_packet = torch.compile(packet, backend="aot_eager", fullgraph=True)
    assert (op(x)[0], compiled(x)[0], packet(x)[0], through_packet(x)[0]) == (2, 3, 2, 2)

    module["op"] = cell(ns, 5, 7)
    assert registry.find_declared_op(f"{ns}::f") is module["op"]
    assert (module["op"](x)[0], compiled(x)[0], packet(x)[0], through_packet(x)[0]) == (5, 6, 5, 5)
    compiled(x).sum().backward()
    assert x.grad.tolist() == [7, 7]

    cell(ns, 3, annotation=Float[Tensor, "n c"])
    with fails("SL201", got="1 dims, shape (2)"):
        packet(x)


def test_a_gradient_attached_later_counts_in_compiled_code(ns, fresh_compiler):
    op = cell(ns, 2)
    compiled = torch.compile(lambda x: op(x) + 1, backend="aot_eager", fullgraph=True)
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(Exception, match="SL304"):
        compiled(x).sum().backward()
    op.backward(lambda grad, saved, needs: {"x": grad * 9})
    compiled(x).sum().backward()
    assert x.grad.tolist() == [9, 9]
    op.backward(lambda grad, saved, needs: {"x": grad * 4})
    compiled(x).sum().backward()
    assert x.grad.tolist() == [13, 13]


def test_a_kernel_replaced_is_used_by_compiled_code(ns, fresh_compiler):
    op = cell(ns, 2)
    compiled = torch.compile(lambda x: op(x) + 1, backend="aot_eager", fullgraph=True)
    assert compiled(torch.ones(1)) == 3
    op.kernel("cpu", lambda x, out: out.copy_(x * 7), name="k")
    assert compiled(torch.ones(1)) == 8
    op.kernel("cpu", lambda x, out: out.copy_(x * 8), name="k")
    assert compiled(torch.ones(1)) == 9


def test_the_same_file_run_as_main_is_the_same_function(ns):
    def f(x: V) -> V:
        return x

    sl.op(f"{ns}::f")(f)
    f.__module__ = "__main__"
    sl.op(f"{ns}::f")(f)


def test_an_op_looks_like_its_function(ns):
    @sl.op(f"{ns}::documented")
    def documented(x: V, k: int = 3) -> V:
        """One sentence."""
        return x * k

    assert documented.__name__ == "documented"
    assert documented.__doc__ == "One sentence."
    assert list(inspect.signature(documented).parameters) == ["x", "k"]
    assert documented(k=2, x=torch.ones(1)) == 2
    assert repr(documented) == f"<shiplap op {ns}::documented(Tensor x, SymInt k=3) -> Tensor; kernels none>"
    assert documented.overload is getattr(torch.ops, ns).documented.default


@sl.op("test_op::module_level")
def module_level(x: V) -> V:
    return x * 2


def test_a_model_that_holds_an_op_is_copied_and_pickled():
    model = torch.nn.Module()
    model.op = module_level
    assert copy.deepcopy(model).op is module_level
    assert copy.copy(module_level) is module_level
    assert pickle.loads(pickle.dumps(module_level)) is module_level


def test_a_plain_call_is_two_frames_and_a_few_questions(ns):
    """What a call costs beside its work: counted here, timed by `benchmarks/overhead.py`."""
    op, x = cell(ns, 2), torch.ones(1, device="meta")
    op.can_skip_dispatcher, op.call_kernel = True, id
    frames, questions = [], []

    def note(frame, event, function):
        if event == "call":
            frames.append(frame.f_code.co_name)
        elif event == "c_call":
            questions.append(function)

    sys.setprofile(note)
    try:
        op(x)
    finally:
        sys.setprofile(None)
    assert frames == ["__call__", "is_dynamo_compiling"]
    assert len(questions[: questions.index(id)]) <= 4, questions


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "bad", [lambda x: ("x",), lambda x: ([x],), lambda x: (x, "2"), lambda x: (x, None), lambda x: ()]
)
def test_wrong_kinds_while_tracing(ns, bad):
    @sl.op(f"{ns}::f")
    def f(x: V, s: float = 1.0) -> V:
        return x * s

    with pytest.raises(Exception, match=r"SL209|SL220"):
        torch.compile(lambda x: f(*bad(x)) + x, backend="aot_eager", fullgraph=True)(torch.ones(1))
    with pytest.raises(sl.ShiplapError, match="SL209"):
        getattr(torch.ops, ns).f(*bad(torch.ones(1)))


@pytest.mark.usefixtures("fresh_compiler")
def test_equal_calls_that_draw_are_two_in_a_graph_for_training(ns):
    @sl.op(f"{ns}::noisy", random="global")
    def noisy(x: V) -> V:
        return x + torch.rand_like(x)

    @noisy.backward
    def _(grad, saved, needs):
        return {"x": grad}

    x = torch.zeros(9, requires_grad=True)
    first, second = torch.compile(lambda x: (noisy(x) * 1, noisy(x) * 2), backend="aot_eager", fullgraph=True)(x)
    assert not torch.equal(first * 2, second)


@pytest.mark.usefixtures("fresh_compiler")
def test_keywords_and_defaults_compile(ns):
    @sl.op(f"{ns}::f")
    def f(x: V, y: V | None = None, k: int = 2, ks: list[int] = (1,), *, p: float = 1.0, mode: str = "a") -> V:
        return x * k * p + (0 if y is None else y) + ks[0] + (mode == "b")

    def fn(x):
        return f(x), f(k=3, x=x), f(x, x, p=0.5), f(x, mode="b", ks=[4]), f(x, None, 2, [1], p=1.0, mode="a")

    x = torch.arange(3.0)
    for a, b in zip(torch.compile(fn, backend="aot_eager", fullgraph=True)(x), fn(x), strict=True):
        assert torch.equal(a, b)


def adopted(ns, real=lambda x, k=2: x * k, **declaration):
    lib = torch.library.Library(ns, "DEF")
    lib.define("f(Tensor x, SymInt k=2) -> Tensor")
    lib.impl("f", real, "CompositeExplicitAutograd")

    @sl.adopt(f"{ns}::f", **declaration)
    def f(x: V, k: int = 2) -> V:
        return x * k

    return lib, f


def test_adopting_leaves_the_op_alone(ns):
    lib, op = adopted(ns, lambda x, k=2: x * k + 1)
    assert op(torch.ones(1)) == 3
    assert op.reference(torch.ones(1)) == 2
    assert op.overload is getattr(torch.ops, ns).f.default
    assert registry.find_declared_op(f"{ns}::f") is None
    with pytest.raises(TypeError, match="is adopted: its kernels are registered elsewhere"):
        op.kernel("cpu", lambda x: x)
    with pytest.raises(TypeError, match="is adopted: its gradient is registered elsewhere"):
        op.backward(lambda grad, saved, needs: {})
    with fails("SL209", got="str"):
        op("x")
    del lib


def test_adopting_what_nobody_registered(ns):
    with fails("SL501", where=f"{ns}::gone", fix="import the library that registers it first"):

        @sl.adopt(f"{ns}::gone")
        def gone(x: V) -> V: ...


def test_the_reset_of_the_compiler_forgets(ns):
    torch_private.reset_compiler()
    assert torch_private.compile_counts().recompiles == 0


def test_whoever_holds_an_op_that_was_declared_again_calls_the_new_one(ns):
    """A cell that was run twice, a module that was reloaded: torch has freed the operator that the old object named."""

    def declare(k):
        @sl.op(f"{ns}::again")
        def op(x: V) -> V:
            return x * k

        @op.kernel("cpu")
        def _(x, *, out):
            torch.mul(x, k, out=out)

        return op

    held = []
    for k in range(1, 4):
        held.append(declare(k))
        assert [op(torch.ones(1)).item() for op in held] == [k] * k

    @held[0].backward
    def _(grad, saved, needs):
        return {"x": grad * 5}

    x = torch.ones(1, requires_grad=True)
    for op in held:
        assert torch.autograd.grad(op(x), x)[0].item() == 5
