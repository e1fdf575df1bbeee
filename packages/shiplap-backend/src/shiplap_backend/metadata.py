"""The reader of a target's metadata: YAML by overload, checked against a schema. Errors have file and line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from shiplap import ShiplapError, safe_io
from shiplap.plugin_api import error
from shiplap_backend import runtimes
from shiplap_backend.entries import ArgumentUpdate, MetadataEntry, MetadataTarget, OutputRule, metadata_error
from shiplap_backend.expression import suggest_nearest
from shiplap_backend.runtime import Runtime
from shiplap_backend.validate import check_entry, check_target

if TYPE_CHECKING:
    import yaml

LIMIT = 1 << 19  # bytes of a metadata file
_T = TypeVar("_T")


class _MetadataFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of one metadata file.

    ``target`` describes the vendor's runtime, and ``ops`` has an entry for each overload. ``extends`` names the file or
    runtime whose entries are used as well. If ``only`` is not None, just the overloads that it lists are kept.
    """

    target: MetadataTarget | None = None
    extends: str = ""
    only: list[str] | None = None
    ops: dict[str, Any] = {}


@dataclass(frozen=True)
class Metadata:
    """A target, that is, one vendor's runtime, and its metadata entries by overload.

    ``where`` has the file and line of each entry, and ``places`` those of the target's fields.
    """

    target: MetadataTarget
    entries: Mapping[str, MetadataEntry]
    where: Mapping[str, str]
    places: Mapping[tuple[str, ...], str]  # file and line of each fact of the target: ("operators", "+")

    @cached_property
    def dtype_sets(self) -> Mapping[str, tuple[str, ...]]:
        """The members of each dtype set of the vendor's runtime, by the set's name."""
        return {name: tuple(members) for name, members in self.target.dtypes.items()}


def shipped_metadata(runtime: str) -> Path:
    """Return the path of the metadata file of ``runtime`` that is a part of this package."""
    return Path(__file__).parent / "metadata" / f"{runtime}.yaml"


