"""Ops that were registered without Shiplap: their fakes, schemas and aliases."""

import torch
from jaxtyping import Float, Float32
from torch import Tensor

import shiplap as sl

from ..registry import add_case


# https://github.com/NVIDIA/cuEquivariance/issues/223
def _gelu_op(space, contiguous):
    @torch.library.custom_op(f"{space}::gelu_rows", mutates_args=())
    def gelu_rows(x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x.contiguous())

    @gelu_rows.register_fake
    def _(x):
        return torch.empty_like(x, memory_format=torch.contiguous_format) if contiguous else torch.empty_like(x)

    @sl.adopt(f"{space}::gelu_rows")
    def declared(x: Float32[Tensor, "n m"]) -> Float32[Tensor, "n m"]:
        return torch.nn.functional.gelu(x)

    return declared


gelu_broken, gelu_sound = _gelu_op("defects", False), _gelu_op("sound", True)
add_case(
    "gelu_rows",
    "NVIDIA/cuEquivariance#223",
    "the fake keeps the strides of the input, the kernel gives contiguous results",
    gelu_broken,
    gelu_sound,
)


# https://github.com/pytorch/pytorch/issues/171622
def _scale_op(space, right):
    @torch.library.custom_op(f"{space}::scale_images", mutates_args=())
    def scale_images(x: Tensor, factor: float) -> Tensor:
        return torch.mul(x, factor).contiguous(memory_format=torch.channels_last)

    @scale_images.register_fake
    def _(x, factor):
        layout = torch.channels_last if right else torch.contiguous_format
        return torch.empty_like(x, memory_format=layout)

    @sl.adopt(f"{space}::scale_images")
    def declared(x: Float32[Tensor, "n c h w"], factor: float) -> Float32[Tensor, "n c h w"]:
        return x * factor

    return declared


scale_broken, scale_sound = _scale_op("defects", False), _scale_op("sound", True)
add_case(
    "scale_images",
    "pytorch/pytorch#171622",
    "the fake is contiguous, the result has its channels last",
    scale_broken,
    scale_sound,
)


# https://github.com/pytorch/pytorch/issues/52569
def _center_op(space, declare):
    @torch.library.custom_op(f"{space}::center_scale", mutates_args=())
    def center_scale(x: Tensor, scale: Tensor) -> Tensor:
        shifted = x - x.mean(-1, keepdim=True) if declare else x.sub_(x.mean(-1, keepdim=True))
        return shifted * scale

    @center_scale.register_fake
    def _(x, scale):
        return torch.empty_like(x)

    @sl.adopt(f"{space}::center_scale", autocast=None)
    def declared(x: Float[Tensor, "n m"], scale: Float[Tensor, "m"]) -> Float[Tensor, "n m"]:
        return (x - x.mean(-1, keepdim=True)) * scale

    return declared


center_broken, center_sound = _center_op("defects", False), _center_op("sound", True)
add_case(
    "center_scale",
    "pytorch/pytorch#52569",
    "the op writes to its input, which its schema does not say",
    center_broken,
    center_sound,
)


# https://github.com/torch/nn/pull/554
def _shrink_op(space, copy):
    library = torch.library.Library(space, "FRAGMENT")
    library.define("shrink(Tensor x, float by=0.0) -> Tensor")

    def shrink(x, by=0.0):
        if by == 0:
            return x.clone() if copy else x
        return torch.sign(x) * (x.abs() - by).clamp_min(0)

    def keep(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.by = inputs[1]

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return (grad.clone() if ctx.by == 0 else grad * x.sign().square() * (x.abs() >= ctx.by)), None

    library.impl("shrink", shrink, "CPU")
    torch.library.register_autograd(f"{space}::shrink", backward, setup_context=keep, lib=library)
    torch.library.register_fake(f"{space}::shrink", lambda x, by=0.0: torch.empty_like(x), lib=library)

    @sl.adopt(f"{space}::shrink")
    def declared(x: Float[Tensor, "n m"], by: float = 0.0) -> Float[Tensor, "n m"]:
        return x.clone() if by == 0 else torch.sign(x) * (x.abs() - by).clamp_min(0)

    return library, declared


(_library_broken, shrink_broken), (_library_sound, shrink_sound) = (
    _shrink_op("defects", False),
    _shrink_op("sound", True),
)
add_case(
    "shrink",
    "torch/nn#554",
    "with nothing to do the op returns its input itself",
    shrink_broken,
    shrink_sound,
)
