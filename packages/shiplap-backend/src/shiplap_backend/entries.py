"""What a metadata file states, as values: a target, and its entries by overload. Reading and checking are elsewhere."""

from __future__ import annotations

from typing import Literal

import msgspec

from shiplap import ShiplapError
from shiplap.plugin_api import error

Empty = Literal["fallback", "run"]


class Output(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape, strides and dtype of one output that no structured ``meta`` gives: a mode, or a list of sizes.

    ``format`` names tensors of which one stored channels last makes the output so. ``order`` lists the dims as they are
    stored, the outermost first. The mode ``meta`` is of outputs whose shape a structured ``meta`` gives, where the
    CPU's kernel chooses the memory format afterwards.
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


class Update(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an argument becomes besides the results, and when: running statistics."""

    graph: str
    when: str = ""


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one overload is on the target. ``graph`` is an expression, or one for each output."""

    template: str
    graph: str | dict[str, str] = ""
    let: dict[str, str] = {}
    dtypes: str | list[str] = ""
    compute: str = ""
    inputs: dict[str, str] = {}
    output: dict[str, Output] = {}
    updates: dict[str, Update] = {}
    guard: dict[str, str] = {}
    shape_only: list[str] = []
    redundant: dict[str, str] = {}
    empty: Empty | None = None
    torch: str = ""
    vendor: str = ""


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The target's own facts; ``operators`` says which vendor function ``+`` is."""

    runtime: str
    requires: dict[str, str] = {}
    dtypes: dict[str, list[str]] = {}
    operators: dict[str, str] = {}
    index_parameters: list[str] = []
    falls_back: dict[str, str] = {}


def wrong(where: str, got: str, expected: str) -> ShiplapError:
    """SL901 for the file and line ``where``."""
    return error("SL901", where=where, got=got, expected=expected)