def load_metadata(path: Path, runtime: Runtime | None = None) -> Metadata:
    """Return the checked metadata in the YAML file ``path`` and in the file that it extends.

    If the metadata is invalid, raise ``SL901`` with file and line, the mistake and the nearest valid name.

    Args:
        path: The metadata file.
        runtime: The runtime of the project. If ``path`` extends a file by the name of this runtime, the runtime's own
            metadata is read.
    """
    file, lines = _read_yaml(path)
    base = _load_base(path, file, lines, runtime)
    target = file.target or (base.target if base else None)
    if target is None:
        raise _file_error(path, 1, "'target:' is missing", "a target, or 'extends: <runtime>'")

    def at(*keys: str) -> str:
        """Return ``file:line`` of the innermost of the nested ``keys`` that the YAML file has.

        The line is 1 if it has none of them.
        """
        # The innermost key may be missing in the file, as for a required field.
        known = (lines[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in lines)
        return f"{path}:{next(known, 1)}"

    if file.target:
        check_target(file.target, lambda *keys: at("target", *keys))
    for name, entry in file.ops.items():
        check_entry(entry, target, lambda *keys, name=name: at("ops", name, *keys))
    kept = _inherited_entries(path, file, lines, base)
    where = {**(base.where if base else {}), **{name: at("ops", name) for name in file.ops}}
    places = {keys[1:]: at(*keys) for keys in lines if keys[0] == "target"}
    return Metadata(target, {**kept, **file.ops}, where, places if file.target or not base else base.places)


def _load_base(
    path: Path, file: _MetadataFile, lines: Mapping[tuple[str, ...], int], runtime: Runtime | None
) -> Metadata | None:
    """Return the metadata that ``file``, the content of a metadata file, extends, or None if it extends none.

    ``path`` is the file, and ``lines`` has the line of each key. ``runtime`` is the runtime of the project, if it is
    known. Raise ``SL901`` for an unknown runtime.
    """
    if not file.extends:
        return None
    # A runtime in a directory is not installed, so that its name alone would not find it.
    if runtime is not None and file.extends == runtime.name:
        return load_metadata(runtime.metadata)
    names = runtimes.runtime_names()
    if file.extends not in names:
        names = sorted({*names, *([runtime.name] if runtime else [])})
        hint = suggest_nearest(file.extends, names)
        raise _file_error(path, lines[("extends",)], f"extends {file.extends!r}{hint}", f"one of {', '.join(names)}")
    return load_metadata(runtimes.find_runtime(file.extends).metadata)


def _inherited_entries(
    path: Path, file: _MetadataFile, lines: Mapping[tuple[str, ...], int], base: Metadata | None
) -> Mapping[str, MetadataEntry]:
    """Return the entries of the extended metadata ``base`` that ``file`` keeps, by overload.

    These are all entries, or those that ``only`` in the file lists. ``path`` is the file, and ``lines`` has the line of
    each key. Raise ``SL901`` if ``only`` is empty or lists an unknown overload.
    """
    entries = base.entries if base else {}
    if file.only is None:
        return entries
    if not file.only:
        raise _file_error(
            path, lines[("only",)], "only: no overload at all", "overloads of the extended file, or no such field"
        )
    for name in file.only:
        if name not in entries:
            raise _file_error(
                path,
                lines[("only",)],
                f"only: {name!r}{suggest_nearest(name, entries)}",
                "overloads of the extended file",
            )
    return {name: e for name, e in entries.items() if name in file.only}


def _read_yaml(path: Path) -> tuple[_MetadataFile, dict[tuple[str, ...], int]]:
    """Return the content of the metadata file ``path``, and a mapping from nested keys to the line of the innermost
    key.

    Raise ``SL907`` without PyYAML, and ``SL901`` for invalid content.
    """
    try:
        import yaml
    except ModuleNotFoundError:
        fix = "install it: pip install pyyaml"
        raise error(
            "SL907", where="metadata of a backend", got="no package 'yaml'", expected="PyYAML", fix=fix
        ) from None
    try:
        content = safe_io.read_file(path, LIMIT, safe_io.NAMED)
    except OSError as e:
        raise _file_error(path, 1, e.strerror or str(e), "a readable metadata file in UTF-8") from None
    try:
        root = safe_io.compose_yaml(content)
        lines = dict(_key_lines(path, root)) if root else {}
        data = safe_io.build_yaml(root) or {}
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        raise _file_error(path, mark.line + 1 if mark else 1, f"not YAML: {e.problem}", "valid YAML") from None
    except ValueError as e:
        raise _file_error(path, 1, str(e), "a readable metadata file in UTF-8") from None
    named: Any = data.get("ops") if isinstance(data, dict) else None
    for place, name in enumerate(named if isinstance(named, dict) else {}):
        if not isinstance(name, str):
            # YAML 1.1 reads ``on`` and ``no`` as booleans and ``1`` as a number, so the line is found by position.
            line = [n for keys, n in lines.items() if keys[0] == "ops" and len(keys) == 2][place]
            raise _file_error(
                path, line, f"a name that is {name!r}, a {type(name).__name__}", "an overload's name, a text"
            )
    # Entries are converted one by one below: msgspec does not name the key of a mapping in its errors.
    file = _convert_node(path, lines, data, _MetadataFile, ())
    for name, raw in file.ops.items():
        for key in [k for k, v in raw.items() if v == "" and k != "graph"] if isinstance(raw, dict) else ():
            raise _file_error(
                path, lines[("ops", name, key)], f"{name}: {key}: an empty text", "a value, or no such field"
            )
    ops = {name: _convert_node(path, lines, raw, MetadataEntry, ("ops", name)) for name, raw in file.ops.items()}
    return msgspec.structs.replace(file, ops=ops), lines


def _convert_node(
    path: Path, lines: Mapping[tuple[str, ...], int], raw: Any, kind: type[_T], at: tuple[str, ...]
) -> _T:
    """Return ``raw``, a value that was read from the YAML file ``path``, as a struct of the class ``kind``.

    ``at`` are the nested keys under which ``raw`` stands. ``lines`` has the line of each key. Raise ``SL901`` with the
    line of the mistake.
    """
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as e:
        what, _, place = str(e).partition(" - at `")
        parts = [p for p in re.split(r"[.\[\]`$]+", place) if p]
        field = m[1] if (m := re.search(r"unknown field `(.*)`", what)) else ""
        below = (*at, *parts, *([field] if field else []))
        # The message names fields and no line. The deepest key on the way to the field has one.
        line = max(
            ((k, n) for k, n in lines.items() if _is_on_path(k, below)), key=lambda c: len(c[0]), default=((), 1)
        )[1]
        fields = [
            name
            for struct in (_MetadataFile, MetadataTarget, MetadataEntry, OutputRule, ArgumentUpdate)
            for name in struct.__struct_fields__
        ]
        hint = suggest_nearest(field, fields) if field else ""
        name = f"{at[-1]}: " if at else ""
        raise _file_error(path, line, f"{name}{what}{hint}", "the fields of docs/backend.md") from None


def _key_lines(path: Path, node: yaml.Node, at: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the nested keys and the line of every key below ``node``, a node of the YAML file ``path``.

    Nested keys are a tuple that begins with ``at``, the keys of ``node`` itself. Raise ``SL901`` for a repeated key,
    because YAML would use the last one without a warning.
    """
    import yaml

    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise _file_error(path, line, "a name that is a list or a mapping", "a text")
        if key.value in seen:
            raise _file_error(
                path, line, f"duplicate {key.value!r}", f"one entry; the first is in line {seen[key.value]}"
            )
        seen[key.value] = line
        yield (*at, key.value), line
        yield from _key_lines(path, value, (*at, key.value))


def _is_on_path(key: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    """Return whether ``key`` is equal to ``parts`` or an outer key of it.

    ``key`` are nested keys of the file. ``parts`` is the path in a message of msgspec, in which ``...`` stands for any
    key.
    """
    return len(key) <= len(parts) and all(p in ("...", k) for k, p in zip(key, parts, strict=False))


def _file_error(path: Path, line: int, got: str, expected: str) -> ShiplapError:
    """Return the error ``SL901`` for the line ``line`` of the metadata file ``path``.

    ``got`` is the mistake, and ``expected`` a description of valid content.
    """
    return metadata_error(f"{path}:{line}", got, expected)
