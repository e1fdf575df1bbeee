"""Choices for natively bound ops: the table in force as numbers, pushed into the binding whenever it changes."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from shiplap.codegen.chosen import config_values, lookup_key
from shiplap.codegen.native import scalar_type
from shiplap.op import choices, registry

if TYPE_CHECKING:
    from shiplap.op import Op

__all__ = ["push", "rows"]


def push(op: Op) -> None:
    """Tell the native code of ``op`` what is chosen now. What is no number, or not for contiguous tensors, stays with
    Python: calls with other layouts are handed over as long as there are choices."""
    native: Any = op.native
    if native is None:
        return
    for index, entry in native.parts.items():
        found = rows(op, entry.device)
        flat = [number for row in found for number in row]
        array = (ctypes.c_int64 * max(1, len(flat)))(*flat)
        defer = bool(choices.frozen) and choices.tunable(op, entry.device)
        native.binding.shiplap_choose(ctypes.c_uint64(index), array, ctypes.c_uint64(len(found)), ctypes.c_int32(defer))


def rows(op: Op, device: str) -> list[list[int]]:
    """Per choice the key, whether Python serves it, and the config."""
    (kernel,) = op.own(device)
    width = len(config_values(kernel.space))
    if not lookup_key(op.spec, op.rule):
        return []
    found = []
    for key, picked in choices.resolved(op).items():
        numbers = _key(op, key) if key[0] == device else None
        if numbers is not None:
            ours = picked is not None and picked.template is None
            config = [int(v) for _, v in picked.config.items] if picked is not None and ours else []
            found.append([*numbers, int(not ours), *(config or [0] * width)])
    return found


def _key(op: Op, key: tuple[Any, ...]) -> list[int] | None:
    """A key of the table in force as C++ computes it; None when it is of other layouts, or of a template."""
    if not isinstance(key[-1], str):
        return None
    *values, dtypes, layout = key[1:]
    codes = layout.split(",")
    tensors = [a for a in op.spec.args if a.tensor is not None or (a.optional and a.scalar is not None)]
    if not set(codes) <= {"c", "-"} or len(codes) != len([a for a in tensors if a.tensor is not None]):
        return None
    numbers = [int(v) for v in values if v is not None]
    numbers += [scalar_type(pair.partition("=")[2]) for pair in dtypes.split(", ") if pair]
    numbers += [int(code == "c") for a, code in zip(op.spec.tensors, codes, strict=True) if a.optional]
    return numbers


def _push_all() -> None:
    for op in registry.ops():
        push(op)


choices.listeners.append(_push_all)
