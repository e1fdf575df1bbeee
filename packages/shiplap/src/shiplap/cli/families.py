"""Verbs and ops of installed distributions, found through entry points.

A distribution of kernels names itself in two groups of its ``pyproject.toml``::

    [project.entry-points."shiplap.families"]
    mylib = "mylib"              # importing the module declares the ops

    [project.entry-points."shiplap.verbs"]
    myverb = "mylib.cli.myverb"  # a module with ``command`` and ``EPILOG``, or with ``group``

Nothing is imported until a verb needs it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

from shiplap.errors import error_line, notice


@dataclass(frozen=True)
class Family:
    """A distribution of ops. ``name`` is its name, and an import of ``module`` declares the ops."""

    name: str
    module: str

    @property
    def header(self) -> Path | None:
        """The path of the family's C header in its source tree, ``csrc/<name>.h``. It is None for an installed family
        and for one without C kernels.
        """
        spec = importlib.util.find_spec(self.module)
        if spec is None or spec.origin is None:
            return None
        # An installed wheel has no sources, so only a source tree has a header to write.
        folder = Path(spec.origin).parent / "csrc"
        return folder / f"{self.name}.h" if folder.is_dir() else None


def families() -> tuple[Family, ...]:
    """Return the installed families (distributions of ops) as a tuple sorted by name. None is imported."""
    return tuple(Family(e.name, e.value) for e in _installed_entry_points("shiplap.families"))


def load_families() -> None:
    """Import every installed family (distribution of ops), so that its ops and errors are registered."""
    for family in families():
        importlib.import_module(family.module)


def installed_verbs(own: Collection[str] = ()) -> list[tuple[str, ModuleType]]:
    """Import the verbs (subcommands) that installed distributions add to the command line, and return them as ``(name,
    module)``. A module has the attributes ``command`` and ``EPILOG``, or ``group``.

    A verb with a name of ``own``, or a module that cannot be imported, is left out with a notice, since all other verbs
    go on without it.
    """
    found: list[tuple[str, ModuleType]] = []
    for entry in _installed_entry_points("shiplap.verbs"):
        try:
            if entry.name in own:
                raise ValueError("Shiplap itself has a verb of this name")
            module = importlib.import_module(entry.value)
            _ = module.group if hasattr(module, "group") else (module.command, module.EPILOG)
            found.append((entry.name, module))
        except Exception as e:
            package = entry.dist.name if entry.dist is not None else entry.value
            notice(f"verb {entry.name}", f"the verb {entry.name} of {package} is left out: {error_line(e)}")
    return found


def _installed_entry_points(group: str) -> Sequence[EntryPoint]:
    """Return the entry points in the group ``group``, sorted by name, one for each name. An editable install may be
    listed beside the wheel that it replaced, so a name can occur twice among the installed ones.
    """
    installed = {e.name: e for e in entry_points(group=group)}
    return [installed[name] for name in sorted(installed)]
