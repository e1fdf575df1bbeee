"""Broken gradients and modes: wrong backward, missing autocast rule, branches on requires_grad."""

import torch
from jaxtyping import Float
from torch import Tensor

from shiplap_testing.zoo.bad.common import M, adopt, bad, declare
from shiplap_testing.zoo.specimen import register


def _save_x(ctx, inputs, output):
    """Save the first of ``inputs`` in ``ctx`` for the backward pass. This is the ``setup_context`` of several
    operators.
    """
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
    """Return ``x * x``, the reference of the broken operator ``zoo::wrong_gradient``. The operator's gradient lacks the
    factor 2.
    """
    return x * x


bad("wrong gradient", wrong_gradient, "gradient", note="the factor 2 is missing")


def _linear(x, w):
    """Return ``x @ w``. Raise ``RuntimeError`` if the dtypes differ, as they do under autocast without an autocast
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
    """Return ``x @ w``, the reference of the broken operator ``zoo::no_autocast``. The operator has no autocast rule,
    though it is declared to compute in the widest dtype.
    """
    return x @ w


bad("missing autocast rule", no_autocast, "autocast")


@adopt(register("looks_at_grad(Tensor x) -> Tensor", lambda x: x * (2 if x.requires_grad else 3), torch.empty_like))
def looks_at_grad(x: M) -> M:
    """Return ``3 * x``, the reference of the broken operator ``zoo::looks_at_grad``. The operator returns ``2 * x`` if
    ``x`` requires a gradient.
    """
    return x * 3


bad("branch on requires_grad", looks_at_grad, "requires_grad")


def _flat_gradient(ctx, grad):
    """Return ``2 * grad``, the gradient of ``2 * x``. This function has a defect on purpose. If ``grad`` is not
    contiguous, its memory is read without regard to its strides.
    """
    return grad.as_strided(grad.shape, torch.empty(grad.shape).stride(), grad.storage_offset()) * 2


@adopt(
    register(
        "flat_gradient(Tensor x) -> Tensor", lambda x: x * 2, lambda x: torch.empty_like(x), _flat_gradient, _save_x
    )
)
def flat_gradient(x: M) -> M:
    """Return ``2 * x``, the reference of the broken operator ``zoo::flat_gradient``. The operator's gradient reads any
    incoming gradient as if it were contiguous.
    """
    return x * 2


bad("backward reads any gradient as contiguous", flat_gradient, "gradient", note="y.T.backward() or y.sum().backward()")


@declare("gradient")
def sl_gradient(x: Float[Tensor, "n ci"], w: Float[Tensor, "co ci"]) -> Float[Tensor, "n co"]:
    """Return ``x @ w.T``, the reference of the broken op ``zoo_sl::gradient``. The op's gradient of ``w`` is doubled if
    ``x`` needs no gradient.
    """
    return x @ w.T


@sl_gradient.backward
def _(grad, saved, needs):
    """Return the gradients of ``x @ w.T`` by argument name, or None for an argument that ``needs`` does not name. This
    function has a defect on purpose. The gradient of ``w`` is doubled if ``x`` needs none.
    """
    both = needs.x and needs.w
    return {
        "x": grad @ saved.w if needs.x else None,
        "w": grad.T @ saved.x * (1 if both else 2) if needs.w else None,
    }


bad("gradient wrong when asked for alone", sl_gradient, "gradient", note="both at once are right")


@declare("looks_at_grad")
def sl_looks_at_grad(x: M) -> M:
    """Return ``3 * x``, the reference of the broken op ``zoo_sl::looks_at_grad``. The op's kernel returns ``2 * x`` if
    ``x`` requires a gradient.
    """
    return x * 3


sl_looks_at_grad.backward(lambda grad, saved, needs: {"x": grad * 3})

sl_looks_at_grad.kernel("cpu", lambda x: x * (2 if x.requires_grad else 3), name="looking")

bad("kernel that branches on requires_grad", sl_looks_at_grad, "requires_grad")


@declare("wasteful")
def sl_gradient_wasteful(x: Float[Tensor, "n ci"], w: Float[Tensor, "co ci"]) -> Float[Tensor, "n co"]:
    """Return ``x @ w.T``, the reference of the op ``zoo_sl::wasteful``. The op's gradients are right, but both are
    computed even if only one is needed. The audit reports this and does not fail.
    """
    return x @ w.T


sl_gradient_wasteful.backward(lambda grad, saved, needs: {"x": grad @ saved.w, "w": grad.T @ saved.x})
