"""The console script, in a package of its own: ``import shiplap`` imports torch, which ``--version`` does not need."""

from __future__ import annotations

import os
import sys
import sysconfig

__all__: list[str] = []


def main() -> None:
    """Run the command line of Shiplap. ``shiplap --version`` alone reads only the metadata of the distribution."""
    open_standard_files()
    drop_current_folder()
    if sys.argv[1:] == ["--version"]:
        from importlib.metadata import version

        print(f"shiplap {version('shiplap')}")
        return
    from shiplap.cli.app import main as run

    run()


def open_standard_files() -> None:
    """Open ``/dev/null`` in place of each standard file that is closed, as ``>&-`` closes it.

    A file that is opened later would get its number otherwise, and everything that native code prints.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def drop_current_folder() -> None:
    """Remove the current folder from the search path of modules, unless the environment variable ``PYTHONPATH`` names
    it.

    Python puts it first for ``python -m`` and for an empty item of ``PYTHONPATH``. Items behind Python's own modules
    stay, since an installation in place has made them.
    """
    named = {_real_path(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p}
    here = _real_path(os.curdir)
    library = os.path.realpath(sysconfig.get_path("stdlib"))
    places = [_real_path(p) for p in sys.path]
    before = places.index(library) if library in places else len(places)
    kept = (p for n, p in enumerate(sys.path) if n > before or places[n] != here or here in named)
    sys.path[:] = [p for p in kept if p]  # an empty entry follows each change of the folder


def _real_path(place: str) -> str:
    """Return the path of ``place`` without links, or an empty string if it is relative to a folder that was removed."""
    try:
        return os.path.realpath(place)
    except OSError:
        return ""
