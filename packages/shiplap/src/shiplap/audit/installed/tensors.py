"""Tensors of the calls that an audit of an installed package makes.

A finding's script contains the text of this module, so that it imports torch alone.
"""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any

import torch

from shiplap.audit.guarded_memory import copy_beside_guard


def tensor(seed: int, dtype: torch.dtype, shape: tuple[int, ...], low: float = 0.0, high: float = 0.0) -> torch.Tensor:
    """Return a tensor of random values between ``low`` and ``high``. Equal seeds give equal values. If ``high`` is not
    larger than ``low``, floating-point values are normally distributed.
    """
    generator = torch.Generator().manual_seed(seed)
    if dtype in (torch.quint8, torch.qint8):
        return torch.quantize_per_tensor(torch.rand(shape, generator=generator), 0.1, 0, dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_floating_point or dtype.is_complex:
        if high > low:
            drawn = torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low
        else:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.to(dtype)
    return torch.randint(int(low), max(int(high), int(low)) + 1, shape, generator=generator).to(dtype)


def matrix(seed: int, dtype: torch.dtype, rows: int, columns: list[tuple[float, float, bool]]) -> torch.Tensor:
    """Return a matrix of random values with ``rows`` rows. ``columns`` has the least value, the largest value and
    whether all values are whole numbers, of each column.
    """
    drawn = []
    for place, (low, high, whole) in enumerate(columns):
        # A column of one value is drawn between it and the next number.
        kind, last = (torch.int64, high) if whole else (torch.float64, max(high, math.nextafter(low, math.inf)))
        drawn.append(tensor(seed + place, kind, (rows,), low, last).to(dtype))
    return torch.stack(drawn, 1)


def offsets(seed: int, dtype: torch.dtype, shape: tuple[int, ...], last: int) -> torch.Tensor:
    """Return a one-dimensional tensor of ascending random integers from 0 to ``last``, like the row offsets of the CSR
    format. ``shape`` must have one dim.
    """
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randint(0, last + 1, (max(shape[0] - 2, 0),), generator=generator).sort().values
    return torch.cat([torch.tensor([0]), inner, torch.tensor([last])])[: shape[0]].to(dtype)


def result(op: str, arguments: dict[str, Any], number: int) -> torch.Tensor:
    """Return a copy of one tensor that the op ``namespace::name.overload`` returns for ``arguments``."""
    name, _, overload = op.replace("::", ".").rpartition(".")
    if name.count("."):
        address = f"{name}.{overload}"
    else:  # the name of an overload is left out where it is the default one
        address = f"{name}.{overload}.default"
    seed_generators()
    call = attrgetter(address)(torch.ops)
    keywords = {a.name for a in call._schema.arguments if a.kwarg_only}
    positional = [v for n, v in arguments.items() if n not in keywords]
    made = call(*positional, **{n: v for n, v in arguments.items() if n in keywords})
    return tensors_in(made)[number].clone()


def seed_generators() -> None:
    """Seed the generators of the CPU and of CUDA with 0, the latter only if this process uses it. ``torch.manual_seed``
    formats a stack for each kind of device that is not in use, which takes longer than most calls of an op.
    """
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


def with_attributes(cls: type, attributes: dict[str, Any]) -> Any:
    """Return an instance of the class ``cls`` that has these ``attributes``. Its constructor is not called."""
    made: Any = object.__new__(cls)
    made.__dict__.update(attributes)
    return made


def strided(t: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``t`` whose elements along the last dim are two elements apart in memory. Return ``t`` itself if
    it has no dims.
    """
    if not t.dim():
        return t
    wide = torch.zeros((*t.shape[:-1], 2 * t.shape[-1]), dtype=t.dtype, device=t.device)
    view = wide[..., ::2]
    return view.copy_(t)


def transposed(t: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``t`` with equal values, in which the first and the last dim are exchanged in memory. If ``t``
    has fewer than two dims, return what ``strided`` returns.
    """
    return t.transpose(0, -1).contiguous().transpose(0, -1) if t.dim() > 1 else strided(t)


def shifted(t: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``t`` that begins one element behind the start of its storage."""
    return torch.zeros(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape).copy_(t)


def guarded(t: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``t`` directly before memory that cannot be accessed, so that an access behind its end crashes.
    Return ``t`` itself if it is not contiguous, quantised, or not in the memory of the CPU.
    """
    plain = t.is_contiguous() and not t.is_quantized and t.device.type == "cpu"
    return copy_beside_guard(t, after=True) if plain else t


def map_tensors(value: Any, function: Any) -> Any:
    """Return an argument or result with each tensor in it replaced by ``function(tensor)``, also inside nested dicts,
    lists and tuples. Tuples become lists.
    """
    if isinstance(value, dict):
        return {name: map_tensors(v, function) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_tensors(v, function) for v in value]
    return function(value) if isinstance(value, torch.Tensor) else value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return a list of the tensors in nested arguments or results, in order."""
    found: list[torch.Tensor] = []
    map_tensors(value, found.append)
    return found
