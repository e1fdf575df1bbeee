"""``python -m shiplap.packaging.worker``: fill the packages of an unpacked wheel, in a process of its own.

The packages are imported from the wheel only, whatever modules the calling process has imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from shiplap import safe_io
from shiplap.errors import ShiplapError, error
from shiplap.errors.base import ERROR_PARTS, error_parts
from shiplap.packaging.contents import NO_EXTRAS, PackageContents, PackageExtras, fill_packages
from shiplap.safe_io.work_folders import work_folder

MODULES, LONGEST = 1000, 1000  # of one wheel; characters of a name


def fill_apart(modules: Sequence[str], unpacked: Path, extras: PackageExtras = NO_EXTRAS) -> list[PackageContents]:
    """Call :func:`fill_packages` with ``modules``, ``unpacked`` and ``extras`` in a separate process. Return its result
    or raise its error. Raise ``SL601`` for too many modules or invalid names.
    """
    named = (name for name in modules if len(name) > LONGEST or not all(map(str.isidentifier, name.split("."))))
    strange = next(named, None)
    if strange is not None or len(modules) > MODULES:
        got = "no name of a module" if strange is not None else f"{len(modules)} modules"
        raise error("SL601", where=(strange or modules[0])[:200], got=got, expected="modules of the wheel")
    command = [sys.executable, "-P", "-m", "shiplap.packaging.worker"]  # -P: no module of the current folder
    # Files and not pipes carry order and answer, as an import may print.
    with work_folder("package") as folder:
        answer, order, errors = (folder / name for name in ("answer.json", "order.json", "stderr"))
        # The worker may have another working folder, so paths are made absolute.
        tuned, calls = (path and str(path.absolute()) for path in (extras.tuned, extras.calls))
        safe_io.write_text(order, json.dumps([str(unpacked), str(answer), tuned, extras.cubins, calls, *modules]))
        with os.fdopen(
            safe_io.open_for_writing(errors), "wb"
        ) as stderr:  # no pipes: a process that an import leaves behind would hold them open
            nothing = subprocess.DEVNULL
            done = subprocess.run([*command, str(order)], check=False, stdin=nothing, stdout=nothing, stderr=stderr)
        how = errors.read_text(errors="replace").strip()[-2000:] or f"the process ended with status {done.returncode}"
        return read_answer(answer, modules, how)


def read_answer(path: Path, modules: Sequence[str], how: str) -> list[PackageContents]:
    """Return the result that the worker process wrote to ``path``, or raise the error that it wrote.

    Raise ``SL308`` if the file holds neither. ``how`` describes how the worker ended, and is the observation in that
    error. ``modules`` are the names of the imported modules, which the error names as well.
    """
    try:
        content = safe_io.parse_json(safe_io.read_file(path, safe_io.ParseLimits().size, safe_io.NAMED))
        if not isinstance(content, dict):
            return msgspec.convert(content, list[PackageContents])
        failure = _worker_error(content)
    # The worker may have ended before it wrote the file, or an imported module may have written to the file.
    except (OSError, ValueError, LookupError):
        where = ", ".join(modules[:10])
        raise error("SL308", where=where, got=how, expected="modules that can be imported") from None
    # Many errors of the catalogue are ValueErrors, which the handler above would replace.
    raise failure


def _worker_error(content: dict[str, Any]) -> ShiplapError:
    """Return the catalogue error that ``content``, a dict from the worker process, describes. Raise ``ValueError`` or
    ``LookupError`` if it describes no such error.
    """
    parts = msgspec.convert({part: content.get(part) for part in ERROR_PARTS}, dict[str, str])
    return error(parts.pop("id"), **parts)


def _fill_by_order(order: str) -> None:
    """Fill packages with native code, as the worker's main function. ``order`` is the path of a JSON file with the
    arguments.

    The contents of the packages are written as JSON to the answer file, whose path is among the arguments. If filling
    raises a catalogue error, the fields of the error are written instead.
    """
    unpacked, answer, tuned, cubins, calls, *modules = json.loads(Path(order).read_text())
    # In front, so that the package of the wheel hides an installed one.
    sys.path.insert(0, unpacked)
    content: object
    try:
        extras = PackageExtras(tuned and Path(tuned), tuple(cubins), calls and Path(calls))
        content = [asdict(each) for each in fill_packages(modules, Path(unpacked), extras)]
    # Only errors of the catalogue are data. Any other exception ends the process, and its traceback is on stderr.
    except ShiplapError as e:
        content = error_parts(e)
    safe_io.write_text(answer, json.dumps(content))


if __name__ == "__main__":
    _fill_by_order(sys.argv[1])
