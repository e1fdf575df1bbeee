"""RMS norms in the ways in which models write them. The rewrite is proven on these programs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from shiplap.rewrite.program import Program


def _norm_as_llama(x: Tensor, weight: Tensor) -> Tensor:
    """Return the RMS norm of ``x`` over the last dim as Llama writes it. It is computed in float32 and cast back before
    it is multiplied by ``weight``.
    """
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def _norm_as_gemma(x: Tensor, weight: Tensor) -> Tensor:
    """Return the RMS norm of ``x`` over the last dim as Gemma writes it. It is computed in float32, multiplied by ``1 +
    weight`` and cast back.
    """
    wide = x.float()
    normed = wide * torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + 1e-5)
    return (normed * (1.0 + weight.float())).type_as(x)


def _norm_without_weight(x: Tensor, weight: Tensor) -> Tensor:
    """Return the sine of the RMS norm of ``x``, which divides by a root, times ``weight``. The weight is not part of
    the norm.
    """
    return (x / torch.sqrt(torch.mean(torch.square(x), axis=-1, keepdim=True) + 1e-5)).sin() * weight  # type: ignore[call-overload]


def _cast_root(x: Tensor, weight: Tensor) -> Tensor:
    """Return the sine of the RMS norm of ``x`` times ``weight``. The root is computed in float32 and cast back before
    it scales ``x``.
    """
    return (x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)).sin() * weight


def _norm_by_sum(x: Tensor, weight: Tensor) -> Tensor:
    """Return the RMS norm of ``x`` over the last dim. Its mean is written as a sum divided by the size. ``x`` is
    multiplied by ``weight`` before the root is applied.
    """
    inverse = 1 / torch.sqrt((x * x).sum(-1, keepdim=True) / x.shape[-1] + 1e-6)
    return weight * x * inverse


def rms_norm_programs() -> Iterator[Program]:
    """Yield the programs on which the rewrite is proven. A program is a function with arguments. Together they compute
    an RMS norm in the ways in which models write it, with several dtypes and layouts.
    """
    rng = torch.Generator().manual_seed(0)

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return a random tensor of the given shape, and a random weight for its last dim. Both have the dtype
        ``dtype``.
        """
        return torch.randn(*shape, generator=rng).to(dtype), torch.randn(shape[-1], generator=rng).to(dtype)

    yield Program(_norm_as_llama, drawn(3, 5, 16), "of three dims, dynamic", dynamic=True)
    yield Program(_norm_as_llama, drawn(3, 16, dtype=torch.bfloat16), "bfloat16")
    x, weight = drawn(2, 5, 3, 16)
    yield Program(_norm_as_gemma, (x.transpose(1, 2), weight), "transposed, with 1 + weight")
    yield Program(_norm_without_weight, drawn(4, 16), "divided by a root, without a weight")
    yield Program(_cast_root, drawn(4, 16, dtype=torch.bfloat16), "a root in bfloat16")
    yield Program(_norm_by_sum, drawn(4, 16, dtype=torch.float16), "a sum by its size, the weight first, float16")
