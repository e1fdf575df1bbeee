"""Torch's own functions as kernels and gradients of themselves: whatever fails on one of them is a false alarm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

import shiplap as sl
from shiplap.dispatch import Op

M = Float[Tensor, "n c"]
V = Float[Tensor, "n"]
C = Float[Tensor, "c"]
S = Float[Tensor, ""]
Q = Float[Tensor, "b h s d"]
OPS: dict[str, Op] = {}


def itself(fn: Callable[..., Any], **declaration: Any) -> None:
    """``fn`` as an op, as its kernel, and through autograd as its gradient."""
    op = sl.op(f"itself::{fn.__name__}", **declaration)(fn)
    op.kernel("cpu", lambda **named: fn(**named))

    @op.backward(saves=[a.name for a in op.spec.tensors])
    def _(grad: Any, saved: Any, needs: Any) -> dict[str, Any]:
        values = {a.name: getattr(saved, a.name) for a in op.spec.args}
        wanted = [n for n, v in values.items() if isinstance(v, Tensor) and getattr(needs, n, False)]
        twice = torch.is_grad_enabled()  # some functions have another formula then
        with torch.enable_grad():
            # views, since two arguments may be one tensor: each has a gradient of its own
            inputs = [v.view_as(v) if (v := values[n]).requires_grad else v.detach().requires_grad_() for n in wanted]
            out = fn(**{**values, **dict(zip(wanted, inputs, strict=True))})
            gradients = torch.autograd.grad(out, inputs, grad, create_graph=twice, allow_unused=True)
        return dict(zip(wanted, gradients, strict=True))

    OPS[fn.__name__] = op


def layer_norm(x: M, w: C, b: C, eps: float = 1e-5) -> M:
    return F.layer_norm(x, x.shape[-1:], w, b, eps)


def rms_norm(x: M, w: C) -> M:
    return F.rms_norm(x, x.shape[-1:], w, 1e-6)


def softmax(x: M) -> M:
    return torch.softmax(x, -1)


def log_softmax(x: M) -> M:
    return torch.log_softmax(x, -1)


def cross_entropy(x: M, y: Int64[Tensor, "n"]) -> S:
    return F.cross_entropy(x, y)


def gelu(x: M) -> M:
    return F.gelu(x)


def gelu_tanh(x: M) -> M:
    return F.gelu(x, approximate="tanh")


def attention(q: Q, k: Q, v: Q) -> Q:
    return F.scaled_dot_product_attention(q, k, v)


def silu(x: M) -> M:
    return F.silu(x)


def softplus(x: M) -> M:
    return F.softplus(x)


def logsumexp(x: M) -> V:
    return torch.logsumexp(x, -1)


def std(x: M) -> V:
    return x.std(-1, correction=0)


def var(x: M) -> V:
    return x.var(-1, correction=0)


def normalize(x: M) -> M:
    return F.normalize(x, dim=-1)


def cosine(x: M, y: M) -> V:
    return F.cosine_similarity(x, y, dim=-1)


def linear(x: M, w: Float[Tensor, "o c"], b: Float[Tensor, "o"]) -> Float[Tensor, "n o"]:
    return F.linear(x, w, b)


def bmm(a: Float[Tensor, "b m k"], b: Float[Tensor, "b k n"]) -> Float[Tensor, "b m n"]:
    return torch.bmm(a, b)


def conv1d(x: Float[Tensor, "b c t"], w: Float[Tensor, "o c 3"]) -> Float[Tensor, "b o t"]:
    return F.conv1d(x, w, padding=1)


def cumsum(x: M) -> M:
    return x.cumsum(-1)


def embedding(w: M, index: Int64[Tensor, "k"]) -> Float[Tensor, "k c"]:
    return F.embedding(index, w)


def mse(x: M, y: M) -> S:
    return F.mse_loss(x, y)


def smooth_l1(x: M, y: M) -> S:
    return F.smooth_l1_loss(x, y)


def kl_div(x: M, y: M) -> S:
    return F.kl_div(x, y, reduction="sum")


def sigmoid(x: M) -> M:
    return torch.sigmoid(x)


def group_norm(x: Float[Tensor, "b 4 t"], w: Float[Tensor, "4"], b: Float[Tensor, "4"]) -> Float[Tensor, "b 4 t"]:
    return F.group_norm(x, 2, w, b)


def elu(x: M, alpha: float = 1.0) -> M:
    return F.elu(x, alpha)


def mean(x: M) -> V:
    return x.mean(-1)


def tanh(x: M) -> M:
    return torch.tanh(x)


def expm1(x: M) -> M:
    return torch.expm1(x)


def huber(x: M, y: M, delta: float = 1.0) -> S:
    return F.huber_loss(x, y, delta=delta)


def sort(x: M) -> M:
    return x.sort(-1).values


def top2(x: M) -> Float[Tensor, "n 2"]:
    return x.topk(2, -1).values


def index_add(x: M, index: Int64[Tensor, "k"], y: Float[Tensor, "k c"]) -> M:
    return x.index_add(0, index, y)


def gather(x: M, index: Int64[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    return x.gather(1, index)


def norm(x: M) -> V:
    return x.norm(dim=-1)


def conv2d(x: Float[Tensor, "b c h w"], w: Float[Tensor, "o c 3 3"]) -> Float[Tensor, "b o h w"]:
    return F.conv2d(x, w, padding=1)


def matmul(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"]) -> Float[Tensor, "m n"]:
    return a @ b


def chained(x: M) -> M:
    return torch.tanh(torch.sigmoid(x) * x) * torch.sigmoid(-x)


def amax(x: M) -> V:
    return x.amax(-1)


def sqrt(x: M) -> M:
    return x.sqrt()


def log(x: M) -> M:
    return x.log()


def reciprocal(x: M) -> M:
    return 1 / x


def atan2(x: M, y: M) -> M:
    return torch.atan2(x, y)


def erf(x: M) -> M:
    return torch.erf(x)


def cumprod(x: M) -> M:
    return x.cumprod(-1)


def log_sigmoid(x: M) -> M:
    return F.logsigmoid(x)


def batch_norm(x: M, w: C, b: C) -> M:
    return F.batch_norm(x, None, None, w, b, training=True)


def causal(x: Float[Tensor, "b s s"]) -> Float[Tensor, "b s s"]:
    keep = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).tril()
    return torch.softmax(x.masked_fill(~keep, float("-inf")), -1)


MORE = (sort, index_add, norm, conv2d, matmul, chained, sqrt, log, reciprocal, atan2, erf, cumprod, log_sigmoid, causal)
SIMPLE = (silu, softplus, std, var, normalize, cosine, linear, bmm, cumsum, embedding, sigmoid, elu, mean, tanh, expm1)
for _fn in (layer_norm, rms_norm, softmax, log_softmax, gelu, gelu_tanh, attention, *SIMPLE):
    itself(_fn)
for _fn in (mse, smooth_l1, kl_div, huber, cross_entropy):
    itself(_fn, requires=("n >= 1", "c >= 1"))
itself(logsumexp, requires=("c >= 1",))
itself(conv1d, requires=("b >= 1", "t >= 1", "c >= 1", "o >= 1"))

itself(group_norm, requires=("b >= 1", "t >= 1"))
for _fn in MORE:
    itself(_fn, requires=("o >= 1", "c >= 1", "h >= 1", "w >= 1", "b >= 1") if _fn is conv2d else ())
itself(amax, requires=("c >= 1",))
itself(top2, requires=("c >= 2",))
itself(gather, requires=("c >= 1",))
itself(batch_norm, requires=("n >= 2", "c >= 1"))
