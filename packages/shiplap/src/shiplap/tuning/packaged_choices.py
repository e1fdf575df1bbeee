"""Choices that came with an installed package: the author's measurements, for the author's devices.

``shiplap package --tuned`` puts them into the folder ``_shiplap`` of the package that declares the ops. They are read
at the first call after the import. An entry is used on a device of the same name and capability, for the op as the
author had it. Choices of this process have priority over it, and a frozen file (``SHIPLAP_TUNED``) replaces all of
them. Versions of torch, of the driver and of Python are not compared: an entry names a kernel and a config that the op
declares.
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
from shiplap.dispatch.package_folder import CHOICES, packaged_choice_tables
from shiplap.dispatch.tuned_choices import ChoiceEntry
from shiplap.errors import ShiplapError, error, notice
from shiplap.tuning.choice import choice_from_json, choice_table_entry
from shiplap.tuning.frozen_table import device_environments, read_frozen_table
from shiplap.tuning.key import MACHINE, key_differences
from shiplap.tuning.store import seal_entry, unseal_entry

FORMAT = "shiplap-packaged/1"
LIMIT = 1 << 24  # bytes of a table


# --- where a package is made ------------------------------------------------------------------------------------------


def write_packaged_table(folder: Path, table: Path, ops: Iterable[Op]) -> int:
    """Write the choices for ``ops`` in the frozen table ``table`` to a file in ``folder``, as part of a package. Return
    their number. Nothing is written if it is 0.

    Raises:
        CommandError: ``SL602`` for a table that cannot be read. ``SL609`` for a table that is damaged, and for an entry
            that was made for another version of an op.
    """
    declared = {op.spec.name: op for op in ops}
    kept = [(key, value) for key, value in read_frozen_table(table) if key["op"] in declared]
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
            "python": _python_version(),
            "files": {name: _file_digest(declared[name]) for name in sorted({key["op"] for key, _ in kept})},
            "entries": [seal_entry(key, value) for key, value in kept],
        }
        folder.mkdir(parents=True, exist_ok=True)
        safe_io.write_text(folder / CHOICES, json.dumps(about, indent=1) + "\n")
    return len(kept)


# --- at the user's ----------------------------------------------------------------------------------------------------


def install_packaged_choices() -> None:
    """Install the tuning choices that came with the packages of declared ops. Choices for the same calls that were
    installed from elsewhere take precedence over them.
    """
    entries: list[ChoiceEntry] = []
    for op in registry.declared_op_list():
        for path in packaged_choice_tables(op):
            entries += _entries_for_op(path, op)
    if entries:
        tuned_choices.install_choice_entries(entries, below=True)


def packaged_kernels(folder: Path, op: Op) -> list[Kernel]:
    """Return the kernels of ``op`` with the configs that a packaged table in ``folder`` has chosen, for any device and
    without repetitions. The list is empty if there is no table, and choices without a config are left out.
    """
    path = folder / CHOICES
    if not path.is_file():
        return []
    variants: dict[str, Kernel] = {}
    for key, value in _read_packaged_table(path).get("entries", ()):
        choice = choice_from_json(key, value, "packaged")
        kernels = [k for k in op.kernels.get(choice.device, ()) if k.name == choice.kernel]
        if key["op"] == op.spec.name and kernels and choice.config.items:
            variants[choice.label] = kernels[0].with_config(choice.config)
    return list(variants.values())


def _entries_for_op(path: Path, op: Op) -> list[ChoiceEntry]:
    """Return the entries with which ``op`` finds its choices, for those choices in the packaged table ``path`` that are
    valid on this machine. Issue a notice if some were made for another version of the op.
    """
    about = _read_packaged_table(path)
    entries, why = [], set[str]()
    mine = [(key, value) for key, value in about.get("entries", ()) if key["op"] == op.spec.name]
    now = device_environments(key["device"] for key, _ in mine)
    for key, value in mine:
        here = now.get(key["device"])
        if here is None or key_differences(key.as_dict(), here, MACHINE):
            continue
        # Digests of an op differ between versions of Python, those of its file do not.
        same_file = about["python"] != _python_version() and about["files"].get(op.spec.name) == _file_digest(op)
        if key["source"] != op.identity and not same_file:
            why.add(f"{op.spec.name} is another version of the op")
            continue
        entries.append(choice_table_entry(choice_from_json(key, value, "packaged"), op.identity))
    for reason in why:
        notice(f"packaged {path} {reason}", f"{path}: choices are not used: {reason}")
    return entries


@cache
def _read_packaged_table(path: Path) -> Mapping[str, Any]:
    """Return the content of the packaged table in the file ``path`` as a mapping. The result is cached.

    It has ``python`` (the version of Python that made the table), ``files`` (a digest of the declaring file for each
    op) and ``entries`` (pairs of key and value). If the file is not a valid table, issue a notice and return an empty
    mapping.
    """
    try:
        about = safe_io.parse_json(safe_io.read_file(path, LIMIT, safe_io.NAMED))
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise ValueError(f"not of format {FORMAT}")
        listed, files = about.get("entries"), about.get("files")
        if not isinstance(listed, list) or not isinstance(files, dict):
            raise ValueError("no entries")
        entries = [unseal_entry(entry) for entry in listed]
        for key, value in entries:
            choice_from_json(key, value, "packaged")
    except (OSError, ValueError, ShiplapError) as e:
        reason = e.got if isinstance(e, ShiplapError) else safe_io.unsafe_reason(e)
        notice(f"packaged {path}", f"{path}: choices are not used: {reason}")
        return {}
    return {"python": about.get("python"), "files": files, "entries": entries}


def _python_version() -> str:
    """Return the major and minor version of Python, such as ``3.12``.

    The digest of an op covers code that Python has compiled, and another version of Python compiles it differently.
    Digests can therefore only be compared within one version.
    """
    return ".".join(platform.python_version_tuple()[:2])


def _file_digest(op: Op) -> str:
    """Return the SHA-256 digest of the file that declares the op, or an empty string if the file cannot be read.

    Unlike the digest of the op, this digest is the same for every version of Python.
    """
    try:
        return hashlib.sha256(Path(op.file).read_bytes()).hexdigest()
    except OSError:
        return ""
