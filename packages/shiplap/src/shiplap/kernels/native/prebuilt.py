"""The bindings that came with an installed package: its ops are native without a compiler, a cache or a setting.

``shiplap package`` puts them into the folder ``_shiplap`` of the package that declares the ops. The package is code
that Python has imported, so what lies in its folder is trusted as its modules are: whoever owns them may own it, and
it is refused where everybody may write. A library is used for an op whose needs it was made for
(``kernels/native/build_digest.py``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

from shiplap import safe_io
from shiplap.dispatch import Op
from shiplap.dispatch.package_folder import folders
from shiplap.errors import ShiplapError
from shiplap.kernels.native.build_digest import TORCH, machine, needs, takes_torch
from shiplap.kernels.native.build_plan import Entry, Plan, bindable
from shiplap.kernels.native.cache import present

MANIFEST, FORMAT = "manifest.json", "shiplap-binding/1"
LIMIT = 1 << 20  # bytes of a manifest

_given_up: dict[Path, str] = {}  # libraries that this process cannot load, with the reason


@dataclass(frozen=True)
class Row:
    """One op of a library: its name, the device type, and the digest of what its binding is made from."""

    op: str
    device: str
    needs: str


def manifest(entries: Sequence[Entry]) -> bytes:
    """Return the manifest of a library, which lists its ops in the order of the library."""
    rows = [asdict(Row(e.op.spec.name, e.device, needs(e.native))) for e in entries]
    least, below = (".".join(map(str, version)) for version in TORCH)
    about = {"format": FORMAT, "machine": machine(), "torch": [least, below], "ops": rows}
    return (json.dumps(about, indent=1) + "\n").encode()


def find(op: Op) -> tuple[Plan | None, str]:
    """Return the library for ``op`` in its package, or None and the reason. The reason is empty without libraries."""
    folders = list(places(op))
    if not folders:
        return None, ""
    entries = bindable(op)
    if not entries:
        return None, ""
    why = ""
    for place in folders:
        try:
            numbers = _numbers(place, entries)
            if not present(place, op.spec.name, safe_io.NAMED):
                raise ValueError("its seal does not fit: a file is missing, cut short or changed")
        except (OSError, ValueError, ShiplapError) as e:
            why = why or f"{place}: {e.got if isinstance(e, ShiplapError) else safe_io.reason(e)}"
            continue
        if numbers is not None:
            return Plan(numbers, place, rule=safe_io.NAMED), ""
    return None, why or f"{folders[0].parent} has no binding for this declaration"


def give_up(place: Path, why: str) -> None:
    """Exclude a library that cannot be loaded in this process."""
    _given_up[place] = why


def places(op: Op) -> Iterator[Path]:
    """Yield the folders of libraries in the package that declares ``op``."""
    for folder in folders(op):
        yield from _listed(folder)


@cache
def _listed(folder: Path) -> tuple[Path, ...]:
    try:
        return tuple(sorted(path for path in folder.iterdir() if (path / MANIFEST).is_file()))
    except OSError:
        return ()


def _numbers(place: Path, entries: Sequence[Entry]) -> dict[int, Entry] | None:
    """Return ``entries`` by their numbers in the library, or None for a library of other ops.

    Raise ValueError for a library of another declaration, platform or release of torch.
    """
    if place in _given_up:
        raise ValueError(_given_up[place])
    rows = _rows(place)
    mine = {row.device: number for number, row in enumerate(rows) if row.op == entries[0].op.spec.name}
    if not mine:
        return None
    for entry in entries:
        number = mine.get(entry.device)
        if number is None or rows[number].needs != needs(entry.native):
            what = f"its code for {entry.device}" if number is not None else f"it has no code for {entry.device}, and"
            raise ValueError(f"{what} was made for another declaration of {entry.op.spec.name} or another shiplap")
    return {mine[entry.device]: entry for entry in entries}


@cache
def _rows(place: Path) -> tuple[Row, ...]:
    """Return the rows of the manifest. Raise ValueError for a library of another platform or release of torch."""
    about = safe_io.parse_json(safe_io.read_file(place / MANIFEST, LIMIT, safe_io.NAMED))
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError(f"{MANIFEST} is not of format {FORMAT}")
    if about.get("machine") != machine():
        raise ValueError(f"it is for {about.get('machine')}, and this is {machine()}")
    if not takes_torch():
        raise ValueError(f"it is for torch {about.get('torch')}, and this is {torch.__version__}")
    listed = about.get("ops")
    rows = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    try:
        return tuple([Row(**{str(k): str(v) for k, v in row.items()}) for row in rows])
    except TypeError:
        raise ValueError(f"{MANIFEST} lists something else than ops") from None
