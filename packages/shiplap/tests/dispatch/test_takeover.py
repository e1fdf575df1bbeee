"""``sl.adopt(source, into=...)``: what a declared op takes over from an implementation, and what it says it left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap_testing.support import fails

M = Float[Tensor, "n c"]


def same_as_reference(op: Any, *args: Any) -> None:
    """Compare values and gradients, eager and traced, with those of the reference."""
    results = []
    for call in (op, torch.compile(op, fullgraph=True, backend="aot_eager"), op.reference):
        given = [a.clone().requires_grad_() if isinstance(a, Tensor) else a for a in args]
        out = call(*given)
        out.square().sum().backward()
        results.append((out, *(a.grad for a in given if isinstance(a, Tensor))))
    for other in results[:-1]:
        torch.testing.assert_close(other, results[-1])


def custom(ns: str) -> Any:
    calls = []

    @torch.library.custom_op(f"{ns}::plain", mutates_args=())
    def plain(x: Tensor, gate: Tensor, scale: float = 2.0) -> Tensor:
        calls.append(x.shape)
        return x * torch.sigmoid(gate) * scale

    plain.register_fake(lambda x, gate, scale=2.0: torch.empty_like(x))

    def keep(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:2])
        ctx.scale = inputs[2]

    def backward(ctx, grad):
        x, gate = ctx.saved_tensors
        s = torch.sigmoid(gate)
        return grad * s * ctx.scale, grad * x * s * (1 - s) * ctx.scale, None

    plain.register_autograd(backward, setup_context=keep)
    return plain, calls


def test_a_custom_op_gives_its_kernels_and_its_gradient(ns: str) -> None:
    _, calls = custom(ns)

    @sl.adopt(f"{ns}::plain", into=f"{ns}::taken")
    def taken(x: M, gate: M, scale: float = 2.0) -> M:
        return x * torch.sigmoid(gate) * scale

    assert {device: [k.name for k in kernels] for device, kernels in taken.kernels.items()} == {
        "cpu": ["plain"],
        "cuda": ["plain"],
    }
    taken(torch.ones(2, 3), torch.ones(2, 3))
    assert calls == [(2, 3)]
    same_as_reference(taken, torch.randn(4, 5), torch.randn(4, 5), 1.5)
    x = torch.ones(2, 3, requires_grad=True)
    (first,) = torch.autograd.grad(taken(x, torch.ones(2, 3)).square().sum(), x, create_graph=True)
    with fails("SL313"):
        torch.autograd.grad(first.sum(), x)
    for transform in (torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f))):
        with fails("SL304", got="a gradient by torch.func, of a source that autograd differentiates"):
            transform(lambda x: taken(x, x).sum())(
                torch.ones(2, 2, 3) if transform is not torch.func.grad else x.detach()
            )
    assert str(taken.adoption).splitlines() == [
        f"from {ns}::plain:",
        "  taken  kernel on cpu, cuda",
        "  taken  gradient, by running the source again; a gradient of the gradient is refused",
        "  taken  fake: derived from the declaration, in place of the source's",
    ]


def test_a_library_without_a_gradient_says_so(ns: str) -> None:
    library = torch.library.Library(ns, "DEF")
    library.define("scaled(Tensor input, Tensor[] others, *, float factor=1.0, bool exact=True) -> Tensor")
    library.impl("scaled", lambda input, others, *, factor=1.0, exact=True: (input + sum(others)) * factor, "CPU")
    library.impl("scaled", lambda *args, **named: None, "AutocastCPU")

    @sl.adopt(f"{ns}::scaled", into=f"{ns}::taken")  # other names, and without the last argument
    def taken(x: M, ys: list[M], factor: float = 1.0) -> M:
        return (x + sum(ys)) * factor

    assert set(taken.kernels) == {"cpu"}
    ones = torch.ones(2, 3)
    assert torch.equal(taken(ones, [ones, ones], 2.0), torch.full((2, 3), 6.0))
    left = str(taken.adoption)
    assert "left   its autocast rule" in left
    assert "left   argument exact: it is not declared, so it keeps its default" in left
    assert "left   gradient: the source has none, declare one with @op.backward" in left
    with fails("SL304"):
        taken(ones.clone().requires_grad_(), [ones]).sum().backward()


def test_a_custom_op_without_a_formula_has_no_gradient_to_take(ns: str) -> None:
    @torch.library.custom_op(f"{ns}::bare", mutates_args=())
    def bare(x: Tensor) -> Tensor:
        return x * 2

    @sl.adopt(f"{ns}::bare", into=f"{ns}::taken")
    def taken(x: M) -> M:
        return x * 2

    assert "left   gradient: the source has none, declare one with @op.backward" in str(taken.adoption)
    with fails("SL304"):
        taken(torch.ones(2, 3, requires_grad=True)).sum().backward()


def test_a_gradient_is_not_taken_by_drawing_other_random_numbers(ns: str) -> None:
    library = torch.library.Library(ns, "DEF")
    library.define("noise(Tensor x) -> Tensor")
    library.impl("noise", lambda x: x * torch.rand_like(x), "CompositeImplicitAutograd")

    @sl.adopt(f"{ns}::noise", into=f"{ns}::taken", random="global")
    def taken(x: M) -> M:
        return x * torch.rand_like(x)

    assert "left   gradient: run again, the source would draw other random numbers" in str(taken.adoption)
    with fails("SL304"):
        taken(torch.ones(2, 3, requires_grad=True)).sum().backward()


def test_a_gradient_of_lists_and_absent_tensors_is_taken(ns: str) -> None:
    library = torch.library.Library(ns, "DEF")
    library.define("both(Tensor[] xs, Tensor? bias) -> (Tensor, Tensor)")

    def both(xs, bias):
        total = torch.stack(xs).sum(0)
        return (total if bias is None else total * bias), xs[0] * 3

    library.impl("both", both, "CompositeImplicitAutograd")

    @sl.adopt(f"{ns}::both", into=f"{ns}::taken")
    def taken(xs: list[M], bias: M | None) -> tuple[M, M]:
        total = torch.stack(xs).sum(0)
        return (total if bias is None else total * bias), xs[0] * 3

    for bias in (None, torch.full((2, 2), 2.0, requires_grad=True)):
        xs = [torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)]
        sum(taken(xs, bias)).sum().backward()
        assert torch.equal(xs[0].grad, torch.full((2, 2), 4.0 if bias is None else 5.0))
        assert bias is None or torch.equal(bias.grad, torch.full((2, 2), 2.0))


class Clip(torch.autograd.Function):
    """With a gradient of its own: that of its formula would be zero outside of the bound."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: float) -> Tensor:
        return x.clamp(-bound, bound)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 7, None


