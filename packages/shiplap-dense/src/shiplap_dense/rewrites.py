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
    """Return True if ``x`` is on a GPU, where the Triton template is faster than the library's product. Otherwise
    return the reason against the rewrite. The other arguments are not read.
    """
    return x.device.type == "cuda" or "on the CPU a product of the library's is faster than the template"


def linear_activation(*, always: bool = False) -> tuple[PatternRewrite, ...]:
    """Return rewrites of ``gelu(linear(x, weight, bias))`` and of other activations. The replacement calls Shiplap's
    matrix product, whose template computes the activation while it stores the result. If ``always`` is true, the
    rewrites apply on every device. Otherwise they apply on GPUs only.
    """
    pays = None if always else _on_gpu
    return tuple(
        sl.rewrite(*_activation_rewrite(act), name=f"linear_{name}", pays=pays) for name, act in ACTIVATIONS.items()
    )


def _activation_rewrite(act: Callable[[Tensor], Tensor]) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return the pattern and the replacement of a rewrite as two functions. The pattern is a linear layer followed by
    the activation ``act``, as models call it. The replacement is ``act`` of Shiplap's matrix product, into which
    Inductor fuses it.
    """

    def pattern(x: Float[Tensor, "*b k"], weight: Float[Tensor, "n k"], bias: Float[Tensor, "n"] | None) -> Tensor:
        """Return the activation of a linear layer. This is the code that the rewrite looks for in models."""
        return act(F.linear(x, weight, bias))

    def replacement(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the activation of Shiplap's matrix product. This code replaces the pattern, and Inductor fuses the
        activation into the product.
        """
        return act(matmul(x, weight.t(), bias))

    return pattern, replacement


