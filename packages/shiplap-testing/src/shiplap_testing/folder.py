"""Folders that go with the process that made them, and not with one that was forked from it."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path


def temporary(name: str) -> Path:
    """Create a temporary folder whose name contains ``name``, and return its path.

    It is removed when this process ends, but not when a process forked from it ends.
    """
    folder = Path(tempfile.mkdtemp(prefix=f"shiplap-{name}-"))
    atexit.register(_remove, folder, os.getpid())
    return folder


def _remove(folder: Path, owner: int) -> None:
    """Remove ``folder`` if ``owner``, the id of the process that created it, is that of this process."""
    # A forked process runs the same exit functions.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
