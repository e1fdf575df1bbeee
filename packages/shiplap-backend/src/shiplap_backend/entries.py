"""The values of a metadata file: a target, and its entries by overload. Reading and checking are in other modules."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec

from shiplap import ShiplapError
from shiplap.dtypes import in_aten
from shiplap.plugin_api import error

Empty = Literal["fallback", "run"]


class OutputRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The shape, strides and dtype of one output that no structured ``meta`` gives: a mode, or a list of sizes.

    ``format`` names tensors: if one of them is stored channels last, so is the output. ``order`` lists the dims as they
    are stored, the outermost first. The mode ``meta`` is for outputs whose shape a structured ``meta`` gives, but whose
    memory format the CPU's kernel chooses afterwards.
    """

    mode: Literal[
        "bypass", "broadcast", "matmul", "reduce", "concat", "transpose", "sizes", "iterator", "infer", "meta"
    ]
    of: str = ""
    sizes: str = ""
    dtype: str = ""
    when: str = ""
    format: list[str] = []
    order: list[int] = []


class ArgumentUpdate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A write to an argument besides the results, such as running statistics, and the condition for it."""

    graph: str
    when: str = ""


class MetadataEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The implementation of one overload on the target. ``graph`` is one expression, or one for each output."""

    template: str
    graph: str | dict[str, str] = ""
    let: dict[str, str] = {}
    dtypes: str | list[str] = ""
    compute: str = ""
    inputs: dict[str, str] = {}
    output: dict[str, OutputRule] = {}
    updates: dict[str, ArgumentUpdate] = {}
    guard: dict[str, str] = {}
    shape_only: list[str] = []
    redundant: dict[str, str] = {}
    empty: Empty | None = None
    torch: str = ""
    vendor: str = ""


class MetadataTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The facts of the target. ``operators`` maps operators such as ``+`` to vendor functions."""

    runtime: str
    requires: dict[str, str] = {}
    dtypes: dict[str, list[str]] = {}
    operators: dict[str, str] = {}
    index_parameters: list[str] = []
    falls_back: dict[str, str] = {}


def target_dtypes(target: MetadataTarget) -> tuple[str, ...]:
    """Return the dtypes in the sets of ``target``; a target without sets has every dtype."""
    return tuple(dict.fromkeys(d for members in target.dtypes.values() for d in members)) or tuple(in_aten())


def wide_dtype(dtype: str, there: Collection[str]) -> str:
    """Return the dtype in which torch computes sums and products of ``dtype``, such as f32 for bf16, or ``dtype``
    itself if that is not in ``there``.
    """
    row, wide = in_aten().get(dtype), dtype
    if row is None or row.itemsize >= 4:
        return dtype
    if row.kind == "float":
        wide = "f32"
    elif row.kind in ("signed", "unsigned", "bool"):
        wide = "i32"
    return wide if wide in there else dtype


def metadata_error(where: str, got: str, expected: str) -> ShiplapError:
    """Return the error SL901 for the mistake ``got`` at ``where``, a file and line of a metadata file, which should
    have ``expected``.
    """
    return error("SL901", where=where, got=got, expected=expected)
