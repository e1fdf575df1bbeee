"""``Binding``, one call of an op with checked arguments and the values of the declaration's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import SymInt

from shiplap.declare.spec import Output, TensorType
from shiplap.declare.values import Args, EnvValue, Size
from shiplap.errors import error

UNPLACED = torch.device("meta")  # of a call of which no tensor has been looked at yet; known by identity


@dataclass(slots=True)
class Binding:
    """The arguments of one call, in schema order, with the dims, scalars and dtypes that they determine.

    Attributes:
        args: the arguments.
        env: the values of dims and scalar arguments by name.
        dtypes: the dtype of each dtype class, which is an annotation that admits several dtypes.
        device: the device of the call.
    """

    args: Args
    env: dict[str, EnvValue] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    device: torch.device = UNPLACED

    def size(self, name: str) -> int:
        """Return the value of the dim or int argument ``name`` in this call as a Python int. The call must not be part
        of a trace with symbolic sizes.
        """
        value = self.env[name]
        assert isinstance(value, int), f"{name} = {value!r}"
        return value

    def dtype_of(self, out: TensorType) -> torch.dtype:
        """Return the dtype of an output in this call. If the output is declared with several dtypes, such as ``Float``,
        it is the dtype of the arguments with the same annotation.
        """
        if not out.concrete:
            return self.dtypes[out.dtype_class]
        dtype: torch.dtype = getattr(torch, out.dtypes[0])
        return dtype


def declared_output_shape(out: Output, env: Mapping[str, EnvValue]) -> list[Size]:
    """Return the shape of an output as a list. ``env`` holds the values of dims and scalars by name, and must hold
    every dim that the output names. Raise ``SL208`` for a negative size.
    """
    shape: list[Size] = []
    for dim in out.tensor.dims:
        if dim.kind == "fixed":
            shape.append(dim.size)
        elif dim.expr is not None:
            shape.append(dim.expr(env))
            # A comparison of a symbolic size would add a guard to the graph.
            if isinstance(shape[-1], int) and shape[-1] < 0:
                raise error("SL208", where=f"output {out.name!r}", got=f"{dim.text} = {shape[-1]}", expected="a size")
        elif isinstance(size := env[dim.text], (int, SymInt)):
            shape.append(size)
        else:
            assert isinstance(size, (tuple, list)), dim  # of a variadic dim
            shape.extend(size)
    return shape
