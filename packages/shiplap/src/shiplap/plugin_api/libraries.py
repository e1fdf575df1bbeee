"""The locations of the compiled libraries of a family."""

from __future__ import annotations

import os
from pathlib import Path

from shiplap.kernels.c.library import locate_library
from shiplap.settings import settings

__all__ = ["find_library", "library_folder"]


def find_library(path: str | os.PathLike[str]) -> Path:
    """Return the path of a kernel library. If the folder that the environment variable ``SHIPLAP_LIBRARY_PATH`` names
    has a file with the name of ``path``, return the path of that file. Otherwise return ``path``.

    ``sl.cabi`` calls this function. A family that opens a library on its own, for example with ctypes, calls it as
    well, so that the user's setting applies.

    Raises:
        ShiplapError: ``SL401`` when neither file exists.
    """
    return locate_library(path)


def library_folder() -> Path | None:
    """Return the absolute path of the folder that the environment variable ``SHIPLAP_LIBRARY_PATH`` names, or None if
    it is not set. Kernel libraries are looked for in this folder first.
    """
    named = settings().library_path
    return Path(named).absolute() if named else None
