"""The schema lock: the schema of each overload for which a project was checked. A difference stops the generator."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from shiplap.plugin_api import error
from shiplap.plugin_api.files import parse_json, read_named
from shiplap.torch_private.aten_operators import AtenDeclaration, aten_declarations
from shiplap_backend.metadata import Metadata


@dataclass(frozen=True)
class SchemaLock:
    """The operator schemas of the version ``torch`` of torch, by the name of the overload."""

    torch: str
    schemas: Mapping[str, str]

    def text(self) -> str:
        """Return the schema lock as a JSON string, which is the content of its file."""
        return json.dumps({"torch": self.torch, "schemas": dict(sorted(self.schemas.items()))}, indent=1) + "\n"


@dataclass(frozen=True)
class SchemaChange:
    """The difference between the schemas of one overload in two versions of torch.

    ``kind`` is ``added``, ``removed`` or ``changed``. ``old`` and ``new`` are the schemas. If the overload was added,
    ``old`` is empty. If it was removed, ``new`` is empty.
    """

    name: str
    kind: str
    old: str
    new: str

    def __str__(self) -> str:
        """Return the kind of the change, the name of the overload, and its schema or, if it changed, both schemas."""
        if self.kind == "changed":
            return f"changed {self.name}\n  - {self.old}\n  + {self.new}"
        return f"{self.kind} {self.old or self.new}"


def schema_digest(schema: str) -> str:
    """Return a digest of ``schema`` of 12 characters.

    A built extension has one for each overload in its manifest, the file with the versions that it was built for.
    """
    return hashlib.sha256(schema.encode()).hexdigest()[:12]


def snapshot_schemas(names: Mapping[str, object] | None = None) -> SchemaLock:
    """Return the schemas of the installed torch.

    If ``names`` is None, the schemas of all overloads are returned. Otherwise those of ``names`` and of their variants,
    such as in-place and ``out=``, are returned.
    """
    declared = aten_declarations()
    chosen = declared if names is None else {n: d for n in names for n, d in _with_group(n, declared)}
    return SchemaLock(torch.__version__.partition("+")[0], {n: d.schema for n, d in sorted(chosen.items())})


def _with_group(name: str, declared: Mapping[str, AtenDeclaration]) -> list[tuple[str, AtenDeclaration]]:
    """Return pairs of name and declaration for the overload ``name`` and its variants, such as in-place and ``out=``.

    ``declared`` has torch's overloads by name. The list is empty if ``name`` is not among them.
    """
    declaration = declared.get(name)
    return [] if declaration is None else [(n, declared[n]) for n in (name, *declaration.group)]


def read_lock(path: Path) -> SchemaLock:
    """Return the schema lock, that is, the schemas for which a project was checked, from the file ``path``.

    Raise ``SL904`` if the file is missing or damaged.
    """
    if not path.is_file():
        raise error(
            "SL904",
            where=str(path),
            what="the schema lock does not exist",
            got="no such file",
            expected="a file that 'shiplap backend gen' or 'shiplap backend diff --write' wrote",
            fix="name a generated project, or its schema lock",
        )
    try:
        # 16 MiB are far more than the schemas of all overloads take.
        data = parse_json(read_named(path, 1 << 24))
        if not isinstance(data, dict) or not isinstance(schemas := data["schemas"], dict):
            raise ValueError("no schemas by overload")
        return SchemaLock(str(data["torch"]), {k: str(v) for k, v in schemas.items()})
    except (OSError, ValueError, KeyError) as e:
        raise error(
            "SL904",
            where=str(path),
            what="the schema lock is damaged",
            got=f"{type(e).__name__}: {e}",
            expected="a file that 'shiplap backend gen' wrote",
            fix="restore the file from version control",
        ) from None


def diff_schemas(old: SchemaLock, new: SchemaLock) -> list[SchemaChange]:
    """Return a ``SchemaChange`` for each schema that was added, removed or changed from ``old`` to ``new``, sorted by
    overload.
    """
    changes = []
    for name in sorted({*old.schemas, *new.schemas}):
        a, b = old.schemas.get(name, ""), new.schemas.get(name, "")
        if a != b:
            kind = "added" if not a else "removed" if not b else "changed"
            changes.append(SchemaChange(name, kind, a, b))
    return changes


def update_lock(path: Path, metadata: Metadata, *, accept: bool = False) -> SchemaLock:
    """Return the new content of the schema lock at ``path``, without writing it.

    The content has the present schemas of the overloads in ``metadata`` and of their variants. If a locked schema has
    changed, or if the overload of an entry is gone, raise ``SL904``, unless ``accept`` is true.
    """
    now = snapshot_schemas(metadata.entries)
    if path.is_file() and not accept:
        locked = read_lock(path)
        drift = [
            c
            for c in diff_schemas(locked, now)
            # Overloads that another torch adds, or that no entry uses any more, do not affect generated code.
            if c.kind == "changed" or (c.kind == "removed" and c.name in metadata.entries)
        ]
        if drift:
            raise error(
                "SL904",
                where=str(path),
                got="\n".join(str(c) for c in drift),
                expected=f"the schemas of torch {locked.torch}; installed is {now.torch}",
            )
    return now
