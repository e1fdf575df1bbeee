"""The parts of a model in the audit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def mean_of_squares(output: Any) -> Tensor:
    """Return the sum of the mean squares of the model's floating-point outputs. It is a loss that can be computed for
    any model.

    ``output`` may nest the tensors in dicts, lists and tuples.
    """
    means: list[Tensor] = []

    def collect(value: Any) -> None:
        """Append the mean square of each floating-point tensor in ``value`` to the enclosing list ``means``."""
        if isinstance(value, Tensor):
            means.extend([value.square().mean()] if value.is_floating_point() else [])
        elif isinstance(value, dict):
            for item in value.values():
                collect(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                collect(item)

    collect(output)
    return torch.stack(means).sum()


@dataclass(frozen=True)
class ModelCase:
    """A model on the CPU with the arguments of its test.

    Args:
        module: The model. Its dropout is switched off for the comparison.
        args: The positional arguments of its forward.
        kwargs: The keyword arguments of its forward.
        train: Further keyword arguments in the training step.
        loss: A function that computes a scalar from the result of the forward in training.
        generate: Arguments of ``module.generate``, whose tokens are compared as well. It is empty if the model
            generates none.
    """

    module: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Tensor] = mean_of_squares
    generate: dict[str, Any] = field(default_factory=dict)


CaseMaker = Callable[[], ModelCase]
