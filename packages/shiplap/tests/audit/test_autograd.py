"""gradient, autocast, requires_grad: how an op sits in PyTorch's autograd and autocast."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import BFloat16, Float, Float32, Int64
from torch import Tensor

import shiplap as sl
from tests.audit.common import look, register


@sl.op("audit_autograd::weighted")
def weighted(
    x: Float[Tensor, "n c"], w: Float[Tensor, "c"], bias: Float[Tensor, "c"] | None = None
) -> Float[Tensor, "n c"]:
    return x * w if bias is None else x * w + bias


@weighted.backward
def _(grad, saved, needs):
    return {
        "x": grad * saved.w if needs.x else None,
        "w": (grad * saved.x).sum(0) if needs.w else None,
        "bias": grad.sum(0) if needs.bias else None,
    }


# gradient


@sl.op("audit_autograd::powers")
def powers(x: Float[Tensor, "n"], factors: Float[Tensor, "k"]) -> Float[Tensor, "n"]:
    out = torch.zeros_like(x)
    for factor in factors:  # without any, no result depends on an input
        out = out * x + factor
    return out


@powers.backward
def _(grad, saved, needs):
    slope = value = torch.zeros_like(saved.x)
    powers_of_x = [torch.ones_like(saved.x)]
    for factor in saved.factors:
        slope, value = slope * saved.x + value, value * saved.x + factor
        powers_of_x.append(powers_of_x[-1] * saved.x)
    sums = [(grad * p).sum() for p in reversed(powers_of_x[:-1])]
    return {"x": grad * slope, "factors": torch.stack(sums)}


def test_a_backward_is_called_where_the_reference_has_no_graph():
    observation = look(powers, "gradient", seed=1)
    assert observation.verdict == "fail"
    assert "stack expects a non-empty TensorList" in observation.evidence


# --8<-- [start:gradient]
@sl.op("audit_autograd::factor_missing")
def factor_missing(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * x


@factor_missing.backward
def _(grad, saved, needs):
    return {"x": grad * saved.x}


# --8<-- [end:gradient]


@sl.op("audit_autograd::forgets_bias")
def forgets_bias(x: Float[Tensor, "n"], bias: Float[Tensor, "n"] | None = None) -> Float[Tensor, "n"]:
    return x * 2 if bias is None else x * 2 + bias


@forgets_bias.backward
def _(grad, saved, needs):
    return {"x": grad * 2}


@sl.op("audit_autograd::wasteful")
def wasteful(x: Float[Tensor, "n"], y: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * y


@wasteful.backward
def _(grad, saved, needs):
    return {"x": grad * saved.y, "y": grad * saved.x}


@sl.op("audit_autograd::opaque_reference")
def opaque_reference(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return torch.from_numpy(x.detach().numpy() ** 2)


@opaque_reference.backward
def _(grad, saved, needs):
    return {"x": grad * saved.x}


@sl.op("audit_autograd::numpy_reference")
def numpy_reference(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return torch.from_numpy(x.numpy() ** 2)


@numpy_reference.kernel(device="cpu")
def _(x):
    return x * x


@numpy_reference.backward
def _(grad, saved, needs):
    return {"x": 2 * grad * saved.x}


@sl.op("audit_autograd::numpy_references")
def numpy_references(x: Float[Tensor, "n"]) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
    return torch.from_numpy(x.numpy() ** 2), torch.from_numpy(x.numpy() * 2)


@numpy_references.kernel(device="cpu")
def _(x):
    return x * x, x * 2


@numpy_references.backward
def _(grads, saved, needs):
    square, double = grads
    return {"x": 2 * square * saved.x + 2 * double}


@sl.op("audit_autograd::no_gradient")
def no_gradient(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * 2


@pytest.mark.parametrize("op", [numpy_reference, numpy_references])
def test_backward_accepts_an_op_whose_reference_autograd_cannot_run(op):
    assert look(op, "backward").verdict == "ok"


def test_gradient_fires():
    finding = look(factor_missing, "gradient")
    assert finding.verdict == "fail"
    assert "d/dx" in finding.evidence
    finding = look(forgets_bias, "gradient")
    assert finding.verdict == "fail"
    assert "SL110" in finding.evidence
    assert "got no gradient of 'bias'" in finding.evidence


def test_gradient_fires_where_only_finite_differences_can_tell():
    finding = look(opaque_reference, "gradient")
    assert finding.verdict == "fail"
    assert "finite differences" in finding.evidence


@pytest.mark.long
def test_gradient_fires_on_a_backward_that_reads_its_gradient_as_contiguous():
    def backward(ctx, grad):
        return torch.empty(0, dtype=grad.dtype).set_(grad.untyped_storage()).resize_(grad.shape) * 2

    register(
        "audit_autograd::contiguous_grad",
        "(Tensor x) -> Tensor",
        lambda x: x.detach() * 2,
        torch.empty_like,
        backward=backward,
    )

    @sl.adopt("audit_autograd::contiguous_grad")
    def contiguous_grad(x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
        return x * 2

    finding = look(contiguous_grad, "gradient")
    assert finding.verdict == "fail"
    assert "gradient of the output" in finding.evidence


def test_gradient_reads_results_that_are_absent(ns):
    @sl.op(f"{ns}::scaled")
    def scaled(
        x: Float[Tensor, "n"], w: Float[Tensor, "n"], total: bool = False
    ) -> tuple[Float[Tensor, "n"], Float[Tensor, ""] | None]:
        return x * w, x.sum() if total else None

    @scaled.backward
    def _(grads, saved, needs):
        more = grads[1] if saved.total else 0
        return {"x": grads[0] * saved.w + more, "w": grads[0] * saved.x if needs.w else None}

    finding = look(scaled, "gradient")
    assert finding.verdict == "ok"
    assert "also computed when not needed: d/dx" in finding.evidence


def test_gradient_notes_gradients_that_nobody_needs():
    finding = look(wasteful, "gradient")
    assert finding.verdict == "ok"
    assert "also computed when not needed: d/dx, d/dy" in finding.evidence


def test_gradient_is_silent_or_says_why_it_does_not_apply():
    finding = look(weighted, "gradient")
    assert finding.verdict == "ok"
    assert "not needed" not in finding.evidence
    assert "SL304" in look(no_gradient, "gradient").evidence
    assert look(no_gradient, "gradient").verdict == "skip"


# autocast


# --8<-- [start:autocast]
def _same_dtype(x, w):
    if x.dtype != w.dtype:
        raise RuntimeError(f"expected scalar type {x.dtype} but found {w.dtype}")
    return x @ w


TWO = "(Tensor x, Tensor w) -> Tensor"
register("audit_autograd::no_rule", TWO, _same_dtype, _same_dtype)


@sl.adopt("audit_autograd::no_rule")
def no_rule(x: Float[Tensor, "n c"], w: Float[Tensor, "c d"]) -> Float[Tensor, "n d"]:
    return x @ w


# --8<-- [end:autocast]


@sl.op("audit_autograd::narrows", autocast="autocast")
def narrows(x: Float[Tensor, "n c"], w: Float[Tensor, "c d"]) -> Float[Tensor, "n d"]:
    return x @ w


@sl.op("audit_autograd::single")
def single(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
    return x * 2


def test_autocast_fires_on_a_missing_rule():
    finding = look(no_rule, "autocast")
    assert finding.verdict == "fail"
    assert "expected scalar type" in finding.evidence


def test_autocast_fires_on_a_wrong_rule():
    register(
        "audit_autograd::promotes",
        "(Tensor x, Tensor w) -> Tensor",
        lambda x, w: x.float() @ w.float(),
        lambda x, w: (x @ w).float(),
    )

    @sl.adopt("audit_autograd::promotes", autocast="autocast")
    def promotes(x: Float[Tensor, "n c"], w: Float[Tensor, "c d"]) -> Float[Tensor, "n d"]:
        return x @ w

    assert look(promotes, "autocast").verdict == "fail"


def test_autocast_fires_where_an_op_without_a_rule_is_changed():
    """Another library's kernel calls an operator that autocast converts; one of ours runs with autocast off."""

    def gram(x):
        return (x @ x.T).float()

    register("audit_autograd::gram", "(Tensor x) -> Tensor", gram, lambda x: x.new_empty(x.shape[0], x.shape[0]))

    @sl.adopt("audit_autograd::gram", autocast=None)
    def adopted(x: Float32[Tensor, "n c"]) -> Float32[Tensor, "n n"]:
        return x @ x.T

    @sl.op("audit_autograd::own_gram", autocast=None)
    def own(x: Float32[Tensor, "n c"]) -> Float32[Tensor, "n n"]:
        return x @ x.T

    own.kernel("cpu", gram)
    finding = look(adopted, "autocast")
    assert finding.verdict == "fail"
    assert "autocast=None: " in finding.evidence
    assert look(own, "autocast").verdict == "ok"


