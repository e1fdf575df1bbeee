"""Tables of choices: ``write_frozen_table`` saves this machine's choices, ``frozen`` installs a table."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shiplap import safe_io
from shiplap.declare.keyword_values import with_checked_arguments
from shiplap.dispatch import Op, registry, tuned_choices
from shiplap.errors import error, notice, writing
from shiplap.settings import settings
from shiplap.tuning.choice import Choice, choice_from_json, choice_table_entry
from shiplap.tuning.key import MACHINE, VERSIONS, Key, key_differences, key_environment
from shiplap.tuning.store import ChoiceStore, entry_checksum, seal_entry, unseal_entry

FORMAT = "shiplap-tuned/1"
LIMIT = 1 << 24  # bytes of a table

_made: dict[str, tuple[Key, Choice]] = {}  # choices of this process, also without a writable store


def remember_choice(key: Key, choice: Choice) -> None:
    """Record a choice that this process has made under ``key``, so that ``write_frozen_table`` writes it."""
    _made[key.digest] = key, choice


def write_frozen_table(path: str | os.PathLike[str], ops: Iterable[Op] | None = None) -> list[Choice]:
    """Write the choices that are valid on this machine to the file ``path``, and return them. They come from the user's
    store and from this process. If ``ops`` is not None, only choices for these ops are written.
    Raise ``SL602`` if the file cannot be written.
    """
    entries: dict[str, tuple[Key, Mapping[str, Any]]] = {}
    for entry in ChoiceStore().entries():
        if entry.key is not None and entry.value is not None:
            entries[entry.key.digest] = entry.key, entry.value
    # The choices of this process come second, so that they replace older ones of the store under the same key.
    entries |= {digest: (key, choice.value()) for digest, (key, choice) in _made.items()}
    names = None if ops is None else {op.spec.name for op in ops}
    kept = [(k, v) for k, v in entries.values() if (names is None or k["op"] in names) and _key_is_current(k)]
    # The same choices give the same file.
    kept.sort(key=lambda pair: pair[0].fields)
    dump_table(path, kept)
    return [choice_from_json(key, value, "frozen") for key, value in kept]


def _key_is_current(key: Key) -> bool:
    """Return whether a choice with this key is valid in this process. The machine and the versions of libraries must be
    those of the key. If the op is declared in this process, its digest must be that of the key, too.
    """
    op = registry.find_declared_op(key["op"])
    if op is not None and key["source"] != op.identity:
        return False
    now = device_environments([key["device"]]).get(key["device"])
    return now is not None and not key_differences(key.as_dict(), now, (*MACHINE, *VERSIONS))


def device_environments(devices: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return a dict from each device type in ``devices`` that this machine has to its key fields, which name the
    machine and the versions of libraries.
    """
    environments = {}
    for device in set(devices):
        if device != "cuda" or torch.cuda.is_available():
            environments[device] = key_environment(device)
    return environments


def dump_table(path: str | os.PathLike[str], entries: Sequence[tuple[Key, Mapping[str, Any]]]) -> None:
    """Write a table of choices with its checksum to the file ``path``. ``entries`` are pairs of key and value. If
    writing fails, an existing file is unchanged and ``SL602`` is raised.
    """
    body = {"format": FORMAT, "entries": [seal_entry(key, value) for key, value in entries]}
    # Indented, so that tables of two machines can be compared line by line.
    text = json.dumps({**body, "sha256": entry_checksum(body)}, indent=1) + "\n"
    with writing(path):
        safe_io.write_whole(Path(path), text.encode())


def read_frozen_table(path: str | os.PathLike[str]) -> list[tuple[Key, Mapping[str, Any]]]:
    """Return the pairs of key and value of the table in the file ``path``, in order. Raise ``SL602`` if the file cannot
    be read, and ``SL609`` if it is damaged or has another format.
    """
    try:
        raw = safe_io.read_file(path, LIMIT, safe_io.NAMED)
    except OSError as e:
        raise error(
            "SL602",
            where=str(path),
            what="the file cannot be read",
            got=safe_io.unsafe_reason(e) if isinstance(e, safe_io.Distrusted) else e.strerror or e,
            expected="a table written by 'shiplap freeze'",
        ) from None
    try:
        content = safe_io.parse_json(raw)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"not of format {FORMAT}")
        if content.get("sha256") != entry_checksum({n: content.get(n) for n in ("format", "entries")}):
            raise ValueError("its checksum does not fit")
        listed = content.get("entries")
        if not isinstance(listed, list):
            raise ValueError("'entries' is no list")
        entries = [unseal_entry(entry) for entry in listed]
        for key, value in entries:
            # Called for its ValueError, so that damage shows when the table is read and not at a call.
            choice_from_json(key, value, "frozen")
            _check_device_type(key)
    except ValueError as e:
        raise error("SL609", where=str(path), got=str(e)[:200], expected=f"a table of format {FORMAT}") from None
    return entries


def _check_device_type(key: Key) -> None:
    """Raise ``ValueError`` unless the field ``device`` of the key is a device type of torch, such as ``cuda``."""
    try:
        known = torch.device(key["device"]).type == key["device"]
    except RuntimeError:
        known = False
    if not known:
        raise ValueError(f"no device type: {key['device'][:40]!r}")


@with_checked_arguments
def frozen(path: str | os.PathLike[str]) -> list[Choice]:
    """Install the choices of the table in the file ``path`` in this process, and return them. From now on nothing is
    measured.

    A call without a choice in the table runs its declared default, and a notice reports that once. With
    ``SHIPLAP_STRICT=1`` such a call raises ``SL607``.

    Choices of another machine are left out, and choices of other library versions are used, each with a notice. If the
    table has choices of several versions for the same calls, the choice of this machine's versions is used. With
    ``SHIPLAP_STRICT=1``, choices of other versions raise ``SL609``. A file that cannot be read raises ``SL602``, and a
    damaged one ``SL609``.
    """
    entries = read_frozen_table(path)
    now = device_environments(key["device"] for key, _ in entries)
    taken: list[tuple[Key, Choice, list[str]]] = []
    other: list[str] = []
    for key, value in entries:
        here = now.get(key["device"])
        if here is None or (differs := key_differences(key.as_dict(), here, MACHINE)):
            other += [f"no device {key['device']}"] if here is None else differs
            continue
        taken.append((key, choice_from_json(key, value, "frozen"), key_differences(key.as_dict(), here, VERSIONS)))
    # An entry of other versions gives way to one of these versions for the same calls.
    exact = {choice_table_entry(choice, key["source"]).call for key, choice, differs in taken if not differs}
    taken = [each for each in taken if not each[2] or choice_table_entry(each[1], each[0]["source"]).call not in exact]
    older = [text for _, _, differs in taken for text in differs]
    # In strict mode a program must not run with choices that were measured on other versions.
    if older and settings().strict:
        raise error("SL609", where=str(path), got=", ".join(sorted(set(older))), expected="the versions it was made on")
    for what, fields in (("of another machine are left out", other), ("of other versions are used", older)):
        if fields:
            notice(f"frozen {path} {what}", f"{path}: entries {what} ({', '.join(sorted(set(fields)))})")
    tuned_choices.install_choice_entries([choice_table_entry(c, k["source"]) for k, c, _ in taken], str(path))
    return [choice for _, choice, _ in taken]


@with_checked_arguments
def thaw() -> None:
    """Remove the choices that :func:`frozen` installed. Missing choices may then be measured again."""
    tuned_choices.install_choice_entries([], "")
