"""Why the dispatcher refused a call, in the words of the declaration: SL209 in place of a schema dump."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shiplap.errors import CATALOGUE, ShiplapError, error
from shiplap.op.check import Checker
from shiplap.op.schema import schema
from shiplap.op.spec import Arg

__all__ = ["explain", "mismatch", "restated"]

_IS: dict[str, Callable[[Any], bool]] = {
    "int": lambda v: hasattr(v, "__index__") and not (isinstance(v, Tensor) and v.dim()) and not _too_large(v),
    "float": lambda v: isinstance(v, (float, torch.SymFloat)) or _IS["int"](v) or hasattr(v, "__float__"),
    "bool": lambda v: isinstance(v, (bool, torch.SymBool)),
    "str": lambda v: isinstance(v, str),
}


def explain(
    checker: Checker, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any], cause: Exception
) -> None:
    """Raise SL209 if the arguments are not of the declared kinds, or what native code meant; else return."""
    if isinstance(cause, ShiplapError):
        return
    spec = checker.spec
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as e:
        raise error("SL209", where=spec.name, got=str(e), expected=schema(spec)) from None
    for arg in spec.args:
        if arg.name in given and (got := mismatch(arg, given[arg.name])):
            expected = f"{_declared(arg)}{' or None' if arg.optional else ''}"
            where = f"{spec.name}, argument {arg.name!r}"
            raise error("SL209", where=where, got=got, expected=expected) from None
    if (meant := restated(cause)) is not None:
        if meant.id < "SL211":  # what the checks of the declaration say, they say better
            checker.bind(tuple(given.get(a.name, a.default) for a in spec.args))
        raise meant from None


def restated(cause: Exception) -> ShiplapError | None:
    """The catalogue error whose text an exception from native code carries: C++ knows no Python classes."""
    found = re.search(r"\b(SL\d{3}): (.*)((?:\n  (?:where|got|expected|fix) .*)*)", str(cause))
    if found is None or found[1] not in CATALOGUE:
        return None
    rows = dict(re.findall(r"^  (where|got|expected|fix) +(.*)$", found[3], re.MULTILINE))
    return error(found[1], what=found[2], **{"where": "", **rows})


def mismatch(arg: Arg, value: Any) -> str:
    """Empty when ``value`` is what ``arg`` declares, else what it is."""
    if value is None:
        return "" if arg.optional else "None"
    kind = str(arg.scalar)
    if arg.many or kind.startswith("list["):
        if not isinstance(value, (list, tuple, torch.Size)):
            return type(value).__name__
        fits = _is_tensor if arg.many else _IS[kind[5:-1]]
        return next((f"{_kind(v)} in a {type(value).__name__}" for v in value if not fits(v)), "")
    fits = _is_tensor if arg.tensor is not None else _IS[kind]
    return "" if fits(value) else _kind(value)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _kind(value: Any) -> str:
    return "int beyond 64 bits" if _too_large(value) else type(value).__name__


def _too_large(value: Any) -> bool:
    return type(value) is int and not -(2**63) <= value < 2**63


def _declared(arg: Arg) -> str:
    return f"list of {arg.tensor}" if arg.many else str(arg.tensor or arg.scalar)
