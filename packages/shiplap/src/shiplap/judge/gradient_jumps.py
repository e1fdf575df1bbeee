"""Places at which the gradient of a reference jumps, so that several gradients are right.

Where values are equal, a sort may take either first, and a maximum may pass its gradient to either. The same holds for
a ReLU or an absolute value at zero. Next to such a place the gradient differs by a whole step, however near it is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shiplap.judge.problem import JudgeProblem
from shiplap.sampling.case import widen_tensor
from shiplap.sandbox.machine_lack import is_lack

NEAR = 2.0**-36  # relative distance, far below the resolution of float32
LEAST_JUMP = 1e-6  # of the size of a gradient: a continuous one changes by about NEAR
ROUNDING = 1e-5  # of the ends of a jump, by which a value may lie beyond them
# Pairs of opposite directions. Two equal values come in both orders in each pair, and of ten equal values each comes
# first in some. A slow reference gets fewer pairs.
LEAST_PAIRS, MOST_PAIRS, SECONDS = 8, 64, 2.0


def gradient_jumps(
    problem: JudgeProblem, args: Sequence[Any], seeds: Sequence[Tensor | None]
) -> list[tuple[Tensor, Tensor]]:
    """Return for each gradient of the reference the least and the greatest values that its elements have next to the
    arguments ``args``.

    The gradient is computed in float64 at points whose distance float32 cannot resolve. ``seeds`` are the gradients of
    the results. Both values are almost equal where the gradient is continuous. Points at which the reference raises an
    error or has gradients that are not finite are left out. Return an empty list if all are. An error is raised again
    if it says that the machine lacks a resource.
    """
    wide = [widen_tensor(a) if isinstance(a, Tensor) else a for a in args]
    place = next((a.device for a in wide if isinstance(a, Tensor)), torch.device("cpu"))
    rng, ends = torch.Generator(place).manual_seed(0), time.monotonic() + SECONDS
    bounds: list[tuple[Tensor, Tensor]] = []
    for number in range(MOST_PAIRS):
        if number >= LEAST_PAIRS and time.monotonic() > ends:
            break
        steps = [_random_step(a, rng) for a in wide]
        for sign in (1.0, -1.0):
            at = tuple(a if s is None else a + sign * s for a, s in zip(wide, steps, strict=True))
            if grads := _finite_gradients(problem, at, seeds):
                known = bounds or [(g, g) for g in grads]
                bounds = [
                    (torch.minimum(low, g), torch.maximum(high, g)) for (low, high), g in zip(known, grads, strict=True)
                ]
    return bounds


def _finite_gradients(problem: JudgeProblem, args: Sequence[Any], seeds: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the gradients of the reference in float64 for the arguments ``args`` and the gradients ``seeds`` of the
    results.

    Return an empty list if the reference raises an error, if a gradient has an element that is not finite, or if one
    has another dtype, as that of a float8 argument or a complex parameter. An error is raised again if it says that the
    machine lacks a resource.
    """
    try:
        grads = problem.gradients(tuple(args), seeds, wide=True)
    except Exception as e:  # the reference refuses these values
        if is_lack(e):
            raise
        return []
    return grads if all(g.dtype == torch.float64 and bool(torch.isfinite(g).all()) for g in grads) else []


def _random_step(value: Any, rng: torch.Generator) -> Tensor | None:
    """Return a random step for each element of a float64 tensor, small against the element and the root mean square of
    all. Return None for another value.
    """
    if not isinstance(value, Tensor) or value.dtype != torch.float64:
        return None
    size = value.detach().abs() + value.detach().square().mean().sqrt().nan_to_num(1.0, 1.0, 1.0) + NEAR
    noise = torch.rand(value.shape, generator=rng, device=rng.device, dtype=torch.float64).mul_(2).sub_(1)
    return noise.to(value.device) * size * NEAR


def settle_jumps(
    got: Sequence[Tensor], wide: Sequence[Tensor], jumps: Sequence[tuple[Tensor, Tensor]], kept: Sequence[int]
) -> tuple[list[Tensor], float]:
    """Return the gradients ``got`` with those elements replaced by the reference's that lie within a jump of the
    reference's gradient, and the largest share of elements of one gradient at which it jumps.

    ``wide`` are the reference's gradients in float64. ``jumps`` is the result of ``gradient_jumps``, in which these
    gradients have the positions ``kept``.
    """
    settled, share = list(got), 0.0
    for at, (g, w) in enumerate(zip(got, wide, strict=True)) if jumps else ():
        low, high = (bound.to(w.dtype) for bound in jumps[kept[at]])
        low, high = torch.minimum(low, w), torch.maximum(high, w)
        jumping = high - low > LEAST_JUMP * (w.abs() + w.square().mean().sqrt())
        slack = ROUNDING * (low.abs() + high.abs())
        within = jumping & (g >= low - slack) & (g <= high + slack)
        settled[at] = torch.where(within, w.to(g.dtype), g)
        share = max(share, float(jumping.double().mean()) if w.numel() else 0.0)
    return settled, share
