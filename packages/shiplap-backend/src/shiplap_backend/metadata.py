"""The one hand-kept file of a target: YAML by overload, checked against a schema. Every error has file and line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from shiplap import ShiplapError, trust
from shiplap.extend import error
from shiplap_backend.expression import DTYPES, nearest

if TYPE_CHECKING:
    import yaml

__all__ = ["Entry", "Metadata", "Output", "Target", "load", "shipped"]

Empty = Literal["fallback", "run"]
LIMIT = 1 << 19  # bytes of a metadata file
_T = TypeVar("_T")


class Output(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape, strides and dtype of one output that no structured ``meta`` gives: a mode, or a list of sizes.

    ``format`` names tensors of which one stored channels last makes the output so.
    """

    mode: Literal["bypass", "broadcast", "matmul", "reduce", "concat", "transpose", "sizes", "iterator", "infer"]
    of: str = ""
    sizes: str = ""
    dtype: str = ""
    when: str = ""
    format: list[str] = []


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
    layout: dict[str, int] = {}
    falls_back: dict[str, str] = {}


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    target: Target | None = None
    extends: str = ""
    only: list[str] = []
    ops: dict[str, Any] = {}


@dataclass(frozen=True)
class Metadata:
    """A target and its entries by overload; ``where`` says file and line of each."""

    target: Target
    entries: Mapping[str, Entry]
    where: Mapping[str, str]

    @cached_property
    def dtype_sets(self) -> Mapping[str, tuple[str, ...]]:
        return {name: tuple(members) for name, members in self.target.dtypes.items()}


def shipped(runtime: str) -> Path:
    """The metadata of ``runtime`` that comes with shiplap."""
    return Path(__file__).parent / "metadata" / f"{runtime}.yaml"


def load(path: Path) -> Metadata:
    """Read ``path`` and what it extends. SL901: file:line, what is wrong, the nearest correct name."""
    file, lines = _read(path)
    base = _base(path, file, lines)
    target = file.target or (base.target if base else None)
    if target is None:
        raise _wrong(path, 1, "'target:' is missing", "a target, or 'extends: <runtime>'")
    where = {name: f"{path}:{lines.get(('ops', name), 1)}" for name in file.ops}
    for name, entry in file.ops.items():
        _check(path, lines, name, entry, target)
    kept = _only(path, file, lines, base)
    return Metadata(target, {**kept, **file.ops}, {**(base.where if base else {}), **where})


def _base(path: Path, file: _File, lines: Mapping[tuple[str, ...], int]) -> Metadata | None:
    if not file.extends:
        return None
    base = shipped(file.extends)
    if not base.is_file():
        names = sorted(p.stem for p in base.parent.glob("*.yaml"))
        hint = nearest(file.extends, names)
        raise _wrong(path, lines[("extends",)], f"extends {file.extends!r}{hint}", f"one of {', '.join(names)}")
    return load(base)


def _only(path: Path, file: _File, lines: Mapping[tuple[str, ...], int], base: Metadata | None) -> Mapping[str, Entry]:
    """The entries taken over: all, or those that ``only`` lists."""
    entries = base.entries if base else {}
    for name in file.only:
        if name not in entries:
            raise _wrong(
                path, lines[("only",)], f"only: {name!r}{nearest(name, entries)}", "overloads of the extended file"
            )
    return {name: e for name, e in entries.items() if not file.only or name in file.only}


def _read(path: Path) -> tuple[_File, dict[tuple[str, ...], int]]:
    try:
        import yaml
    except ModuleNotFoundError:
        raise error("SL907", where="metadata of a backend", got="no package 'yaml'", expected="PyYAML") from None
    try:
        content = trust.read_file(path, LIMIT, trust.NAMED)
    except OSError as e:
        raise _wrong(path, 1, e.strerror or str(e), "a readable metadata file in UTF-8") from None
    try:
        root = trust.compose_yaml(content)
        lines = dict(_lines(path, root)) if root else {}
        data = trust.build_yaml(root) or {}
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        raise _wrong(path, mark.line + 1 if mark else 1, f"not YAML: {e.problem}", "valid YAML") from None
    except ValueError as e:
        raise _wrong(path, 1, str(e), "a readable metadata file in UTF-8") from None
    file = _converted(path, lines, data, _File, ())
    ops = {name: _converted(path, lines, raw, Entry, ("ops", name)) for name, raw in file.ops.items()}
    return msgspec.structs.replace(file, ops=ops), lines


