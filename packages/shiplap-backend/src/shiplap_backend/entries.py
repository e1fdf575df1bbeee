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

    Most outputs need none, because torch computes them by the operator's ``meta`` function. ``mode`` says how the sizes
    are found. In the mode ``sizes``, the field ``sizes`` is an expression for the list of sizes. ``of`` names the
    tensor with the device and memory format of the output, or in the mode ``iterator`` a function of
    ``TensorIterator``. ``dtype`` is an expression. ``when`` is a condition, without which the output is an undefined
    tensor.

    If one of the tensors in ``format`` is stored channels last, the output is, too. ``order`` lists the dims as they
    are stored, the outermost first. The mode ``meta`` is for outputs whose shape the ``meta`` function gives, but whose
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
    """A write to an argument of the operator, such as to running statistics.

    ``graph`` is the expression of the new value. ``when`` is the condition for the write. If ``when`` is empty, the
    write is made in every call.
    """

    graph: str
    when: str = ""


class MetadataEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The implementation of one overload on the target, that is, on the vendor's runtime, as the metadata file
    describes it.

    ``template`` names the kind of C++ wrapper. ``graph`` is the expression of the only output, or one expression for
    each output by name. ``let`` names expressions that ``graph`` and ``updates`` can read. ``dtypes`` are the accepted
    dtypes, and ``compute`` is the dtype of the computation. ``inputs`` has the dtypes to which tensors are converted.

    ``guard`` maps conditions that a call must satisfy to the reason for them. Only shapes depend on the arguments
    ``shape_only``, and ``redundant`` names arguments whose value follows from others. ``empty`` says whether a call
    with an input without elements runs on the CPU. ``torch`` and ``vendor`` are the ranges of versions for which the
    entry applies.
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

    ``runtime`` is its name, and ``dtypes`` maps names of sets of dtypes to their members. ``requires`` maps Python
    packages to version ranges. ``operators`` maps operators such as ``+`` to vendor functions. ``index_parameters`` are
    the parameters of vendor functions that take integer constants. ``falls_back`` maps patterns of overload names to
    the reason why these run on the CPU.
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
