"""``SampleCase``: one sample of the arguments of an op."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shiplap.sampling.layouts import clone_exactly
from shiplap.sampling.recipe import SampleRecipe

if TYPE_CHECKING:
    from shiplap.dispatch import Op

GENERATOR_SEED = 7  # seed of torch's own generator, for ops that draw from it


def tree_map(fn: Callable[[Tensor], Any], args: Iterable[Any]) -> tuple[Any, ...]:
    """Return ``args`` as a tuple with ``fn`` applied to every tensor, including tensors in lists. Other values are
    unchanged.
    """
    return tuple(fn(v) if isinstance(v, Tensor) else list(tree_map(fn, v)) if isinstance(v, list) else v for v in args)


def tensors_among(args: Iterable[Any]) -> list[Tensor]:
    """Return all tensors of ``args`` in order, including those in lists."""
    flat: list[Tensor] = []
    tree_map(flat.append, args)
    return flat


def plain_copies(args: Iterable[Any]) -> tuple[Any, ...]:
    """Return ``args`` with every tensor replaced by a detached, contiguous copy."""
    return tree_map(lambda t: t.detach().clone(memory_format=torch.contiguous_format), args)


def is_float8(t: Tensor) -> bool:
    """Return whether ``t`` has a float8 dtype. Torch converts and copies such tensors, but does not add, multiply or
    compare them.
    """
    return t.is_floating_point() and t.itemsize == 1


def widen_tensor(t: Tensor) -> Tensor:
    """Return a floating-point tensor as float64 and a complex one as complex128. Other tensors are unchanged, and so
    are float8 tensors, whose bits are codes.
    """
    if is_float8(t) or not (t.is_floating_point() or t.is_complex()):
        return t
    return t.to(torch.promote_types(t.dtype, torch.float64))


def widened_copy(t: Tensor) -> Tensor:
    """Return a copy of ``t`` as ``widen_tensor`` returns it, which shares no memory with ``t``."""
    wide = widen_tensor(t.detach())
    return wide.clone() if wide.dtype == t.dtype else wide


def arguments_by_name(op: Op, args: Iterable[Any]) -> dict[str, Any]:
    """Return a dict from the names of the op's arguments to ``args``, their values in schema order."""
    return {a.name: v for a, v in zip(op.spec.args, args, strict=True)}


@dataclass(frozen=True)
class SampleCase:
    """One sample of the arguments of an op, with the recipe and the seed from which it was made.

    The arguments ``args`` are never passed to an op. :meth:`fresh` returns copies with the same strides and offsets.

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
        """The recipe of the sample as a string, with its sizes, scalars, dtypes, layouts and kind of values. The string
        and the seed are enough to make the same sample again.
        """
        return str(self.recipe)

    @property
    def numel(self) -> int:
        """The number of elements of all tensors among the arguments, including those in lists."""
        return sum(t.numel() for t in tensors_among(self.args))

    @property
    def graph_key(self) -> tuple[object, ...]:
        """A tuple that is equal for samples which one compiled graph can serve. For each argument, the tuple holds the
        length if it is a list, and otherwise whether it is None.
        """
        return tuple(len(v) if isinstance(v, list) else v is None for v in self.args)

    def with_args(self, args: tuple[Any, ...]) -> SampleCase:
        """Return a copy of the sample with ``args`` in place of its arguments, which must have the same sizes."""
        return replace(self, args=args)

    def fresh(self) -> tuple[Any, ...]:
        """Return copies of the arguments for one call of the op, with the same strides and offsets.

        Every ``torch.Generator`` among them is copied in its present state. If ``reseeds`` is true, as for a random op,
        torch's own generator is seeded anew. Otherwise it is left unchanged.
        """
        if self.reseeds:
            torch.manual_seed(GENERATOR_SEED)
        return copy_generators(tree_map(clone_exactly, self.args))


def copy_generators(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return ``args`` with each ``torch.Generator`` replaced by a copy in the same state. Each call with such copies
    draws the same numbers.
    """
    return tuple(v.clone_state() if isinstance(v, torch.Generator) else v for v in args)


def describe_arguments(op: Op, case: SampleCase) -> str:
    """Return a description of the sample's arguments on one line, such as ``x float32(5, 3) strides (1, 5), a=1.0``."""
    return ", ".join(_format_argument(a.name, v) for a, v in zip(op.spec.args, case.args, strict=True))


def _format_argument(name: str, value: Any) -> str:
    """Return one argument as a string. A tensor is shown by ``name``, its dtype and its shape. If it is not contiguous
    or does not begin its storage, its strides and its offset follow. A list of tensors is shown by ``name`` and its
    tensors in brackets, and any other value as ``name=value``.
    """
    if isinstance(value, Tensor):
        plain = value.is_contiguous() and value.storage_offset() == 0
        layout = "" if plain else f" strides {value.stride()} offset {value.storage_offset()}"
        return f"{name} {str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}{layout}"
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return f"{name} [{', '.join(_format_argument('', v).strip() for v in value)}]"
    return f"{name}={value!r}"
