"""Where the compiled libraries of a family are looked for."""

from __future__ import annotations

import os
from pathlib import Path

from shiplap.bind.library import locate
from shiplap.settings import settings

__all__ = ["find_library", "library_folder"]


def find_library(path: str | os.PathLike[str]) -> Path:
    """The file of a kernel library: of its name in ``SHIPLAP_LIBRARY_PATH``, else ``path`` itself.

    ``sl.cabi`` looks there by itself. A family that opens a library on its own, with ctypes say, asks this function, so
    that a user's setting holds for it as well.

    Raises:
        ShiplapError: SL401 when neither is there.
    """
    return locate(path)


def library_folder() -> Path | None:
    """The folder that ``SHIPLAP_LIBRARY_PATH`` names, in which libraries of vendors are looked for first, too."""
    named = settings().library_path
    return Path(named).absolute() if named else None
