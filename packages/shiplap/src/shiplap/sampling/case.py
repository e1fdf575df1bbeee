"""``SampleCase``: one sample of the arguments of an op."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shiplap.dispatch import Op
from shiplap.sampling.layouts import clone_exactly
from shiplap.sampling.recipe import SampleRecipe

GENERATOR_SEED = 7  # seed of torch's own generator, for ops that draw from it


def tree_map(fn: Callable[[Tensor], Any], args: Iterable[Any]) -> tuple[Any, ...]:
    """Return ``args`` with ``fn`` applied to every tensor, also inside lists. Other values stay."""
    return tuple(fn(v) if isinstance(v, Tensor) else list(tree_map(fn, v)) if isinstance(v, list) else v for v in args)


@dataclass(frozen=True)
class SampleCase:
    """One sample of the arguments of an op.

    ``args`` are never passed to an op. :meth:`fresh` returns copies with the same strides and offsets.

    Attributes:
        env: the value of each dim and scalar by name.
        reseeds: whether torch's own generator is seeded before each call.
    """

    recipe: SampleRecipe
    seed: int
    args: tuple[Any, ...]
    env: dict[str, Any]
    device: str = "cpu"
    reseeds: bool = False

    @property
    def label(self) -> str:
        """The recipe as text, from which the sample can be made again."""
        return str(self.recipe)

    @property
    def numel(self) -> int:
        """The number of elements of all tensors."""
        total = 0

        def count(t: Tensor) -> None:
            """Add the elements of one tensor."""
            nonlocal total
            total += t.numel()

        tree_map(count, self.args)
        return total

    @property
    def graph_key(self) -> tuple[object, ...]:
        """A key of the arguments that are present, equal for samples that one compiled graph can serve."""
        return tuple(len(v) if isinstance(v, list) else v is None for v in self.args)

    def fresh(self) -> tuple[Any, ...]:
        """Return copies of the arguments. A random generator starts at the state of the sample's generator."""
        if self.reseeds:
            torch.manual_seed(GENERATOR_SEED)
        return copy_generators(tree_map(clone_exactly, self.args))


def copy_generators(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``args`` with copies of generators, so that each call starts from the same state."""
    return tuple(v.clone_state() if isinstance(v, torch.Generator) else v for v in args)


def describe_arguments(op: Op, case: SampleCase) -> str:
    """Return the arguments on one line, such as ``x float32(5, 3) strides (1, 5), a=1.0``."""
    return ", ".join(_format_argument(a.name, v) for a, v in zip(op.spec.args, case.args, strict=True))


def _format_argument(name: str, value: Any) -> str:
    """Return one argument as text."""
    if isinstance(value, Tensor):
        plain = value.is_contiguous() and value.storage_offset() == 0
        layout = "" if plain else f" strides {value.stride()} offset {value.storage_offset()}"
        return f"{name} {str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}{layout}"
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return f"{name} [{', '.join(_format_argument('', v).strip() for v in value)}]"
    return f"{name}={value!r}"