def _converted(path: Path, lines: Mapping[tuple[str, ...], int], raw: Any, kind: type[_T], at: tuple[str, ...]) -> _T:
    """``raw`` as a ``kind``; msgspec's path below ``at`` gives the line."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as e:
        what, _, place = str(e).partition(" - at `")
        parts = [p for p in re.split(r"[.\[\]`$]+", place) if p]
        field = m[1] if (m := re.search(r"unknown field `(.*)`", what)) else ""
        below = (*at, *parts, *([field] if field else []))
        line = max(((k, n) for k, n in lines.items() if _fits(k, below)), key=lambda c: len(c[0]), default=((), 1))[1]
        hint = nearest(field, kind.__struct_fields__) if field else ""  # type: ignore[attr-defined]
        name = f"{at[-1]}: " if at else ""
        raise _wrong(path, line, f"{name}{what}{hint}", "the fields of docs/backend.md") from None


def _lines(path: Path, node: yaml.Node, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """The line of every key. A key met twice in one mapping is an error, where YAML would take the last."""
    import yaml

    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise _wrong(path, line, "a name that is a list or a mapping", "a text")
        if key.value in seen:
            raise _wrong(path, line, f"duplicate {key.value!r}", f"one entry; the first is in line {seen[key.value]}")
        seen[key.value] = line
        yield (*at, key.value), line
        yield from _lines(path, value, (*at, key.value))


def _fits(key: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    """Whether ``key`` lies on the way to ``parts``; ``...`` is a key that msgspec does not name."""
    return len(key) <= len(parts) and all(p in ("...", k) for k, p in zip(key, parts, strict=False))


def _check(path: Path, lines: Mapping[tuple[str, ...], int], name: str, entry: Entry, target: Target) -> None:
    def at(*keys: str) -> int:
        return lines.get(("ops", name, *keys), lines[("ops", name)])

    sets = {**target.dtypes}
    for dtype in [entry.dtypes] if isinstance(entry.dtypes, str) else entry.dtypes:
        if dtype and dtype not in sets and dtype not in DTYPES:
            got = f"dtypes: {dtype!r}{nearest(dtype, {**sets, **DTYPES})}"
            raise _wrong(path, at("dtypes"), got, f"one of {', '.join((*sets, *DTYPES))}")
    for argument, dtype in entry.inputs.items():
        if dtype not in DTYPES and dtype not in ("raw", "compute"):
            got = f"inputs: {argument}: {dtype!r}{nearest(dtype, [*DTYPES, 'raw', 'compute'])}"
            raise _wrong(path, at("inputs", argument), got, "raw, compute or a dtype")
    for key, range_ in (("torch", entry.torch), ("vendor", entry.vendor)):
        if range_ and not re.fullmatch(r"(?:>=|<=|<|>|==)\d+(?:\.\d+)*(?:,(?:>=|<=|<|>|==)\d+(?:\.\d+)*)*", range_):
            raise _wrong(path, at(key), f"{key}: {range_!r}", "a version range such as '>=2.11,<2.14'")


def _wrong(path: Path, line: int, got: str, expected: str) -> ShiplapError:
    return error("SL901", where=f"{path}:{line}", got=got, expected=expected)


def wrong(where: str, got: str, expected: str) -> Any:
    """SL901 for an entry whose file and line ``Metadata.where`` knows."""
    return error("SL901", where=where, got=got, expected=expected)