def test_autocast_is_silent_or_says_why_it_does_not_apply():
    assert look(weighted, "autocast").verdict == "ok"
    assert look(narrows, "autocast").verdict == "ok"
    assert look(single, "autocast").verdict == "skip"


# requires_grad


# --8<-- [start:requires_grad]
@torch.library.custom_op("audit_autograd::branches", mutates_args=())
def _branches(x: Tensor) -> Tensor:
    return x * (2.0 if x.requires_grad else 3.0)


_branches.register_fake(torch.empty_like)
_branches.register_autograd(lambda ctx, grad: grad * 2)


@sl.adopt("audit_autograd::branches")
def branches(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    return x * 3


# --8<-- [end:requires_grad]


@sl.op("audit_autograd::count_positive")
def count_positive(x: Int64[Tensor, "n"]) -> Int64[Tensor, "1"]:
    return (x > 0).sum().reshape(1)


def test_requires_grad_fires():
    finding = look(branches, "requires_grad")
    assert finding.verdict == "fail"
    assert "inputs that require gradients" in finding.evidence


def test_requires_grad_is_silent():
    assert look(weighted, "requires_grad").verdict == "ok"
    assert "eager only" in look(no_gradient, "requires_grad").evidence
    assert "inference mode only" in look(count_positive, "requires_grad").evidence


@pytest.mark.parametrize(("change", "verdict"), [(2**-22, "ok"), (2**-10, "fail")])
def test_backward_leaves_rounding_to_the_order_of_atomic_additions(ns, change, verdict):
    """A gradient that atomic additions sum up differs from run to run in its last bits."""
    runs = []

    @sl.op(f"{ns}::doubled")
    def doubled(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
        return x * 2

    @doubled.backward
    def _(grad, saved, needs):
        runs.append(len(runs))
        return {"x": grad * (2 + change * (len(runs) % 2))}

    assert look(doubled, "backward").verdict == verdict


# gradients of 16 bits


def _scaled_in_bfloat16(ns: str, factor: float, calls: int) -> sl.Op:
    """Return an op of bfloat16 whose backward multiplies its gradients by ``factor`` in each ``calls``-th run."""
    runs = []

    @sl.op(f"{ns}::scaled")
    def scaled(x: BFloat16[Tensor, "n c"], w: BFloat16[Tensor, "c"]) -> BFloat16[Tensor, "n c"]:
        return (x.float() * w.float()).bfloat16()

    @scaled.backward
    def _(grad, saved, needs):
        runs.append(grad)
        by = factor if len(runs) % calls == 0 else 1.0
        g, x = grad.float() * by, saved.x.float()
        return {"x": (g * saved.w.float()).bfloat16(), "w": (g * x).sum(0).bfloat16()}

    return scaled


def test_a_second_backward_of_16_bits_that_is_five_percent_off_is_found(ns):
    observation = look(_scaled_in_bfloat16(ns, 1.05, 2), "backward", seed=1)
    assert observation.verdict == "fail", observation


def test_a_gradient_of_16_bits_that_is_five_percent_off_is_found(ns):
    observation = look(_scaled_in_bfloat16(ns, 1.05, 1), "gradient", seed=1)
    assert observation.verdict == "fail", observation
    assert "all numbers are about 1.05 times those expected" in observation.evidence


@pytest.mark.parametrize("narrow", [False, True])
def test_a_backward_of_16_bits_may_add_in_another_order(ns, narrow):
    rng = torch.Generator().manual_seed(1)

    @sl.op(f"{ns}::scaled")
    def scaled(x: BFloat16[Tensor, "n c"], w: BFloat16[Tensor, "c"]) -> BFloat16[Tensor, "n c"]:
        return (x.float() * w.float()).bfloat16()

    @scaled.backward
    def _(grad, saved, needs):
        terms = grad.float() * saved.x.float()
        total = torch.zeros(terms.shape[1:], dtype=torch.bfloat16 if narrow else torch.float32)
        for row in torch.randperm(len(terms), generator=rng):
            total = total + terms[row].to(total.dtype)
        return {"x": (grad.float() * saved.w.float()).bfloat16(), "w": total.bfloat16()}

    assert look(scaled, "backward", seed=1).verdict == "ok"


def test_a_gradient_of_one_number_may_be_exact_by_chance_the_first_time(ns):
    """The error of one number stood for those of all orders of a sum."""
    runs = []

    @sl.op(f"{ns}::scaled")
    def scaled(x: BFloat16[Tensor, "n"], w: BFloat16[Tensor, "1"]) -> BFloat16[Tensor, "n"]:
        return (x.float() * w.float()).bfloat16()

    @scaled.backward
    def _(grad, saved, needs):
        runs.append(grad)
        by = 1 + 3.6 * 2**-7 if len(runs) % 2 == 0 and len(grad) >= 16 else 1.0
        total = (grad.float() * saved.x.float()).sum(0, keepdim=True) * by
        return {"x": (grad.float() * saved.w.float()).bfloat16(), "w": total.bfloat16()}

    observation = look(scaled, "backward", seed=1)
    assert observation.verdict == "ok", observation
