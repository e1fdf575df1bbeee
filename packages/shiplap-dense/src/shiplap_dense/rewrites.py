"""Rewrites that put our dense ops into models. The surrounding operations go into the template's kernel.

``linear_activation``, ``gated_linear``, ``norm_linear``, ``int8_linear`` and ``linear_loss`` are functions that return
rewrites, for ``sl.rewrites(*linear_activation(), ...)``. ``always=True`` places an op where it is not expected to pay,
too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import BFloat16, Float, Float16, Float32, Int8
from torch import Tensor
from torch.nn import functional as F

import shiplap as sl
from shiplap.plugin_api.rewriting import FoldedNorm, LinearLoss, PatternRewrite, Program, Rewrite, conv_norm, no_ops
from shiplap_dense.functional import conv2d, linear_cross_entropy, matmul, matmul_int8

__all__ = ["conv_norm_dense", "gated_linear", "int8_linear", "linear_activation", "linear_loss", "norm_linear"]

Rewrites = tuple[Rewrite, ...]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


# Unpacking n*k weights moves 3nk bytes, once; of 2mnk operations the template does fewer a second than the library.
# Both grow with nk, so it is m that decides (H200, bfloat16: 1.25x at 256 rows, level at 512, 0.93x at 1024).
FEW_ROWS = 256


def _on_gpu(x: Tensor, **others: Any) -> bool | str:
    """Return True for a tensor on a GPU, where the Triton template that a rewrite calls is faster than the library,
    otherwise the reason against the rewrite.
    """
    return x.device.type == "cuda" or "on the CPU a product of the library's is faster than the template"


def linear_activation(*, always: bool = False) -> tuple[PatternRewrite, ...]:
    """Return rewrites of ``gelu(linear(x, weight, bias))`` and of other activations, whose replacement computes the
    activation in the product's epilogue. On GPUs, unless ``always``.
    """
    pays = None if always else _on_gpu
    return tuple(
        sl.rewrite(*_activation_rewrite(act), name=f"linear_{name}", pays=pays) for name, act in ACTIVATIONS.items()
    )


def _activation_rewrite(act: Callable[[Tensor], Tensor]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return two functions for a rewrite: the pattern, a linear layer followed by the activation ``act`` as models call
    it, and the replacement, ``act`` of Shiplap's matrix product, into which Inductor fuses it.
    """

    def pattern(x: Float[Tensor, "*b k"], weight: Float[Tensor, "n k"], bias: Float[Tensor, "n"] | None) -> Tensor:
        """Return ``act`` of a linear layer as models compute it."""
        return act(F.linear(x, weight, bias))

    def replacement(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``act`` of the declared matrix product, which fuses ``act``."""
        return act(matmul(x, weight.t(), bias))

    return pattern, replacement


def gated_linear(*, always: bool = False) -> tuple[PatternRewrite, ...]:
    """Return rewrites of SwiGLU and GEGLU, ``silu(linear(x, gate)) * linear(x, up)``, also with gate and up as halves
    of one layer.

    Our product for the gate, with the activation and the multiplication in its epilogue. On GPUs.
    """
    pays = None if always else _on_gpu
    gates = {name: ACTIVATIONS[name] for name in ("silu", "gelu", "gelu_tanh")}
    made = [sl.rewrite(*_gated_rewrite(act), name=f"gated_{name}", pays=pays) for name, act in gates.items()]
    for half, last in (("first", False), ("last", True)):
        named = ((f"gated_{name}_{half}_half", act) for name, act in gates.items())
        # A fused layer of odd width cannot be cut in halves.
        made += [
            sl.rewrite(*_split_gate_rewrite(act, last), name=name, where="n % 2 == 0", pays=pays) for name, act in named
        ]
    return tuple(made)


def _gated_rewrite(act: Callable[[Tensor], Tensor]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return two functions for a rewrite: the pattern, a linear layer with the activation ``act`` times a second linear
    layer, and the replacement, in which Shiplap's matrix product computes the first one.
    """

    def pattern(x: Float[Tensor, "*b k"], gate: Float[Tensor, "n k"], up: Float[Tensor, "n k"]) -> Tensor:
        """Return the gated product of two linear layers as models compute it."""
        return act(F.linear(x, gate)) * F.linear(x, up)

    def replacement(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        """Return the gated product with the declared matrix product for the gate."""
        return act(matmul(x, gate.t())) * F.linear(x, up)

    return pattern, replacement


def _split_gate_rewrite(
    act: Callable[[Tensor], Tensor], last: bool
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return the pattern and the replacement for one linear layer whose first half, or with ``last`` its last half, is
    the gate.
    """

    def pattern(x: Float[Tensor, "*b k"], weight: Float[Tensor, "n k"], bias: Float[Tensor, "n"] | None) -> Tensor:
        """Return the gated product of the halves of one layer as models compute it."""
        halves = F.linear(x, weight, bias).chunk(2, -1)
        return act(halves[last]) * halves[not last]

    def replacement(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the gated product with two products by halves of the weight, the gate's by the declared matrix
        product.
        """
        # Rows of the weight are output features, so the halves are views.
        weights = weight.chunk(2)
        biases = (None, None) if bias is None else bias.chunk(2)
        return act(matmul(x, weights[last].t(), biases[last])) * F.linear(x, weights[not last], biases[not last])

    return pattern, replacement


def norm_linear(*, always: bool = False) -> Rewrites:
    """Return rewrites of a layer norm or RMS norm before a linear layer, whose replacement computes the norm in the
    product's prologue. On GPUs, unless ``always``.
    """
    pays = None if always else _on_gpu
    spelled = (("rms_norm_linear", Float32, torch.float32), ("rms_norm_linear_bfloat16", BFloat16, torch.bfloat16))
    rms = (sl.rewrite(*_rms_norm_rewrite(kind, dtype), name=name, pays=pays) for name, kind, dtype in spelled)
    return (no_ops, sl.rewrite(_layer_norm, _layer_norm_product, name="layer_norm_linear", pays=pays), *rms)


def _layer_norm(
    x: Float[Tensor, "*b k"],
    gain: Float[Tensor, "k"],
    shift: Float[Tensor, "k"],
    weight: Float[Tensor, "n k"],
    bias: Float[Tensor, "n"] | None,
    eps: float,
) -> Tensor:
    """Return a layer norm over the last dim, followed by a linear layer: the pattern of a rewrite."""
    return F.linear(F.layer_norm(x, (x.shape[-1],), gain, shift, eps), weight, bias)


def _layer_norm_product(
    x: Tensor, gain: Tensor, shift: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """Return a layer norm over the last dim, followed by the declared matrix product: the replacement of a rewrite."""
    return matmul(F.layer_norm(x, (x.shape[-1],), gain, shift, eps), weight.t(), bias)


def _rms_norm_rewrite(kind: Any, dtype: torch.dtype) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return the pattern and the replacement of an RMS norm before a linear layer, for tensors of ``dtype``, as
    transformers writes it: in float32, scaled in the model's dtype.
    """

    def normed(x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """Return the RMS norm of ``x`` with the weight ``gain``, computed in float32 and scaled in the dtype of the
        rewrite.
        """
        wide = x if dtype == torch.float32 else x.to(torch.float32)
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return gain * (scaled if dtype == torch.float32 else scaled.to(dtype))

    def pattern(x: Tensor, gain: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Return the RMS norm followed by a linear layer as models compute it."""
        return F.linear(normed(x, gain, eps), weight, bias)

    def replacement(x: Tensor, gain: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Return the RMS norm followed by the declared matrix product."""
        return matmul(normed(x, gain, eps), weight.t(), bias)

    shapes = {"x": "batch tokens k", "gain": "k", "weight": "n k", "bias": "n"}
    kinds = {name: kind[Tensor, shape] for name, shape in shapes.items()}
    # Dtypes belong to the pattern: casts differ from model to model.
    pattern.__annotations__ |= kinds | {"bias": kinds["bias"] | None, "eps": float}
    return pattern, replacement


def int8_linear(*, always: bool = False) -> tuple[PatternRewrite, ...]:
    """Return rewrites of ``linear(x, weight.to(x.dtype) * scale)`` with 8-bit weights, whose replacement never unpacks
    the weights.

    On GPUs up to ``FEW_ROWS``.
    """
    kinds = {"float32": Float32, "bfloat16": BFloat16, "float16": Float16}
    pays = None if always else _few_rows
    return tuple(
        sl.rewrite(*_int8_rewrite(kind, getattr(torch, name)), name=f"int8_linear_{name}", pays=pays)
        for name, kind in kinds.items()
    )


def _few_rows(x: Tensor, **others: Any) -> bool | str:
    """Return True if the rows of ``x`` are few enough for the int8 template to be faster, otherwise the reason against
    it.
    """
    # On the CPU the template is used for any number of rows.
    few = x.device.type != "cuda" or x.numel() <= FEW_ROWS * x.shape[-1]
    return few or f"more than {FEW_ROWS} rows: unpacking the weights costs less than the template loses to the library"


def _int8_rewrite(kind: Any, dtype: torch.dtype) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return the pattern and the replacement of a linear layer over dequantised 8-bit weights, for tensors of
    ``dtype``.
    """

    def pattern(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        """Return the linear layer over dequantised weights as models compute it."""
        return F.linear(x, weight.to(dtype) * scale, bias)

    def replacement(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        """Return the linear layer by the declared int8 product."""
        return matmul_int8(x, weight, scale.view(-1), bias)

    pattern.__annotations__ |= {
        "x": kind[Tensor, "*b k"],
        "weight": Int8[Tensor, "n k"],
        "scale": kind[Tensor, "n 1"],
        "bias": kind[Tensor, "n"] | None,
    }
    return pattern, replacement


def linear_loss(*, always: bool = False) -> Rewrites:
    """Return the rewrite of ``cross_entropy(linear(hidden, weight), target)``, where nothing else reads the logits, to
    ``linear_cross_entropy``.

    ``linear_cross_entropy`` takes the place of both, so that neither the logits of all rows nor their gradients exist.
    """
    return (LinearLoss("linear_cross_entropy", linear_cross_entropy, always=always),)


def _call_conv2d(
    input: Tensor, weight: Tensor, bias: Tensor, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Tensor:
    """Return the convolution of ``input`` with weights into which a norm was folded, by the declared op. Raises
    NotImplementedError for groups, which the op does not have.
    """
    if groups != 1:
        raise NotImplementedError("dense.conv2d has no groups")
    pair = [v if isinstance(v, int) else tuple(v) for v in (stride, padding, dilation)]
    return conv2d(input, weight, bias, *pair)


def _channels_last_examples() -> Iterator[Program]:
    """Yield the example programs of a convolution followed by a norm on which the rewrite is tested, without groups and
    with inputs in ``torch.channels_last``.
    """
    for program in conv_norm.examples():
        x, *others = program.args
        if "groups=1" in program.label:
            args = (x.to(memory_format=torch.channels_last), *others)
            yield Program(program.fn, args, program.label, train=False)


def _of_one_pixel(named: dict[str, Any]) -> bool | str:
    """Return True if the weight is that of a 1x1 convolution on a GPU, for which the Triton template is faster than the
    library, otherwise the reason against the rewrite.
    """
    if named["weight"].device.type == "cpu":
        return "on the CPU, Inductor folds constants into the library's convolution, and the template is no faster"
    if set(named["weight"].shape[2:]) != {1}:
        return f"weights of {list(named['weight'].shape[2:])}: the library's convolution is as fast as the template"
    return True


conv_norm_dense = FoldedNorm(
    "conv_norm_dense", "conv2d", _call_conv2d, _channels_last_examples, pays=_of_one_pixel, gradient=False
)
"""A convolution of a tensor in ``torch.channels_last`` and the norm behind it: ``dense.conv2d`` with folded weights.

It pays for 1x1 on CUDA, with what follows in the template's epilogue (H200, 2026-11: 1.29x and 1.23x of Inductor;
3x3 are 0.83x to 1.06x: ``benchmarks/results/dense_gpu.json``).
"""
