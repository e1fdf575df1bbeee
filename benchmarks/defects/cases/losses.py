"""Losses and what they are made of."""

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from ..registry import address_view, case


def _labels(rng, rows, classes, ignored):
    target = torch.randint(0, max(classes, 1), (rows,), generator=rng)
    return torch.where(torch.rand(rows, generator=rng) < 0.3, ignored, target) if classes else target.fill_(ignored)


# https://github.com/chainer/chainer/pull/500
@case("chainer/chainer#500", "the mean over no counted label divides by zero")
def nll_mean(x: Float[Tensor, "n k"], target: Int64[Tensor, "n"], ignore: int = -100) -> Float[Tensor, ""]:
    """Minus the mean of the log-probabilities of the labels, without the ignored ones; zero where all are ignored."""
    counted = target != ignore
    wide = torch.cat([x, x.new_zeros(x.shape[0], 1)], 1)
    picked = wide.gather(1, torch.where(counted, target, x.shape[1])[:, None])[:, 0]
    return -picked.sum() / counted.sum().clamp_min(1)


@nll_mean.samples
def _(rng, sizes, dtype, device):
    n, k, ignore = sizes["n"], sizes["k"], sizes["ignore"]
    x = torch.randn(n, k, generator=rng).to(device, dtype)
    return x, _labels(rng, n, k, ignore).to(device), ignore


@nll_mean.broken.kernel("cpu")
def _(x, target, ignore):
    kept = (target != ignore).nonzero()[:, 0]
    return -x[kept, target[kept]].mean()


@nll_mean.sound.kernel("cpu")
def _(x, target, ignore):
    kept = (target != ignore).nonzero()[:, 0]
    return -x[kept, target[kept]].sum() / max(len(kept), 1)


@nll_mean.backward
def _(grad, saved, needs):
    counted = saved.target != saved.ignore
    rows = torch.where(counted, -1.0, 0.0).to(grad.dtype) * grad / counted.sum().clamp_min(1)
    column = torch.arange(saved.x.shape[1], device=grad.device)
    return {"x": torch.where(column == saved.target[:, None], rows[:, None], 0.0)}


# https://github.com/google-deepmind/optax/pull/1786
@case("google-deepmind/optax#1786", "a target of zero gives zero times minus infinity")
def kl_rows(log_p: Float[Tensor, "n k"], target: Float[Tensor, "n k"]) -> Float[Tensor, "n"]:
    """The Kullback-Leibler divergence of each row from target probabilities; zero times log zero is zero."""
    return (torch.xlogy(target, target) - torch.where(target == 0, 0.0, target * log_p)).sum(-1)


@kl_rows.samples
def _(rng, sizes, dtype, device):
    shape = sizes["n"], sizes["k"]
    log_p = torch.randn(shape, generator=rng).log_softmax(-1)
    target = torch.randn(shape, generator=rng).softmax(-1)
    return log_p.to(device, dtype), target.to(device, dtype)


@kl_rows.broken.kernel("cpu")
def _(log_p, target):
    return (target * (target.log() - log_p)).sum(-1)


@kl_rows.sound.kernel("cpu")
def _(log_p, target):
    terms = target * (target.log() - log_p)
    return torch.where(target == 0, 0.0, terms).sum(-1)


# https://github.com/pytorch/pytorch/issues/24933
@case("pytorch/pytorch#24933", "the logarithm of a sigmoid is taken in two steps, and is infinite for large logits")
def bce_with_logits(x: Float[Tensor, "*n"], target: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """The binary cross entropy of each logit."""
    return torch.logaddexp(x, torch.zeros_like(x)) - x * target


@bce_with_logits.samples
def _(rng, sizes, dtype, device):
    shape = sizes["n"] if isinstance(sizes["n"], (tuple, list)) else (sizes["n"],)
    x, target = torch.randn(shape, generator=rng) * 4, torch.rand(shape, generator=rng)
    return x.to(device, dtype), target.to(device, dtype)


@bce_with_logits.broken.kernel("cpu")
def _(x, target):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    p = torch.sigmoid(wide)
    return (-(target * p.log() + (1 - target) * (1 - p).log())).to(x.dtype)


@bce_with_logits.sound.kernel("cpu")
def _(x, target):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return ((1 - target) * wide - torch.nn.functional.logsigmoid(wide)).to(x.dtype)


@bce_with_logits.backward
def _(grad, saved, needs):
    return {"x": grad * (torch.sigmoid(saved.x) - saved.target), "target": -grad * saved.x}


# https://github.com/ROCm/TransformerEngine/pull/623
@case("ROCm/TransformerEngine#623", "the backward takes one gradient a row from memory, also where it is broadcast")
def cross_entropy_rows(x: Float32[Tensor, "n k"], target: Int64[Tensor, "n"]) -> Float32[Tensor, "n"]:
    """The cross entropy of each row of logits."""
    return torch.logsumexp(x, -1) - x.gather(1, target[:, None])[:, 0]


@cross_entropy_rows.samples
def _(rng, sizes, dtype, device):
    k = max(sizes["k"], 1)
    x = torch.randn(sizes["n"], k, generator=rng)
    return x.to(device, dtype), torch.randint(0, k, (sizes["n"],), generator=rng).to(device)


@cross_entropy_rows.broken.kernel("cpu")
@cross_entropy_rows.sound.kernel("cpu")
def _(x, target):
    return torch.nn.functional.cross_entropy(x, target, reduction="none")


def _ce_backward(name, contiguous):
    @torch.library.custom_op(f"defects_parts::{name}", mutates_args=())
    def scale(grad: Tensor, x: Tensor, target: Tensor) -> Tensor:
        n, k = x.shape
        read = grad.contiguous() if contiguous else grad
        rows = address_view(read, n)
        return (torch.softmax(x, -1) - torch.nn.functional.one_hot(target, k)) * rows[:, None]

    scale.register_fake(lambda grad, x, target: x.new_empty(x.shape))
    return lambda grad, saved, needs: {"x": scale(grad, saved.x, saved.target)}


cross_entropy_rows.broken.backward(_ce_backward("ce_backward_flat", False), strided=True)
cross_entropy_rows.sound.backward(_ce_backward("ce_backward", True), strided=True)


# https://github.com/microsoft/onnxruntime/pull/10576
@case("microsoft/onnxruntime#10576", "log(1 + y) for a tiny y loses it, where log1p keeps it")
def softplus(x: Float32[Tensor, "n"]) -> Float32[Tensor, "n"]:
    """log(1 + exp(x)) without overflow."""
    return torch.logaddexp(x, torch.zeros_like(x))


SOFTPLUS = """
#include <cmath>
int softplus_values(const sl_context*, const DLTensor* x, DLTensor* out) {
  const float* from = static_cast<const float*>(x->data);
  float* to = static_cast<float*>(out->data);
  for (int64_t i = 0; i < x->shape[0]; i++) {
    const float v = from[i], y = expf(-fabsf(v));
    to[i] = (v < 0 ? 0 : v) + $LOG;
  }
  return SL_OK;
}
"""
softplus.kernels("softplus_values", SOFTPLUS, LOG=("logf(1.0f + y)", "log1pf(y)"))


@softplus.backward
def _(grad, saved, needs):
    return {"x": grad * torch.sigmoid(saved.x)}
