"""The folder in which ``shiplap package`` puts the files of an op, inside the package that declares it.

Python has imported code of that package, so its folder is trusted as its modules are.
``shiplap.kernels.native.prebuilt`` and ``shiplap.tuning.packaged_choices`` read it. A first call finds out here whether
there is anything to read, and imports neither of them if there is not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from shiplap.dispatch.state import OpState

FOLDER, CHOICES = "_shiplap", "choices.json"


def package_folders(op: OpState) -> Iterator[Path]:
    """Yield the folder that ``shiplap package`` fills, inside each location of the Python package that declares ``op``.
    It need not exist.
    """
    package = sys.modules.get((op.reference.__module__ or "").partition(".")[0])
    # The spec lists all folders of a namespace package.
    about = package.__spec__ if package is not None else None
    for root in (about.submodule_search_locations or ()) if about is not None else ():
        yield Path(root) / FOLDER


def packaged_choice_tables(op: OpState) -> list[Path]:
    """Return the paths of the tables of tuned choices shipped in the Python package that declares ``op``."""
    return [path for folder in package_folders(op) if (path := _choice_table_path(folder)) is not None]


@cache
def _choice_table_path(folder: Path) -> Path | None:
    """Return the path of the table of tuned choices in ``folder``, or None if there is no such file."""
    return folder / CHOICES if (folder / CHOICES).is_file() else None