def test_an_autograd_function_gives_its_own_gradient(ns: str) -> None:
    @sl.adopt(Clip, into=f"{ns}::clip")
    def clip(x: M, bound: float) -> M:
        return x.clamp(-bound, bound)

    x = torch.randn(3, 4, requires_grad=True)
    torch.compile(clip, fullgraph=True, backend="aot_eager")(x, 0.5).sum().backward()
    assert torch.equal(x.grad, torch.full((3, 4), 7.0))
    report = sl.audit(clip, checks=("gradient",), seed=0, isolate=False)
    assert report.verdict == "failed"  # which is the point: the formula is not the reference's

    @sl.adopt(Clip.apply, into=f"{ns}::clip_by_apply")
    def by_apply(x: M, bound: float) -> M:
        return x.clamp(-bound, bound)

    assert torch.equal(torch.autograd.grad(by_apply(x, 0.5).sum(), x)[0], torch.full((3, 4), 7.0))


def test_an_audit_where_only_the_reference_ran_proves_nothing(ns: str) -> None:
    @sl.adopt(Clip, into=f"{ns}::clip", devices="cuda")
    def clip(x: M, bound: float) -> M:
        return x.clamp(-bound, bound)

    report = sl.audit(clip, checks=("fresh",), seed=0, isolate=False)
    assert report.verdict == "incomplete"
    assert ("samples", "what was adopted has no kernel on cpu, but on cuda: only the reference ran") in report.missing


def test_a_function_of_a_compiled_extension_is_a_kernel(ns: str) -> None:
    function = torch._C._VariableFunctions.tanh  # built in, without a signature as those of pybind11 are

    @sl.adopt(function, into=f"{ns}::tanh", devices=["cpu"])
    def tanh(x: M) -> M:
        return x.tanh()

    assert torch.equal(tanh(torch.ones(2, 2)), torch.ones(2, 2).tanh())
    assert "gradient: the source has none" in str(tanh.adoption)

    @tanh.backward
    def _(grad, saved, needs):
        return {"x": grad * (1 - saved.x.tanh().square())}

    same_as_reference(tanh, torch.randn(3, 4))


