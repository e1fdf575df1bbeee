"""Folders that go with the process that made them, and not with one that was forked from it."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path


def temporary(name: str) -> Path:
    """A new folder outside of the repository. Workers of one run share those that were made before they were forked."""
    folder = Path(tempfile.mkdtemp(prefix=f"shiplap-{name}-"))
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
