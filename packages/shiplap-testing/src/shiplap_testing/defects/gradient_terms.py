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
    @sl.op(f"{ns}::pair")
    def pair(x: M) -> tuple[M, M]:
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
    @sl.op(f"{ns}::joined")
    def joined(x: M, more: list[M]) -> M:
        return sum(((i + 2) * t for i, t in enumerate(more)), x)

    return joined


def _list_gradient(step):
    def gradients(grad, saved, needs):
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
    def entropies(grad, saved, needs):
        p, logp = torch.softmax(saved.x, 1), logs(saved.x)
        return {"x": -grad[:, None] * p * (logp - (p * logp).sum(1, keepdim=True))}

    return backward(entropies)


def entropy(ns):
    @sl.op(f"{ns}::entropy")
    def entropy(x: M) -> V:
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
    @sl.op(f"{ns}::linear")
    def linear(x: Float[Tensor, "n k"], w: Float[Tensor, "m k"]) -> Float[Tensor, "n m"]:
        return x @ w.T

    return linear


def _weight_gradient(rows):
    def gradients(grad, saved, needs):
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
