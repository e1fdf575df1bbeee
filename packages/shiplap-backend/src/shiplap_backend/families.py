"""The families of wrappers: the C++ template that ``template:`` names, and the defaults that an entry can omit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from shiplap_backend.entries import Empty, OutputRule

_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class WrapperFamily:
    """A family of wrappers, with the values that its metadata entries may leave out.

    ``file`` is the C++ template of the family in ``codegen/templates/backend``. ``about`` describes the operators in a
    few words. ``graph`` is true if the wrapper builds a graph of the vendor, and false if it builds none. ``compute``,
    ``dtypes``, ``empty`` and ``output`` are for an entry without such a field, and ``entries`` explains their values.
    The conditions in ``guard`` hold for every entry.
    """

    file: str
    about: str
    compute: str = "common"
    dtypes: str = "real"
    empty: Empty = "fallback"
    graph: bool = True
    guard: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    output: OutputRule | None = None


FAMILIES: dict[str, WrapperFamily] = {
    "unary": WrapperFamily("structured", "one input, elementwise"),
    "binary": WrapperFamily("structured", "broadcast and promoted inputs, elementwise"),
    "reduction": WrapperFamily("structured", "some dims to one or none", compute="out"),
    "matmul": WrapperFamily("structured", "products of matrices", compute="self", dtypes="float"),
    "structured": WrapperFamily("structured", "any other op with a structured meta", compute="self"),
    "functional": WrapperFamily("functional", "an explicit output rule", compute="self"),
    "inplace": WrapperFamily("functional", "writes into its first argument", compute="self"),
    "factory": WrapperFamily("functional", "no tensor input", compute="out", dtypes="all"),
    "custom": WrapperFamily("custom", "a hand-written body in csrc/", graph=False, dtypes="all"),
}
