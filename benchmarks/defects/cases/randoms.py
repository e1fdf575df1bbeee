"""Random numbers."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ..registry import case


def _dropped(x, p, seed):
    generator = torch.Generator().manual_seed(seed % 2**63)
    kept = (torch.rand(x.shape, generator=generator) >= p).to(x)
    return x * kept / (1 - p), kept / (1 - p)


# https://github.com/facebookresearch/xformers/issues/173
@case(
    "facebookresearch/xformers#173",
    "the address of the seed is used in place of the seed",
    random="seed",
    requires=("0 <= p", "p < 1"),
    outputs=("out", "factor"),
    nondifferentiable="factor",
)
def seeded_dropout(
    x: Float[Tensor, "n c"], seed: Int64[Tensor, ""], p: float = 0.5
) -> tuple[Float[Tensor, "n c"], Float[Tensor, "n c"]]:
    """Dropout by a seed, and the factor of each element."""
    return _dropped(x, p, int(seed))


@seeded_dropout.broken.kernel("cpu")
def _(x, seed, p):
    return _dropped(x, p, seed.data_ptr())


@seeded_dropout.sound.kernel("cpu")
def _(x, seed, p):
    return _dropped(x, p, int(seed) ^ 0x5DEECE66D)


@seeded_dropout.backward
def _(grads, saved, needs):
    return {"x": grads[0] * saved.factor}


def _noise(x, seed):
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x)


def _mixed(seed, times):
    """Return 31 bits of a seed of 64: torch's generator of a CPU reads 32 bits alone."""
    return (seed * times ^ seed >> 32) & 0x7FFFFFFF


# https://github.com/flagos-ai/FlagGems/pull/27
@case("flagos-ai/FlagGems#27", "the high half of a seed of 64 bits is cut off", random="seed")
def seeded_noise(x: Float[Tensor, "n"], seed: int) -> Float[Tensor, "n"]:
    """Noise of standard normal numbers added to the input."""
    return x + _noise(x, _mixed(seed, 1))


@seeded_noise.broken.kernel("cpu")
def _(x, seed):
    return x + _noise(x, seed & 0xFFFFFFFF)


@seeded_noise.sound.kernel("cpu")
def _(x, seed):
    return x + _noise(x, _mixed(seed, 3))


@seeded_noise.backward
def _(grad, saved, needs):
    return {"x": grad}
