"""Why the dispatcher refused a call, in the words of the declaration: SL209 in place of a schema dump."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shiplap.errors import ShiplapError, error
from shiplap.op.schema import schema
from shiplap.op.spec import Arg, OpSpec

__all__ = ["explain", "mismatch"]

_IS: dict[str, Callable[[Any], bool]] = {
    "int": lambda v: hasattr(v, "__index__") and not (isinstance(v, Tensor) and v.dim()),
    "float": lambda v: isinstance(v, (float, torch.SymFloat)) or _IS["int"](v) or hasattr(v, "__float__"),
    "bool": lambda v: isinstance(v, (bool, torch.SymBool)),
    "str": lambda v: isinstance(v, str),
}


def explain(
    spec: OpSpec, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any], cause: Exception
) -> None:
    """Raise SL209 if the arguments are not of the declared kinds; return if the failure has another reason."""
    if isinstance(cause, ShiplapError):
        return
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as e:
        raise error("SL209", where=spec.name, got=str(e), expected=schema(spec)) from None
    for arg in spec.args:
        if arg.name in given and (got := mismatch(arg, given[arg.name])):
            expected = f"{_declared(arg)}{' or None' if arg.optional else ''}"
            where = f"{spec.name}, argument {arg.name!r}"
            raise error("SL209", where=where, got=got, expected=expected) from None


def mismatch(arg: Arg, value: Any) -> str:
    """Empty when ``value`` is what ``arg`` declares, else what it is."""
    if value is None:
        return "" if arg.optional else "None"
    kind = str(arg.scalar)
    if arg.many or kind.startswith("list["):
        if not isinstance(value, (list, tuple, torch.Size)):
            return type(value).__name__
        fits = (lambda v: isinstance(v, Tensor)) if arg.many else _IS[kind[5:-1]]
        return next((f"{type(v).__name__} in a {type(value).__name__}" for v in value if not fits(v)), "")
    fits = (lambda v: isinstance(v, Tensor)) if arg.tensor is not None else _IS[kind]
    return "" if fits(value) else type(value).__name__


def _declared(arg: Arg) -> str:
    return f"list of {arg.tensor}" if arg.many else str(arg.tensor or arg.scalar)
