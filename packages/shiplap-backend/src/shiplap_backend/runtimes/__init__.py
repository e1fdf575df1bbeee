"""The runtimes that can be found: those of this package, installed ones, and those in a directory.

Another distribution offers a runtime through an entry point of the group ``shiplap.runtimes``, whose name is the
runtime's and whose value is a ``Runtime``. A directory offers one through ``runtime.py``, which defines ``RUNTIME``.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from shiplap import ShiplapError, safe_io
from shiplap.plugin_api import error
from shiplap_backend.expression import suggest_nearest
from shiplap_backend.runtime import CONTRACT, RUNTIMES, Runtime

__all__ = ["find_runtime", "is_path", "runtime_names"]

GROUP = "shiplap.runtimes"
LIMIT = 1 << 18  # bytes of a runtime.py
_FIELDS: dict[str, tuple[Any, str]] = {  # the type of each field of a Runtime, and its words
    **dict.fromkeys(("name", "functions_header"), (str, "a text")),
    **dict.fromkeys(("directory", "metadata"), (Path, "a Path")),
    **dict.fromkeys(("opset", "enums", "version", "system_dirs", "link_args"), (Callable, "a function")),
    **dict.fromkeys(("compile_args", "sources"), (tuple, "a tuple")),
    "requires": (Mapping, "a mapping"),
    "discrete": (bool, "True or False"),
    "block": (int, "a number of elements, or 0"),
}


def is_path(name: str) -> bool:
    """Return whether ``name`` is the path of a directory instead of the name of a runtime.

    A path contains a separator, or starts with ``.`` or ``~``.
    """
    return "/" in name or "\\" in name or name.startswith((".", "~"))


def runtime_names() -> list[str]:
    """Return the sorted names of the runtimes of this package and of installed packages."""
    return _names(_installed_runtimes())


def find_runtime(name: str, base: Path | None = None) -> Runtime:
    """Return the description of the vendor runtime ``name``.

    Args:
        name: The name of a runtime, or the path of its directory (see ``is_path``).
        base: The directory from which a relative path starts. By default it is the current directory.

    Raises:
        BackendError: ``SL907`` if there is no such runtime, ``SL909`` if it was written for another contract, and
            ``SL910`` if it cannot be used.
    """
    if is_path(name):
        return _in_directory(((base or Path()) / Path(name).expanduser()).resolve())
    installed = _installed_runtimes()
    known = _names(installed)
    if name not in known:
        raise error(
            "SL907",
            where=name,
            got=f"no runtime {name!r}{suggest_nearest(name, known)}",
            expected=", ".join(known),
            fix="name one of the expected runtimes, or the directory of one, such as ./runtime-mine",
        )
    points = [p for p in installed if p.name == name]
    # Two distributions with one name would shadow each other by order of installation.
    if len(points) + (name in _own_runtime_names()) > 1:
        got = f"{len(points) + (name in _own_runtime_names())} runtimes of this name: " + ", ".join(
            p.value for p in points
        )
        raise _unusable_runtime_error(
            f"runtime {name!r}", got, "one", "uninstall the others, or name the directory of one"
        )
    if name in _own_runtime_names():
        # Imported when it is used: a runtime's module may need the vendor's package.
        return _check_runtime(import_module(f"{__name__}.{name}").RUNTIME, name)
    try:
        # It imports another package, which may raise anything.
        offered = points[0].load()
    except Exception as e:
        got = f"{type(e).__name__}: {e}"
        raise _unusable_runtime_error(f"entry point {points[0].value!r}", got, "a Runtime") from e
    return _check_runtime(offered, f"entry point {points[0].value!r}", name)


def _names(installed: Iterable[EntryPoint]) -> list[str]:
    """Return the sorted names of the runtimes of this package and of the entry points ``installed``."""
    return sorted({*_own_runtime_names(), *(point.name for point in installed)})


def _own_runtime_names() -> list[str]:
    """Return the sorted names of the runtimes that are a part of this package."""
    return sorted(p.parent.name for p in RUNTIMES.glob("*/__init__.py"))


def _installed_runtimes() -> list[EntryPoint]:
    """Return the entry points under which installed packages offer runtimes."""
    return list(entry_points(group=GROUP))


@cache
def _in_directory(directory: Path) -> Runtime:
    """Return the runtime that ``runtime.py`` in ``directory`` defines.

    The file is executed. Raise ``SL907`` if it is missing, ``SL909`` if it is for another contract, and ``SL910`` if it
    fails or defines no usable runtime.
    """
    path = directory / "runtime.py"
    try:
        source = safe_io.read_file(path, LIMIT, safe_io.NAMED)
    except OSError as e:
        got = e.strerror or str(e)
        raise error(
            "SL907",
            where=str(path),
            got=got,
            expected="a directory with runtime.py, which defines RUNTIME",
            fix="name the directory of a runtime",
        ) from None
    module = ModuleType(f"shiplap_runtime_{directory.name}")
    module.__file__ = str(path)
    try:
        # With its path, by which the line of an error is found.
        exec(compile(source, str(path), "exec"), module.__dict__)
    except ShiplapError:
        raise
    except Exception as e:
        # The innermost line of the vendor's file, and not of code that it calls.
        lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == str(path)]
        line = e.lineno if isinstance(e, SyntaxError) else lines[-1] if lines else 1
        raise _unusable_runtime_error(
            f"{path}:{line}", f"{type(e).__name__}: {e}", "a file that defines RUNTIME"
        ) from e
    if "RUNTIME" not in module.__dict__:
        raise _unusable_runtime_error(f"{path}:1", "no RUNTIME", "a file that defines RUNTIME")
    return _check_runtime(module.__dict__["RUNTIME"], f"{path}:1")


def _check_runtime(value: Any, where: str, name: str = "") -> Runtime:
    """Return ``value`` if it is a usable runtime.

    Raise ``SL909`` if it was written for another contract, that is, another version of the interface for runtimes.
    Raise ``SL910`` for any other mistake. The runtime must have the name ``name``. If ``name`` is empty, any name is
    allowed.
    """
    if not isinstance(value, Runtime):
        raise _unusable_runtime_error(where, f"a {type(value).__name__}", "a shiplap_backend.runtime.Runtime")
    # Compared before the fields, whose meaning depends on the contract.
    if value.contract != CONTRACT:
        raise error(
            "SL909",
            where=f"{where}: {value.name}",
            got=f"contract {value.contract!r}",
            expected=f"contract {CONTRACT}",
        )
    for field, (kind, expected) in _FIELDS.items():
        # True would be a block of one element.
        if not isinstance(got := getattr(value, field), kind) or (kind is int and (got is True or got < 0)):
            raise _unusable_runtime_error(where, f"{field} = {got!r}", expected)
    if not value.name.isidentifier() or value.name != value.name.lower() or name not in ("", value.name):
        raise _unusable_runtime_error(
            where, f"a runtime named {value.name!r}", repr(name) if name else "a lower-case word"
        )
    if value.graph not in ("own", "eager"):
        raise _unusable_runtime_error(where, f"graph = {value.graph!r}", "'own' or 'eager'")
    for needed in value.needed:
        if not needed.is_file():
            fix = "write the file; a library without graphs of its own says graph='eager' and needs no vendor.h"
            raise _unusable_runtime_error(
                where, f"no file {needed}", f"{value.needed[0].name} and a metadata file", fix
            )
    if value.graph == "eager" and (value.directory / "vendor.h").exists():
        raise _unusable_runtime_error(where, "graph = 'eager' and a vendor.h", "one of the two")
    return value


def _unusable_runtime_error(where: str, got: str, expected: str, fix: str | None = None) -> ShiplapError:
    """Return the error ``SL910`` for a runtime at ``where`` that cannot be used.

    ``got`` is its mistake, and ``expected`` a description of a valid runtime. ``fix`` is the advice in the error. If it
    is None, the error has the advice of the catalogue.
    """
    return error("SL910", where=where, got=got, expected=expected, **({"fix": fix} if fix else {}))