def test_a_write_is_taken_with_the_write_that_is_declared(ns: str) -> None:
    library = torch.library.Library(ns, "DEF")
    library.define("add_(Tensor(a!) x, float by) -> ()")

    def add(x, by):
        x.add_(by)

    library.impl("add_", add, "CPU")

    @sl.adopt(f"{ns}::add_", into=f"{ns}::taken_", mutates="x")
    def taken(x: M, by: float) -> None:
        x.add_(by)

    x = torch.zeros(3, 4).T  # strided: the source gets it as it lies
    taken(x, 2.0)
    assert torch.equal(x, torch.full((4, 3), 2.0))
    with fails("SL142", got="it writes to x", fix="declare the same arguments in mutates="):

        @sl.adopt(f"{ns}::add_", into=f"{ns}::silent")
        def silent(x: M, by: float) -> M:
            return x + by


def test_an_optional_argument_that_is_not_declared_is_none(ns: str) -> None:
    library = torch.library.Library(ns, "DEF")
    library.define("sums(Tensor x, Tensor? mask, Tensor(a!)? out, int dim) -> Tensor")

    def sums(x, mask, out, dim):
        assert mask is None
        assert out is None
        return x.sum(dim)

    library.impl("sums", sums, "CompositeImplicitAutograd")

    @sl.adopt(f"{ns}::sums", into=f"{ns}::taken", requires="dim == 0")
    def taken(x: M, dim: int = 0) -> Float[Tensor, "c"]:
        return x.sum(dim)

    assert "left   argument out: it is not declared, so it is always None" in str(taken.adoption)
    same_as_reference(taken, torch.randn(3, 4))
    with fails("SL142", expected="as many arguments as the declaration has: x"):  # dim has no default

        @sl.adopt(f"{ns}::sums", into=f"{ns}::rows")
        def rows(x: M) -> Float[Tensor, "c"]:
            return x.sum(0)


def test_a_function_that_autograd_differentiates_gives_its_gradient(ns: str) -> None:
    @sl.adopt(lambda x, scale: x.sin() * scale, into=f"{ns}::wave", devices="cpu", differentiable=True)
    def wave(x: M, scale: float) -> M:
        return torch.sin(x) * scale

    assert "taken  kernel on cpu\n" in str(wave.adoption)
    assert "taken  gradient" in str(wave.adoption)
    same_as_reference(wave, torch.randn(3, 4), 0.5)
    for source in (Clip, f"{ns}::wave"):
        with fails("SL142", fix="leave differentiable= out"):

            @sl.adopt(source, into=f"{ns}::other", differentiable=True)
            def other(x: M, bound: float) -> M:
                return x


@pytest.mark.parametrize(
    ("source", "into", "id"),
    [
        ("{ns}::gone", "{ns}::a", "SL501"),
        ("{ns}::two", "{ns}::two", "SL142"),
        ("{ns}::two", "{ns}::b", "SL142"),
        (lambda x, y: x, "{ns}::c", "SL142"),
        (Clip, "{ns}::d", "SL142"),
        (3, "{ns}::e", "SL142"),
        (Clip, None, "SL142"),
    ],
)
def test_what_does_not_fit_is_refused(source: Any, into: str | None, id: str, ns: str) -> None:
    library = torch.library.Library(ns, "DEF")
    library.define("two(Tensor x, Tensor y) -> Tensor")
    source = source.format(ns=ns) if isinstance(source, str) else source
    with fails(id):

        @sl.adopt(source, into=into and into.format(ns=ns))
        def one(x: M) -> M:
            return x


def test_a_tag_of_the_source_is_taken_over(ns: str) -> None:
    library, unsafe = torch.library.Library(ns, "DEF"), torch.Tag.cudagraph_unsafe
    library.define("waits(Tensor x) -> Tensor", tags=(unsafe, torch.Tag.pointwise))
    library.impl("waits", lambda x: x * 2, "CPU")

    @sl.adopt(f"{ns}::waits", into=f"{ns}::taken")
    def taken(x: M) -> M:
        return x * 2

    assert "  taken  tag cudagraph_unsafe" in str(taken.adoption).splitlines()
    assert taken.spec.tags == (unsafe,)
    assert unsafe in taken.overload.tags
    with fails("SL142", got="tags= without into=", fix="pass into= as well, or leave tags= out"):
        sl.adopt(f"{ns}::waits", tags=unsafe)
