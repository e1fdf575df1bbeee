"""``Case``: one sample of the arguments of an op."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shiplap.dispatch import Op
from shiplap.sampling.layouts import clone_exactly
from shiplap.sampling.recipe import Recipe

SEED = 7  # of torch's own generator, where an op draws from it


def tree_map(fn: Callable[[Tensor], Any], args: Iterable[Any]) -> tuple[Any, ...]:
    """``fn`` on every tensor of ``args``, also inside lists; anything else stays."""
    return tuple(fn(v) if isinstance(v, Tensor) else list(tree_map(fn, v)) if isinstance(v, list) else v for v in args)


@dataclass(frozen=True)
class Case:
    """One sample. ``args`` are never passed to an op: ``fresh()`` gives copies with the same strides and offsets."""

    recipe: Recipe
    seed: int
    args: tuple[Any, ...]
    env: dict[str, Any]
    device: str = "cpu"
    reseeds: bool = False  # whether torch's own generator starts anew with each call

    @property
    def label(self) -> str:
        return str(self.recipe)

    @property
    def numel(self) -> int:
        total = 0

        def count(t: Tensor) -> None:
            nonlocal total
            total += t.numel()

        tree_map(count, self.args)
        return total

    @property
    def form(self) -> tuple[object, ...]:
        """What two cases share that one compiled graph, or one set of buffers, can serve: which arguments are there."""
        return tuple(len(v) if isinstance(v, list) else v is None for v in self.args)

    def fresh(self) -> tuple[Any, ...]:
        """Copies of the arguments; a random generator starts where that of the sample stands."""
        if self.reseeds:
            torch.manual_seed(SEED)
        return rewound(tree_map(clone_exactly, self.args))


def rewound(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``args`` with copies of generators, so that each call finds them in the same state."""
    return tuple(v.clone_state() if isinstance(v, torch.Generator) else v for v in args)


def describe(op: Op, case: Case) -> str:
    """One line: ``x float32(5, 3) strides (1, 5), a=1.0``."""
    return ", ".join(_show(a.name, v) for a, v in zip(op.spec.args, case.args, strict=True))


def _show(name: str, value: Any) -> str:
    if isinstance(value, Tensor):
        plain = value.is_contiguous() and value.storage_offset() == 0
        layout = "" if plain else f" strides {value.stride()} offset {value.storage_offset()}"
        return f"{name} {str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}{layout}"
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return f"{name} [{', '.join(_show('', v).strip() for v in value)}]"
    return f"{name}={value!r}"
