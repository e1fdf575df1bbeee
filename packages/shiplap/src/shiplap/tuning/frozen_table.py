"""``write``: the choices of this machine as one file; ``frozen``: a file in force, after which nothing is measured."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shiplap import safe_io
from shiplap.dispatch import Op, registry, tuned_choices
from shiplap.errors import error, notice, writing
from shiplap.settings import settings
from shiplap.tuning.choice import Choice, entry_of, from_json
from shiplap.tuning.key import MACHINE, VERSIONS, Key, differences, environment
from shiplap.tuning.store import Store, checksum, seal, unseal

FORMAT = "shiplap-tuned/1"
LIMIT = 1 << 24  # bytes of a table

_made: dict[str, tuple[Key, Choice]] = {}  # what this process chose or received, also where no store takes it


def keep(key: Key, choice: Choice) -> None:
    """Remember a choice for ``write``."""
    _made[key.digest] = key, choice


def write(path: str | os.PathLike[str], ops: Iterable[Op] | None = None, *, store: Store | None = None) -> list[Choice]:
    """What ``shiplap.freeze`` does."""
    entries: dict[str, tuple[Key, Mapping[str, Any]]] = {}
    for entry in (store or Store()).entries():
        if entry.key is not None and entry.value is not None:
            entries[entry.key.digest] = entry.key, entry.value
    entries |= {digest: (key, choice.value()) for digest, (key, choice) in _made.items()}
    names = None if ops is None else {op.spec.name for op in ops}
    kept = [(k, v) for k, v in entries.values() if (names is None or k["op"] in names) and _holds(k)]
    kept.sort(key=lambda pair: pair[0].fields)
    dump(path, kept)
    return [from_json(key, value, "frozen") for key, value in kept]


def _holds(key: Key) -> bool:
    """Whether a choice with this key would be asked for now; of an op that is not declared here, all but its source."""
    op = registry.find(key["op"])
    if op is not None and key["source"] != op.identity:
        return False
    now = environments([key["device"]]).get(key["device"])
    return now is not None and not differences(key.as_dict(), now, (*MACHINE, *VERSIONS))


def environments(devices: Iterable[str]) -> dict[str, dict[str, str]]:
    """MACHINE and VERSIONS for each device type that this machine has."""
    environments = {}
    for device in set(devices):
        if device != "cuda" or torch.cuda.is_available():
            environments[device] = environment(device)
    return environments


def dump(path: str | os.PathLike[str], entries: Sequence[tuple[Key, Mapping[str, Any]]]) -> None:
    """Write a table of choices, whole or not at all. SL602 when it cannot be written."""
    body = {"format": FORMAT, "entries": [seal(key, value) for key, value in entries]}
    text = json.dumps({**body, "sha256": checksum(body)}, indent=1) + "\n"
    with writing(path):
        safe_io.write_whole(Path(path), text.encode())


def read(path: str | os.PathLike[str]) -> list[tuple[Key, Mapping[str, Any]]]:
    """Keys and values of a table. SL602 when there is none, SL609 when it is damaged."""
    try:
        raw = safe_io.read_file(path, LIMIT, safe_io.NAMED)
    except OSError as e:
        raise error(
            "SL602",
            where=str(path),
            what="the file cannot be read",
            got=safe_io.reason(e) if isinstance(e, safe_io.Distrusted) else e.strerror or e,
            expected="a table written by 'shiplap freeze'",
        ) from None
    try:
        content = safe_io.parse_json(raw)
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"not of format {FORMAT}")
        if content.get("sha256") != checksum({n: content.get(n) for n in ("format", "entries")}):
            raise ValueError("its checksum does not fit")
        listed = content.get("entries")
        if not isinstance(listed, list):
            raise ValueError("'entries' is no list")
        entries = [unseal(entry) for entry in listed]
        for key, value in entries:
            from_json(key, value, "frozen")
            _device_of(key)
    except ValueError as e:
        raise error("SL609", where=str(path), got=str(e)[:200], expected=f"a table of format {FORMAT}") from None
    return entries


def _device_of(key: Key) -> None:
    """ValueError unless the key names a device type that torch knows."""
    try:
        known = torch.device(key["device"]).type == key["device"]
    except RuntimeError:
        known = False
    if not known:
        raise ValueError(f"no device type: {key['device'][:40]!r}")


def frozen(path: str | os.PathLike[str]) -> list[Choice]:
    """Fix the choices of this process to those of a table: from now on nothing is measured.

    A call without an entry runs its declared default and says so once. With ``SHIPLAP_STRICT=1`` it raises SL607.
    Entries of another machine are left out, entries of other library versions used, both with a notice. Of entries for
    the same calls, one of the versions of this machine comes first.
    """
    entries = read(path)
    now = environments(key["device"] for key, _ in entries)
    taken: list[tuple[Key, Choice, list[str]]] = []
    other: list[str] = []
    for key, value in entries:
        here = now.get(key["device"])
        if here is None or (differs := differences(key.as_dict(), here, MACHINE)):
            other += [f"no device {key['device']}"] if here is None else differs
            continue
        taken.append((key, from_json(key, value, "frozen"), differences(key.as_dict(), here, VERSIONS)))
    exact = {entry_of(choice, key["source"]).call for key, choice, differs in taken if not differs}
    taken = [each for each in taken if not each[2] or entry_of(each[1], each[0]["source"]).call not in exact]
    older = [text for _, _, differs in taken for text in differs]
    if older and settings().strict:
        raise error("SL609", where=str(path), got=", ".join(sorted(set(older))), expected="the versions it was made on")
    for what, fields in (("of another machine are left out", other), ("of other versions are used", older)):
        if fields:
            notice(f"frozen {path} {what}", f"{path}: entries {what} ({', '.join(sorted(set(fields)))})")
    tuned_choices.install([entry_of(c, k["source"]) for k, c, _ in taken], str(path))
    return [choice for _, choice, _ in taken]


def thaw() -> None:
    """Undo :func:`frozen`: no choices are in force."""
    tuned_choices.install([], "")
