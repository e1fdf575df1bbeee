"""Gradients."""

import torch
from jaxtyping import Complex64, Float, Float32, Int64
from torch import Tensor

from ..registry import case


# https://github.com/pytorch/pytorch/issues/2421
@case("pytorch/pytorch#2421", "the gradient of the length of a zero vector is not a number")
def row_length(x: Float[Tensor, "n c"]) -> Float[Tensor, "n"]:
    """The length of each row."""
    return torch.linalg.vector_norm(x, dim=-1)


@row_length.broken.kernel("cpu")
@row_length.sound.kernel("cpu")
def _(x, *, out):
    torch.linalg.vector_norm(x, dim=-1, out=out)


@row_length.broken.backward
def _(grad, saved, needs):
    return {"x": (grad / saved.out)[:, None] * saved.x}


@row_length.sound.backward
def _(grad, saved, needs):
    length = torch.where(saved.out == 0, 1.0, saved.out)
    return {"x": torch.where(saved.out == 0, 0.0, grad / length)[:, None] * saved.x}


# https://github.com/pytorch/pytorch/issues/58509
@case("pytorch/pytorch#58509", "the backward uses a value that autograd does not see, so its own gradient is wrong")
def squared_double(x: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    """The square of twice the input."""
    return (2 * x).square()


@squared_double.broken.kernel("cpu")
@squared_double.sound.kernel("cpu")
def _(x):
    return 4 * x * x


@squared_double.broken.backward(once_differentiable=False)
def _(grad, saved, needs):
    with torch.no_grad():
        doubled = saved.x * 2
    return {"x": 4 * doubled * grad}


@squared_double.sound.backward(once_differentiable=False)
def _(grad, saved, needs):
    doubled = saved.x * 2
    return {"x": 4 * doubled * grad}


# https://github.com/pytorch/pytorch/issues/81417
@case("pytorch/pytorch#81417", "the backward scales the incoming gradient in place, which others hold too")
def scaled_tanh(x: Float[Tensor, "n c"], scale: float = 2.0) -> Float[Tensor, "n c"]:
    """A multiple of the hyperbolic tangent."""
    return torch.tanh(x) * scale


@scaled_tanh.broken.kernel("cpu")
@scaled_tanh.sound.kernel("cpu")
def _(x, scale, *, out):
    torch.tanh(x, out=out).mul_(scale)


@scaled_tanh.broken.backward
def _(grad, saved, needs):
    slope = 1 - torch.tanh(saved.x).square()
    return {"x": grad.mul_(saved.scale) * slope}


@scaled_tanh.sound.backward
def _(grad, saved, needs):
    slope = 1 - torch.tanh(saved.x).square()
    return {"x": grad * saved.scale * slope}


# https://github.com/linkedin/Liger-Kernel/issues/254
@case("linkedin/Liger-Kernel#254", "the backward writes the gradients over the saved inputs")
def swiglu(a: Float32[Tensor, "n c"], b: Float32[Tensor, "n c"]) -> Float32[Tensor, "n c"]:
    """a * sigmoid(a) * b."""
    return a * torch.sigmoid(a) * b


@swiglu.broken.kernel("cpu")
@swiglu.sound.kernel("cpu")
def _(a, b, *, out):
    torch.mul(a, torch.sigmoid(a), out=out).mul_(b)


def _swiglu_backward(name, in_place):
    @torch.library.custom_op(f"defects_parts::{name}", mutates_args=())
    def both(grad: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        gate = torch.sigmoid(a)
        grad_a, grad_b = grad * b * gate * (1 + a * (1 - gate)), grad * a * gate
        if in_place:
            a.detach().numpy()[...] = grad_a.numpy()
            b.detach().numpy()[...] = grad_b.numpy()
        return grad_a, grad_b

    both.register_fake(lambda grad, a, b: (a.new_empty(a.shape), b.new_empty(b.shape)))

    def backward(grad, saved, needs):
        grad_a, grad_b = both(grad, saved.a, saved.b)
        return {"a": grad_a, "b": grad_b}

    return backward


swiglu.broken.backward(_swiglu_backward("swiglu_backward_in_place", True))
swiglu.sound.backward(_swiglu_backward("swiglu_backward", False))


# https://github.com/unslothai/unsloth/pull/4550
@case("unslothai/unsloth#4550", "the backward gives no gradient of the weight")
def rms_scale(x: Float[Tensor, "n c"], weight: Float[Tensor, "c"], eps: float = 1e-6) -> Float[Tensor, "n c"]:
    """Root mean square normalisation."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@rms_scale.broken.kernel("cpu")
@rms_scale.sound.kernel("cpu")
def _(x, weight, eps):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


@rms_scale.broken.backward
def _(grad, saved, needs):
    scale = torch.rsqrt(saved.x.square().mean(-1, keepdim=True) + saved.eps)
    normal, inner = saved.x * scale, grad * saved.weight
    return {"x": scale * (inner - normal * (inner * normal).mean(-1, keepdim=True)), "weight": None}


@rms_scale.sound.backward
def _(grad, saved, needs):
    scale = torch.rsqrt(saved.x.square().mean(-1, keepdim=True) + saved.eps)
    normal, inner = saved.x * scale, grad * saved.weight
    shift = normal * (inner * normal).mean(-1, keepdim=True)
    return {"x": scale * (inner - shift), "weight": (grad * normal).sum(0)}


# https://github.com/mgmalek/efficient_cross_entropy/pull/8
@case("mgmalek/efficient_cross_entropy#8", "the backward fails where only the weight needs a gradient")
def projected_square(x: Float[Tensor, "n c"], weight: Float[Tensor, "c d"]) -> Float[Tensor, "n d"]:
    """The squares of a linear map."""
    return (x @ weight).square()


@projected_square.broken.kernel("cpu")
@projected_square.sound.kernel("cpu")
def _(x, weight):
    return (x @ weight).square_()


@projected_square.broken.backward
def _(grad, saved, needs):
    result = {}
    if needs.x:
        inner = 2 * grad * (saved.x @ saved.weight)
        result["x"] = inner @ saved.weight.mT
    if needs.weight:
        result["weight"] = saved.x.mT @ inner
    return result


@projected_square.sound.backward
def _(grad, saved, needs):
    inner = 2 * grad * (saved.x @ saved.weight)
    return {"x": inner @ saved.weight.mT, "weight": saved.x.mT @ inner}


# https://github.com/tensorflow/tensorflow/issues/4859
@case("tensorflow/tensorflow#4859", "the gradient of a complex product is not conjugated")
def complex_matmul(a: Complex64[Tensor, "n k"], b: Complex64[Tensor, "k m"]) -> Complex64[Tensor, "n m"]:
    """A product of complex matrices."""
    return a @ b


@complex_matmul.broken.kernel("cpu")
@complex_matmul.sound.kernel("cpu")
def _(a, b):
    return a @ b


@complex_matmul.broken.backward
def _(grad, saved, needs):
    return {"a": grad @ saved.b.mT, "b": saved.a.mT @ grad}


@complex_matmul.sound.backward
def _(grad, saved, needs):
    return {"a": grad @ saved.b.mH, "b": saved.a.mH @ grad}


# https://github.com/kaldi-asr/kaldi/issues/3890
@case("kaldi-asr/kaldi#3890", "the kept elements are guessed from input and output, which fails at zero")
def keyed_dropout(x: Float[Tensor, "n"], seed: Int64[Tensor, ""]) -> Float[Tensor, "n"]:
    """Half of the elements, doubled; which half follows from a seed."""
    return x * (2.0 * _keyed(x, seed)).to(x.dtype)


def _keyed(x, seed):
    bits = (torch.arange(x.shape[0], device=x.device) + 1) * 2654435761 + seed * 40503
    return (bits // 1024) % 2


@keyed_dropout.broken.kernel("cpu")
@keyed_dropout.sound.kernel("cpu")
def _(x, seed):
    return torch.where(_keyed(x, seed) == 1, 2 * x, 0 * x)


@keyed_dropout.broken.backward
def _(grad, saved, needs):
    return {"x": torch.where(saved.x == 0, grad, grad * saved.out / saved.x)}


@keyed_dropout.sound.backward
def _(grad, saved, needs):
    return {"x": grad * (2.0 * _keyed(saved.x, saved.seed)).to(grad.dtype)}
