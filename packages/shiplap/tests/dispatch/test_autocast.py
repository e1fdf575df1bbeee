"""What torch.autocast does to an op's floating inputs."""

import contextlib

import jaxtyping
import pytest
import torch
from jaxtyping import BFloat16, Float, Float32, Int, Int64
from torch import Tensor

import shiplap as sl
from shiplap.dispatch import autocast
from shiplap.torch_private import dispatcher_calls
from shiplap_testing.effort import sampled
from shiplap_testing.support import fails

V = Float[Tensor, "n"]
HALF, SINGLE, DOUBLE = torch.bfloat16, torch.float32, torch.float64


def declare(ns, rule):
    @sl.op(f"{ns}::rule_{rule}", autocast=rule)
    def op(
        x: V,
        y: V | None,
        xs: list[V],
        index: Int64[Tensor, "n"],
        table: Float32[Tensor, "n"],
        k: int = 1,
        *,
        p: float = 1,
    ) -> V:
        assert index.dtype == torch.int64
        assert table.dtype == SINGLE
        return sum((x, *xs)) * (1 if y is None else y) * p

    @op.backward
    def _(grad, saved, needs):
        return {"x": grad * saved.p, "xs": [grad * saved.p for _ in saved.xs]}

    return op


def call(op, *dtypes, fn=None):
    x, y, z = (None if d is None else torch.ones(3, dtype=d) for d in dtypes)
    return (fn or op)(x, y, [z], torch.zeros(3, dtype=torch.int64), torch.zeros(3), p=2.0).dtype


RULES = [
    ("widest", (HALF, SINGLE, HALF), SINGLE),
    ("widest", (HALF, None, HALF), HALF),
    ("widest", (HALF, torch.float16, HALF), SINGLE),
    ("widest", (HALF, SINGLE, DOUBLE), DOUBLE),
    ("autocast", (SINGLE, None, SINGLE), HALF),
    ("autocast", (SINGLE, HALF, SINGLE), HALF),
    ("autocast", (DOUBLE, HALF, SINGLE), DOUBLE),
    ("float32", (HALF, HALF, HALF), SINGLE),
    ("float32", (HALF, DOUBLE, HALF), DOUBLE),
]


@pytest.mark.parametrize(
    ("rule", "dtypes", "result", "compiled"),
    [*(pytest.param(*rule, False) for rule in RULES), *sampled([pytest.param(*rule, True) for rule in RULES], 4)],
)
@pytest.mark.usefixtures("fresh_compiler")
def test_rules(ns, rule, dtypes, result, compiled):
    op = declare(ns, rule)
    fn = torch.compile(op, backend="aot_eager", fullgraph=True) if compiled else op
    with torch.autocast("cpu", HALF):
        assert call(op, *dtypes, fn=fn) == result
    with torch.autocast("cpu", HALF), torch.autocast("cpu", enabled=False), pytest.raises(sl.ShiplapError):
        call(op, HALF, SINGLE, HALF)


def test_no_rule_leaves_the_inputs_alone(ns):
    op = declare(ns, None)
    with torch.autocast("cpu", HALF), pytest.raises(sl.ShiplapError, match="SL205"):
        call(op, HALF, SINGLE, HALF)


