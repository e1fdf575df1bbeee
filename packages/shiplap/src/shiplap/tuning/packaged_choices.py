"""Choices that came with an installed package: what its author measured, for the devices that its author had.

``shiplap package --tuned`` puts them into the folder ``_shiplap`` of the package that declares the ops. They are read
at the first call after the import. An entry counts on a device of the same name and capability, for the op as the
author had it, below what this process has tuned itself. A frozen file (``SHIPLAP_TUNED``) takes their place. Other
versions of torch, of the driver and of Python do not matter: an entry names a kernel and a config that the op declares.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from shiplap import safe_io
from shiplap.declare.kernel import Kernel
from shiplap.dispatch import Op, registry, tuned_choices
from shiplap.dispatch.package_folder import CHOICES, choices_of
from shiplap.dispatch.tuned_choices import Entry
from shiplap.errors import ShiplapError, error, notice
from shiplap.tuning.choice import entry_of, from_json
from shiplap.tuning.frozen_table import environments, read
from shiplap.tuning.key import MACHINE, differences
from shiplap.tuning.store import seal, unseal

FORMAT = "shiplap-packaged/1"
LIMIT = 1 << 24  # bytes of a table


# --- where a package is made ------------------------------------------------------------------------------------------


def write(folder: Path, table: Path, ops: Iterable[Op]) -> int:
    """Put the entries of a frozen table that are for ``ops`` into ``folder``; how many.

    Raises:
        CommandError: SL602 for a table that cannot be read.
        TuneError: SL609 for a table that is damaged, and for an entry that was made for another version of an op.
    """
    declared = {op.spec.name: op for op in ops}
    kept = [(key, value) for key, value in read(table) if key["op"] in declared]
    for key, _ in kept:
        op = declared[key["op"]]
        if key["source"] != op.identity:
            raise error(
                "SL609",
                where=str(table),
                what="an entry was made for another version of an op",
                got=f"{op.spec.name} of digest {key['source']}",
                expected=f"digest {op.identity}, the op as the wheel has it",
                fix="tune again with the package that goes into the wheel, then freeze",
            )
    if kept:
        about = {
            "format": FORMAT,
            "python": _python(),
            "files": {name: _file_digest(declared[name]) for name in sorted({key["op"] for key, _ in kept})},
            "entries": [seal(key, value) for key, value in kept],
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CHOICES).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return len(kept)


# --- at the user's ----------------------------------------------------------------------------------------------------


def load() -> None:
    """Use the entries that came with the packages of declared ops, where no other one is there for the same calls."""
    entries: list[Entry] = []
    for op in registry.ops():
        for path in choices_of(op):
            entries += _entries(path, op)
    if entries:
        tuned_choices.install(entries, below=True)


def chosen(folder: Path, op: Op) -> list[Kernel]:
    """The kernels with their configs that a table in ``folder`` has chosen for ``op``, for whatever device."""
    path = folder / CHOICES
    if not path.is_file():
        return []
    variants: dict[str, Kernel] = {}
    for key, value in _read(path).get("entries", ()):
        choice = from_json(key, value, "packaged")
        kernels = [k for k in op.kernels.get(choice.device, ()) if k.name == choice.kernel]
        if key["op"] == op.spec.name and kernels and choice.config.items:
            variants[choice.label] = kernels[0].variant(choice.config)
    return list(variants.values())


def _entries(path: Path, op: Op) -> list[Entry]:
    """Those of a table for ``op`` on the devices of this machine. A notice where the table cannot be used."""
    about = _read(path)
    entries, why = [], set[str]()
    mine = [(key, value) for key, value in about.get("entries", ()) if key["op"] == op.spec.name]
    now = environments(key["device"] for key, _ in mine)
    for key, value in mine:
        here = now.get(key["device"])
        if here is None or differences(key.as_dict(), here, MACHINE):
            continue
        same_file = about["python"] != _python() and about["files"].get(op.spec.name) == _file_digest(op)
        if key["source"] != op.identity and not same_file:
            why.add(f"{op.spec.name} is another version of the op")
            continue
        entries.append(entry_of(from_json(key, value, "packaged"), op.identity))
    for reason in why:
        notice(f"packaged {path} {reason}", f"{path}: choices are not used: {reason}")
    return entries


@cache
def _read(path: Path) -> Mapping[str, Any]:
    """The content of a table with its entries as keys and values. Empty, with a notice, for what is none."""
    try:
        about = safe_io.parse_json(safe_io.read_file(path, LIMIT, safe_io.NAMED))
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise ValueError(f"not of format {FORMAT}")
        listed, files = about.get("entries"), about.get("files")
        if not isinstance(listed, list) or not isinstance(files, dict):
            raise ValueError("no entries")
        entries = [unseal(entry) for entry in listed]
        for key, value in entries:
            from_json(key, value, "packaged")
    except (OSError, ValueError, ShiplapError) as e:
        reason = e.got if isinstance(e, ShiplapError) else safe_io.reason(e)
        notice(f"packaged {path}", f"{path}: choices are not used: {reason}")
        return {}
    return {"python": about.get("python"), "files": files, "entries": entries}


def _python() -> str:
    """The digest of an op is of what Python has compiled: that of another version cannot be compared."""
    return ".".join(platform.python_version_tuple()[:2])


def _file_digest(op: Op) -> str:
    """sha256 of the file that declares the op: the same for every version of Python. Empty if it cannot be read."""
    try:
        return hashlib.sha256(Path(op.file).read_bytes()).hexdigest()
    except OSError:
        return ""