def gated_linear(*, always: bool = False) -> tuple[PatternRewrite, ...]:
    """Return rewrites of SwiGLU and GEGLU, ``act(linear(x, gate)) * linear(x, up)``, also with ``gate`` and ``up`` as
    halves of one layer. Shiplap's matrix product computes the gate, with the activation and the multiplication fused
    into it. If ``always`` is true, the rewrites apply on every device. Otherwise they apply on GPUs only.
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
    """Return the pattern and the replacement of a rewrite as two functions. The pattern is a linear layer with the
    activation ``act``, times a second linear layer. In the replacement, Shiplap's matrix product computes the first
    layer.
    """

    def pattern(x: Float[Tensor, "*b k"], gate: Float[Tensor, "n k"], up: Float[Tensor, "n k"]) -> Tensor:
        """Return a linear layer with an activation, times a second linear layer. This is the code that the rewrite
        looks for in models.
        """
        return act(F.linear(x, gate)) * F.linear(x, up)

    def replacement(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        """Return the pattern's result with Shiplap's matrix product for the layer with the activation. This code
        replaces the pattern.
        """
        return act(matmul(x, gate.t())) * F.linear(x, up)

    return pattern, replacement


def _split_gate_rewrite(
    act: Callable[[Tensor], Tensor], last: bool
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return the pattern and the replacement of a rewrite of one linear layer, one half of which is the gate. The gate
    is the last half if ``last`` is true, and otherwise the first.
    """

    def pattern(x: Float[Tensor, "*b k"], weight: Float[Tensor, "n k"], bias: Float[Tensor, "n"] | None) -> Tensor:
        """Return the product of the two halves of one linear layer, one of them after an activation. This is the code
        that the rewrite looks for in models.
        """
        halves = F.linear(x, weight, bias).chunk(2, -1)
        return act(halves[last]) * halves[not last]

    def replacement(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product of the two halves of the layer, each computed from its half of the weight. Shiplap's
        matrix product computes the half with the activation, and ``F.linear`` computes the other half.
        """
        # Rows of the weight are output features, so the halves are views.
        weights = weight.chunk(2)
        biases = (None, None) if bias is None else bias.chunk(2)
        return act(matmul(x, weights[last].t(), biases[last])) * F.linear(x, weights[not last], biases[not last])

    return pattern, replacement


def norm_linear(*, always: bool = False) -> Rewrites:
    """Return rewrites of a layer norm or RMS norm before a linear layer. The replacement calls Shiplap's matrix
    product, whose template computes the norm while it loads its input. If ``always`` is true, the rewrites apply on
    every device. Otherwise they apply on GPUs only.
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
    """Return a layer norm over the last dimension, followed by a linear layer. This is the pattern of a rewrite.
    ``gain`` and ``shift`` are those of the norm.
    """
    return F.linear(F.layer_norm(x, (x.shape[-1],), gain, shift, eps), weight, bias)


def _layer_norm_product(
    x: Tensor, gain: Tensor, shift: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """Return a layer norm over the last dimension, followed by Shiplap's matrix product. This code replaces the pattern
    ``_layer_norm``. ``gain`` and ``shift`` are those of the norm.
    """
    return matmul(F.layer_norm(x, (x.shape[-1],), gain, shift, eps), weight.t(), bias)


def _rms_norm_rewrite(kind: Any, dtype: torch.dtype) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return the pattern and the replacement of an RMS norm before a linear layer, for tensors of ``dtype``. The norm
    is written as in transformers, which computes in float32 and multiplies by the gain in the model's dtype. ``kind``
    is the annotation class of the dtype.
    """

    def normed(x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """Return the RMS norm of ``x`` with the weight ``gain``. It is computed in float32 and multiplied by the gain
        in ``dtype`` (argument of ``_rms_norm_rewrite``).
        """
        wide = x if dtype == torch.float32 else x.to(torch.float32)
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return gain * (scaled if dtype == torch.float32 else scaled.to(dtype))

    def pattern(x: Tensor, gain: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Return the RMS norm of ``x`` followed by a linear layer. This is the code that the rewrite looks for in
        models.
        """
        return F.linear(normed(x, gain, eps), weight, bias)

    def replacement(x: Tensor, gain: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Return the RMS norm of ``x`` followed by Shiplap's matrix product. This code replaces the pattern."""
        return matmul(normed(x, gain, eps), weight.t(), bias)

    shapes = {"x": "batch tokens k", "gain": "k", "weight": "n k", "bias": "n"}
    kinds = {name: kind[Tensor, shape] for name, shape in shapes.items()}
    # Dtypes belong to the pattern: casts differ from model to model.
    pattern.__annotations__ |= kinds | {"bias": kinds["bias"] | None, "eps": float}
    return pattern, replacement


def int8_linear(*, always: bool = False) -> tuple[PatternRewrite, ...]:
    """Return rewrites of ``linear(x, weight.to(x.dtype) * scale)`` with 8-bit weights. The replacement never converts
    the whole weight. On GPUs the rewrites apply to inputs of up to ``FEW_ROWS`` rows, unless ``always`` is true.
    """
    kinds = {"float32": Float32, "bfloat16": BFloat16, "float16": Float16}
    pays = None if always else _few_rows
    return tuple(
        sl.rewrite(*_int8_rewrite(kind, getattr(torch, name)), name=f"int8_linear_{name}", pays=pays)
        for name, kind in kinds.items()
    )


def _few_rows(x: Tensor, **others: Any) -> bool | str:
    """Return True if ``x`` has at most ``FEW_ROWS`` rows or is on a CPU, where the int8 template is faster than the
    library. Otherwise return the reason against the template. The other arguments are not read.
    """
    # On the CPU the template is used for any number of rows.
    few = x.device.type != "cuda" or x.numel() <= FEW_ROWS * x.shape[-1]
    return few or f"more than {FEW_ROWS} rows: unpacking the weights costs less than the template loses to the library"


def _int8_rewrite(kind: Any, dtype: torch.dtype) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Return the pattern and the replacement of a rewrite as two functions, for tensors of ``dtype``. The pattern is a
    linear layer whose 8-bit weights are converted and scaled first. ``kind`` is the annotation class of ``dtype``.
    """

    def pattern(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        """Return a linear layer whose 8-bit weights are converted and scaled first. This is the code that the rewrite
        looks for in models.
        """
        return F.linear(x, weight.to(dtype) * scale, bias)

    def replacement(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        """Return the pattern's result from Shiplap's product with 8-bit weights. This code replaces the pattern."""
        return matmul_int8(x, weight, scale.view(-1), bias)

    # ``kind`` is an argument, so the annotations with it are set when the pattern exists.
    pattern.__annotations__ |= {
        "x": kind[Tensor, "*b k"],
        "weight": Int8[Tensor, "n k"],
        "scale": kind[Tensor, "n 1"],
        "bias": kind[Tensor, "n"] | None,
    }
    return pattern, replacement


def linear_loss(*, always: bool = False) -> Rewrites:
    """Return the rewrite of ``cross_entropy(linear(hidden, weight), target)`` to ``linear_cross_entropy``. It applies
    if nothing else reads the logits. Neither the logits of all rows nor their gradients are then computed at once. If
    ``always`` is false, small losses are left as they are.
    """
    return (LinearLoss("linear_cross_entropy", linear_cross_entropy, always=always),)


def _call_conv2d(
    input: Tensor, weight: Tensor, bias: Tensor, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Tensor:
    """Return the convolution of ``input`` with weights into which a norm was folded, computed by ``dense.conv2d``.
    Raise ``NotImplementedError`` if ``groups`` is not 1. The arguments are those of ``torch.nn.functional.conv2d``.
    """
    if groups != 1:
        raise NotImplementedError("dense.conv2d has no groups")
    pair = [v if isinstance(v, int) else tuple(v) for v in (stride, padding, dilation)]
    return conv2d(input, weight, bias, *pair)


def _channels_last_examples() -> Iterator[Program]:
    """Yield the example programs without groups of a convolution followed by a norm, on which the rewrite is tested.
    Their inputs are in ``torch.channels_last``.
    """
    for program in conv_norm.examples():
        x, *others = program.args
        if "groups=1" in program.label:
            args = (x.to(memory_format=torch.channels_last), *others)
            yield Program(program.fn, args, program.label, train=False)


def _of_one_pixel(named: dict[str, Any]) -> bool | str:
    """Return True if the weight is that of a 1x1 convolution on a GPU, for which the Triton template is faster than the
    library. Otherwise return the reason against the rewrite.
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
