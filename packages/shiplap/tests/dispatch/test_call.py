"""``Op.__call__`` takes a short cut below autograd: whoever must see a call still sees it.

``CASES`` are run twice: on an op as it is, and on one that takes the short cut always and past the dispatcher too. The
second shows that each case can fail.
"""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from jaxtyping import Float
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import shiplap as sl
from shiplap.torch_private import dispatcher_calls
from shiplap_testing.effort import sampled

V = Float[torch.Tensor, "n"]


def declare(ns):
    """``x * y + a``; ``ran`` lists the type of each first argument that reached the kernel."""
    ran = []

    @sl.op(f"{ns}::fma", autocast="autocast")
    def fma(x: V, y: V, a: float = 1.0) -> V:
        return x * y + a

    @fma.kernel("cpu")
    def kernel(x, y, a):
        ran.append(type(x))
        return x * y + a

    @fma.backward
    def backward(grad, saved, needs):
        return {"x": 10 * grad * saved.y, "y": 10 * grad * saved.x}  # tenfold: it is this that ran, and not autograd

    return SimpleNamespace(op=fma, ran=ran, x=torch.arange(3.0), y=torch.tensor([2.0, 3.0, 4.0]))


def gradient(on):
    y = on.y.clone().requires_grad_()
    on.op(on.x, y).sum().backward()
    assert torch.equal(y.grad, 10 * on.x)


def gradient_by_keyword(on):
    y = on.y.clone().requires_grad_()
    on.op(on.x, y=y, a=2.0).sum().backward()
    assert torch.equal(y.grad, 10 * on.x)


def no_gradient_where_none_is_wanted(on):
    y = on.y.clone().requires_grad_()
    for guard in (torch.no_grad, torch.inference_mode):
        with guard():
            out = on.op(on.x, y)
        assert not out.requires_grad
        assert out.is_inference() == (guard is torch.inference_mode)
    assert "fma" in on.op(on.x, y).grad_fn.name()


def autocast(on):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert on.op(on.x, on.y).dtype == torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert on.op(on.x, on.y).dtype == torch.float32


def functorch_gradient(on):
    """Below autograd the gradient would be zero."""
    assert torch.equal(torch.func.grad(lambda y: on.op(on.x, y).sum())(on.y), 10 * on.x)


def functorch_gradient_inside_another(on):
    """The tensor that functionalize wraps does not say that it requires a gradient: only the transform tells."""
    got = torch.func.grad(lambda y: torch.func.functionalize(on.op)(on.x, y).sum())(on.y)
    assert torch.equal(got, 10 * on.x)


def forward_mode(on):
    with torch.autograd.forward_ad.dual_level():
        y = torch.autograd.forward_ad.make_dual(on.y, torch.ones_like(on.y))
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(on.op(on.x, y)).tangent, on.x)
    assert on.ran == []  # the reference, since no kernel knows tangents


def functorch_vmap(on):
    """torch loops over an op without a batching rule: the kernel sees rows, never the batch."""
    rows = on.x.expand(2, 3)
    got = torch.func.vmap(lambda x: on.op(x, on.y))(rows)
    assert torch.equal(got, rows * on.y + 1)
    assert on.ran == [torch.Tensor] * 2


def dispatch_mode(on):
    class Log(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Log() as log:
        on.op(on.x, on.y)
    assert log.seen[0] == str(on.op.overload)


def flop_counter(on):
    packet = on.op.below_autograd._overloadpacket
    counter = FlopCounterMode(display=False, custom_mapping={packet: lambda x, y, a=1.0, **_: 2 * x[0]})
    with counter:
        on.op(on.x, on.y)
    assert counter.get_total_flops() == 6


def fake_mode(on):
    with torch._subclasses.FakeTensorMode() as mode:
        out = on.op(mode.from_tensor(on.x), mode.from_tensor(on.y))
    assert isinstance(out, torch._subclasses.FakeTensor)
    assert not on.ran


def function_mode(on):
    class Log(TorchFunctionMode):
        seen = ()

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen = (*self.seen, str(func))
            return func(*args, **(kwargs or {}))

    with Log() as log:
        on.op(on.x, on.y)
    assert log.seen[0] == str(on.op.below_autograd)


def function_subclass(on):
    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return str(func)

    assert on.op(on.x, on.y.as_subclass(Named)) == str(on.op.below_autograd)


def dispatch_subclass(on):
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, inner):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return str(func)

    with pytest.raises(RuntimeError, match=r"(?i)unable to cast|expected.*tensor"):  # a string is no tensor: C++ saw it
        on.op(Wrapper(on.x), on.y)
    assert not on.ran


def traced_by_make_fx(on):
    graph = make_fx(lambda x, y: on.op(x, y))(on.x, on.y).graph
    assert [str(n.target) for n in graph.nodes if n.op == "call_function"] == [str(on.op.overload)]


def traced_by_symbolic_trace(on):
    graph = torch.fx.symbolic_trace(lambda x, y: on.op(x, y)).graph
    assert [str(n.target) for n in graph.nodes if n.op == "call_function"] == [str(on.op.below_autograd)]


def traced_by_jit(on):
    graph = torch.jit.trace(lambda x, y: on.op(x, y), (on.x, on.y)).graph
    assert on.op.below_autograd._schema.name in {n.kind() for n in graph.nodes()}


def exported(on):
    class Model(torch.nn.Module):
        def forward(self, x, y):
            return on.op(x, y)

    for strict in (False, True):
        graph = torch.export.export(Model(), (on.x, on.y), strict=strict).graph
        assert [str(n.target) for n in graph.nodes if n.op == "call_function"] == [str(on.op.overload)]


