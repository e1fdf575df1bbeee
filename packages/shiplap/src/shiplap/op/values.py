"""What arguments, sizes and results are, by one name each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["Args", "Env", "EnvValue", "Numbers", "Outputs", "Result", "Returned", "Scalar", "Size", "Supports", "Value"]

Scalar: TypeAlias = int | float | bool | str
Size: TypeAlias = int | torch.SymInt
Symbol: TypeAlias = torch.SymInt | torch.SymFloat | torch.SymBool  # a scalar while a graph is traced
Numbers: TypeAlias = Sequence[int] | Sequence[float] | Sequence[bool] | Sequence[Size]

# What torch's schemas carry besides numbers and text.
Setting: TypeAlias = complex | torch.dtype | torch.device | torch.layout | torch.memory_format | torch.Generator

# What a dim, a variadic dim or a scalar argument is bound to; None is an optional scalar that was left out.
EnvValue: TypeAlias = Scalar | Symbol | Numbers | Setting | Sequence[str] | None
Env: TypeAlias = Mapping[str, EnvValue]

Value: TypeAlias = Tensor | Sequence[Tensor] | EnvValue
Args: TypeAlias = tuple[Value, ...]

Outputs: TypeAlias = tuple[Tensor, ...]  # always as many as are declared
Result: TypeAlias = Tensor | Outputs | None  # one output stands for itself, and none is None
Returned: TypeAlias = Tensor | Sequence[Tensor] | None  # what a function that somebody wrote may return

Supports: TypeAlias = Callable[..., bool | str]  # of a call's arguments: True, or the reason why not