def test_the_reference_runs_outside_autocast(ns):
    @sl.op(f"{ns}::mm", autocast="float32")
    def mm(x: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
        return x @ x

    with torch.autocast("cpu", HALF):
        assert mm(torch.ones(2, 2, dtype=HALF)).dtype == SINGLE


def test_gradients_come_back_in_the_dtype_of_the_argument(ns):
    op = declare(ns, "autocast")
    x = torch.ones(3, requires_grad=True)
    with torch.autocast("cpu", HALF):
        op(x, None, [x.detach()], torch.zeros(3, dtype=torch.int64), torch.zeros(3)).sum().backward()
    assert x.grad.dtype == SINGLE


@pytest.mark.parametrize("rule", ["widest", "autocast", "float32"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.usefixtures("fresh_compiler")
def test_a_mutated_tensor_is_never_converted(ns, rule, compiled):
    @sl.op(f"{ns}::add_{rule}", autocast=rule, mutates="x")
    def add_(x: V, y: V) -> None:
        x.add_(y)

    for dtype in (HALF, SINGLE):
        x = torch.zeros(3, dtype=dtype)
        fn = torch.compile(lambda x, y: add_(x, y), backend="aot_eager", fullgraph=True) if compiled else add_
        with torch.autocast("cpu", HALF):
            fn(x, torch.ones(3, dtype=SINGLE))
        assert x.tolist() == [1, 1, 1], "the copy took the write"


@pytest.mark.parametrize("way", ["op", "torch.ops"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("rule", "inner"), [("autocast", HALF), ("float32", SINGLE), ("widest", SINGLE)])
def test_what_a_kernel_gets_and_what_comes_back(ns, rule, inner, way, grad):
    """Of an op without lists, whose calls need not go through torch's dispatcher."""
    seen = []

    @sl.op(f"{ns}::product_{rule}", autocast=rule)
    def product(x: Float[Tensor, "n k"], y: Float[Tensor, "k m"], scale: float = 1.0) -> Float[Tensor, "n m"]:
        return x @ y * scale

    @product.kernel("cpu")
    def _(x, y, scale, *, out):
        out.copy_(x @ y * scale)
        seen.append((x.dtype, y.dtype, (torch.ones(2, 2) @ torch.ones(2, 2)).dtype, torch.is_grad_enabled()))

    @product.backward
    def _(grad, saved, needs):
        return {"x": grad @ saved.y.T * saved.scale, "y": saved.x.T @ grad * saved.scale}

    call = product if way == "op" else getattr(getattr(torch.ops, ns), f"product_{rule}")
    x, y = torch.randn(5, 4, requires_grad=grad), torch.randn(4, 3).to(HALF).requires_grad_(grad)
    with torch.autocast("cpu", HALF):
        out = call(x, y, 2.0)
    assert seen[0][:3] == (inner, inner, SINGLE), "the kernel's own product is not cast"
    assert out.dtype == inner
    assert out.requires_grad is grad
    expected = x.to(inner) @ y.to(inner) * 2.0
    assert torch.equal(out, expected)
    if grad:
        out.float().square().sum().backward()
        assert (x.grad.dtype, y.grad.dtype) == (SINGLE, HALF)
        mine = x.grad, y.grad
        x.grad = y.grad = None
        expected.float().square().sum().backward()
        torch.testing.assert_close(mine, (x.grad, y.grad), rtol=2e-2, atol=2e-2)


def test_autocast_of_another_device_converts_nothing(ns):
    @sl.op(f"{ns}::twice", autocast="autocast")
    def twice(x: V) -> V:
        return x * 2

    with torch.autocast("cpu", HALF):
        assert twice(torch.ones(3, device="meta")).dtype == SINGLE


def test_tensors_of_two_device_types_are_left_to_the_dispatcher():
    here, there = torch.ones(3), torch.ones(3, device="meta")
    with torch.autocast("cpu", HALF):
        assert dispatcher_calls.autocast_alone((here, here, 1)) == "cpu"
        assert dispatcher_calls.autocast_alone((here, there)) is None
    assert dispatcher_calls.autocast_alone((here, here)) is None


def test_the_call_of_an_op_does_not_reach_the_dispatcher(ns, monkeypatch):
    """Torch's way to a kernel of Python costs more than most small kernels take."""

    @sl.op(f"{ns}::short", autocast="autocast")
    def short(x: V) -> V:
        return x * 2

    monkeypatch.setattr(type(short), "overload", property(lambda self: pytest.fail("it was called")), raising=False)
    with torch.autocast("cpu", HALF), torch.no_grad():
        assert short(torch.ones(3)).dtype == HALF


def test_a_declaration_that_takes_over_keeps_the_rule(ns):
    def declared():
        @sl.op(f"{ns}::renewed", autocast="autocast")
        def renewed(x: V) -> V:
            return x * 2

        return renewed

    first, second = declared(), declared()
    with torch.autocast("cpu", HALF):
        assert first(torch.ones(3)).dtype == second(torch.ones(3)).dtype == HALF


@pytest.mark.parametrize(
    ("way", "rule"),
    [
        ("torch.ops", None),
        *((way, rule) for way in ("call", "keyword", "out", "recorded") for rule in ("widest", None)),
    ],
)
def test_an_error_of_a_concrete_dtype_says_autocast(ns, way, rule):
    @sl.op(f"{ns}::shifted", autocast=rule)
    def shifted(x: Float32[Tensor, "n n"]) -> Float32[Tensor, "n n"]:
        return x + 1

    shifted.backward(lambda grad, saved, needs: {"x": grad})
    x, calls = (
        torch.ones(2, 2),
        {
            "keyword": lambda x: shifted(x=x),
            "torch.ops": shifted.overload,
            "out": lambda x: shifted.out(x, out=torch.empty(2, 2)),
            "recorded": lambda x: shifted(x.requires_grad_()),
        },
    )
    with torch.autocast("cpu", HALF):
        narrow = x @ x
        with fails("SL204", 'autocast="float32"', got=f"{HALF}, in a torch.autocast region"):
            calls.get(way, shifted)(narrow)
    with pytest.raises(sl.ShiplapError) as caught:
        shifted(narrow)
    assert "autocast" not in str(caught.value)


def test_an_error_without_a_rule_says_autocast(ns):
    op = declare(ns, None)
    with torch.autocast("cpu", HALF), fails("SL205", 'autocast="widest"', "in a torch.autocast region"):
        call(op, HALF, SINGLE, HALF)
    with fails("SL205", "give y a dtype class of its own"):
        call(op, HALF, SINGLE, HALF)


def test_the_annotation_that_an_error_suggests_is_one_for_the_argument(ns):
    @sl.op(f"{ns}::norm")
    def norm(xs: list[Float[Tensor, "n c"]], at: Int[Tensor, "n"], to: Int[Tensor, "n"], b: Float[Tensor, "c"]) -> V:
        return xs[0].sum(1)

    x, at, b = torch.ones(2, 3), torch.zeros(2, dtype=torch.int32), torch.ones(3)
    for given in (b.to(HALF), b.double(), b.half()):
        with pytest.raises(sl.ShiplapError, match="SL205") as caught:
            norm([x], at, at, given)
        annotation = caught.value.fix.partition("in the declaration: b: ")[2]
        norm.reference.__annotations__["b"] = eval(annotation, {**vars(jaxtyping), "Tensor": Tensor})
        repaired = sl.op(f"{ns}::repaired_{str(given.dtype)[6:]}")(norm.reference)
        assert repaired([x], at, at, given).shape == (2,), "the fix is an action that works"
    with fails("SL205", 'to: Int8[Tensor, "n"] | Int16[Tensor, "n"] | Int32[Tensor, "n"] | Int64[Tensor, "n"]'):
        norm([x], at, at.long(), b)
    with pytest.raises(sl.ShiplapError, match="SL205") as caught:
        norm([x, x.to(HALF)], at, at, b)
    assert caught.value.fix == "convert one of the tensors with .to(dtype)"


@pytest.mark.parametrize("keyword", ["widest", None])
@pytest.mark.parametrize("outside", [False, True])
def test_a_traced_error_says_autocast(ns, keyword, outside):
    @sl.op(f"{ns}::narrow", autocast=keyword)
    def narrow(x: Float32[Tensor, "n c"]) -> Float32[Tensor, "n c"]:
        return x * 2

    def model(x):
        with contextlib.nullcontext() if outside else torch.autocast("cpu", HALF):
            return narrow(x @ x)

    around = torch.autocast("cpu", HALF) if outside else contextlib.nullcontext()
    with pytest.raises(Exception, match="SL204") as caught, around:
        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.ones(2, 2))
    assert "in a torch.autocast region" in str(caught.value)
    assert 'autocast="float32"' in str(caught.value)


def test_an_argument_with_a_dtype_class_of_its_own(ns):
    """The ordinary case of a norm: activations in bfloat16, weights in float32."""

    @sl.op(f"{ns}::scaled")
    def scaled(x: Float[Tensor, "n c"], w: BFloat16[Tensor, "c"] | Float32[Tensor, "c"]) -> Float[Tensor, "n c"]:
        return (x.float() * w.float()).to(x.dtype)

    for x, w in ((HALF, SINGLE), (HALF, HALF), (SINGLE, HALF)):
        assert scaled(torch.ones(2, 3, dtype=x), torch.ones(3, dtype=w)).dtype == x
    assert sl.audit(scaled, checks=("numerics", "fake"), seed=0).proven


def declare_gram(ns, rule=None, kernel=True):
    """An op whose kernel, reference and backward call operators that autocast would convert."""

    @sl.op(f"{ns}::gram", autocast=rule)
    def gram(x: Float32[Tensor, "n c"]) -> Float32[Tensor, "n n"]:
        return x @ x.T

    if kernel:

        @gram.kernel("cpu")
        def _(x):
            return (x @ x.T).float()

    @gram.backward
    def _(grad, saved, needs):
        return {"x": (grad + grad.T) @ saved.x}

    return gram


def by_torch(ns, op):
    return getattr(torch.ops, ns).gram


@pytest.mark.parametrize(("rule", "kernel"), [(None, True), (None, False), ("widest", True)])
@pytest.mark.parametrize(
    "way",
    [
        lambda ns, op: op,
        by_torch,
        lambda ns, op: lambda x: op(x=x),
        lambda ns, op: torch.compile(op, backend="eager", fullgraph=True),
        lambda ns, op: torch.compile(op, backend="aot_eager", fullgraph=True),
        lambda ns, op: lambda x: torch.vmap(op)(x[None])[0],
    ],
    ids=["op", "torch.ops", "keyword", "dynamo", "aot_eager", "vmap"],
)
@pytest.mark.usefixtures("fresh_compiler")
def test_autocast_is_off_inside_of_kernel_reference_and_backward(ns, rule, kernel, way):
    op = declare_gram(ns, rule, kernel)
    x, pull = torch.randn(5, 40), torch.randn(5, 5)
    wanted = ((pull + pull.T) @ x, x @ x.T)
    x.requires_grad_()
    with torch.autocast("cpu", HALF):
        out = way(ns, op)(x)
        (grad,) = torch.autograd.grad(out, x, pull)
    assert torch.equal(out, wanted[1])
    torch.testing.assert_close(grad, wanted[0])


@pytest.mark.parametrize("call", [lambda ns, op: op, by_torch], ids=["op", "torch.ops"])
@pytest.mark.parametrize("rule", [None, "widest"])
def test_autocast_is_off_inside_of_a_reference_that_torch_func_differentiates(ns, rule, call):
    """A level of torch.func restores the state of autocast that the call came with."""
    op, x = declare_gram(ns, rule), torch.randn(5, 40)
    with torch.autocast("cpu", HALF):
        value, tangent = torch.func.jvp(call(ns, op), (x,), (x,))
        nested = torch.func.jvp(lambda x: torch.func.grad(lambda x: call(ns, op)(x).sum())(x), (x,), (x,))[1]
    assert torch.equal(value, x @ x.T)
    torch.testing.assert_close(tangent, 2 * value)
    torch.testing.assert_close(nested, 2 * torch.ones(5, 5) @ x)


@pytest.mark.parametrize("kernel", [False, True])
def test_autocast_is_off_inside_of_an_out_variant(ns, kernel):
    op, x, out = declare_gram(ns, None, kernel), torch.randn(5, 40), torch.empty(5, 5)
    for _ in range(2):
        with torch.autocast("cpu", HALF):
            op.out(x, out=out)
        assert torch.equal(out, x @ x.T)


def test_autocast_is_off_inside_of_ops_without_floating_arguments(ns):
    """No autocast rule can see them: their tensors hold integers, are on another device, in lists, or absent."""

    @sl.op(f"{ns}::counts")
    def counts(index: Int64[Tensor, "n"]) -> Float32[Tensor, "n n"]:
        return index.float()[:, None] @ index.float()[None]

    @sl.op(f"{ns}::filled", fake="reference")
    def filled(n: int, base: Float32[Tensor, "k"] | None = None) -> Float32[Tensor, "n n"]:
        return torch.full((n, n), 1.001) @ torch.ones(n, n)

    @sl.op(f"{ns}::listed", autocast=None)
    def listed(xs: list[Float32[Tensor, "n n"]]) -> Float32[Tensor, "n n"]:
        return xs[0] @ xs[1]

    @listed.backward
    def _(grad, saved, needs):
        return {"xs": [grad @ saved.xs[1].T, saved.xs[0].T @ grad]}

    index, xs, pull = (
        torch.tensor([257, 3]),
        [torch.randn(4, 4, requires_grad=True) for _ in range(2)],
        torch.ones(4, 4),
    )
    wanted = [counts(index), filled(4), listed(xs), *torch.autograd.grad(listed(xs), xs, pull)]
    with torch.autocast("cpu", HALF):
        got = [counts(index), filled(4), listed(xs), *torch.autograd.grad(listed(xs), xs, pull)]
        assert torch.compile(filled, backend="aot_eager", fullgraph=True)(4).dtype == SINGLE
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a, b)


def test_autocast_is_off_inside_of_an_op_with_views(ns):
    @sl.op(f"{ns}::powered", aliases="x", autocast=None)
    def powered(x: Float32[Tensor, "n n"], squared: bool) -> Float32[Tensor, "n n"]:
        return x @ x if squared else x.view_as(x)

    x = torch.randn(4, 4)
    with torch.autocast("cpu", HALF):
        assert powered(x, True).dtype == SINGLE


def test_a_rule_is_registered_for_the_autocast_of_every_device_type(ns):
    declare(ns, "widest")
    keys = ("AutocastCPU", "AutocastCUDA", "AutocastXPU", "AutocastMPS", "AutocastHPU", "AutocastPrivateUse1")
    assert all(dispatcher_library_has(f"{ns}::rule_widest", key) for key in keys)


def dispatcher_library_has(name, key):
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def test_kernels_leave_the_autocast_of_other_devices_too(ns):
    """As of the CPU where tensors are on a GPU, here the other way round: autocast of the device is off either way."""
    seen = []

    @sl.op(f"{ns}::noted", autocast=None)
    def noted(x: V) -> V:
        seen.append([torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")])
        return x + 1

    with torch.autocast("cpu", HALF):
        torch.set_autocast_enabled("cuda", True)
        try:
            noted(torch.ones(3))
        finally:
            torch.set_autocast_enabled("cuda", False)
    assert seen == [[False, False]]


@pytest.mark.parametrize(
    "call", [lambda ns, op: op, lambda ns, op: getattr(torch.ops, ns).moved], ids=["op", "torch.ops"]
)
def test_a_rule_converts_keyword_only_tensors(ns, call):
    @sl.op(f"{ns}::moved", autocast="widest")
    def moved(x: V, *, by: V, times: float = 1.0) -> V:
        return x + by * times

    call = call(ns, moved)
    with torch.autocast("cpu", HALF):
        assert call(torch.ones(3, dtype=HALF), by=torch.ones(3)).tolist() == [2, 2, 2]
        assert call(torch.ones(3), by=torch.ones(3, dtype=HALF), times=2.0).dtype == SINGLE


def test_the_tensors_that_a_rule_may_convert():
    x, k = torch.ones(1), torch.ones(1, dtype=torch.int64)
    found = [autocast._castable_tensors(value) for value in (x, k, [x, k, None, 3, x], (x,), 3, None)]
    assert [len(each) for each in found] == [1, 0, 2, 1, 0, 0]