def compiled(on):
    """Once: what is asked while tracing must not become a guard that fails at the next call."""
    graphs = CompileCounterWithBackend("aot_eager")
    run = torch.compile(lambda y: on.op(on.x, y).sum(), backend=graphs, fullgraph=True)
    for _ in range(2):
        y = on.y.clone().requires_grad_()
        run(y).backward()
        assert torch.equal(y.grad, 10 * on.x)
    assert graphs.frame_count == 1


def errors(on):
    for bad in (("x",), (on.x, on.y, 1.0, 2.0), (on.x, "y")):
        with pytest.raises(sl.ShiplapError) as caught:
            on.op(*bad)
        assert caught.value.id == "SL209"


CASES = [
    gradient,
    gradient_by_keyword,
    no_gradient_where_none_is_wanted,
    autocast,
    functorch_gradient,
    functorch_gradient_inside_another,
    functorch_vmap,
    forward_mode,
    dispatch_mode,
    flop_counter,
    fake_mode,
    function_mode,
    function_subclass,
    dispatch_subclass,
    traced_by_make_fx,
    traced_by_symbolic_trace,
    traced_by_jit,
    exported,
    compiled,
    errors,
]
by_name = pytest.mark.parametrize("case", sampled(CASES, 10), ids=lambda case: case.__name__)


@by_name
@pytest.mark.usefixtures("fresh_compiler")
def test_whoever_must_see_a_call_sees_it(case, ns):
    case(declare(ns))


@by_name
@pytest.mark.usefixtures("fresh_compiler")
def test_a_short_cut_past_everything_is_noticed(case, ns):
    on = declare(ns)

    class Cut(sl.Op):
        def __call__(self, *args, **kwargs):
            with torch.no_grad():  # with gradients on, `execute` would record what nothing above it has recorded
                return self.execute(*args, **kwargs)

    cut = object.__new__(Cut)
    cut.__dict__.update(on.op.__dict__)
    on.op = cut
    with pytest.raises(BaseException):  # noqa: B017, PT011 - what the case asserts, or torch says
        case(on)


class NotCompiling:
    _is_compiling_flag = False


QUESTIONS = {
    "compiler": (exported, NotCompiling),
    "any_autocast": (autocast, lambda: False),
    "any_requires_grad": (gradient, lambda *_: False),
    "functorch_transform": (functorch_gradient_inside_another, lambda: None),
    "is_dynamo_compiling": (compiled, lambda: False),
    "forward": (forward_mode, SimpleNamespace(_current_level=-1)),
}


OLDER = pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="Dynamo leaves _is_compiling_flag unset before torch 2.13: no guard is on it"
)


@pytest.mark.parametrize(
    "question", [pytest.param(name, marks=OLDER) if name == "is_dynamo_compiling" else name for name in QUESTIONS]
)
@pytest.mark.usefixtures("fresh_compiler")
def test_each_question_is_needed(question, ns, monkeypatch):
    case, no = QUESTIONS[question]
    monkeypatch.setattr(dispatcher_calls, question, no)
    with pytest.raises((AssertionError, RuntimeError, pytest.fail.Exception)):
        case(declare(ns))


def test_a_redeclared_op_is_called_anew(ns):
    def declared(factor):
        @sl.op(f"{ns}::scale")
        def scale(x: V) -> V:
            return x * factor

        return scale

    old, x = declared(2.0), torch.ones(3)
    assert torch.equal(old(x), x * 2)
    assert torch.equal(declared(3.0)(x), x * 3)


def test_a_gradient_attached_later_is_found(ns):
    on = declare(ns)
    on.op(on.x, on.y)
    on.op.backward(lambda grad, saved, needs: {"y": torch.full_like(grad, 7.0)})
    y = on.y.clone().requires_grad_()
    on.op(on.x, y).sum().backward()
    assert torch.equal(y.grad, torch.full((3,), 7.0))
    assert torch.equal(on.op(on.x, on.y), on.x * on.y + 1)


def test_only_an_overload_as_torch_makes_them_is_bypassed():
    plain = torch.ops.aten.add.Tensor
    assert dispatcher_calls.builtin_of(plain) is plain._op

    class Odd(type(plain)):
        pass

    odd = object.__new__(Odd)
    assert dispatcher_calls.builtin_of(odd) is odd
    assert dispatcher_calls.builtin_of(len) is len


@pytest.mark.parametrize("raised", [RuntimeError, NotImplementedError, torch.OutOfMemoryError])
def test_a_failed_call_keeps_no_tensor(ns, raised):
    """A caller that runs out of memory frees it and tries again, without waiting for the garbage collector."""

    @sl.op(f"{ns}::failing")
    def failing(x: V) -> V:
        raise raised("no memory")

    gc.disable()
    try:
        for call in (failing, failing.overload, failing.below_autograd):
            x = torch.ones(3)
            kept = weakref.ref(x)
            with pytest.raises(raised):
                call(x)
            del x
            assert kept() is None, call
    finally:
        gc.enable()


def test_an_op_of_source_text_without_a_module_is_compiled(ns: str) -> None:
    """As of a harness that executes sources in a namespace without ``__name__``."""
    lines = [
        "import torch, shiplap as sl",
        "from jaxtyping import Float",
        "from torch import Tensor",
        f"@sl.op('{ns}::doubled')",
        "def doubled(x: Float[Tensor, 'n']) -> Float[Tensor, 'n']:",
        "    return x * 2",
    ]
    made: dict[str, Any] = {}
    exec("\n".join(lines), made)
    x = torch.randn(3)
    assert torch.equal(torch.compile(made["doubled"], fullgraph=True, backend="eager")(x), x * 2)
