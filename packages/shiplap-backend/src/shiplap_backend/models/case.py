"""The parts of a model in the audit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


def mean_of_squares(output: Any) -> Tensor:
    """Return the sum of the mean squares of all floating-point tensors in ``output``, nested in dicts and lists: a loss
    for any model.
    """
    means: list[Tensor] = []

    def collect(value: Any) -> None:
        """Append the mean square of a tensor, or of each tensor in a dict or list, to the list of the terms of the
        loss.
        """
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
    """A model on the CPU with its arguments.

    Args:
        module: without dropout, since a training step is compared.
        args: of its forward, positional.
        kwargs: of its forward, by name. Those of ``train`` are added in the training step.
        loss: makes a scalar from the result of the forward in training mode.
        generate: arguments of ``module.generate``, whose tokens are compared as well; empty if the model has none.
    """

    module: torch.nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Tensor] = mean_of_squares
    generate: dict[str, Any] = field(default_factory=dict)


CaseMaker = Callable[[], ModelCase]
