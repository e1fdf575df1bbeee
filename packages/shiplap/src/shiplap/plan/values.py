"""The functions that generated Python calls, and the types of its variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from shiplap.declare.dim_expression import FUNCTIONS
from shiplap.declare.values import Size, Value
from shiplap.plan.sharing import any_shares_memory, shares_memory

Constant: TypeAlias = torch.dtype | frozenset[torch.dtype] | type
Local: TypeAlias = Value | torch.dtype | torch.device | Exception  # a variable of a call
Scope: TypeAlias = dict[str, object]  # globals of generated functions: modules, functions, classes


def sizes_text(sizes: Sequence[Size]) -> str:
    """Return sizes as text for errors, such as ``(3, 4)``. One size is printed as ``(3)``."""
    return f"({', '.join(map(str, sizes))})"


def why_no_value(cause: Exception) -> str:
    """Return the reason why an expression has no value, from its exception ``cause``. The words do not depend on the
    version of Python.
    """
    if isinstance(cause, ZeroDivisionError):
        return "division by zero"
    if isinstance(cause, LookupError):
        return "an index outside its list"
    return "an empty list" if isinstance(cause, ValueError) else str(cause)


def place_call(device: torch.device | None, given: torch.device | str | None) -> torch.device:
    """Return the device on which a call runs. It is ``device``, that of its tensors. If that is None, it is ``given``,
    which an argument requested, or torch's default if that is None too.
    """
    if device is not None:
        return device
    return torch.get_default_device() if given is None else torch.device(given)


def same_size_lists(a: Sequence[Size], b: Sequence[Size]) -> bool | torch.SymBool:
    """Return whether two lists of sizes, of the same length, are equal. If some sizes are symbolic, the result is a
    condition on symbols.
    """
    holds: bool | torch.SymBool = True
    for x, y in zip(a, b, strict=True):
        same = x == y
        # ``&`` keeps symbolic comparisons as one condition, where ``and`` would decide each.
        holds = same if holds is True else holds & same
    return holds


def has_strides(t: Tensor) -> bool:
    """Return whether ``t`` has strides. A nested tensor has none, although it reports the strided layout."""
    return t.layout is torch.strided and not t.is_nested


def memory_text(t: object, *, extents: bool = False) -> str:
    """Return a text for errors that describes ``t``, a value that was passed for a tensor to write to, such as
    ``torch.uint8 on cpu``.

    If ``extents`` is true, the text also has the shape and the strides. Otherwise they are left out. If the value is
    not a tensor, the text is the name of its type.
    """
    if not isinstance(t, Tensor):
        return type(t).__name__
    kind = f"{t.dtype} on {t.device}"
    if not has_strides(t):
        return f"{kind}, {'nested' if t.is_nested else t.layout}"
    return f"{kind}, {tuple(t.shape)} by {t.stride()}" if extents else kind


def has_own_memory(t: Tensor) -> bool:
    """Return whether no two elements of ``t`` share memory. Return True for a symbolic shape, since the call with real
    sizes is checked again.
    """
    if t.is_contiguous():
        return True
    axes = list(zip(t.stride(), t.shape, strict=True))
    # Counting elements needs numbers.
    if not all(isinstance(v, int) for axis in axes for v in axis) or t.numel() == 0:
        return True
    reach = 0
    # From the smallest stride outwards: no dim may begin inside the ones before.
    for stride, size in sorted(axes):
        if size > 1 and stride <= reach:
            break  # dims may interleave without touching, as sizes (2, 3) with strides (3, 2) do: count
        reach += (size - 1) * stride
    else:
        return True
    offsets = sum(np.ogrid[tuple(slice(size) for _, size in axes)][i] * stride for i, (stride, _) in enumerate(axes))
    return bool(np.unique(offsets).size == t.numel())


def rule_scope(constants: Mapping[str, Constant] | None = None) -> Scope:
    """Return the global names for compiled conditions and error texts of rules. They are the functions and classes that
    the rules use, and ``constants``.
    """
    return {
        # The functions that declared expressions may call, such as cdiv.
        **FUNCTIONS,
        "Tensor": Tensor,
        "strided": torch.strided,
        "is_grad_enabled": torch.is_grad_enabled,
        "empty": torch.empty,
        "contiguous_format": torch.contiguous_format,
        "kind_of_memory": memory_text,
        "own_memory": has_own_memory,
        "placed": place_call,
        "same_sizes": same_size_lists,
        "any_shares_memory": any_shares_memory,
        "shares_memory": shares_memory,
        "show": sizes_text,
        "why_none": why_no_value,
        **(constants or {}),
    }
