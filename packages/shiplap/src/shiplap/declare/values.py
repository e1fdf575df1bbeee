"""The types of arguments, sizes and results, each under one name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from shiplap.torch_private import graph_objects


class Opaque(graph_objects.BASE):  # type: ignore[misc] # a class of torch, or object
    """A base class for objects that are arguments of an op, such as the plan of a transform or the handle to a library.

    Torch passes such an object on without reading it.

    ``class Plan(sl.Opaque, fields=("n",))`` declares that the number, sizes and dtypes of results depend on no
    attribute of a plan but ``n``. Such an attribute is an int, a bool, a float, a str or a tuple of these. Compiled
    code is guarded on it.

    A class method ``sample(rng, sizes)`` makes an object for the audit. ``rng`` is a seeded generator, and ``sizes``
    holds the size of each dim. Without this method, the op needs ``@op.samples``.
    """

    fields: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, fields: Sequence[str] | str = (), **keywords: Any) -> None:
        """Add the attribute names ``fields`` of a class definition to the inherited ones. Compiled code is guarded on
        these attributes.
        """
        super().__init_subclass__(**keywords)
        named = (fields,) if isinstance(fields, str) else tuple(fields)
        cls.fields = (*cls.fields, *(f for f in named if f not in cls.fields))


Scalar: TypeAlias = int | float | bool | str
Size: TypeAlias = int | torch.SymInt
Symbol: TypeAlias = torch.SymInt | torch.SymFloat | torch.SymBool  # a scalar while a graph is traced
Numbers: TypeAlias = Sequence[int] | Sequence[float] | Sequence[bool] | Sequence[Size]

# What torch's schemas carry besides numbers and text.
Setting: TypeAlias = (
    complex | torch.dtype | torch.device | torch.layout | torch.memory_format | torch.Generator | Opaque
)

# What a dim, a variadic dim or a scalar argument is bound to; None is an optional scalar that was left out.
EnvValue: TypeAlias = Scalar | Symbol | Numbers | Setting | Sequence[str] | None
Env: TypeAlias = Mapping[str, EnvValue]

Value: TypeAlias = Tensor | Sequence[Tensor] | EnvValue
Args: TypeAlias = tuple[Value, ...]

Outputs: TypeAlias = tuple[Tensor, ...]  # always as many as are declared
Result: TypeAlias = Tensor | Outputs | None  # one output stands for itself, and none is None
Returned: TypeAlias = Tensor | Sequence[Tensor] | None  # what a function that somebody wrote may return

Supports: TypeAlias = Callable[..., bool | str]  # of a call's arguments: True, or the reason why not
