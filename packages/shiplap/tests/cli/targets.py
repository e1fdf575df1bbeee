"""What the tests point the command line at: two good ops, one of them with a C kernel, and something that is no op."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

import shiplap as sl

print("targets are noisy")  # a module may print; --json must stay clean


@sl.op("cli_targets::scale")
def scale(x: Float[Tensor, "n"], by: float = 2.0) -> Float[Tensor, "n"]:
    """``x * by``."""
    return x * by


@sl.op("cli_targets::shift")
def shift(x: Float[Tensor, "n"], by: float = 1.0) -> Float[Tensor, "n"]:
    """``x + by``."""
    return x + by


@scale.backward(saves=())
def _(grad, saved, needs):
    return {"x": scale(grad, saved.by)}


@shift.backward(saves=())
def _(grad, saved, needs):
    return {"x": grad.clone()}


shift.kernel("meta", sl.cabi("libabsent.so", "cli_targets_shift"))  # bound, but never in the way of the tests

not_an_op = 3
