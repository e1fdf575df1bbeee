"""Broken gradients and modes: wrong backward, missing autocast rule, branches on requires_grad."""

import torch
from jaxtyping import Float
from torch import Tensor

from shiplap_testing.zoo.bad.common import M, adopt, bad, declare
from shiplap_testing.zoo.specimen import register


def _save_x(ctx, inputs, output):
    """Save the first of ``inputs`` in ``ctx`` for the backward, as the ``setup_context`` of an operator."""
    ctx.save_for_backward(inputs[0])


@adopt(
    register(
        "wrong_gradient(Tensor x) -> Tensor",
        lambda x: x * x,
        torch.empty_like,
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        _save_x,
    )
)
def wrong_gradient(x: M) -> M:
    """Return ``x * x``. The gradient of the broken operator lacks the factor 2."""
    return x * x


bad("wrong gradient", wrong_gradient, "gradient", note="the factor 2 is missing")


def _linear(x, w):
    """Return ``x @ w``. Raise ``RuntimeError`` if the dtypes differ. They do so under autocast if there is no autocast
    rule.
    """
    if x.dtype != w.dtype:
        raise RuntimeError("expected x and w of one dtype")
    return x @ w


@adopt(
    register("no_autocast(Tensor x, Tensor w) -> Tensor", _linear, lambda x, w: x.new_empty(x.shape[0], w.shape[1])),
    autocast="widest",
)
def no_autocast(x: Float[Tensor, "n ci"], w: Float[Tensor, "ci co"]) -> Float[Tensor, "n co"]:
    """Return ``x @ w``. The broken operator has no autocast rule, though it is declared to compute in the widest
    dtype.
    """
    return x @ w


bad("missing autocast rule", no_autocast, "autocast")


@adopt(register("looks_at_grad(Tensor x) -> Tensor", lambda x: x * (2 if x.requires_grad else 3), torch.empty_like))
def looks_at_grad(x: M) -> M:
    """Return ``3 * x``. The broken operator returns ``2 * x`` if ``x`` requires a gradient."""
    return x * 3


bad("branch on requires_grad", looks_at_grad, "requires_grad")


def _flat_gradient(ctx, grad):
    """Return the gradient ``2 * grad``. This function has a defect on purpose: the memory of a ``grad`` that is not
    contiguous is read without regard to its strides.
    """
    return grad.as_strided(grad.shape, torch.empty(grad.shape).stride(), grad.storage_offset()) * 2


@adopt(
    register(
        "flat_gradient(Tensor x) -> Tensor", lambda x: x * 2, lambda x: torch.empty_like(x), _flat_gradient, _save_x
    )
)
def flat_gradient(x: M) -> M:
    """Return ``2 * x``. The gradient of the broken operator reads any incoming gradient as contiguous."""
    return x * 2


bad("backward reads any gradient as contiguous", flat_gradient, "gradient", note="y.T.backward() or y.sum().backward()")


@declare("gradient")
def sl_gradient(x: Float[Tensor, "n ci"], w: Float[Tensor, "co ci"]) -> Float[Tensor, "n co"]:
    """Return ``x @ w.T``. Kernels and gradients of the op are compared with this reference."""
    return x @ w.T


@sl_gradient.backward
def _(grad, saved, needs):
    """Return the gradients of ``x @ w.T`` that ``needs`` names. This function has a defect on purpose: the gradient of
    ``w`` is doubled if ``x`` needs none.
    """
    both = needs.x and needs.w
    return {
        "x": grad @ saved.w if needs.x else None,
        "w": grad.T @ saved.x * (1 if both else 2) if needs.w else None,
    }


bad("gradient wrong when asked for alone", sl_gradient, "gradient", note="both at once are right")


@declare("looks_at_grad")
def sl_looks_at_grad(x: M) -> M:
    """Return ``3 * x``. The kernel of the op returns ``2 * x`` if ``x`` requires a gradient."""
    return x * 3


sl_looks_at_grad.backward(lambda grad, saved, needs: {"x": grad * 3})

sl_looks_at_grad.kernel("cpu", lambda x: x * (2 if x.requires_grad else 3), name="looking")

bad("kernel that branches on requires_grad", sl_looks_at_grad, "requires_grad")


@declare("wasteful")
def sl_gradient_wasteful(x: Float[Tensor, "n ci"], w: Float[Tensor, "co ci"]) -> Float[Tensor, "n co"]:
    """Return ``x @ w.T``. The gradient of the op is right, but also computes what is not needed. The audit notes this
    and does not fail.
    """
    return x @ w.T


sl_gradient_wasteful.backward(lambda grad, saved, needs: {"x": grad @ saved.w, "w": grad.T @ saved.x})
