"""Gradients that miss a term, an output, rows or digits."""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

import shiplap as sl
from shiplap_testing.defects.declared import M, V, added
from shiplap_testing.defects.defect import add, backward, of
from shiplap_testing.defects.gradient import cube
from shiplap_testing.defects.witness import randn, same_grad

gradient = partial(add, "gradient")


def pair(ns):
    """Declare the op ``pair`` in the namespace ``ns`` and return it. Its reference returns ``2 * x`` and ``x * x``, as
    two tensors.
    """

    @sl.op(f"{ns}::pair")
    def pair(x: M) -> tuple[M, M]:
        """Return ``2 * x`` and ``x * x``, as two tensors. Kernels of the op are compared with this reference."""
        return x * 2, x * x

    return pair


gradient(
    "gradient of the second output left out",
    "right as long as the loss uses the first output only",
    of(pair, backward(lambda grad, saved, needs: {"x": grad[0] * 2})),
    of(pair, backward(lambda grad, saved, needs: {"x": grad[0] * 2 + grad[1] * 2 * saved.x})),
    same_grad(lambda: (randn(3, 2),)),
)


def joined(ns):
    """Declare the op ``joined`` in the namespace ``ns`` and return it. Its reference returns the sum of ``x`` and the
    tensors of ``more``. The tensors of ``more`` have the factors 2, 3, 4 and so on.
    """

    @sl.op(f"{ns}::joined")
    def joined(x: M, more: list[M]) -> M:
        """Return ``x`` plus the tensors of ``more``, with the factors 2, 3, 4 and so on. Kernels of the op are compared
        with this reference.
        """
        return sum(((i + 2) * t for i, t in enumerate(more)), x)

    return joined


def _list_gradient(step):
    """Return a function that registers a gradient of the op ``joined``.

    If ``step`` is 1, the gradients for the list ``more`` are in its order, and there is no defect. If it is -1, there
    is a defect on purpose: their order is reversed.
    """

    def gradients(grad, saved, needs):
        """Return the gradients of ``joined`` for ``x`` and for the list ``more``, as a dict by argument name. If
        ``step`` (argument of ``_list_gradient``) is 1, there is no defect. If it is -1, there is a defect on purpose:
        the gradients of the list are in reverse order.
        """
        # Each tensor of the list has another factor, so that an exchange shows.
        return {"x": grad, "more": [(i + 2) * grad for i in range(len(saved.more))][::step]}

    return backward(gradients)


gradient(
    "gradients of a list in reverse",
    "they are collected from the last to the first, and so returned",
    of(joined, _list_gradient(-1)),
    of(joined, _list_gradient(1)),
    same_grad(lambda: (randn(2, 2), [randn(2, 2, seed=1), randn(2, 2, seed=2)])),
)


def _entropy(logs):
    """Return a function that registers a gradient of the op ``entropy``. ``logs(x)`` returns the logarithm of the
    softmax of each row. If it is exact for small probabilities, there is no defect. If it is minus infinity for them,
    there is a defect on purpose: the gradient is NaN.
    """

    def entropies(grad, saved, needs):
        """Return the gradient of the entropy of the softmax of each row for ``x``, as a dict by argument name. If
        ``logs`` (argument of ``_entropy``) returns minus infinity, there is a defect on purpose: infinity is multiplied
        by zero, and the gradient is NaN. Otherwise there is no defect.
        """
        p, logp = torch.softmax(saved.x, 1), logs(saved.x)
        return {"x": -grad[:, None] * p * (logp - (p * logp).sum(1, keepdim=True))}

    return backward(entropies)


def entropy(ns):
    """Declare the op ``entropy`` in the namespace ``ns`` and return it. Its reference returns the entropy of the
    softmax of each row of ``x``.
    """

    @sl.op(f"{ns}::entropy")
    def entropy(x: M) -> V:
        """Return the entropy of the softmax of each row of ``x``. Kernels of the op are compared with this
        reference.
        """
        return -(torch.softmax(x, 1) * torch.log_softmax(x, 1)).sum(1)

    return entropy


gradient(
    "gradient of the entropy of a sure choice",
    "zero times the logarithm of zero: logits that lie 200 apart",
    of(entropy, _entropy(lambda x: torch.softmax(x, 1).log())),
    of(entropy, _entropy(lambda x: torch.log_softmax(x, 1))),
    same_grad(lambda: (torch.tensor([[200.0, 0.0]]),)),
)
gradient(
    "activations kept in bfloat16",
    "saved in 8 bits of precision for a gradient in 24",
    of(cube, backward(lambda grad, saved, needs: {"x": grad * 3 * saved.x.bfloat16().to(saved.x.dtype).square()})),
    of(cube, backward(lambda grad, saved, needs: {"x": grad * 3 * saved.x.square()})),
    same_grad(lambda: (randn(3, 2),)),
)


def linear(ns):
    """Declare the op ``linear`` in the namespace ``ns`` and return it. Its reference returns the matrix product ``x @
    w.T``.
    """

    @sl.op(f"{ns}::linear")
    def linear(x: Float[Tensor, "n k"], w: Float[Tensor, "m k"]) -> Float[Tensor, "n m"]:
        """Return ``x @ w.T``. Kernels of the op are compared with this reference."""
        return x @ w.T

    return linear


def _weight_gradient(rows):
    """Return a function that registers a gradient of the op ``linear``. If ``rows`` is None, there is no defect.
    Otherwise there is a defect on purpose: the gradient for ``w`` covers only the first ``rows`` rows of ``x``.
    """

    def gradients(grad, saved, needs):
        """Return the gradients of ``x @ w.T``, as a dict by argument name. If ``rows`` (argument of
        ``_weight_gradient``) is None, there is no defect. Otherwise there is a defect on purpose: the gradient for
        ``w`` leaves out all but the first ``rows`` rows of ``x``.
        """
        return {"x": grad @ saved.w, "w": grad[:rows].T @ saved.x[:rows]}

    return backward(gradients)


gradient(
    "weight gradient over the first 512 rows",
    "one pass of split-K covers 512 rows, and there is no second one",
    of(linear, _weight_gradient(512)),
    of(linear, _weight_gradient(None)),
    same_grad(lambda: (randn(600, 3), randn(2, 3, seed=1))),
)
gradient(
    "gradient of a sum with the sign of a difference",
    "copied from the op beside it",
    of(added, backward(lambda grad, saved, needs: {"x": grad, "y": -grad}, [])),
    of(added, backward(lambda grad, saved, needs: {"x": grad, "y": grad}, [])),
    same_grad(lambda: (randn(3, 2), randn(3, 2, seed=1))),
)
