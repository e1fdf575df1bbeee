"""The families of wrappers: the C++ template that ``template:`` names, and the defaults that an entry can omit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from shiplap_backend.entries import Empty, Output

_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Family:
    """The defaults of one family. ``file`` is a template of ``codegen/templates/backend``."""

    file: str
    about: str
    compute: str = "common"
    dtypes: str = "real"
    empty: Empty = "fallback"
    graph: bool = True
    guard: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    output: Output | None = None
    key: tuple[str, ...] = ("compute",)


FAMILIES: dict[str, Family] = {
    "unary": Family("structured", "one input, elementwise"),
    "binary": Family("structured", "broadcast and promoted inputs, elementwise"),
    "reduction": Family("structured", "some dims to one or none", compute="out"),
    "matmul": Family("structured", "products of matrices", compute="self", dtypes="float"),
    "structured": Family("structured", "any other op with a structured meta", compute="self"),
    "functional": Family("functional", "an explicit output rule", compute="self"),
    "inplace": Family("functional", "writes into its first argument", compute="self"),
    "factory": Family("functional", "no tensor input", compute="out", dtypes="all"),
    "custom": Family("custom", "a hand-written body in csrc/", graph=False, dtypes="all"),
}
