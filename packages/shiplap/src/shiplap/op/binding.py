"""``Binding``: one call of an op, its arguments checked and the names of the declaration bound to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from shiplap.errors import error
from shiplap.op.expr import Expr
from shiplap.op.spec import Output, TensorType

__all__ = ["Binding", "shape_of"]


@dataclass
class Binding:
    """One call's arguments, by name, with what they determine.

    ``env`` maps dim names and int arguments to sizes; ``dtypes`` maps dtype classes to dtypes.
    """

    args: tuple[Any, ...]
    env: dict[str, Any] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    device: torch.device | None = None
    origin: dict[str, str] = field(default_factory=dict)
    late: list[tuple[str, int, Any, Expr]] = field(default_factory=list)

    def dtype_of(self, out: TensorType) -> torch.dtype:
        """The dtype of an output: its own if it is concrete, else that of its class in this call."""
        return getattr(torch, out.dtypes[0]) if out.concrete else self.dtypes[out.dtype_class]


def shape_of(out: Output, env: dict[str, Any]) -> list[Any]:
    """The shape of an output once ``env`` holds every dim it names."""
    shape: list[Any] = []
    for dim in out.tensor.dims:
        if dim.kind == "variadic":
            shape.extend(env[dim.text])
        elif dim.expr is not None:
            shape.append(dim.expr(env))
            if isinstance(shape[-1], int) and shape[-1] < 0:
                raise error("SL208", where=f"output {out.name!r}", got=f"{dim.text} = {shape[-1]}", expected="a size")
        else:
            shape.append(dim.size if dim.kind == "fixed" else env[dim.text])
    return shape
