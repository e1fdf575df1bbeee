"""The bindings that came with an installed package. Its ops are native without a compiler, a cache or a setting.

``shiplap package`` puts them into the folder ``_shiplap`` of the package that declares the ops. Python has imported
code of that package, so its folder is trusted as its modules are. It may belong to any owner of the modules, and is
refused if everybody may write to it. A library is used for an op whose needs it was made for
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
from shiplap.dispatch.package_folder import package_folders
from shiplap.errors import ShiplapError
from shiplap.kernels.native.build_digest import TORCH, machine_type, op_build_digest, takes_torch
from shiplap.kernels.native.build_plan import LibraryPlan, NativeKernelEntry, bindable_entries
from shiplap.kernels.native.cache import is_library_present

MANIFEST, FORMAT = "manifest.json", "shiplap-binding/1"
LIMIT = 1 << 20  # bytes of a manifest

_unusable_libraries: dict[Path, str] = {}  # libraries that this process cannot load, with the reason


@dataclass(frozen=True)
class ManifestRow:
    """The native code of one op on one device type, as a row of a library's manifest.

    Attributes:
        op: the name of the op.
        device: the device type.
        needs: the digest of the generated code of the op's binding.
    """

    op: str
    device: str
    needs: str


def library_manifest(entries: Sequence[NativeKernelEntry]) -> bytes:
    """Return the manifest that is packaged beside a native library, as JSON in UTF-8. It holds the format, the machine
    type and the releases of torch. For each of ``entries``, in the order of the library, it holds the op, its device
    type and the digest of its generated code.
    """
    rows = [asdict(ManifestRow(e.op.spec.name, e.device, op_build_digest(e.native))) for e in entries]
    least, below = (".".join(map(str, version)) for version in TORCH)
    about = {"format": FORMAT, "machine": machine_type(), "torch": [least, below], "ops": rows}
    return (json.dumps(about, indent=1) + "\n").encode()


def find_prebuilt_library(op: Op) -> tuple[LibraryPlan | None, str]:
    """Return the plan of the prebuilt library for ``op`` in its package, and an empty string. If there is none, return
    None and the reason. The reason is empty if the package has no libraries or if C++ can bind no kernel of the op.
    """
    folders = list(prebuilt_folders(op))
    if not folders:
        return None, ""
    entries = bindable_entries(op)
    if not entries:
        return None, ""
    why = ""
    for place in folders:
        try:
            numbers = _entry_numbers(place, entries)
            # NAMED: whoever owns the package may own its libraries, as they own its modules.
            if not is_library_present(place, op.spec.name, safe_io.NAMED):
                raise ValueError("its seal does not fit: a file is missing, cut short or changed")
        except (OSError, ValueError, ShiplapError) as e:
            why = why or f"{place}: {e.got if isinstance(e, ShiplapError) else safe_io.unsafe_reason(e)}"
            continue
        if numbers is not None:
            return LibraryPlan(numbers, place, rule=safe_io.NAMED), ""
    return None, why or f"{folders[0].parent} has no binding for this declaration"


def give_up_library(place: Path, why: str) -> None:
    """Exclude the library in the folder ``place`` from use in this process. ``why`` is the reason why it cannot be
    loaded.
    """
    _unusable_libraries[place] = why


def prebuilt_folders(op: Op) -> Iterator[Path]:
    """Yield the folders of prebuilt native libraries in the package that declares ``op``, each with a manifest."""
    for folder in package_folders(op):
        yield from _listed_libraries(folder)


@cache
def _listed_libraries(folder: Path) -> tuple[Path, ...]:
    """Return the folders in ``folder`` that contain the manifest of a library, sorted."""
    try:
        return tuple(sorted(path for path in folder.iterdir() if (path / MANIFEST).is_file()))
    except OSError:
        return ()


def _entry_numbers(place: Path, entries: Sequence[NativeKernelEntry]) -> dict[int, NativeKernelEntry] | None:
    """Return a mapping from numbers in the prebuilt library at ``place`` to ``entries``, the kernels of one op for each
    device type.

    Return None if the library does not contain the op. Raise ``ValueError`` if it was built for another declaration,
    platform or release of torch.
    """
    if place in _unusable_libraries:
        raise ValueError(_unusable_libraries[place])
    rows = _read_manifest_rows(place)
    mine = {row.device: number for number, row in enumerate(rows) if row.op == entries[0].op.spec.name}
    if not mine:
        return None
    for entry in entries:
        number = mine.get(entry.device)
        # One op of a library may have been edited since; the others can still be used.
        if number is None or rows[number].needs != op_build_digest(entry.native):
            what = f"its code for {entry.device}" if number is not None else f"it has no code for {entry.device}, and"
            raise ValueError(f"{what} was made for another declaration of {entry.op.spec.name} or another shiplap")
    return {mine[entry.device]: entry for entry in entries}


@cache
def _read_manifest_rows(place: Path) -> tuple[ManifestRow, ...]:
    """Return the rows of the manifest in the folder ``place``, one per op and device type. Raise ``ValueError`` if the
    manifest is not valid, or if the library is for another platform or release of torch.
    """
    about = safe_io.parse_json(safe_io.read_file(place / MANIFEST, LIMIT, safe_io.NAMED))
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ValueError(f"{MANIFEST} is not of format {FORMAT}")
    if about.get("machine") != machine_type():
        raise ValueError(f"it is for {about.get('machine')}, and this is {machine_type()}")
    if not takes_torch():
        raise ValueError(f"it is for torch {about.get('torch')}, and this is {torch.__version__}")
    listed = about.get("ops")
    rows = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    try:
        return tuple([ManifestRow(**{str(k): str(v) for k, v in row.items()}) for row in rows])
    except TypeError:
        raise ValueError(f"{MANIFEST} lists something else than ops") from None
