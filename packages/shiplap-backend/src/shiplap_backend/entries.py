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
    """The rule for the shape, strides and dtype of one output.

    Most outputs need none, because torch computes them by the operator's ``meta`` function. ``mode`` names the rule. In
    the mode ``sizes``, ``sizes`` is an expression for the list of sizes. ``format`` names tensors. If one of them is
    stored channels last, the output is, too. ``order`` lists the dims as they are stored, the outermost first. The mode
    ``meta`` is for outputs whose shape the ``meta`` function gives, but whose memory format the CPU's kernel chooses
    afterwards.
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
    """A write to an argument of the operator, such as to running statistics.

    ``graph`` is the expression of the new value. ``when`` is the condition for the write. If it is empty, the write is
    made in every call.
    """

    graph: str
    when: str = ""


class MetadataEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The implementation of one overload on the target, that is, on the vendor's runtime, as the metadata file
    describes it.

    ``graph`` is the expression of the only output, or one expression for each output by name.
    """

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
    """The facts of the target, that is, of one vendor's runtime.

    ``runtime`` is its name, and ``dtypes`` maps names of sets of dtypes to their members. ``operators`` maps operators
    such as ``+`` to vendor functions. ``falls_back`` maps patterns of overload names to the reason why these run on the
    CPU.
    """

    runtime: str
    requires: dict[str, str] = {}
    dtypes: dict[str, list[str]] = {}
    operators: dict[str, str] = {}
    index_parameters: list[str] = []
    falls_back: dict[str, str] = {}


def target_dtypes(target: MetadataTarget) -> tuple[str, ...]:
    """Return the dtypes that the dtype sets of ``target`` contain.

    If ``target`` has no sets, return all dtypes.
    """
    return tuple(dict.fromkeys(d for members in target.dtypes.values() for d in members)) or tuple(in_aten())


def wide_dtype(dtype: str, there: Collection[str]) -> str:
    """Return the dtype in which torch computes sums and products of ``dtype``, such as ``f32`` for ``bf16``.

    If that dtype is not in ``there``, the dtypes that the vendor's runtime has, return ``dtype`` itself.
    """
    row, wide = in_aten().get(dtype), dtype
    # Torch widens only dtypes of less than 32 bits.
    if row is None or row.itemsize >= 4:
        return dtype
    if row.kind == "float":
        wide = "f32"
    elif row.kind in ("signed", "unsigned", "bool"):
        wide = "i32"
    return wide if wide in there else dtype


def metadata_error(where: str, got: str, expected: str) -> ShiplapError:
    """Return the error ``SL901`` for a mistake in a metadata file.

    ``where`` is the file and line, ``got`` the mistake, and ``expected`` a description of valid content.
    """
    return error("SL901", where=where, got=got, expected=expected)
